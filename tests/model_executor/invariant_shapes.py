"""Batch invariance of models of published shapes: few layers of noise, and the bits of a text's logits in any company.

``python -m tests.model_executor.invariant_shapes [NAME[:OPTION] ...]`` on a GPU prints how many comparisons of each
shape differ, and ends with 1 if any does. A process can share one model with a second GPU: one ``:x2`` a command.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.config import TargetSettings
from outrider.kv_cache import KVSequence
from outrider.model_executor.distributed.runner import open_runner
from outrider.model_executor.graph_shapes import GraphLimits
from outrider.model_executor.input_batch import ForwardRow
from outrider.model_executor.model_runner import ModelRunner

PUBLISHED = Path(__file__).with_name("published")
_MOST_SCORED = 16
"""Tokens of another row up to which all get logits, as draft tokens do."""
WINDOW = 256
"""Window of layers that have one, so that the text is longer."""
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3 = {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936}
_SMALL_QWEN3 = {**_QWEN3, "num_attention_heads": 16, "tie_word_embeddings": True}
OTHERS: dict[str, dict[str, Any]] = {
    "llama-3-8b": _LLAMA,
    "llama-3-1b": {
        **_LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True,
    },
    "qwen2-7b": {
        **_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "qwen3-0.6b": {**_SMALL_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_SMALL_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "qwen3-32b": {**_QWEN3, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64},
    "mistral-7b": {
        **_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 32000,
        "sliding_window": WINDOW,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
        "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
        "attention_bias": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 150000, "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"}, "hidden_act": "silu",
    },
}  # fmt: skip
LAYERS = {"gemma-3-1b": 6, "gemma-3-27b-it": 6, "olmo-3-1025-7b": 4, "qwen3.5-27b": 4, "qwen3.5-35b-a3b": 4}
"""Layers of which one attends to all, or is not recurrent; others: 2."""
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "fp8": {"quantization": "fp8"},
    "fp8-kv": {"kv_cache_dtype": "fp8"},
    "fp16": {"dtype": "float16"},
    "x2": {"num_ranks": 2},
    "x2-experts": {"num_ranks": 2, "enable_expert_parallel": True},
    "fast": {"batch_invariant": "off"},
}
"""Options of ``NAME:OPTION``; those with "x2" take two GPUs, "fast" is the negative control."""


def shape_of(name: str) -> dict[str, Any]:
    """The config.json of a few layers of a published model."""
    config: dict[str, Any] = OTHERS.get(name) or json.loads(PUBLISHED.joinpath(f"{name}.json").read_text())["config"]
    return _with_few_layers(config, LAYERS.get(name, 2))


def _with_few_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    if "text_config" in config:
        return config | {"text_config": _with_few_layers(config["text_config"], count)}
    few = config | {"num_hidden_layers": count}
    if few.get("sliding_window"):
        few["sliding_window"] = min(WINDOW, few["sliding_window"])
    if few.get("layer_types"):
        few["layer_types"] = few["layer_types"][:count]
    return few


@dataclass(frozen=True, slots=True)
class Company:
    """Rows computed with the text, and the chunks of the text."""

    cuts: Sequence[int]
    """Ends of its chunks."""
    num_others: int = 0
    """Other rows of each forward."""
    other_tokens: int = 1
    """Tokens of each other row."""


@dataclass(slots=True)
class Sizes:
    """Lengths that are compared."""

    length: int = 700
    counts: Sequence[int] = (*range(1, 301), 512, 1000, 4096)
    """Tokens of the forwards that the last token is computed in."""
    most_rows: int = 300
    companies: Sequence[Company] = field(
        default_factory=lambda: (
            Company([9, 300, 512, 700]),
            Company([128, 640, 700], 3),
            Company([600, *range(601, 701)]),
            Company([640, *range(641, 701)], 31),
            Company([660, *range(665, 701, 5)], 0),
            Company([660, *range(665, 701, 5)], 15, 5),
            Company([690, *range(691, 701)], 255),
            Company([690, 695, 700], 127, 4),
            Company([682, 691, 700], 55, 9),
        )
    )


class Comparison:
    """Logits of one text, alone in one forward and in any company."""

    def __init__(self, runner: ModelRunner, sizes: Sizes) -> None:
        self.runner, self.sizes = runner, sizes
        vocabulary = runner.config.vocab_size
        self.text = [3 + (7919 * place * place + 31 * place) % (vocabulary - 3) for place in range(sizes.length)]
        self.whole = self.logits(Company([sizes.length]))

    def logits(self, company: Company) -> torch.Tensor:
        """Logits of every position."""
        runner, found, first = self.runner, [], 0
        sequence = runner.sequences.open(len(self.text))
        room = len(company.cuts) * company.other_tokens
        others = [runner.sequences.open(room) for _ in range(company.num_others)]
        for number, stop in enumerate(company.cuts):
            rows = [self._other(other, place + number, company.other_tokens) for place, other in enumerate(others)]
            place = (7 * number) % (len(rows) + 1)
            rows.insert(place, ForwardRow(sequence, self.text[first:stop], stop - first))
            begin = sum(row.num_logits for row in rows[:place])
            found.append(runner.forward(rows)[begin : begin + stop - first].clone())
            first = stop
        self._release([sequence, *others])
        return torch.cat(found)

    def last_in(self, count: int) -> torch.Tensor:
        """Logits of the last token in a forward of so many tokens."""
        runner, last = self.runner, len(self.text) - 1
        sequence = runner.sequences.open(len(self.text))
        runner.forward([ForwardRow(sequence, self.text[:last], 1)])
        lengths = [1] * (count - 1) if count <= self.sizes.most_rows else [count - 1]
        others = [runner.sequences.open(length) for length in lengths]
        pairs = enumerate(zip(others, lengths, strict=True))
        rows = [self._other(other, place, length) for place, (other, length) in pairs]
        place = (7 * count) % (len(rows) + 1)
        rows.insert(place, ForwardRow(sequence, self.text[last:], 1))
        begin = sum(row.num_logits for row in rows[:place])
        found = runner.forward(rows)[begin].clone()
        self._release([sequence, *others])
        return found

    def differing(self) -> Iterator[str]:
        """Differences, in words; nothing if the bits are equal."""
        if not torch.isfinite(self.whole).all():
            yield "logits are not finite"
        for company in self.sizes.companies:
            found = self.logits(company)
            rows = (found != self.whole).any(1).nonzero().flatten().tolist()
            if rows:
                others = f"{company.num_others} x {company.other_tokens}"
                yield f"{company.cuts[:2]}.. beside {others}: {len(rows)} positions"
        for count in self.sizes.counts:
            if not torch.equal(self.last_in(count), self.whole[-1]):
                yield f"of {count} tokens"

    def _other(self, sequence: KVSequence, place: int, count: int) -> ForwardRow:
        ids = [(5 + 13 * place + 101 * number) % self.runner.config.vocab_size for number in range(count)]
        return ForwardRow(sequence, ids, count if count <= _MOST_SCORED else 1)

    def _release(self, sequences: Sequence[KVSequence]) -> None:
        for one in sequences:
            self.runner.sequences.release(one)


def load(name: str, folder: Path, *, num_ranks: int = 1, device: str = "cuda", **options: Any) -> ModelRunner:
    """A shape with weights of noise, in bfloat16."""
    folder.joinpath("config.json").write_text(json.dumps(shape_of(name)))
    chosen: dict[str, Any] = {
        "device": device, "dtype": "bfloat16", "load_format": "dummy", "num_pages": 2500, "max_model_len": 4096,
        "prefix_caching": False, "batch_invariant": "on", **options,
    }  # fmt: skip
    if num_ranks > 1:
        own = {"model": str(folder), "tensor_parallel_size": num_ranks, "max_batched_tokens": 4096}
        return open_runner(TargetSettings.model_validate(own | chosen))
    graphs = GraphLimits(max_draft_length=4, max_tokens=512, max_batched_tokens=4096)
    return ModelRunner.load(folder, num_state_slots=400, graphs=graphs, **chosen)


def main(names: Sequence[str]) -> int:
    """Compare each shape and print a line about it."""
    if sum("x2" in name.partition(":")[2] for name in names) > 1:
        sys.exit("more than one shape over two GPUs: give each a command of its own")
    num_differing = 0
    for given in names or [*OTHERS, *sorted(path.stem for path in PUBLISHED.glob("*.json"))]:
        began = time.monotonic()
        name, _, option = given.partition(":")
        try:
            with tempfile.TemporaryDirectory() as folder:
                runner = load(name, Path(folder), **OPTIONS[option])
                runner.warm_up()
                sizes = Sizes()
                found = list(Comparison(runner, sizes).differing())
                runner.close()
        except Exception as error:  # the next shape is compared all the same
            found = [f"{type(error).__name__}: {error}"]
        num_differing += bool(found)
        text = f"{len(found)} differ: {'; '.join(found)[:300]}" if found else "equal bits"
        sys.stdout.write(f"{given}: {text} ({time.monotonic() - began:.0f} s)\n")
        sys.stdout.flush()
    return int(num_differing > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
