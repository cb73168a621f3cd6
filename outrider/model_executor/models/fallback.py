"""Decoder whose layers are transformers' modelling code, over our paged KV cache.

A forward is one row of tokens [1, T] of all sequences; what they attend to is our plan's. transformers finds our
attention by name. Each attention layer's shape and window are learnt from what it asks for in a forward without a
cache. Linear layers become ours where their weights are quantized, or where they are merged.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.errors import ConfigError, ModelError
from outrider.kv_cache import KVCacheLayout, KVCacheSpec
from outrider.model_executor.distributed.communicator import SINGLE_RANK, Communicator, SingleRank
from outrider.model_executor.distributed.sharding import Shard
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import DeviceBatch, KVScaled, WeightTarget
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.config_reader import without_warnings
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.fallback_attention import (
    HOLDER,
    NAME,
    AttentionProbe,
    CacheScales,
    Current,
    Paged,
    register,
)
from outrider.model_executor.models.fallback_config import transformers_config
from outrider.model_executor.models.fallback_linear import (
    ALONE,
    Groups,
    Shares,
    covered_linears,
    recording_inputs,
    replace_linears,
    stored_tensors,
)
from outrider.model_executor.models.fallback_norm import replace_norms
from outrider.model_executor.models.fallback_sharding import share_linears
from outrider.model_executor.models.fallback_states import LayerStates
from outrider.model_executor.models.fallback_tensors import check_loaded, check_shapes, key_mapping_of, warn_of_unused
from outrider.model_executor.models.json_files import one_line, read_object

_log = logging.getLogger(__name__)
_NO_INTERFACE = "its attention does not go through transformers' attention interface"


def _numbers_tokens(decoder: torch.nn.Module) -> bool:
    """True if a decoder takes no positions, or has its own way to number them: after the padding token's id."""
    if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
        return True
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in decoder.modules())


