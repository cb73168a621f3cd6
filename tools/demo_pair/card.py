"""The model card, written from the reports that the stages left.

Owns wording and layout of the card.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from demo_pair.corpus import LARGEST_FILE_BYTES
from demo_pair.heads.eagle3 import NUM_STEPS
from demo_pair.job import ACCEPTANCE_ROWS, ACCEPTANCE_TOKENS, DRAFT_LENGTH, PROMPT_TOKENS
from demo_pair.measuring import COMPLETION_TOKENS, Completion
from demo_pair.model import DRAFT_SHAPES
from demo_pair.recipes import DRAFT_TEXT, SAMPLED_SHARE, TESTS_SHARE
from demo_pair.training import OVERLAP_TEMPERATURES

EXCERPT_LINES = 14
HEAD_TITLES = {"eagle3": "EAGLE-3 head", "dflash": "DFlash block drafter"}
"""Titles by method."""
MEASURED_DRAFT = "measure-draft-"

Report = dict[str, Any]


def write_card(work: Path, pair: Path, shipped: str) -> None:
    """Write MODEL_CARD.md beside the folders target/ and draft/ of `pair`; `shipped` names the draft that was taken."""
    reports = {path.stem: json.loads(path.read_text()) for path in work.glob("*.json") if path.stem != "tokenizer"}
    sections = (
        _introduction(pair),
        _sizes(pair),
        _data(reports["corpus"]),
        _training(reports, shipped),
        _quality(reports, shipped),
        _acceptance(reports, shipped),
        _examples(reports["measure-target"]["completions"]),
    )
    (pair / "MODEL_CARD.md").write_text("\n\n".join(sections) + "\n")


def add_head_to_card(work: Path, pair: Path, method: str) -> None:
    """Write a head's section into the card of a pair, in the place of an earlier one, and the sizes anew."""
    made, measured = (json.loads((work / f"{name}.json").read_text()) for name in (method, f"measure-{method}"))
    corpus = json.loads((work / "corpus.json").read_text())
    path = pair / "MODEL_CARD.md"
    titled = path.read_text().split("\n## ")
    sections = {part.splitlines()[0]: part.rstrip("\n") for part in titled[1:]}
    sections["Sizes"] = _sizes(pair).removeprefix("## ")
    title = HEAD_TITLES[method]
    head = {title: f"{title}\n{_head_section(pair, method, made, measured, corpus)}"}
    examples = {"Examples": sections.pop("Examples")}
    ordered = {**sections, **head, **examples}  # an earlier section of the head keeps its place
    path.write_text("\n## ".join([titled[0], *(text + "\n" for text in ordered.values())]))


def _head_section(pair: Path, method: str, made: Report, measured: Report, corpus: Report) -> str:
    config = json.loads((pair / method / "config.json").read_text())
    described, borrowed, loss, remark = (_of_block if method == "dflash" else _of_eagle3)(config)
    lengths = zip(measured[method].values(), measured["draft"].values(), strict=True)
    shares = [f"{ours['mean_acceptance_length'] / theirs['mean_acceptance_length']:.2f}" for ours, theirs in lengths]
    rows = [
        (
            label,
            *(f"{item['acceptance']:.3f} ({item['mean_acceptance_length']:.2f})" for item in measured[key].values()),
        )
        for label, key in ((HEAD_TITLES[method], method), ("draft model", "draft"))
    ]
    recipe = made["recipe"]
    before = "\nIt began as the head that was shipped before, which was trained alike." if made["is_continued"] else ""
    return f"""{described} ({config["num_attention_heads"]} heads of
{config["head_dim"]}, feed-forward {config["intermediate_size"]}){borrowed}
`outrider demo --method {method}` drafts with it.

Trained by `tools/make_pair.py demo {method}` in {made["seconds"]:.0f} s on {made["device"]}:
{recipe["steps"]:,} steps of {recipe["rows"]} x {recipe["length"]} tokens, {made["sampled_share"]:.0%} of the rows from
{made["num_tokens"] / 1e6:.1f} million tokens that the target wrote ({made["sampling_seconds"]:.0f} s to write), the
others from {made["corpus_tokens"] / 1e6:.2f} million of the Python {corpus["python"]} standard library. The loss is the
draft's, {loss}.{before}

Acceptance and mean acceptance length as above, after the same prompts:

{_table(("draft", "T = 0", "T = 0.7", "T = 1"), rows)}

Its mean acceptance length is {", ".join(shares)} of the draft model's.{remark}"""


