"""All parts: the figures that the project is judged by."""

from __future__ import annotations

from dataclasses import replace

from outrider.benchmarks.figures.rows import CommandRow, ForwardComparison, LoadRow, Part, PeerRow, ServedPair

_ALL_USERS = {1: 2.45, 8: 3.3, 32: 4.3, 64: 5.3, 128: 7.0, 256: 10.5}
_BETWEEN = {1: 0.6, 32: 1.0, 64: 1.4}
_TWO_CARDS = {1: 2.0, 8: 2.7, 32: 3.4, 64: 3.9, 128: None, 256: None}
_FIXED = {0.5: (1, 3), 0.75: (2, 4), 0.9: (4, 8)}
_ARRANGEMENTS = {
    "apart": ("--device", "cuda:0", "--draft-device", "cuda:1"),
    "latency": ("--optimize", "latency"),
    "throughput": ("--optimize", "throughput"),
    "tp2": ("--device", "cuda:0", "--draft-device", "cuda:0", "--tensor-parallel-size", "2"),
}
_FIXED_LENGTHS = ("--set", "coordinator.draft_length=fixed")
_FOUR_DRAFT_TOKENS = ("--num-speculative-tokens", "4", *_FIXED_LENGTHS)
"""Flags that make a step as long for sampled requests as for greedy ones."""
_FORMATS = {
    "fp8": ("weights made FP8 at load", ("--quantization", "fp8")),
    "fp8-kv": ("weights and KV cache in FP8", ("--quantization", "fp8", "--kv-cache-dtype", "fp8")),
    "invariant": ("batch-invariant target", ("--batch-invariant", "on")),
}
_SAMPLED = ('{"temperature": 0.6, "top_p": 0.9}', '{"temperature": 0.7, "top_p": 0.8, "top_k": 20}')


def _two_cards(name: str, flags: tuple[str, ...]) -> Part:
    services = ServedPair(flags=flags, with_fixed=False)
    rows = tuple(
        LoadRow(f"x2-{name}-users{users}", services, users, num_gpus=2, wanted_ms=wanted)
        for users, wanted in _TWO_CARDS.items()
    )
    return Part(name, f"two cards: {' '.join(flags)}", rows, num_cards=2)


def _shapes(target: str, draft: str, flags: tuple[str, ...] = ()) -> tuple[LoadRow, ...]:
    services = ServedPair(target, draft, flags=flags, pages=1_600, max_model_len=4096)
    return tuple(LoadRow(f"{target}-{draft}-users{users}".lower(), services, users, fixed=(3,)) for users in (1, 8, 32))


def _flags(name: str, *values: int | str) -> tuple[str, ...]:
    return tuple(word for value in values for word in (name, str(value)))


def _engine(
    name: str,
    role: str,
    words: tuple[str, ...],
    *,
    context: int = 1024,
    batch_sizes: tuple[int, ...] = (1, 8, 32),
    longest_context: int | None = None,
    comparisons: tuple[ForwardComparison, ...] = (),
) -> CommandRow:
    """``outrider bench engine`` on the target or the draft of the pair; with tiny models contexts are short."""
    began = ("engine", f"{{pair}}/{role}", "--load-format", "synthetic", "--device", "{device}", "--dtype", "{dtype}")
    is_long = longest_context is not None
    full = ("--context", str(context), *(("--longest-context", str(longest_context)) if is_long else ()))
    tiny = ("--context", "32", *(("--longest-context", "200") if is_long else ()), "--samples", "2", "--warmups", "1")
    few = batch_sizes if comparisons else (1, 2)
    return CommandRow(
        name,
        (*began, *words),
        (*_flags("--batch-size", *batch_sizes), *full),
        (*_flags("--batch-size", *few), *tiny),
        comparisons=comparisons,
    )


def _forward(batch_size: int, num_tokens: int) -> dict[str, int]:
    return {"batch_size": batch_size, "num_tokens": num_tokens}


