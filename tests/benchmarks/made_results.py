"""Results as the benchmarks write them, with figures that are easy to check."""

import dataclasses
from collections.abc import Mapping

from outrider.benchmarks.peers.engines import Pair
from outrider.benchmarks.peers.run import Load, PeerOutcome, PeerPlan, to_result
from outrider.benchmarks.schema import Result, Series
from tests.benchmarks.test_schema import make_result


def serve_result(users: int, *, num_gpus: int = 2) -> Result:
    configuration = {
        "pair": "a / b",
        "traffic": {"max_concurrency": users},
        "decoding": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        "input_lens": [128],
        "num_speculative_tokens": 8,
        "draft_length": "auto",
        "placement": "target on 1 GPU, draft on 1 more",
        "num_gpus": num_gpus,
    }
    series = tuple(
        item
        for arm, faster in (("speculation", 2.0), ("baseline", 1.0))
        for item in (
            Series("tpot", "ms", (4.0 / faster, 6.0 / faster), {"arm": arm}),
            Series("output_throughput", "tok/s", (faster * 200.0 * users,), {"arm": arm}),
            Series("after_first_tokens", "ms", (6.0 / faster,), {"arm": arm}),
        )
    )
    figures: dict[str, dict[str, float]] = {"speculation": {}, "baseline": {}}
    return dataclasses.replace(
        make_result(f"users{users}"), kind="serve", configuration=configuration, series=series, figures=figures
    )


def peer_result(name: str, users: tuple[int, ...], *, length: int = 3) -> Result:
    """A result of vLLM, without speculation where ``length`` is 0."""
    return engines_result(name, {"vllm-speculative" if length else "vllm": (4.0 if length else 8.0, users)}, length)


def engines_result(name: str, engines: Mapping[str, tuple[float, tuple[int, ...]]], length: int = 3) -> Result:
    """A result of several engines: milliseconds per token, and numbers of users."""
    prompt = (0,) * 128
    most = sorted({count for _, users in engines.values() for count in users})
    plan = PeerPlan(
        ("vllm",),
        Pair("a", "b", "cuda", "bfloat16", length, 512),
        tuple(Load(count, ((prompt,) * count,)) for count in most),
    )
    outcomes = [
        PeerOutcome(engine, (ms,), (1.0,), ((1,),) * count, (2 * ms,), count, "0.26.0+cu129", (ms,))
        for engine, (ms, users) in engines.items()
        for count in users
    ]
    facts = {"pair": "8b-1b", "target": "8b-1b target", "synthetic": True}
    result = to_result(outcomes, plan, name=name, configuration=facts)
    return dataclasses.replace(result, environment=make_result("some").environment)
