"""Groups of a service's flags in its help, and names of their values."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

GROUPS = {
    "Model": "model revision served_model_name target_model load_format dtype quantization model_impl batch_invariant"
    " max_model_len tokenizer tokenizer_revision chat_template generation_config tool_call_parser reasoning_parser",
    "Speculation": "method proposer num_speculative_tokens draft_length acceptance_method trusted_drafts"
    " rejection_sample_method posterior_threshold posterior_alpha disable_by_batch_size draft_timeout_ms"
    " direct_proposals channels_between_hosts draft_ahead draft_sample_method support_mass"
    " support_limit attention_window attention_sinks prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth"
    " suffix_decoding_max_spec_factor suffix_decoding_min_token_prob suffix_decoding_max_cached_tokens tensor_plane"
    " hidden_state_layers",
    "Devices and memory": "device tensor_parallel_size enable_expert_parallel one_shot_all_reduce kv_cache_dtype"
    " kv_cache_scales page_size num_pages"
    " kv_cache_bytes gpu_memory_utilization prefix_caching state_snapshot_interval cuda_graph_max_tokens"
    " cuda_graph_memory_mb cuda_graph_capture_s cost_profile_s num_threads num_pinned_cpus compute_ahead",
    "Requests": "max_running_requests max_queue scheduling_policy max_batched_tokens max_mixed_prefill_tokens"
    " logprobs_mode disable_logprobs max_logprobs max_body_bytes max_open_request_bytes max_stream_messages_per_s"
    " resume_timeout_s root_path enabled num_processes",
    "Addresses and links": "host port reuse_port own_port coordinator_address target_address draft_address"
    " resolve_interval_s link_timeout_ms target_timeout_s max_sessions_per_link session_idle_timeout_s"
    " max_connection_age_s max_connection_age_grace_s",
    "Security": "tls_cert_file tls_key_file tls_client_ca_file api_token_file link_token_file allow_plaintext_token"
    " link_tls_ca_file link_tls_cert_file link_tls_key_file link_tls_server_name allow_plaintext_link_token"
    " coordinator_token_file coordinator_tls coordinator_tls_ca_file coordinator_tls_cert_file coordinator_tls_key_file"
    " coordinator_tls_server_name allowed_origins allowed_methods allowed_headers allow_credentials",
    "Health, metrics and logs": "health_port health_host hang_timeout_s drain_delay_s drain_grace_s metrics_port"
    " metrics_host vllm_metric_names max_traced_steps trace_file log_level log_interval_s",
}
"""Title: the settings of all services in that group."""

_GROUP_OF = {key: title for title, keys in GROUPS.items() for key in keys.split()}
_NAMES = {int: "INTEGER", float: "FLOAT"}
_MAX_CHOICES = 4
"""Choices that fit into a line of ``--help``."""


def group_of(key: str) -> str:
    """Title of the group of a setting."""
    return _GROUP_OF[key]


def value_name(key: str, annotation: Any) -> str:  # noqa: ANN401 - a type as annotated
    """Placeholder of a value in the help: its type, or the values if they are few."""
    kind = _kind(annotation)
    choices = [each.value for each in kind] if _is_enum(kind) else [str(each) for each in typing.get_args(kind)]
    if 0 < len(choices) <= _MAX_CHOICES:
        return "|".join(choices)
    if key.endswith("address"):
        return "ADDRESS"
    return "FILE" if key.endswith("_file") else _NAMES.get(kind, "TEXT")


def _kind(annotation: Any) -> Any:  # noqa: ANN401
    """The type within Annotated and optional ones."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _kind(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return _kind(next(each for each in typing.get_args(annotation) if each is not type(None)))
    return annotation


def _is_enum(kind: Any) -> bool:  # noqa: ANN401
    return isinstance(kind, type) and issubclass(kind, enum.Enum)
