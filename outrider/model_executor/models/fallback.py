"""Decoder whose layers are transformers' modelling code, over our paged KV cache.

A forward is one row of tokens [1, T] of all sequences; what they attend to is our plan's. transformers finds our
attention by name; inputs of a forward reach it through its modules, which all hold the model's ``_Current``. Each
attention layer's shape and window are learnt from what it asks for in a forward without a cache. Linear layers become
ours where their weights are quantized while loading.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM

from outrider.errors import ModelError
from outrider.kernels.kv_store import store_kv
from outrider.kernels.paged_attention import DevicePlan, paged_attention
from outrider.kv_cache import KVCacheLayout, KVCacheSpec
from outrider.model_executor.distributed.communicator import SINGLE_RANK
from outrider.model_executor.kv_cache_tensors import KVCacheTensors
from outrider.model_executor.layers.contract import AttentionInputs, DeviceBatch
from outrider.model_executor.models.config import ModelConfig
from outrider.model_executor.models.decoder import Decoder
from outrider.model_executor.models.fallback_config import transformers_config
from outrider.model_executor.models.fallback_linear import covered_linears, replace_linears
from outrider.model_executor.models.fallback_states import LayerStates
from outrider.model_executor.models.json_files import one_line, read_object

_NAME = "outrider_paged"
_HOLDER = "outrider_current"
_NO_INTERFACE = "its attention does not go through transformers' attention interface"
_REFUSED = ("s_aux", "sinks", "position_bias", "attn_bias", "block_table", "indices")
"""Arguments of attention functions that change the result and that ours does not know."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Attention of a forward of one token without a cache: learns the layers' shapes."""

    window: int | None
    specs: dict[int, KVCacheSpec] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Record the layer, and let the token see itself: [1, 1, H, D]."""
        refused = [name for name in _REFUSED if options.get(name) is not None]
        if refused or key.shape[-1] != value.shape[-1]:
            raise ModelError(f"attention with {', '.join(refused) or 'values of another size than keys'}")
        if layer in self.specs:
            raise ModelError(f"layer {layer} attends twice")
        self.specs[layer] = KVCacheSpec(key.shape[1], key.shape[3], options.get("sliding_window"))
        self.keys[layer] = key
        return value.transpose(1, 2).repeat_interleave(query.shape[1] // key.shape[1], 2)

    def sources(self) -> list[int]:
        """Of each layer the one whose keys and values it reads: its own number, or that of one before it."""
        found: list[int] = []
        for layer, spec in sorted(self.specs.items()):
            source = next(one for one in sorted(self.keys) if self.keys[one] is self.keys[layer])
            if self.specs[source] != spec:
                raise ModelError(f"layer {layer} reads the keys of layer {source} in another window")
            found.append(source)
        return found


@dataclass(frozen=True, slots=True)
class _Paged:
    """Attention of a forward over the cache."""

    kv_cache: KVCacheTensors
    inputs: Sequence[AttentionInputs]
    """Of each layer of the cache."""
    places: Sequence[int]
    """Of each layer of the model, the layer of the cache that it reads."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """Store the tokens' keys and values unless a layer before has, and attend: [1, T, H, D]."""
        place = self.places[layer]
        kv, inputs = self.kv_cache.layer(place), self.inputs[place]
        queries, keys, values = (part[0].transpose(0, 1) for part in (query, key, value))
        if place not in self.places[:layer]:
            content, slots = torch.stack((keys, values), dim=1).to(kv.dtype), inputs.slots.long()
            if isinstance(inputs.plan, DevicePlan):
                slots, content = _without_padding(kv, slots, content)
            store_kv(kv, slots, content)
        return paged_attention(
            queries.contiguous(), kv, inputs.plan, scale=options.get("scaling"), softcap=options.get("softcap")
        )[None]


@dataclass(slots=True)
class _Current:
    """Attention of the forward that runs; every attention module of a model holds the same one."""

    attention: _Probe | _Paged | None = None
    given: torch.Tensor | None = None
    """What the decoder returns without being run: [1, T, hidden]."""


def _without_padding(kv: torch.Tensor, slots: torch.Tensor, content: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and content of tokens [T] of a CUDA graph, some of which have slot -1: these write what the first token
    writes, or, where there is no token at all, what the last slot holds.
    """
    is_empty, last = slots[:1] < 0, kv.shape[0] - 1
    first_slot = torch.where(is_empty, last, slots[:1])
    first = torch.where(is_empty.view(1, 1, 1, 1), kv[last:], content[:1])
    is_real = slots >= 0
    return torch.where(is_real, slots, first_slot), torch.where(is_real.view(-1, 1, 1, 1), content, first)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, H, T, D]
    key: torch.Tensor,  # [1, H_kv, T, D]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' modules call it, to [1, T, H, D]."""
    current: _Current | None = getattr(module, _HOLDER, None)
    if current is None or current.attention is None:
        raise ModelError("its attention layers have no number")
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError("it has attention masks of its own")
    return current.attention.attend(int(module.layer_idx), query, key, value, options), None  # type: ignore[arg-type]


def register() -> str:
    """Make our attention known to transformers; returns its name."""
    AttentionInterface.register(_NAME, _attention)
    return _NAME


def _check_complete(missing: Collection[str]) -> None:
    """Raise ``ModelError`` for tensors that the files lack: transformers draws them at random."""
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"tensor {min(missing)}{rest} missing from its files")