class _Module:
    """Model of transformers whose layers attend through ``current``, and what its layers keep in the cache."""

    def __init__(self, model: Any, num_layers: int) -> None:  # noqa: ANN401 - transformers' own class
        """``ModelError`` unless each layer attends once, and within the window that it should."""
        self.model, self.current = model, Current()
        for module in model.modules():
            setattr(module, HOLDER, self.current)
        self.decoder = model.get_decoder()
        """Decoder, to whose states the head is applied."""
        if not hasattr(sys.modules[type(self.decoder).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise ModelError(_NO_INTERFACE)
        if _numbers_tokens(self.decoder):
            raise ModelError("its decoder numbers tokens by itself, not by position_ids from 0 on")
        probe = self._run_probe()
        if sorted(probe.specs) != list(range(num_layers)):
            raise ModelError(
                f"it attends in {len(probe.specs)} layers, and config.json has {num_layers} for its decoder"
            )
        self._check_windows([probe.specs[layer] for layer in range(num_layers)], probe.window)
        sources = probe.sources()
        cached = sorted(set(sources))
        self.specs = [probe.specs[layer] for layer in cached]
        """Specifications of the layers of the cache."""
        self.cache_layers = [cached.index(source) for source in sources]
        """Index of the cache layer that each layer of the model reads."""

    @property
    def _config(self) -> Any:  # noqa: ANN401 - transformers' own class
        return self.model.config.get_text_config(decoder=True)

    def _run_probe(self) -> AttentionProbe:
        """A forward of two tokens, which shows whether the decoder's output is all that the head reads."""
        probe = self.current.attention = AttentionProbe(getattr(self._config, "sliding_window", None))
        token = torch.zeros(1, 2, dtype=torch.long, device=next(self.model.parameters()).device)
        compute, outputs = self.decoder.forward, list[Any]()

        def forward(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - transformers' own
            if (given := self.current.given) is not None:
                return type(outputs[0])(last_hidden_state=given)
            outputs[:] = [compute(*inputs, **options)]
            return outputs[0]

        self.decoder.forward = forward
        self.model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=token[0], return_dict=True)
        if not outputs or not hasattr(outputs[0], "last_hidden_state"):
            raise ModelError("its head is applied to another module than its decoder")
        return probe

    def _check_windows(self, specs: list[KVCacheSpec], window: int | None) -> None:
        if odd := [spec.window for spec in specs if spec.window is not None and spec.window < 1]:
            raise ModelError(f"sliding_window should be at least 1, and is {odd[0]}")
        own = self._config
        if window is not None and window >= getattr(own, "max_position_embeddings", math.inf):
            return  # every token is within it
        types = getattr(own, "layer_types", None)
        asks_for_window = [kind == "sliding_attention" for kind in types or ()]
        if types is None:
            is_unused = getattr(own, "use_sliding_window", True) is False
            asks_for_window = [window is not None and not is_unused] * len(specs)
        if any(spec.window is None for spec, asks in zip(specs, asks_for_window, strict=True) if asks):
            raise ModelError("it does not say the windows of its sliding layers")


class TransformersDecoder(Decoder):
    """A whole model, or a rank's part of its linear layers. Weights are read by transformers; draft loops are not
    available, and CUDA graphs only where they are asked for.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        communicator: Communicator = SINGLE_RANK,
        groups: Groups = (),
        scales: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """Load the folder, with one product for each of the ``groups`` of linear layers, and with the ``scales`` of FP8
        layers; ``ModelError`` where its attention cannot be replaced by ours.
        """
        self.config, self.part = config, communicator.shard.part_of(config)
        self.dtype, self.device, self.batch_invariant = dtype, device, False
        self.communicator, self.shard = communicator, communicator.shard
        with _explained(folder):
            self._module = _Module(self._loaded(folder, groups, scales), config.num_layers)
            self._states = LayerStates(self._module.model, config.num_layers)
        self.kv_cache_layout = KVCacheLayout.of(self._module.specs)
        self._groups = [group for group, _ in self.kv_cache_layout.indices]
        self.cache_layers = self._module.cache_layers
        self._scales = [CacheScales() for _ in self._groups]

    @property
    def scaled_layers(self) -> dict[int, KVScaled]:
        """Layers that store keys and values of their own."""
        return {self.cache_layers.index(place): scales for place, scales in enumerate(self._scales)}

    def layer_states(
        self, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Decoder.layer_states``."""
        groups = [inputs.mapped() for inputs in batch.groups]
        inputs = [groups[group] for group in self._groups]
        self._module.current.attention = Paged(kv_cache, inputs, self.cache_layers, self._scales)
        with self._states.collected(layers) as states:
            output = self._module.decoder(
                input_ids=batch.token_ids.long()[None], position_ids=batch.positions.long()[None], use_cache=False,
                return_dict=True,
            )  # fmt: skip
        last: torch.Tensor = output.last_hidden_state[0]
        return last, states.joined(last)

    def head_logits(self, hidden: torch.Tensor, indices: torch.Tensor | None) -> torch.Tensor:
        """See ``Decoder.head_logits``."""
        token = torch.zeros(1, len(hidden), dtype=torch.long, device=self.device)
        current, kept = self._module.current, 0 if indices is None else indices.long()
        current.given = hidden[None]
        try:
            output = self._module.model(input_ids=token, use_cache=False, logits_to_keep=kept, return_dict=True)
        finally:
            current.given = None
        logits: torch.Tensor = output.logits[0]
        return logits

    def _loaded(self, folder: Path, groups: Groups, scales: Mapping[str, torch.Tensor]) -> Any:  # noqa: ANN401
        """The model with our attention, norms and linear layers."""
        raw = read_object(folder / "config.json")
        own = transformers_config(raw)
        with without_warnings():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, config=own, dtype=self.dtype, attn_implementation=register(), local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,
                key_mapping=key_mapping_of(own, raw),
            )  # fmt: skip
        model, found = loaded
        check_loaded(found)
        warn_of_unused(self.config.architecture, found, scales)
        shares = _shared(model, self.config, self.communicator)
        if self.config.quantization is None:
            model.to(self.device)
        replace_linears(model, self.config, groups, dtype=self.dtype, device=self.device, scales=scales, shares=shares)
        model.eval().to(self.device)
        replace_norms(model, self.dtype)
        return model


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn whatever transformers' modules raise into a ``ModelError`` that names the folder."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = _NO_INTERFACE if error.args == (NAME,) else one_line(error)
        raise ModelError(f"{folder} cannot be run through transformers: {reason}") from error


@dataclass(frozen=True, slots=True)
class FallbackSizes:
    """Memory of a model that transformers computes."""

    weight_bytes: int
    layout: KVCacheLayout | None
    """None: it is known only with the weights."""
    groups: Groups = ()
    """Linear layers that can be one product."""
    quantized: Mapping[str, WeightTarget] = field(default_factory=dict)
    """Tensors of FP8 layers, as the files should have them."""
    decoding_bytes: int | None = None
    """See ``ModelEstimate``."""
    is_text_part: bool = False
    """True if the files are those of a whole model, of which the text part is made."""


class _FirstRank(SingleRank):
    """The first of several ranks, whose sums are not read."""

    def __init__(self, num_ranks: int) -> None:
        self.shard = Shard(0, num_ranks)


def estimate_sizes(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    num_ranks: int = 1,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> FallbackSizes:
    """Memory of a rank by the configuration alone; ``ModelError`` where transformers cannot make the model, or not of
    tensors of these ``shapes`` on file, or where its attention cannot be replaced by ours, ``ConfigError`` where ranks
    cannot share it.
    """
    with _explained(folder), torch.device("meta"):
        raw = read_object(folder / "config.json")
        own = transformers_config(raw)
        own._experts_implementation = "batched_mm"  # whose shapes depend on no numbers
        model = _without_numbers(own)
        covered_linears(model, config)  # which refuses FP8 experts
        if shapes is not None:
            check_shapes(_without_numbers(own), shapes, key_mapping_of(own, raw))
        shares = _shared(model, config, _FirstRank(num_ranks))
        num_kept = sum(model.get_submodule(name).weight.numel() for name in shares.kinds)
        num_parameters = sum(parameter.numel() for parameter in model.parameters()) - num_kept + num_kept // num_ranks
        num_quantized = sum(linear.weight.numel() for linear in covered_linears(model, config).values())
        num_quantized += num_kept // num_ranks - num_kept
        quantized = dict(stored_tensors(model, config, shares))
        weight_bytes = num_parameters * dtype.itemsize - num_quantized * (dtype.itemsize - 1)
        unread = _num_unread(model)
        layout, groups = _try_out(model, config)
    return FallbackSizes(
        weight_bytes, layout, groups, quantized, is_text_part=own.model_type != raw["model_type"],
        decoding_bytes=None if unread is None else weight_bytes - unread * dtype.itemsize,
    )  # fmt: skip


def _without_numbers(own: PreTrainedConfig) -> Any:  # noqa: ANN401 - transformers' own class
    auto_class: Any = AutoModelForCausalLM
    return auto_class.from_config(own, attn_implementation=register(), trust_remote_code=False)


def _num_unread(model: Any) -> int | None:  # noqa: ANN401 - transformers' own class
    """Number of parameters that a forward of one token does not read: of embeddings, of experts that it does not
    choose, and of other parts than decoder and head; None: not known.
    """
    if (head := model.get_output_embeddings()) is None:
        return None
    num_chosen = getattr(model.config.get_text_config(decoder=True), "num_experts_per_tok", None)
    read = {id(parameter) for part in (model.get_decoder(), head) for parameter in part.parameters()}
    read -= {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    read.add(id(head.weight))
    num_unread = 0
    for name, parameter in model.named_parameters():
        is_of_experts = ".experts." in name
        if id(parameter) not in read:
            num_unread += parameter.numel()
        elif is_of_experts and parameter.dim() == 3 and isinstance(num_chosen, int):
            num_unread += parameter.numel() - parameter[0].numel() * min(num_chosen, len(parameter))
        elif is_of_experts or parameter.dim() > 2:
            return None
    return num_unread


def _shared(model: Any, config: ModelConfig, communicator: Communicator) -> Shares:  # noqa: ANN401
    """Leave this rank's part of the linear layers, but for those that are quantized, which are cut when they are."""
    if communicator.shard.size == 1:
        return ALONE
    covered = covered_linears(model, config)
    kinds = share_linears(model, communicator, config.num_kv_heads, covered.values())
    return Shares(communicator, {name: kinds[linear] for name, linear in covered.items() if linear in kinds})


def _try_out(model: Any, config: ModelConfig) -> tuple[KVCacheLayout | None, Groups]:  # noqa: ANN401
    """Cache of a model without numbers, None where its code needs numbers, and the linear layers that can be merged:
    its code takes what they give as parts of one tensor.
    """
    try:
        with recording_inputs(model) as groups:
            layout = KVCacheLayout.of(_Module(model, config.num_layers).specs)
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, (NotImplementedError, RuntimeError)) and "meta" in str(error):
            return None, ()  # of an operation that needs numbers
        if error.args == (NAME,):
            raise
        said = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"the fields of config.json do not fit together ({_sizes(model)}): {said}") from error
    plain = replace(config, quantization=None)
    replace_linears(model, plain, groups, dtype=torch.float32, device=torch.device("meta"), scales={})
    try:
        _Module(model, config.num_layers)
    except Exception as error:
        _log.info("%s: linear layers are not merged: %s", config.architecture, one_line(error))
        return layout, ()
    return layout, groups


def _sizes(model: Any) -> str:  # noqa: ANN401 - transformers' own class
    """Fields of which one may be wrong where a forward fails."""
    text = model.config.get_text_config(decoder=True)
    names = ("hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim")
    given = [f"{name} {size}" for name in names if (size := getattr(text, name, None)) is not None]
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ())
    return ", ".join([*given, *([f"layer_types {', '.join(kinds)}"] if kinds else [])])