_FORWARDS = Part("rows", "forwards of some rows, and one long context beside 31 short ones", (
    _engine("rows", "target", (*_flags("--num-tokens", 1, 5, 8, 9), "--most-tokens", "320", "--draft-length", "0"),
            batch_sizes=(8, 32, 33, 64), comparisons=(
        ForwardComparison("33 over 32 users", _forward(33, 1), _forward(32, 1)),
        ForwardComparison("9 over 8 tokens, 8 users", _forward(8, 9), _forward(8, 8)),
        ForwardComparison("9 over 8 tokens, 32 users", _forward(32, 9), _forward(32, 8)),
        ForwardComparison("160 rows over the floor", _forward(32, 5)),
        ForwardComparison("320 rows over the floor", _forward(64, 5)),
    )),
    _engine("rows-many", "target", (*_flags("--num-tokens", 1, 4), "--draft-length", "0"),
            context=256, batch_sizes=(64, 65, 128, 256), comparisons=(
        ForwardComparison("65 over 64 users", _forward(65, 1), _forward(64, 1)),
        ForwardComparison("512 rows over the floor", _forward(128, 4)),
    )),
    _engine("rows-long", "target", (*_flags("--num-tokens", 1, 5), "--draft-length", "0"),
            batch_sizes=(32,), longest_context=120_000, comparisons=(
        ForwardComparison("31 short and a long over 32 short, 1 token", _forward(32, 1), _forward(32, 1), is_long=True),
        ForwardComparison("31 short and a long over the floor, 1 token", _forward(32, 1), is_long=True),
        ForwardComparison("31 short and a long over the floor, 5 tokens", _forward(32, 5), is_long=True),
    )),
))  # fmt: skip
_ENGINE = Part("engine", "the target's forward and the draft's loop", (
    _engine("engine-8b", "target", (*_flags("--num-tokens", 1, 5, 8), "--draft-length", "1")),
    _engine("engine-1b", "draft", (*_flags("--num-tokens", 1, 5), *_flags("--draft-length", 2, 4, 8))),
    _engine("engine-1b-sampled", "draft", (
        "--num-tokens", "1", "--most-tokens", "1", *_flags("--draft-length", 4, 16),
        *_flags("--sampling", '{"temperature": 0}', *_SAMPLED)), context=256, batch_sizes=(1, 8, 32, 64, 128, 256)),
))  # fmt: skip
_CHANGING = Part("changing", "1, 128, 1, 8, then 32 users; acceptance that falls from .9 to .3 in the middle", (
    CommandRow("changing-users", ("changing", "{address}", "--device", "{device}"),
               _flags("--phase", "1x8", "128x2", "1x8", "8x4", "32x4"),
               (*_flags("--phase", "1x2", "2x2", "1x2"), "--input-len", "32", "--output-len", "16", "--runs", "1"),
               services=ServedPair(with_fixed=False)),
    *(LoadRow(f"falling-users{users}", ServedPair(acceptance=0.9, later_acceptance=0.3), users, fixed=(2, 4),
          acceptance_falls=True) for users in (1, 32)),
))  # fmt: skip
_INTERFERENCE = Part("interference", "long prompts beside running requests", tuple(
    CommandRow(f"interference-k{length}",
               ("interference", "--address", "{address}", "-k", str(length), "--device", "{device}",
                "--dtype", "{dtype}"),
               ("--prefill-len", "8192", "--runs", "3"),
               ("--prefill-len", "256", "--output-len", "64", "--runs", "1", "--num-running", "2"),
               services=ServedPair(flags=_FIXED_LENGTHS, with_fixed=False))
    for length in (0, 4)
))  # fmt: skip
_HOST = (
    Part("kernels", "each kernel beside its floor", (
        CommandRow("kernels", ("kernels", "--device", "{device}", "--dtype", "{dtype}"),
                   tiny=("--samples", "1", "--warmups", "0", "--num-rows", "2", "--tokens-per-row", "2")),)),
    Part("between", "time between the forwards: three processes, forwards that only take time", (
        CommandRow("between", ("step", *_flags("--sessions", *_BETWEEN)), ("--samples", "300"),
                   ("--samples", "5", "--warmups", "2"),
                   wanted=", ".join(f"{ms:g} ms with {users}" for users, ms in _BETWEEN.items())),)),
    Part("wire", "the wire alone", (CommandRow("wire", ("rpc",), ("--samples", "200"), ("--samples", "10")),)),
    Part("tracing", "what tracing adds to a step", (
        CommandRow("tracing", ("tracing",), tiny=("--steps", "8", "--rounds", "2")),)),
)  # fmt: skip

