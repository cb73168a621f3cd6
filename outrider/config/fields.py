"""Types of single settings: bounds and accepted spellings.

A setting of several sections has one type here, so its bounds and text are the same in all of them.
"""

from __future__ import annotations

import enum
import json
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from outrider.addresses import bare_host, form_problem, host_problem
from outrider.limits import MAX_DRAFT_LENGTH, MAX_LOGPROBS
from outrider.planes import PlaneKind
from outrider.types import AcceptanceMethod, LogprobsMode

_VLLM_ACCEPTANCE = {
    "rejection_sampler": AcceptanceMethod.REJECTION,
    "typical_acceptance_sampler": AcceptanceMethod.TYPICAL,
}

_VLLM_DTYPES = {"half": "float16", "float": "float32"}
MTP_METHODS = ("mtp", "mimo_mtp", "qwen3_next_mtp", "qwen3_5_mtp")
"""Names of method mtp, ours first."""
_VLLM_METHODS = {"ngram_gpu": "ngram", "[ngram]": "ngram", **dict.fromkeys(MTP_METHODS, "mtp")}
_ON_HIDDEN_STATES = {"dspark", "extract_hidden_states"}


class DraftMethod(enum.StrEnum):
    """Source of proposals; the names are vLLM's."""

    DRAFT_MODEL = "draft_model"
    DFLASH = "dflash"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    MTP = "mtp"
    NGRAM = "ngram"
    SUFFIX = "suffix"
    CUSTOM_CLASS = "custom_class"
    """A user's own; ``draft.proposer`` names it."""
    NONE = "none"

    @property
    def has_model(self) -> bool:
        """True if a model makes the proposals."""
        return self is DraftMethod.DRAFT_MODEL or self.is_head

    @property
    def needs_model(self) -> bool:
        """True if ``draft.model`` has to name it."""
        return self.has_model and self is not DraftMethod.MTP

    @property
    def is_head(self) -> bool:
        """True if it reads the target's hidden states."""
        return self in _HEADS

    @property
    def reads_target(self) -> bool:
        """True if the target's folder is needed too, for embedding or head."""
        return self in _READ_TARGET


_READ_TARGET = (DraftMethod.DFLASH, DraftMethod.EAGLE, DraftMethod.EAGLE3, DraftMethod.MTP)
_HEADS = (*_READ_TARGET, DraftMethod.MEDUSA, DraftMethod.MLP_SPECULATOR)


class DraftSampleMethod(enum.StrEnum):
    """Sampling of draft tokens for requests with a temperature; the names are vLLM's."""

    PROBABILISTIC = "probabilistic"
    """Sampled from the draft's distribution."""
    GREEDY = "greedy"
    """The most likely token, which counts as certain."""


class RejectionSampleMethod(enum.StrEnum):
    """Method by which rejection judges the draft tokens of a step; ``standard`` is vLLM's name."""

    STANDARD = "standard"
    """One after the other, up to the first that is rejected."""
    BLOCK = "block"
    """All together (block verification)."""


class GenerationConfig(enum.StrEnum):
    """Source of the defaults of sampling parameters."""

    AUTO = "auto"
    """The model's ``generation_config.json``."""
    NONE = "none"
    """Outrider's own defaults."""


class TensorPlane(enum.StrEnum):
    """Transport of a target's hidden states to a draft."""

    AUTO = "auto"
    """The fastest plane that both can use, by measured time."""
    INLINE = "inline"
    SHARED_MEMORY = "shared_memory"
    GLOO = "gloo"
    NCCL = "nccl"
    CUDA_IPC = "cuda_ipc"

    def kinds(self, *, is_gpu: bool, is_encrypted: bool) -> tuple[PlaneKind, ...]:
        """The planes that a target may offer; none for inline. ``is_encrypted``: its links are, and planes between
        hosts are not, so they have to be asked for by name.
        """
        if self is not TensorPlane.AUTO:
            return () if self is TensorPlane.INLINE else (PlaneKind(self.value),)
        on_host = (PlaneKind.CUDA_IPC, PlaneKind.SHARED_MEMORY) if is_gpu else (PlaneKind.SHARED_MEMORY,)
        if is_encrypted:
            return on_host
        return (*on_host, PlaneKind.NCCL, PlaneKind.GLOO) if is_gpu else (*on_host, PlaneKind.GLOO)


class DraftLengthMode(enum.StrEnum):
    """Policy that decides the number of draft tokens per step."""

    AUTO = "auto"
    FIXED = "fixed"


class SchedulingPolicy(enum.StrEnum):
    """Order of waiting requests."""

    FCFS = "fcfs"
    """First come, first served."""
    PRIORITY = "priority"


class DraftAhead(enum.StrEnum):
    """Drafting ahead: what a draft computes before the coordinator asks for it."""

    IN_TURN = "in_turn"
    VERDICT = "verdict"
    CHAIN = "chain"
    AUTO = "auto"


def _refuse_bool(value: Any) -> Any:  # noqa: ANN401 - whatever a source held
    if isinstance(value, bool):
        raise ValueError("should be a number")
    return value


def _known_acceptance(value: Any) -> Any:  # noqa: ANN401
    return _VLLM_ACCEPTANCE.get(value, value) if isinstance(value, str) else value


def _known_generation_config(value: Any) -> Any:  # noqa: ANN401
    """VLLM's name for its own defaults is understood."""
    return GenerationConfig.NONE if value == "vllm" else value