def _of_eagle3(config: Report) -> tuple[str, str, str, str]:
    """Kind of the head, the states that it reads, its loss, and notes on its figures."""
    layers = _listed(config["eagle_aux_hidden_state_layer_ids"])
    return (
        f"One decoder layer over the target's states after layers {layers}",
        ", and a last product of its own; the embedding is the\ntarget's, and not stored.",
        f"over {NUM_STEPS} steps of the training-time test of the paper",
        "",
    )


def _of_block(config: Report) -> tuple[str, str, str, str]:
    layers = _listed(layer + 1 for layer in config["dflash_config"]["target_layer_ids"])
    return (
        f"{config['num_hidden_layers']} decoder layers over the target's states after layers {layers}, which draft up"
        f" to {config['block_size'] - 1} tokens in one forward",
        "; embedding and last product are the target's, and not\nstored.",
        "over the tokens of random blocks of all lengths",
        " Tokens of a block are drawn without knowledge of\neach other, which costs more the higher the"
        " temperature; the loss still fell when training ended.",
    )


def _introduction(pair: Path) -> str:
    target, draft = (json.loads((pair / name / "config.json").read_text()) for name in ("target", "draft"))
    return f"""# The embedded pair

Two small Llama models of Python source text, made by `tools/make_pair.py demo`, so that Outrider can be tried and
tested without downloading anything. They continue code in the manner of the standard library; they know nothing and
answer nothing. All figures on this page were measured by that tool on the weights shipped here, upcast from bfloat16 to
float32.

{_shape_table(target, draft)}

Both share one byte-level BPE tokenizer of {target["vocab_size"]:,} tokens (0 is bos, put before every prompt; 1 is eos,
which ends a file). A word takes the space *after* it, and line ends and indentation stand alone, so that a prompt may
end after `def ` or a line end. Rotary positions (theta {target["rope_theta"]:,.0f}), tied embeddings."""


def _shape_table(target: Report, draft: Report) -> str:
    rows = [
        ("layers", "num_hidden_layers"),
        ("hidden size", "hidden_size"),
        ("feed-forward size", "intermediate_size"),
        ("attention heads", "num_attention_heads"),
        ("key-value heads", "num_key_value_heads"),
        ("head size", "head_dim"),
        ("positions", "max_position_embeddings"),
    ]
    return _table(("", "target", "draft"), ((label, target[key], draft[key]) for label, key in rows))


def _sizes(pair: Path) -> str:
    files = sorted(path for path in pair.rglob("*") if path.is_file() and path.name != "MODEL_CARD.md")
    sizes = [(path.relative_to(pair).as_posix(), path.stat().st_size) for path in files]
    total = ("all", sum(size for _, size in sizes))
    table = _table(("file", "bytes"), [*((f"`{name}`", size) for name, size in sizes), total])
    counts = ", ".join(
        f"{name} {parameters(pair / name):,}" for name in ("target", "draft", *HEAD_TITLES) if (pair / name).is_dir()
    )
    return f"""## Sizes
Parameters: {counts}, in bfloat16.

{table}"""


def parameters(folder: Path) -> int:
    """The number of parameters in a published folder, from the headers of its weight files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        header.pop("__metadata__", None)
        total += sum((entry["data_offsets"][1] - entry["data_offsets"][0]) // 2 for entry in header.values())
    return total


def _data(corpus: Report) -> str:
    names = {"library": "library, training", "tests": "its own test suites, training", "held_out": "library, held out"}
    rows = ((label, corpus["files"][key], corpus["bytes"][key], corpus["tokens"][key]) for key, label in names.items())
    per_token = corpus["bytes"]["held_out"] / corpus["tokens"]["held_out"]
    return f"""## Data and licence
