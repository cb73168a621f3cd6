"""docs/http.md against the code: every field is in its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from outrider.gateway.app import make_app
from outrider.gateway.endpoints import Endpoints
from outrider.gateway.protocol import ChatCompletionRequest, CompletionRequest
from outrider.gateway.protocol.unsupported import REFUSED
from outrider.gateway.responses.error_responses import _STATUSES

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
TABLE = PAGE[PAGE.index("| field | completions") :]


def rows() -> dict[str, str]:
    """Field -> its row."""
    return {
        name: line
        for line in TABLE.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }


VLLM_FIELDS = {
    2: (
        "model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream"
        " stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty length_penalty"
        " stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens"
        " spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs"
        " logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority"
        " request_id return_tokens_as_token_ids return_token_ids return_token_offsets cache_salt kv_transfer_params"
        " ec_transfer_params vllm_xargs repetition_detection thinking_token_budget mm_payload return_mm_kwargs"
        " return_weight_versions routed_experts_prompt_start session_id stream_interval watermarking"
    ),
    3: (
        "messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n"
        " presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice"
        " reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p"
        " repetition_penalty length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens"
        " skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs"
        " logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message"
        " add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs"
        " structured_outputs priority request_id return_tokens_as_token_ids return_token_ids return_token_offsets"
        " return_prompt_text return_assistant_tokens_mask cache_salt kv_transfer_params ec_transfer_params vllm_xargs"
        " repetition_detection mm_payload return_mm_kwargs return_weight_versions routed_experts_prompt_start"
        " session_id stream_interval watermarking"
    ),
}
"""Column of the table -> fields of the request class of vLLM 0.26 and 0.33."""


@pytest.mark.parametrize("column", VLLM_FIELDS)
def test_every_field_of_vllm_has_an_entry(column: int) -> None:
    for name in VLLM_FIELDS[column].split():
        assert name in rows() and rows()[name].split("|")[column].strip(), name


def test_every_field_that_is_understood_is_documented_as_such() -> None:
    for fields, column in ((CompletionRequest.model_fields, 2), (ChatCompletionRequest.model_fields, 3)):
        for name in fields:
            said = rows()[name].split("|")[column].strip()
            assert said and said not in ("refused", "ignored"), name


def test_every_field_that_is_refused_is_documented_as_such() -> None:
    for name, (harmless, _) in REFUSED.items():
        assert "refused" in rows()[name] or any(str(value).lower() in rows()[name] for value in harmless), name


def test_every_endpoint_and_status_is_documented() -> None:
    app = make_app(Endpoints(None, None))  # type: ignore[arg-type]
    for route in app.routes:
        path = str(getattr(route, "path", "")).replace("{name:path}", "NAME")
        assert path in PAGE
    for status in _STATUSES.values():
        assert f"| {int(status)}" in PAGE, status