class _Module:
    """Model of transformers whose layers attend through ``current``, and what its layers keep in the cache."""

    def __init__(self, model: Any, num_layers: int) -> None:  # noqa: ANN401 - transformers' own class
        """``ModelError`` unless each layer attends once, and within the window that it should."""
        self.model, self.current = model, _Current()
        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                setattr(module, _HOLDER, self.current)
        self.decoder = model.get_decoder()
        """What the head is applied to."""
        if not hasattr(sys.modules[type(self.decoder).__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise ModelError(_NO_INTERFACE)
        probe = self._run_probe()
        if sorted(probe.specs) != list(range(num_layers)):
            raise ModelError(f"{len(probe.specs)} of its {num_layers} layers have our attention")
        self._check_windows([probe.specs[layer] for layer in range(num_layers)], probe.window)
        sources = probe.sources()
        cached = sorted(set(sources))
        self.specs = [probe.specs[layer] for layer in cached]
        """Of each layer of the cache."""
        self.places = [cached.index(source) for source in sources]
        """Of each layer of the model, the layer of the cache that it reads."""

    @property
    def _config(self) -> Any:  # noqa: ANN401 - transformers' own class
        return self.model.config.get_text_config(decoder=True)

    def _run_probe(self) -> _Probe:
        """A forward of one token, which shows whether the decoder's output is all that the head reads."""
        probe = self.current.attention = _Probe(getattr(self._config, "sliding_window", None))
        token = torch.zeros(1, 1, dtype=torch.long, device=next(self.model.parameters()).device)
        compute, outputs = self.decoder.forward, list[Any]()

        def forward(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 - transformers' own
            if (given := self.current.given) is not None:
                return type(outputs[0])(last_hidden_state=given)
            outputs[:] = [compute(*inputs, **options)]
            return outputs[0]

        self.decoder.forward = forward
        self.model(input_ids=token, position_ids=token, use_cache=False, logits_to_keep=token[0], return_dict=True)
        if not outputs:
            raise ModelError("its head is applied to another module than its decoder")
        return probe

    def _check_windows(self, specs: list[KVCacheSpec], window: int | None) -> None:
        own = self._config
        types = getattr(own, "layer_types", None)
        asks_for_window = [kind == "sliding_attention" for kind in types or ()]
        if types is None:
            is_unused = getattr(own, "use_sliding_window", True) is False
            asks_for_window = [window is not None and not is_unused] * len(specs)
        if any(spec.window is None for spec, asks in zip(specs, asks_for_window, strict=True) if asks):
            raise ModelError("it does not say the windows of its sliding layers")


class TransformersDecoder(Decoder):
    """A whole model on one device. Weights are read by transformers; draft loops are not available, and CUDA graphs
    only where they are asked for.
    """

    def __init__(self, folder: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Load the folder; ``ModelError`` where its attention cannot be replaced by ours."""
        self.config = self.part = config
        self.dtype, self.device, self.batch_invariant = dtype, device, False
        self.communicator, self.shard = SINGLE_RANK, SINGLE_RANK.shard
        with _explained(folder):
            self._module = _Module(self._loaded(folder), config.num_layers)
            self._states = LayerStates(self._module.model, config.num_layers)
        self.kv_cache_layout = KVCacheLayout.of(self._module.specs)
        self._groups = [group for group, _ in self.kv_cache_layout.places]

    def layer_states(
        self, batch: DeviceBatch, kv_cache: KVCacheTensors, layers: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Decoder.layer_states``."""
        inputs = [batch.groups[group] for group in self._groups]
        self._module.current.attention = _Paged(kv_cache, inputs, self._module.places)
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

    def _loaded(self, folder: Path) -> Any:  # noqa: ANN401 - transformers' own class
        """The model with our attention, and with our linear layers where it is quantized."""
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=transformers_config(read_object(folder / "config.json")), dtype=self.dtype,
            attn_implementation=register(), local_files_only=True, trust_remote_code=False, use_safetensors=True,
            output_loading_info=True,
        )  # fmt: skip
        model, found = loaded
        _check_complete(found["missing_keys"])
        if self.config.quantization is not None:
            replace_linears(model, self.config.quantization, self.dtype, self.device)
        return model.eval().to(self.device)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn whatever transformers' modules raise into a ``ModelError`` that names the folder."""
    try:
        yield
    except Exception as error:
        reason = _NO_INTERFACE if error.args == (_NAME,) else one_line(error)
        raise ModelError(f"{folder} cannot be run through transformers: {reason}") from error


@dataclass(frozen=True, slots=True)
class FallbackSizes:
    """Memory of a model that transformers computes."""

    weight_bytes: int
    kv_bytes_per_token: int


def estimate_sizes(folder: Path, config: ModelConfig, dtype: torch.dtype) -> FallbackSizes:
    """Memory by the configuration alone; ``ModelError`` where transformers cannot make the model, or where its
    attention cannot be replaced by ours.
    """
    auto_class: Any = AutoModelForCausalLM
    with _explained(folder), torch.device("meta"):
        own = transformers_config(read_object(folder / "config.json"))
        own._experts_implementation = "batched_mm"  # whose shapes depend on no numbers
        model = auto_class.from_config(own, attn_implementation=register(), trust_remote_code=False)
        linears = [] if config.quantization is None else list(covered_linears(model, config.quantization))
        kv_bytes = config.kv_bytes_per_token(dtype)
        try:
            specs = _Module(model, config.num_layers).specs
            kv_bytes = KVCacheLayout.of(specs).bytes_per_token(dtype.itemsize)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error):  # else of an operation that needs numbers
                raise
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_quantized = sum(linear.weight.numel() for _, linear in linears)
    return FallbackSizes(num_parameters * dtype.itemsize - num_quantized * (dtype.itemsize - 1), kv_bytes)
