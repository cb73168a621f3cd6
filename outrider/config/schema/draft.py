"""Settings of the draft service."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from outrider.config.fields import (
    MTP_METHODS,
    BatchInvariant,
    ClassPath,
    DraftMethod,
    DraftSampleMethod,
    Method,
    NonNegative,
    NonNegativeFloat,
    Port,
    Positive,
    Share,
    Text,
    is_class_path,
)
from outrider.config.schema.model_service import ModelServiceSettings

_FREE_TO_NAME_A_MODEL = (DraftMethod.NONE, DraftMethod.CUSTOM_CLASS)
"""Methods for which the model is not used now, or by the class alone."""


class DraftSettings(ModelServiceSettings):
    """``outrider draft``: proposes tokens: a small model, a head over hidden states, or a lookup."""

    name: ClassVar[str] = "draft"

    method: Method = Field(
        DraftMethod.NONE,
        description="draft_model; dflash, eagle, eagle3, mtp, medusa or mlp_speculator (heads over the target's hidden"
        " states; mtp: a layer of the target's own folder); ngram (prompt lookup) or suffix (suffix decoding) without a"
        " model; module:Class (a proposer of your own) or none;"
        " unset or draft_model: what config.json of the model says.",
    )
    target_model: Text | None = Field(
        None,
        description="Folder of the target, whose embedding, head and tokenizer dflash, eagle, eagle3 and mtp take;"
        " `outrider serve` gives its own.",
    )
    proposer: ClassPath | None = Field(
        None,
        description="Class of the proposer with method custom_class, as module:Class; method: module:Class sets both.",
    )
    model: Text | None = Field(
        None, description="Folder of the draft model in the Hugging Face layout, or its id on the Hub."
    )
    port: Port = Field(50052, description="Port to listen on.")
    max_model_len: Positive | None = Field(
        None,
        description="Length after which the draft proposes nothing, in tokens; unset: the model's, in `outrider serve`"
        " at most the target's.",
    )
    batch_invariant: BatchInvariant = Field(
        "off",
        description="The target's setting for the draft: on makes draft tokens, and so the number of accepted ones,"
        " independent of the batch. Greedy and coupled output does not need it; rejection and typical acceptance"
        " repeat in another batch only if both services have it.",
    )
    attention_window: Positive | None = Field(
        None,
        description="draft_model: last tokens of a text that it attends to, and the first attention_sinks; unset: all. "
        "Long contexts then cost the draft less and it agrees with the target less often; what is generated stays "
        "exact. Of a new text it computes the last window, and at most half a window or 256 tokens more.",
    )
    attention_sinks: NonNegative = Field(
        4, description="First tokens of a text that the draft model attends to besides its attention_window."
    )
    prompt_lookup_max: Positive = Field(5, description="Maximum length of the n-grams that are looked up, in tokens.")
    prompt_lookup_min: Positive = Field(5, description="Minimum length of the n-grams that are looked up, in tokens.")
    suffix_decoding_max_tree_depth: Positive = Field(
        24, description="suffix: maximum length of a match and its continuation together, in tokens."
    )
    suffix_decoding_max_spec_factor: NonNegativeFloat = Field(
        1.0, description="suffix: maximum number of draft tokens for each token of the match."
    )
    suffix_decoding_min_token_prob: Share = Field(
        0.1,
        description="suffix: minimum probability of a draft token and all before it, by how often they followed the"
        " match.",
    )
    suffix_decoding_max_cached_tokens: NonNegative = Field(
        1 << 18,
        description="suffix: tokens of outputs of all requests in which greedy and coupled requests look for matches,"
        " about 400 bytes each; 0: only in the request's own text. Requests of different cache_salt share none.",
    )
    draft_sample_method: DraftSampleMethod = Field(
        DraftSampleMethod.PROBABILISTIC,
        description="Draft tokens of sampled requests: probabilistic (drawn from the draft's distribution) or"
        " greedy (its most likely token). Exact with either; coupled requests always share the target's noise.",
    )
    support_mass: Share = Field(
        0.999, description="Rejection: the draft samples from its most likely tokens with this probability mass."
    )
    support_limit: Positive = Field(
        1024, description="Rejection: maximum number of tokens that the draft samples from."
    )

    link_tls_ca_file: Text | None = Field(
        None,
        description="Authorities (PEM) of the certificates of targets on other hosts; set: channels to them speak TLS,"
        " and show tls_cert_file.",
    )
    allow_plaintext_link_token: bool = Field(
        False, description="Send link_token_file's first token to targets of other hosts without TLS."
    )

    @model_validator(mode="before")
    @classmethod
    def _method_from_model(cls, data: Any) -> Any:  # noqa: ANN401 - raw input
        if not isinstance(data, dict):
            return data
        if is_class_path(data.get("method")):
            return {**data, "method": DraftMethod.CUSTOM_CLASS, "proposer": data["method"]}
        if data.get("method") in MTP_METHODS and data.get("model") is not None:
            # vLLM's model of an MTP layer is the target, which holds it.
            return {**data, "model": None, "target_model": data.get("target_model") or data["model"]}
        if data.get("method") is not None:
            # vLLM's model of a method without one is that method's name.
            is_same = data.get("model") == str(data["method"]).strip("[]").removesuffix("_gpu")
            return {**data, "model": None} if is_same else data
        # vLLM lets the model's name stand for the method.
        if data.get("model") == DraftMethod.NGRAM:
            return {**data, "method": DraftMethod.NGRAM, "model": None}
        return {**data, "method": DraftMethod.DRAFT_MODEL if data.get("model") else DraftMethod.NONE}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.method is DraftMethod.DRAFT_MODEL and self.model is None:
            raise ValueError("model: is needed by method draft_model")
        if self.method.is_head and self.method.needs_model and self.model is None:
            raise ValueError(f"model: is needed by method {self.method}")
        if self.method.is_head and self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: is {self.tensor_parallel_size}; a head runs on one GPU, method {self.method}"
            )
        if (self.method is DraftMethod.CUSTOM_CLASS) != (self.proposer is not None):
            raise ValueError("proposer: goes with method custom_class, and that with it")
        if not self.method.has_model and self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size: is {self.tensor_parallel_size}, and without a model there is nothing to share"
            )
        if self.model is not None and not (self.method.has_model or self.method in _FREE_TO_NAME_A_MODEL):
            raise ValueError(
                f"model: is {self.model}, and method {self.method} drafts without a model; one of them should go"
            )
        if self.revision is not None and self.model is None and self.method is not DraftMethod.MTP:
            raise ValueError("revision: is set, and there is no draft model")
        if self.attention_window is not None and self.method not in (DraftMethod.DRAFT_MODEL, *_FREE_TO_NAME_A_MODEL):
            raise ValueError(f"attention_window: is set, and only method draft_model has one, not {self.method}")
        if self.batch_invariant == "on" and (self.method.is_head or not self.method.has_model):
            raise ValueError(f"batch_invariant: is on, and only draft models can be, not method {self.method}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is above prompt_lookup_max {self.prompt_lookup_max}"
            )
        return self
