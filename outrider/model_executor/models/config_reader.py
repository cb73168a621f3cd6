"""Reading of a model folder's ``config.json`` and ``generation_config.json``; refuses to know weights and devices."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import import_utils
from transformers.utils import logging as transformers_logging

from outrider.errors import ModelError, NoNativeLayerError
from outrider.model_executor.layers.quantization import Numbers, Quantization
from outrider.model_executor.layers.rope import rotated_size
from outrider.model_executor.models.config import Activation, ModelConfig, RopeConfig
from outrider.model_executor.models.config_schema import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    MAX_POSITION,
    ROPE_PARAMETERS,
    ConfigFile,
    SpecialTokens,
    without_code,
)
from outrider.model_executor.models.families import ModelFamily, architecture_of, family_of, is_native
from outrider.model_executor.models.json_files import is_there, one_line, read_object, shown, validated
from outrider.model_executor.models.quantization_reader import read_quantization
from outrider.model_executor.models.tensor_names import module_aliases

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)
SUPPORTED_DTYPES = ("float32", "float16", "bfloat16", "float64")
_DTYPE_NAMES = {"auto": "float32", "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16"} | {
    "bf16": "bfloat16",
    "double": "float64",
}
"""Other names of these types in published files; "auto" is as good as none."""
_TIED = "tie_word_embeddings"
_MAX_FIELDS_TRIED = 200
"""Models have some fifty."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def _leave_out_activations() -> None:
    """Keep transformers from importing its activation functions, and with them ``torch._dynamo``: 1.8 s at each start.

    Its configurations import them to check ``hidden_act`` by name, and leave that check out where there are none. This
    module checks it. Later imports of ``transformers.activations`` get the real module.
    """
    name = "transformers.activations"
    if name in sys.modules:
        return
    empty = ModuleType(name)
    vars(empty)["ACT2FN"] = {}
    sys.modules[name] = empty
    try:
        importlib.import_module("transformers.utils.type_validators")
    except ImportError:  # of a release that needs more of it: imported as a whole when it is used
        pass
    finally:
        del sys.modules[name]


def _leave_out_second_scan() -> None:
    """Keep ``transformers.models`` from reading its 2,400 files for the names that each defines: 0.3 s at each start.

    ``transformers`` has just read them for the same names, and answers ``from transformers import``. The package below
    then knows no names before its modules are imported, and transformers imports those by their full names.
    """
    scan = import_utils.define_import_structure
    import_utils.define_import_structure = lambda *_: {}
    try:
        importlib.import_module("transformers.models")
    finally:
        import_utils.define_import_structure = scan


_leave_out_activations()
_leave_out_second_scan()


def read_model_config(folder: Path, model_impl: str = "auto") -> ModelConfig:
    """Read a folder in the Hugging Face layout; ``ModelError`` says what is missing, malformed or not supported.

    ``model_impl`` is "native", "transformers", or "auto": transformers' code where there is no native family.
    """
    if not folder.is_dir():
        what = "not a folder" if folder.suffix != ".gguf" else "a GGUF file, which is not read"
        raise ModelError(f"{folder} is {what}: give a folder with config.json and *.safetensors")
    path = folder / "config.json"
    _check_is_model(folder)
    raw = read_object(path)
    if model_impl == "transformers" or (model_impl == "auto" and not _has_family(raw)):
        return _read_fallback(folder, raw, is_asked_for=model_impl == "transformers")
    family = _family(folder, raw)
    architecture = family.architecture
    _check_model_type(path, raw.get("model_type"), family)
    quantization = read_quantization(folder, raw)
    if quantization is not None:
        quantization = replace(quantization, aliases=module_aliases(family), file=str(path))
    special = _checked(path, raw, family)
    fields = _read_fields(folder, raw, family)
    _warn_of_ids(path, special, fields["vocab_size"])
    eos_token_ids = _eos_token_ids(folder, fields)
    try:
        return _convert(fields, family, quantization, eos_token_ids)
    except NoNativeLayerError as error:
        if model_impl == "auto":
            with contextlib.suppress(ModelError):
                return _read_fallback(folder, raw, is_asked_for=True)
        raise ModelError(f"{folder}: {error}") from error
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path} does not describe a {architecture}: {one_line(error)}") from error