def _known_method(value: Any) -> Any:  # noqa: ANN401
    if not isinstance(value, str) or value in set(DraftMethod):
        return value
    if value in _VLLM_METHODS:
        return _VLLM_METHODS[value]
    if value in _ON_HIDDEN_STATES or value.endswith("mtp"):
        raise ValueError(
            "should be draft_model, dflash, eagle, eagle3, mtp (of MiMo, Qwen3.5 and Qwen3-Next targets), medusa,"
            " mlp_speculator, ngram, suffix, module:Class or none; MTP layers of other models and DSpark are not"
            " supported"
        )
    return value


def _known_dtype(value: Any) -> Any:  # noqa: ANN401
    return _VLLM_DTYPES.get(value, value) if isinstance(value, str) else value


def _as_comma_list(value: Any) -> Any:  # noqa: ANN401
    """A list, also one written in JSON as vLLM takes it, as texts with commas between them."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError('should be texts with commas, or a JSON list such as ["*"]') from None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return ",".join(value) or None
    return value


def _as_layers(value: Any) -> Any:  # noqa: ANN401
    """A list of numbers, also one in JSON, as a text with commas; a single number as it is written. A method and the
    folder of its head stay as they are.
    """
    if isinstance(value, str) and re.match(r"(eagle3|dflash):.", value):
        return value
    if isinstance(value, str):
        value = value.strip("[]")
    numbers = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    if value is None or numbers in ([], [""]):
        return None
    texts = [str(number).strip() for number in numbers]
    if not all(re.fullmatch(r"-1|\d+", text) for text in texts):
        raise ValueError(
            "should be numbers of layers such as 2,16,29, with -1 for what the head reads, or the method and folder of"
            " a draft head, such as eagle3:/models/head"
        )
    return ",".join(texts)


def _known_root_path(value: str) -> str:
    if not re.fullmatch(r"(/[^/?#\s]+)+/?", value):
        raise ValueError("should be a path such as /outrider")
    return value.rstrip("/")


def _known_logprobs(value: Any) -> Any:  # noqa: ANN401
    return value.removesuffix("_logprobs") if isinstance(value, str) else value


def _known_class_path(value: str) -> str:
    if not is_class_path(value):
        raise ValueError("should be module:Class")
    return value


def is_class_path(value: object) -> bool:
    """True if a value names a class, as ``package.module:Class``."""
    return (
        isinstance(value, str)
        and all(part.isidentifier() for name in value.split(":", 1) for part in name.split("."))
        and value.count(":") == 1
    )


def _known_addresses(value: str) -> str:
    if problem := next(filter(None, (form_problem(address.strip()) for address in value.split(","))), ""):
        raise ValueError(problem)
    return value


def _known_host(value: str) -> str:
    """A host as servers take it, without the brackets that an IPv6 address may have."""
    host = bare_host(value)
    if problem := host_problem(host):
        raise ValueError(problem)
    return host


def _known_device(value: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", value):
        raise ValueError("should be auto, cpu, cuda or cuda:N")
    return value


def _word_of_switch(value: object) -> object:
    """YAML reads on and off as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


# Python counts a bool as a number; a "yes" in a YAML file is not one.
Int = Annotated[int, BeforeValidator(_refuse_bool)]
Float = Annotated[float, BeforeValidator(_refuse_bool), Field(allow_inf_nan=False)]

LogLevel = Literal["debug", "info", "warning", "error"]
Device = Annotated[str, AfterValidator(_known_device)]
Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_known_dtype)]
ToolCallParser = Literal["none", "deepseek_v3", "hermes", "llama3_json", "mistral", "openai", "pythonic", "qwen3_coder"]
ReasoningParser = Literal["none", "deepseek_r1", "openai", "qwen3"]
LoadFormat = Literal["safetensors", "dummy", "synthetic"]
Quantization = Literal["none", "fp8"]
KVCacheDtype = Literal["auto", "model", "fp8"]
KVCacheScales = Literal["checkpoint", "measured"]
ModelImplementation = Annotated[
    Literal["auto", "native", "transformers"],
    BeforeValidator(lambda value: "native" if value == "vllm" else value),
]
"""vLLM calls models of its own vllm."""
BatchInvariant = Annotated[Literal["auto", "on", "off"], BeforeValidator(_word_of_switch)]
Method = Annotated[DraftMethod, BeforeValidator(_known_method)]
Logprobs = Annotated[LogprobsMode, BeforeValidator(_known_logprobs)]
Acceptance = Annotated[AcceptanceMethod, BeforeValidator(_known_acceptance)]
Defaults = Annotated[GenerationConfig, BeforeValidator(_known_generation_config)]
Text = Annotated[str, Field(min_length=1)]
Host = Annotated[Text, AfterValidator(_known_host)]
AddressList = Annotated[Text, AfterValidator(_known_addresses)]
TextList = Annotated[str | None, BeforeValidator(_as_comma_list)]
LayerList = Annotated[str | None, BeforeValidator(_as_layers)]
RootPath = Annotated[str, AfterValidator(_known_root_path)]
ClassPath = Annotated[str, AfterValidator(_known_class_path)]
Port = Annotated[Int, Field(ge=1, le=65535)]
Positive = Annotated[Int, Field(ge=1)]
NumProcesses = Annotated[Int, Field(ge=1, le=64)]
NonNegative = Annotated[Int, Field(ge=0)]
Seconds = Annotated[Float, Field(ge=0)]
PositiveSeconds = Annotated[Float, Field(gt=0)]
DraftLength = Annotated[Int, Field(ge=0, le=MAX_DRAFT_LENGTH)]
MaxLogprobs = Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)]
Share = Annotated[Float, Field(gt=0, le=1)]
NonNegativeFloat = Annotated[Float, Field(ge=0)]