PARTS = (
    Part("users", "one card, chosen against plain and fixed lengths", tuple(
        LoadRow(f"users{users}", ServedPair(), users, fixed=(3, 5) if users <= 64 else (), wanted_ms=wanted,
            wanted_between_ms=_BETWEEN.get(users))
        for users, wanted in _ALL_USERS.items()
    )),
    *(Part(f"acceptance{share:g}", f"acceptance {share:g}, users 1 to 128", tuple(
        LoadRow(f"acceptance{share:g}-users{users}", ServedPair(acceptance=share), users, fixed=lengths,
            wanted_over_plain=0.98, wanted_over_best=0.95)
        for users in (1, 8, 32, 128)
    )) for share, lengths in _FIXED.items()),
    Part("useless", "a draft that is always wrong", tuple(
        LoadRow(f"useless-users{users}", ServedPair(acceptance=0.0, with_fixed=False), users, wanted_over_plain=0.95)
        for users in (1, 8, 32)
    )),
    _CHANGING,
    Part("lengths", "one user, fixed lengths 2 to 5", (
        LoadRow("lengths-users1", ServedPair(), 1, fixed=(2, 3, 4, 5)),)),
    Part("context4k", "64 users with 4,000 tokens each, the draft with a window", (
        LoadRow("context4k-users64", ServedPair(
            flags=("--set", "draft.attention_window=1024"), pages=19_000),
            64, input_len=4000, fixed=(3, 5), cached_prompts=True, wanted_over_plain=1.5),
    )),
    Part("context16k", "8 users with 16,000 tokens each", (
        LoadRow("context16k-users8", ServedPair(max_model_len=20_000, with_fixed=False), 8, input_len=16_000,
            wanted_over_plain=0.98),
    )),
    Part("arrivals", "users who always have a request, prompts of 128 to 4,000 tokens", tuple(
        LoadRow(f"arrivals{input_len}-users{users}", ServedPair(), users, input_len=input_len, output_len=output_len,
            requests=requests, fixed=(3,), wanted_over_plain=0.98)
        for input_len, output_len, users, requests in (
            (128, 256, 64, 6), (1000, 256, 16, 6), (2000, 128, 16, 6), (4000, 256, 16, 3)
        )
    )),
    Part("arrivals-short", "users who always have a request of few tokens", tuple(
        LoadRow(f"arrivals128-out{output_len}-users{users}", ServedPair(), users, output_len=output_len,
                requests=requests, fixed=(3,), wanted_over_plain=0.98)
        for output_len, users, requests in ((16, 8, 96), (32, 8, 64), (16, 32, 48), (32, 32, 32))
    )),
    Part("sampled", "sampled requests beside greedy ones, K = 4", (
        LoadRow("sampled-users1", ServedPair(flags=_FOUR_DRAFT_TOKENS, with_fixed=False), 1, samplings=_SAMPLED),
        LoadRow("sampled-users32", ServedPair(flags=_FOUR_DRAFT_TOKENS, with_fixed=False), 32, samplings=_SAMPLED),
    )),
    Part("sampled-chosen", "sampled requests, chosen against plain", tuple(
        LoadRow(f"{name}-users{users}", ServedPair(with_fixed=False), users, sampling=sampling, wanted_over_plain=0.98)
        for name, sampling in (("sampled-chosen", _SAMPLED[1]), ("sampled-chosen0.6", _SAMPLED[0]))
        for users in (1, 32)
    )),
    Part("first-token", "the first token of 8,000", (
        LoadRow("first-token-8000", ServedPair(with_fixed=False), 1, input_len=8000, output_len=4),
    )),
    _INTERFERENCE,
    *(Part(name, f"{about}: beside `users`", tuple(
        LoadRow(f"{name}-users{users}", ServedPair(flags=flags), users, fixed=(3,) if users <= 32 else ())
        for users in (1, 32, 128, 256)
    )) for name, (about, flags) in _FORMATS.items()),
    *(Part(head, f"{head}, 1 and 32 users", (
        LoadRow(f"{head}-users1", ServedPair(draft=head, acceptance=0.8), 1, fixed=(5,),
            wanted_ms=1.9 if head == "eagle3" else None),
        LoadRow(f"{head}-users32", ServedPair(draft=head, acceptance=0.8), 32, fixed=(3, 5),
            wanted_over_plain=1.3 if head == "eagle3" else None),
    )) for head in ("eagle3", "mtp", "dflash")),
    Part("32b", "32B/0.6B on one card", _shapes("32B", "0.6B")),
    Part("70b", "70B/1B on two cards", _shapes("70B", "1B", _ARRANGEMENTS["tp2"]), num_cards=2),
    Part("coordinators", "256 users, two coordinators, fixed lengths", (
        LoadRow("coordinators2-users256", ServedPair(
            flags=("--num-coordinators", "2", *_FIXED_LENGTHS), with_fixed=False), 256),
    )),
    *(_two_cards(name, flags) for name, flags in _ARRANGEMENTS.items()),
    _FORWARDS,
    _ENGINE,
    *_HOST,
    Part("vllm", "vLLM on the same pair, by the command of --vllm", (PeerRow("vllm"),)),
)  # fmt: skip
"""Parts in the order in which they are measured."""


def find_parts(names: list[str], *, most_cards: int) -> list[Part]:
    """Parts of these names; without names, all that the number of cards allows.

    A row's name is its part with that row alone.
    ``KeyError`` of a name that is neither a part's nor a row's.
    """
    known = {row.name: replace(part, rows=(row,)) for part in PARTS for row in part.rows}
    known |= {part.name: part for part in PARTS}
    return [known[name] for name in names] if names else [part for part in PARTS if part.num_cards <= most_cards]