The sources of the Python {corpus["python"]} standard library, copyright Python Software Foundation and others, used
under the [PSF License Agreement](https://docs.python.org/3/license.html); nothing else. Left out: installed packages,
files that do not parse, character tables, files over {LARGEST_FILE_BYTES // 1000} kB. Held out is one library file in
twenty, by a hash of its path; none of these was trained on, though the library's tests of them were, and the run was
watched by their loss. The tokenizer saw the library's training files only ({per_token:.2f} bytes a token on the
held-out files).

{_table(("part", "files", "bytes", "tokens"), rows)}

Text that these models write may repeat the library's, and then falls under the library's licence."""


def _training(reports: dict[str, Report], shipped: str) -> str:
    target, draft = reports["target"]["target"], reports["draft"][f"draft-{shipped}"]
    return f"""## How it was made
* Target: {_run(target)}, on the text, {TESTS_SHARE:.0%} of the
  rows from the tests; Muon for the matrices, AdamW for the rest, dropout {target["recipe"]["dropout"]}.
* Draft: {_run(draft)}, distilled from the target's logits: cross
  entropy against its distribution plus {draft["recipe"]["overlap_weight"]:g} times the total variation from it at
  temperatures {_listed(OVERLAP_TEMPERATURES)}; {SAMPLED_SHARE:.0%} of the rows from text that the target wrote at
  temperatures {_listed(text.temperature for text in DRAFT_TEXT)}
  ({reports["draft"]["sampling_seconds"]:.0f} s to write), the others from the corpus. The drafts
  compared below were trained side by side within that time.
* On {target["device"]}, in bfloat16 arithmetic over float32 weights."""


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _run(history: Report) -> str:
    recipe = history["recipe"]
    return f"{recipe['steps']:,} steps of {recipe['rows']} x {recipe['length']:,} tokens in {history['seconds']:.0f} s"


def _quality(reports: dict[str, Report], shipped: str) -> str:
    measured = reports["measure-target"]
    completions = [Completion(**item) for item in measured["completions"]["sampled"]]
    parsing = sum(item.parses for item in completions)
    draft_bits = reports[f"measure-draft-{shipped}"]["bits_per_byte"]
    prompts = len({item.prompt for item in completions})
    return f"""## Quality
* Held-out loss: target {measured["bits_per_byte"]:.3f} bits per byte, draft {draft_bits:.3f}.
* Of {len(completions)} completions of {prompts} code prompts at temperature 0.8 ({COMPLETION_TOKENS} tokens or eos),
  {parsing} ({parsing / len(completions):.1%}) parse with `ast` up to the last whole statement: a completion that was
  cut off loses its last line, and what is left may end inside an open block, bracket or string but may hold no error
  before that."""


def _acceptance(reports: dict[str, Report], shipped: str) -> str:
    names = sorted(
        (key for key in reports if key.startswith(MEASURED_DRAFT)), key=lambda key: not key.endswith(shipped)
    )
    rows = (_acceptance_row(key.removeprefix(MEASURED_DRAFT), reports[key], shipped) for key in names)
    return f"""## Acceptance
A plain loop with rejection sampling and K = {DRAFT_LENGTH}, after {ACCEPTANCE_ROWS} prompts of {PROMPT_TOKENS} tokens
from the held-out files, {ACCEPTANCE_TOKENS} tokens each: acceptance (the share of judged draft tokens that were
accepted) and, in brackets, the mean acceptance length (tokens gained a step, the recovered or bonus one included).

{_table(("draft", "T = 0", "T = 0.7", "T = 1", "bits per byte"), rows)}"""


def _acceptance_row(name: str, report: Report, shipped: str) -> tuple[str, ...]:
    figures = report["acceptance"].values()
    cells = [f"{item['acceptance']:.3f} ({item['mean_acceptance_length']:.2f})" for item in figures]
    shape = DRAFT_SHAPES[name]
    made = f"{shape.num_layers} x {shape.hidden_size}, {'shipped' if name == shipped else 'not shipped'}"
    return (made, *cells, f"{report['bits_per_byte']:.3f}")


def _examples(completions: dict[str, list[Report]]) -> str:
    parts = [
        "## Examples\nThe first of each prompt, not picked, cut after a few lines; each text begins with its prompt."
    ]
    for item in completions["greedy"]:
        first = next(other for other in completions["sampled"] if other["prompt"] == item["prompt"])
        parts += [_example("Greedy", item), _example("Temperature 0.8", first)]
    return "\n\n".join(parts)


def _example(title: str, item: Report) -> str:
    lines = (item["prompt"] + item["text"]).splitlines()
    return f"{title}, prompt `{item['prompt']!r}`:\n\n```python\n" + "\n".join(lines[:EXCERPT_LINES]) + "\n```"


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    lines = [[_cell(value) for value in row] for row in (head, *rows)]
    ruler = ["---"] * len(lines[0])
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ruler, *lines[1:]))


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
