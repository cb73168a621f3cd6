"""Coverage of CUDA graphs: shapes that are said to have one have one, and others have none, for any settings."""

from __future__ import annotations

import itertools

import pytest

from outrider.config import DraftSettings, TargetSettings
from outrider.kernels.paged_attention.device_plan import MAX_DECODE_QUERIES
from outrider.model_executor.device_inputs import BatchShape
from outrider.model_executor.distributed.runner import graph_limits
from outrider.model_executor.graph_coverage import describe_coverage, prompt_coverage, scoring_coverage
from outrider.model_executor.graph_shapes import GraphLimits, choose_shape, forward_shapes

SETTINGS = [
    {"max_running_requests": requests, "num_speculative_tokens": drafts, "max_batched_tokens": tokens}
    for requests, drafts, tokens in itertools.product((1, 3, 64, 100, 256, 700), (0, 1, 4, 16, 20), (64, 1024, 4096))
]


def limits_of(**settings: int) -> GraphLimits:
    return graph_limits(TargetSettings.model_validate({"model": "m", "device": "cuda", **settings}))


def has_graph(num_rows: int, queries: int, shapes: tuple[BatchShape, ...]) -> bool:
    return choose_shape(BatchShape(num_rows, num_rows * queries, queries), shapes) is not None


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
@pytest.mark.parametrize("has_chunks", [True, False])
def test_what_is_said_is_so_for_every_setting(settings: dict[str, int], has_chunks: bool) -> None:
    limits = limits_of(**settings)
    shapes = forward_shapes(limits, has_chunks=has_chunks)
    for kept in (shapes, shapes[len(shapes) // 3 :], ()):  # memory leaves out the largest
        coverage = scoring_coverage(limits, kept)
        assert [one.draft_length for one in coverage] == list(range(settings["num_speculative_tokens"] + 1))
        for one in coverage:
            queries = one.draft_length + 1
            assert one.num_possible == min(limits.max_sequences, max(1, settings["max_batched_tokens"] // queries))
            for num_rows in {1, one.num_sequences, one.num_sequences + 1, one.num_possible} - {0}:
                assert has_graph(num_rows, queries, kept) == (num_rows <= one.num_sequences)
        tokens, rows = prompt_coverage(limits, kept)
        for count in {MAX_DECODE_QUERIES + 1, tokens, max(tokens, MAX_DECODE_QUERIES) + 1} - {0}:
            assert (choose_shape(BatchShape(1, count, count), kept) is not None) == (count <= tokens)
        if tokens:
            beside = BatchShape(rows, tokens, tokens - rows + 1)
            assert choose_shape(beside, kept) is not None


@pytest.mark.parametrize("settings", [one for one in SETTINGS if one["max_batched_tokens"] <= 1024], ids=str)
def test_every_forward_that_the_settings_allow_has_a_graph(settings: dict[str, int]) -> None:
    """Up to the 1,024 tokens that are captured; where attention takes chunks."""
    limits = limits_of(**settings)
    shapes = forward_shapes(limits, has_chunks=True)
    assert all(one.is_whole for one in scoring_coverage(limits, shapes))
    tokens, rows = prompt_coverage(limits, shapes)
    assert (tokens, rows) == (settings["max_batched_tokens"], min(tokens, settings["max_running_requests"]))


def test_graphs_and_cache_follow_the_requests_and_drafts_of_the_settings() -> None:
    limits = limits_of(max_running_requests=40, num_speculative_tokens=3, cuda_graph_max_tokens=512)
    assert (limits.max_sequences, limits.max_draft_length) == (40, 3)
    assert (limits.max_tokens, limits.forward_tokens) == (512, 4096)
    for size in (1, 2):
        draft = graph_limits(DraftSettings.model_validate({"model": "m", "tensor_parallel_size": size}))
        assert not draft.decodes  # it draws in loops


def said(has_chunks: bool = True, leave_out: int = 0, **settings: int) -> str:
    limits = limits_of(**{"max_batched_tokens": 1024, **settings})
    return describe_coverage(limits, forward_shapes(limits, has_chunks=has_chunks)[leave_out:])


def test_what_is_covered_and_what_is_not_is_said_in_words() -> None:
    assert said() == (
        "with a graph: up to 256 sequences with 0 to 16 draft tokens, prompts in up to 1024 tokens; "
        "without: more than 256 sequences"
    )
    assert said(has_chunks=False).endswith(
        "without: prompts in more than 512 tokens, prompts beside more than 64 sequences, more than 256 sequences"
    )
    assert said(max_batched_tokens=4096, num_speculative_tokens=4).endswith(
        "without: 4 draft tokens for more than 204 sequences, prompts in more than 1024 tokens, more than 256 sequences"
    )
    assert said(leave_out=6) == (
        "with a graph: up to 256 sequences with 0 to 2 draft tokens, prompts in up to 896 tokens; without: 3 to 16 "
        "draft tokens for more than 224 to 52 sequences, prompts in more than 896 tokens, more than 256 sequences"
    )
    assert describe_coverage(limits_of(max_batched_tokens=1024), ()) == (
        "with a graph: nothing; without: 0 to 16 draft tokens for more than 0 sequences, "
        "prompts in more than 0 tokens, more than 256 sequences"
    )