def _read_fallback(folder: Path, raw: dict[str, Any], *, is_asked_for: bool) -> ModelConfig:
    """Configuration of a model that transformers' code computes."""
    # transformers imports the modelling code of every family for it.
    from outrider.model_executor.models.fallback_config import fallback_config, is_known, transformers_config

    path = folder / "config.json"
    try:
        with without_warnings():
            special = validated(path, GENERATION_CONFIG_FILE, raw)
            whole = transformers_config(raw)
            text = whole.get_text_config(decoder=True)
            ends = getattr(whole, "eos_token_id", None)
            fields = {
                "vocab_size": text.vocab_size,
                "eos_token_id": getattr(text, "eos_token_id", None) if ends is None else ends,
            }
            _warn_of_ids(path, special, fields["vocab_size"])
            dtype = _dtype(raw.get("dtype") or raw.get("torch_dtype"))
            return fallback_config(path, raw, dtype, _eos_token_ids(folder, fields))
    except ModelError as error:
        if is_asked_for or is_known(raw.get("model_type")):
            raise ModelError(f"{folder} cannot be run through transformers: {error}") from error
        try:
            _family(folder, raw)
        except ModelError as native:
            raise ModelError(f"{native}; {error}") from error
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"{path} does not describe a decoder that transformers runs: {one_line(error)}") from error


def _has_family(raw: dict[str, Any]) -> bool:
    architecture = _named_architecture(raw)
    return isinstance(architecture, str) and is_native(architecture)


def _named_architecture(raw: dict[str, Any]) -> object:
    """Class that config.json names, by its model_type where it names none."""
    named = raw.get("architectures") or [architecture_of(str(raw.get("model_type")))]
    return named[0] if isinstance(named, list) else named


def _check_model_type(path: Path, model_type: object, family: ModelFamily) -> None:
    """Raise ``ModelError`` for the ``model_type`` of another family than ``architectures`` names: transformers makes a
    model of this type, whose layers may be others for the same tensors.
    """
    if model_type in (None, family.model_type, *family.text_types):
        return
    named, other = family.architecture, architecture_of(str(model_type))
    if not is_native(other):
        from outrider.model_executor.models.fallback_config import decoder_of  # seldom needed, and slow to import

        other = decoder_of(model_type) or named
    if other != named:
        raise ModelError(
            f"{path}: architectures names {named}, and model_type {shown(model_type)} is that of {other}: the two"
            " should agree"
        )


def _check_is_model(folder: Path) -> None:
    """Raise ``ModelError`` for the folder of an adapter (LoRA), which has no model of its own or one that it should
    change, or of a GGUF file.
    """
    has_model, adapter = is_there(folder / "config.json"), folder / "adapter_config.json"
    if is_there(adapter):
        base = shown(read_object(adapter).get("base_model_name_or_path")).strip("'")
        if has_model:
            raise ModelError(
                f"{adapter} is of an adapter of {base}, which is not served: merge it, or take it out of the folder if"
                " the weights have it already"
            )
        raise ModelError(f"{folder} is an adapter of {base}, not a model: merge it into its base model and serve that")
    if has_model:
        return
    if (file := min(folder.glob("*.gguf"), default=None)) is not None:
        raise ModelError(f"{file} is a GGUF file, which is not read: give a folder with config.json and *.safetensors")


def config_of_fields(path: Path, fields: dict[str, Any], architecture: str) -> ModelConfig:
    """A configuration that stands in another file, ``path``, which errors name."""
    try:
        with without_warnings():
            complete = _fields_of(_transformers_config(**without_code(fields)))
        return _convert(complete, family_of(architecture), None, ())
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except Exception as error:  # transformers raises whatever its validators raise
        raise ModelError(f"{path} does not describe a {architecture}: {one_line(error)}") from error


def _warn_of_ids(path: Path, special: SpecialTokens, vocab_size: int) -> None:
    """Log the ids that the model has no row for: it never generates them."""
    if named := special.without_rows(vocab_size):
        rest = f" and {len(named) - 1} more" if len(named) > 1 else ""
        _log.warning("%s: %s%s not used: vocab_size is %d", path, named[0], rest, vocab_size)


def _checked(path: Path, raw: dict[str, Any], family: ModelFamily) -> ConfigFile:
    """Fields of ``config.json``, those of its text part among them, in their types and ranges."""
    text = raw.get("text_config", {}) if family.is_text_part else {}
    if not isinstance(text, dict):
        raise ModelError(f"{path}: text_config should be an object, not {shown(text)}")
    if family.is_text_part and (kind := text.get("model_type", family.text_types[0])) not in family.text_types:
        raise ModelError(f"{path}: a text_config of type {shown(kind)} is not supported by {family.architecture}")
    parts = [validated(path, CONFIG_FILE, _without_layer_ropes(path, part, family)) for part in (raw, text)]
    for part in parts:
        _check_dtypes(path, part.torch_dtype, part.dtype)
    return parts[0]


