"""Makes docs/models.md from the table of what is served; with --check only says whether it is up to date."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from outrider.model_executor.models.config import FALLBACK_SPEED
from outrider.model_executor.models.support import FALLBACKS, FAMILIES, FORMATS

PAGE = Path(__file__).parent.parent / "docs" / "models.md"

HEAD = """\
# Models

<!-- Made by scripts/generate_models.py from outrider/model_executor/models/support.py; change it there. -->

`outrider check FOLDER_OR_ID` says from the configuration, and the headers of a folder's weights, whether a model would
load, how much memory it takes, or why it would not load.

## Families

Heads are drafts that read hidden states: EAGLE, EAGLE-3, DFlash, Medusa and MLP speculator.

| architecture | models | heads |
|---|---|---|
"""

SERVED = """\
* names and shapes: 22 published lists; Gemma 4, GLM-4.5, Qwen2.5, Qwen-VL and MiMo as transformers writes them

`pytest -m slow tests/end_to_end/test_matrix.py` plays 200 prompts of each family and format, and 60 of each model
through transformers: alone; in small pools, with prefix cache and drafts of 1 to 8 tokens by the model itself; by
another model over gRPC while draft and target are lost. Greedy tokens are transformers', coupled ones those of the
target alone.
"""
FALLBACK_HEAD = f"""
Decoders of other families run through transformers' code with paged attention (`--model-impl transformers`; auto
where no family fits), if every layer attends through its attention interface. RMS norms and products are ours; CUDA
graphs are used if they give the same logits: expect {FALLBACK_SPEED} of native speed. `--tensor-parallel-size` shares
linear layers by transformers' plan; experts, or no plan, are refused then. Linear layers are FP8 if they are on file,
or with `--quantization fp8`; FP8 experts and heads, and frequencies that depend on the longest sequence, are refused.
Latent attention (MLA) keeps each head's whole keys and values. Code
from a model's folder is never run. Compared with transformers in float32, or refused, by `outrider check` too:

| `model_type` | models | refused |
|---|---|---|
"""

LONGROPE = """
longrope (Phi) has one set of factors for all lengths: short ones up to the trained length, which is the default of
`--max-model-len`, long ones where it is set higher. dynamic stretches each token by its
own position, not by the whole text's.
"""

FORMATS_HEAD = """
## Weight formats

Compared with transformers and the widened weights in float64, inputs rounded as compressed-tensors does,
for Llama, Mistral, Qwen2 and 3, and experts of Qwen3 and Mixtral; mxfp4 with the weights as transformers widens them.
Without the kernels weights are widened to the model's type.

| `quant_method` | weights | activations | kernels |
|---|---|---|---|
"""

REST = """
Layers that a checkpoint ignores keep its 16 or 32 bits, as do head and experts unless it quantizes them.

The KV cache has the model's type, or FP8 (E4M3) with `--kv-cache-dtype fp8` or where a checkpoint asks for it
(`kv_cache_scheme`): twice the tokens, on a CPU or a GPU of compute capability 8.9. Scales are the checkpoint's
`k_scale` and `v_scale`, else 1, or measured (`kv_cache_scales`). Logits equal transformers' over a cache that rounds
alike. Heads keep their type.

Activations are rounded as the format says, whatever the number of rows. With `--tensor-parallel-size` above 1 a scale
for each token is that of a rank's part of the token where ranks share the inputs; other scales do not change.

Experts are read one by one or stacked. With `--enable-expert-parallel` each
GPU has some of them whole. Routers have the type on file, FP8 too.

Adapters (LoRA; merge them), images, 4 bits, `ue8m0` scales and others are not served. A killed download fetches
unfinished files anew.
"""


def render() -> str:
    """The page."""
    families = [f"| `{one.architecture}` | {one.models} | {one.drafts} |\n" for one in FAMILIES]
    others = [f"| `{one.model_type}` | {one.models} | {one.refused} |\n" for one in FALLBACKS]
    formats = [f"| {one.name} | {one.weights} | {one.activations} | {one.kernels} |\n" for one in FORMATS]
    return (
        HEAD
        + "".join(families)
        + _compared()
        + FALLBACK_HEAD
        + "".join(others)
        + LONGROPE
        + FORMATS_HEAD
        + "".join(formats)
        + REST
    )


def _compared() -> str:
    """Sentences that say what families were compared with, the most common last."""
    (common, _), *_ = Counter(one.compared for one in FAMILIES).most_common(1)
    lines = ["\nCompared with:\n"]
    for compared in dict.fromkeys(one.compared for one in FAMILIES if one.compared != common):
        named = [f"`{one.architecture}`" for one in FAMILIES if one.compared == compared]
        lines.append(f"* {', '.join(named)}: {compared}\n")
    return "".join([*lines, f"* all others: {common}\n", SERVED])


def main() -> int:
    """Write the page, or compare with it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(render(), encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != render():
        sys.stderr.write(f"{PAGE} is stale: run `make docs`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