def _without_layer_ropes(path: Path, part: dict[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The same fields less ``rope_parameters`` of each type of layer, which are checked here."""
    ropes = part.get("rope_parameters")
    if not family.has_layer_ropes or not isinstance(ropes, dict):
        return part
    for name, parameters in ropes.items():
        if isinstance(parameters, dict):
            validated(path, ROPE_PARAMETERS, parameters, f": rope_parameters.{name[:60]}")
    return {**part, "rope_parameters": {name: value for name, value in ropes.items() if not isinstance(value, dict)}}


def _check_dtypes(path: Path, *names: str | None) -> None:
    """Raise ``ModelError`` for a type that is not supported, before transformers looks it up in torch."""
    try:
        for name in names:
            _dtype(name)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error


def _read_fields(folder: Path, raw: dict[str, Any], family: ModelFamily) -> dict[str, Any]:
    """The fields as transformers has them, with the defaults of the architecture."""
    try:
        with without_warnings():
            model_type = family.reads_as or raw.get("model_type") or family.model_type
            whole = _transformers_config(**{**without_code(raw), "model_type": model_type})
            if family.is_text_part:
                return _text_fields(whole, raw)
            return {**_fields_of(whole), "dtype": raw.get("dtype") or raw.get("torch_dtype")}
    except Exception as error:  # transformers raises whatever its validators raise
        path = folder / "config.json"
        field = _field_at_fault(raw, family)
        raise ModelError(f"{path} does not describe a {family.architecture}: {field}{one_line(error)}") from error


def _transformers_config(**fields: object) -> PreTrainedConfig:
    """Configuration of these fields as transformers reads them."""
    from transformers import AutoConfig  # imports transformers.models: after ``_leave_out_second_scan``

    return AutoConfig.for_model(**fields)


def _fields_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields as transformers computes with them."""
    # Moves what stands beside rope_scaling, such as original_max_position_embeddings of Phi-3, into it, as the models
    # of transformers do before they compute positions.
    config.standardize_rope_params()
    return dict(config.to_dict())


def _text_fields(whole: PreTrainedConfig, raw: dict[str, Any]) -> dict[str, Any]:
    """Fields of the text part; what the whole model says of its head, types and ids counts for it."""
    outer, text = whole.to_dict(), _fields_of(whole.get_text_config(decoder=True))
    own = raw.get("text_config", {})
    if (tied := next((part[_TIED] for part in (raw, own) if part.get(_TIED) is not None), None)) is not None:
        text[_TIED] = tied  # else the default of the text part: whole models have one that not all of theirs follow
    text["dtype"] = next((part[key] for part in (raw, own) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    return text if outer.get("eos_token_id") is None else {**text, "eos_token_id": outer["eos_token_id"]}


def _field_at_fault(raw: dict[str, Any], family: ModelFamily) -> str:
    """The field without which transformers reads the others, as the beginning of an error; empty if there is none."""
    model_type = family.reads_as or str(raw.get("model_type") or family.model_type)
    for name in list(raw)[:_MAX_FIELDS_TRIED]:
        others = {key: value for key, value in without_code(raw).items() if key not in (name, "model_type")}
        try:
            with without_warnings():
                _transformers_config(**others, model_type=model_type)
        except Exception:
            continue
        return f"{name[:60]} {shown(raw[name])} cannot be read: "
    return ""


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Context without warnings of transformers about fields that are checked here, or that nothing is computed with."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


def _family(folder: Path, raw: dict[str, Any]) -> ModelFamily:
    architecture = _named_architecture(raw)
    try:
        return family_of(architecture if isinstance(architecture, str) else repr(architecture))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def _convert(
    fields: dict[str, Any], family: ModelFamily, quantization: Quantization | None, eos_token_ids: tuple[int, ...]
) -> ModelConfig:
    traits = family.traits(fields)
    activation = _activation(fields, traits.activation)
    is_mxfp4 = quantization is not None and quantization.numbers is Numbers.MXFP4
    if is_mxfp4 and (traits.experts is None or traits.experts.names.gate_up is None):
        raise ModelError(
            f"quantization_config: mxfp4 is supported for experts of gpt-oss, not for {family.architecture}"
        )
    if quantization is not None and not is_mxfp4 and traits.experts is not None and traits.experts.names.gate_up:
        quantization = replace(quantization, ignored=(*quantization.ignored, r".*\.experts\."))  # no linear layers
    ropes = _read_ropes(fields, traits.rope_types, family)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    for rope in ropes:
        _check_rotated(rope, head_dim)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields.get("intermediate_size") or fields["shared_expert_intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"],
        head_dim=head_dim,
        max_position=_max_position(fields["max_position_embeddings"], ropes, has_kinds=bool(traits.rope_types)),
        rms_norm_eps=fields["rms_norm_eps"],
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        qk_norm=traits.qk_norm,
        tied_embeddings=bool(fields["tie_word_embeddings"]),
        sliding_windows=traits.sliding_windows,
        rope=ropes[0],
        eos_token_ids=eos_token_ids,
        bos_token_id=fields["bos_token_id"],
        dtype=_dtype(fields.get("dtype") or ("bfloat16" if is_mxfp4 else None)),
        experts=traits.experts,
        recurrent=traits.recurrent,
        quantization=quantization,
        variant=replace(traits.variant, activation=activation),
        layer_ropes=ropes if traits.rope_types else (),
        layer_sizes=traits.layer_sizes,
        kv_sources=traits.kv_sources,
    )


def _activation(fields: dict[str, Any], field: str) -> Activation:
    name = fields.get(field)
    if name not in _ACTIVATIONS:
        raise NoNativeLayerError(f"{field} {name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _dtype(name: object) -> torch.dtype:
    named = str(name or "auto").removeprefix("torch.")
    named = _DTYPE_NAMES.get(named, named)
    if named not in SUPPORTED_DTYPES:
        raise ModelError(f"torch_dtype {named[:60]!r} is not supported; supported are {', '.join(SUPPORTED_DTYPES)}")
    found: torch.dtype = getattr(torch, named)
    return found


def _read_ropes(fields: dict[str, Any], types: tuple[str, ...], family: ModelFamily) -> tuple[RopeConfig, ...]:
    """Rotary embedding of each layer, whose parameters have these keys; without keys, the one of all layers."""
    parameters: dict[str, Any] = dict(fields["rope_parameters"] or {})
    if not types:
        return (_read_rope(fields, parameters, family),)
    shared = {"truncate": parameters.get("truncate", True)}  # where transformers reads it, for all types
    found = {name: _read_rope(fields, {**(parameters[name] or {}), **shared}, family) for name in set(types)}
    return tuple(found[name] for name in types)


def _read_rope(fields: dict[str, Any], parameters: dict[str, Any], family: ModelFamily) -> RopeConfig:
    rope_type = str(parameters.get("rope_type", "default"))
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelError(f"rope type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}")
    partial = float(parameters.get("partial_rotary_factor") or 1.0)
    if partial != 1.0 and rope_type != "proportional" and not family.has_partial_rotary:
        raise ModelError("a partial_rotary_factor other than 1 is not supported")
    original = parameters.get("original_max_position_embeddings") or fields["max_position_embeddings"]
    factor = parameters.get("factor")
    if factor is None:
        factor = fields["max_position_embeddings"] / original
    return RopeConfig(
        rope_type=rope_type,
        theta=float(parameters.get("rope_theta", 10000.0)),
        factor=float(factor),
        original_max_position=int(original),
        attention_factor=parameters.get("attention_factor"),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        mscale=parameters.get("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim"),
        truncate=bool(parameters.get("truncate", True)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        partial=partial,
        is_interleaved=family.rotates_pairs,
        short_factor=tuple(map(float, parameters.get("short_factor") or ())),
        long_factor=tuple(map(float, parameters.get("long_factor") or ())),
    )


def _check_rotated(rope: RopeConfig, head_dim: int) -> None:
    size = rotated_size(rope, head_dim)
    if size < 2 or size % 2:
        raise ModelError(f"partial_rotary_factor {rope.partial} should rotate an even number of {head_dim} features")
    factors = {"short_factor": rope.short_factor, "long_factor": rope.long_factor}
    for name, given in factors.items() if rope.rope_type == "longrope" else ():
        if len(given) != size // 2:
            raise ModelError(f"{name} should have {size // 2} numbers, and has {len(given)}")


def _max_position(max_position_embeddings: int, ropes: tuple[RopeConfig, ...], *, has_kinds: bool) -> int:
    """Linear and dynamic scaling stretch what config.json gives, yarn what it was trained at; llama3's is final, and so
    is linear scaling of one kind of layers beside another (Gemma 3).
    """
    stretching = () if has_kinds else ("linear", "dynamic")
    longest = max(_stretched(max_position_embeddings, rope, stretching) for rope in ropes)
    if longest > MAX_POSITION:
        raise ModelError(f"max_position_embeddings and its scaling make {longest} tokens; at most {MAX_POSITION}")
    return longest


def _stretched(max_position_embeddings: int, rope: RopeConfig, stretching: tuple[str, ...]) -> int:
    if rope.rope_type in stretching:
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn":
        return max(max_position_embeddings, int(rope.original_max_position * rope.factor))
    return max_position_embeddings


def _eos_token_ids(folder: Path, fields: dict[str, Any]) -> tuple[int, ...]:
    """Every end token of generation_config.json, else of config.json, that has a row."""
    path = folder / "generation_config.json"
    named = None
    if is_there(path):
        special = validated(path, GENERATION_CONFIG_FILE, read_object(path))
        _warn_of_ids(path, special, fields["vocab_size"])
        named = special.eos_token_id
    if named is None:
        named = fields.get("eos_token_id")
    if named is None:
        return ()
    # What config.json leaves open is the architecture's default, for which a small model may have no row.
    return tuple(end for end in (named if isinstance(named, list) else [named]) if 0 <= end < fields["vocab_size"])
