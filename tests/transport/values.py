"""Hypothesis strategies for every value that crosses the wire, and equality that looks into arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st

from outrider import ports
from outrider.chat import ChatPrompt
from outrider.generation import (
    DEFAULTABLE,
    Delta,
    GenerationRequest,
    GenerationResult,
    ModelInfo,
    ModelPlacement,
    Progress,
    Resumption,
    SpeculationStats,
    StageTimes,
    Started,
    Timing,
    Usage,
)
from outrider.limits import LINK_PAGES, LONGEST_RETRY_DELAY_MS, LONGEST_STAGE_NS
from outrider.prefix_hash import chain_size
from outrider.types import (
    AcceptanceMethod,
    CandidateLogprobs,
    FinishReason,
    HiddenStates,
    JudgingRule,
    LogprobsMode,
    ModelDescription,
    SamplingParams,
    SparseEvidence,
    SparseScores,
    StepCost,
    Support,
    TokenLogprob,
    TokenScores,
    TypicalScores,
)

u32 = st.integers(0, (1 << 31) - 1)
delays, stages = st.integers(0, LONGEST_RETRY_DELAY_MS), st.integers(0, LONGEST_STAGE_NS)
u64 = st.integers(0, (1 << 64) - 1)
ids = st.lists(u32, max_size=5).map(tuple)
text = st.text(max_size=12)
single = st.floats(width=32, allow_nan=False, allow_infinity=False)
double = st.floats(allow_nan=False, allow_infinity=False)
methods = st.sampled_from(AcceptanceMethod)


def ints(size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(st.integers(-1, 1 << 30), min_size=size, max_size=size).map(lambda v: np.array(v, dtype=np.int32))


def floats(size: int) -> st.SearchStrategy[np.ndarray]:
    return st.lists(single, min_size=size, max_size=size).map(lambda v: np.array(v, dtype=np.float32))


@st.composite
def rows(draw: st.DrawFn, *, num_rows: int | None = None) -> tuple[np.ndarray, int]:
    """Counts of sparse rows, and their sum."""
    count = draw(st.integers(1, 4)) if num_rows is None else num_rows
    counts = np.array(draw(st.lists(st.integers(0, 4), min_size=count, max_size=count)), dtype=np.int32)
    return counts, int(counts.sum())


@st.composite
def supports(draw: st.DrawFn, *, num_rows: int) -> Support | None:
    """One with ids: a support without any travels as none."""
    counts, total = draw(rows(num_rows=num_rows))
    return Support(counts, draw(ints(total))) if total else None


@st.composite
def sparse_evidence(draw: st.DrawFn, *, num_rows: int) -> SparseEvidence:
    counts, total = draw(rows(num_rows=num_rows))
    return SparseEvidence(counts, draw(ints(total)), draw(floats(total)))


@st.composite
def sparse_scores(draw: st.DrawFn) -> SparseScores:
    positions = draw(st.integers(1, 4))
    return SparseScores(draw(floats(draw(st.integers(0, 5)))), draw(floats(positions)), draw(ints(positions)))


@st.composite
def typical_scores(draw: st.DrawFn) -> TypicalScores:
    count = draw(st.integers(0, 4))
    return TypicalScores(draw(floats(count)), draw(floats(count)), draw(ints(count).map(np.abs)), draw(u32))


forms = st.one_of(
    st.builds(TokenScores, ids),
    sparse_scores(),
    typical_scores(),
)
sampling = st.builds(
    SamplingParams,
    temperature=double,
    top_p=double,
    top_k=st.integers(-1, 1 << 30),
    min_p=double,
    repetition_penalty=double,
    frequency_penalty=double,
    presence_penalty=double,
    min_tokens=u32,
    logit_bias=st.lists(st.tuples(u32, double), max_size=3).map(tuple),
    bad_words=st.lists(ids, max_size=3).map(tuple),
    allowed_token_ids=ids,
)


@st.composite
def hidden_states(draw: st.DrawFn) -> HiddenStates:
    dtype, num_bytes = draw(st.sampled_from([("float32", 4), ("bfloat16", 2), ("float16", 2)]))
    rows, width = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    size = rows * width * num_bytes
    return HiddenStates(draw(u32), rows, width, dtype, draw(st.binary(min_size=size, max_size=size)))


layers = st.lists(st.integers(-1, 99), max_size=3).map(tuple)
opens = st.builds(
    ports.Open,
    session=u64,
    generation=u64,
    sampling=sampling,
    seed=u64,
    judging_rule=st.sampled_from(JudgingRule),
    prompt_length=u32,
    max_length=u32,
    num_token_ids=u32,
    eos_token_ids=ids,
    banned_token_ids=ids,
    num_logprobs=st.none() | st.integers(0, 1024),
    num_prompt_logprobs=st.none() | st.integers(0, 1024),
    logprobs_mode=st.sampled_from(LogprobsMode),
    request_id=st.text(max_size=8),
    trace_id=st.text(max_size=8),
    prefix_hash_key=st.binary(max_size=64),
    cache_salt=st.text(max_size=8),
    arrival_ns=u64,
    hidden_state_layers=layers,
    in_turn=st.booleans(),
)
releases = st.builds(ports.Release, u64, u64)
prepares = st.builds(ports.Prepare, u64, u64, st.integers(0, 1 << 16))


@st.composite
def heads(draw: st.DrawFn) -> dict[str, Any]:
    """Fields that commands of a step share."""
    kept = draw(st.sampled_from([0, 1, 255, 256, 1 << 30]) | u32)
    chain = draw(st.binary(min_size=chain_size(kept), max_size=chain_size(kept)))
    return {
        "session": draw(u64),
        "generation": draw(u64),
        "num_kept_tokens": kept,
        "prefix_hash": (chain, draw(u64)),
        "token_ids": draw(ids),
        "trace_parent": draw(text),
    }


@st.composite
def extends(draw: st.DrawFn) -> ports.Extend:
    return ports.Extend(**draw(heads()), draft_length=draw(u32), hidden_states=draw(st.none() | hidden_states()))


@st.composite
def scores_wanted(draw: st.DrawFn) -> ports.Score:
    drafts = draw(ids)
    return ports.Score(
        **draw(heads()),
        draft_token_ids=drafts,
        support=draw(st.none() | supports(num_rows=len(drafts))),
        hidden_states_from=draw(st.none() | u32),
    )


@st.composite
def proposals(draw: st.DrawFn) -> ports.Proposal:
    token_ids = draw(ids)
    evidence = draw(st.one_of(st.none(), *([sparse_evidence(num_rows=len(token_ids))] if token_ids else [])))
    return ports.Proposal(draw(u64), draw(u64), draw(u32), token_ids, evidence)


logprobs = st.builds(TokenLogprob, u32, single, u32)


@st.composite
def candidate_logprobs(draw: st.DrawFn) -> CandidateLogprobs:
    own, likeliest = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    return CandidateLogprobs(
        draw(ints(own)), draw(floats(own)), draw(ints(own)), draw(ints(likeliest)), draw(floats(likeliest))
    )


positions = st.lists(candidate_logprobs(), max_size=2).map(tuple)
scores = st.builds(ports.Scores, u64, u64, u32, forms, positions, positions, st.none() | hidden_states())
chunks = st.builds(ports.HiddenStateChunk, u64, u64, hidden_states())
common_events = st.one_of(
    st.builds(ports.Opened, u64, u64, u32),
    st.builds(ports.Preempted, u64, u64, delays),
    st.builds(ports.SessionLost, u64, u64, text),
    st.builds(ports.SessionFailed, u64, u64, text, text, text),
    st.builds(ports.Refused, u64, u64, delays, text),
)
reports = st.builds(ports.ForwardReport, stages, stages, stages, stages, u32, u32, u32, u64, u32, u32)


def messages(items: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[Any, ...]]:
    """A few items; the order of those of one session is kept on a link, so they are sorted by session."""
    return st.lists(items, max_size=4).map(by_session)


def by_session(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(items, key=lambda item: int(item.session)))


draft_commands = messages(st.one_of(opens, extends(), releases))
target_commands = messages(st.one_of(opens, scores_wanted(), prepares, releases))


def batches(events: st.SearchStrategy[Any]) -> st.SearchStrategy[ports.EventBatch[Any]]:
    return st.builds(ports.EventBatch, messages(events), st.none() | reports)


descriptions = st.builds(
    ModelDescription,
    role=st.sampled_from(["draft", "target"]),
    device_name=text,
    model_name=text,
    architecture=text,
    vocab_size=u32,
    num_token_ids=u32,
    max_model_len=u32,
    eos_token_ids=ids,
    bos_token_id=st.none() | u32,
    dtype=text,
    device=text,
    page_size=u32,
    num_pages=st.integers(0, LINK_PAGES.most),
    tokenizer_files=st.dictionaries(text, st.binary(max_size=8), max_size=2),
    tokenizer_hash=text,
    acceptance_methods=st.lists(methods, max_size=3, unique=True).map(tuple),
    version=text,
    hidden_size=u32,
    num_layers=u32,
    hidden_state_layers=layers,
    step_costs=st.lists(st.builds(StepCost, u32, u32, u32, u64), max_size=3).map(tuple),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(text, json_values, max_size=2)
chats = st.builds(
    ChatPrompt,
    st.lists(
        st.builds(lambda role, rest: {**rest, "role": role}, st.sampled_from(["user", "tool"]), objects),
        min_size=1,
        max_size=2,
    ).map(tuple),
    st.none() | st.lists(objects, max_size=2).map(tuple),
    st.none() | st.lists(objects, max_size=2).map(tuple),
    text,
    objects,
    add_generation_prompt=st.just(False),
    continue_final_message=st.booleans(),
)
requests = st.builds(
    lambda prompt, sampling, defaulted, **fields: GenerationRequest(
        sampling=dataclasses.replace(sampling, **{name: getattr(SamplingParams(), name) for name in defaulted}),
        defaulted=defaulted,
        **prompt,
        **fields,
    ),
    defaulted=st.frozensets(st.sampled_from(DEFAULTABLE)),
    add_special_tokens=st.none() | st.booleans(),
    skip_special_tokens=st.booleans(),
    prompt=st.one_of(
        st.fixed_dictionaries({"prompt": text}),
        st.fixed_dictionaries({"prompt_token_ids": ids}),
        st.fixed_dictionaries({"chat": chats}),
        st.just({}),
    ),
    max_tokens=u32,
    sampling=sampling.map(lambda params: dataclasses.replace(params, bad_words=())),
    bad_words=st.lists(text, max_size=2).map(tuple),
    seed=st.none() | u64,
    stop=st.lists(text, max_size=2).map(tuple),
    stop_token_ids=ids,
    ignore_eos=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.none() | u32,
    prompt_logprobs=st.none() | u32,
    num_speculative_tokens=st.none() | u32,
    acceptance_method=st.none() | methods,
    draft_ahead=st.booleans(),
    priority=st.integers(-(1 << 63), (1 << 63) - 1),
    request_id=text,
    cache_salt=text,
    resumable=st.booleans(),
    resume=st.none() | st.builds(Resumption, ids, text),
)
emitted = st.builds(TokenLogprob, u32, single, u32, st.lists(st.tuples(u32, single), max_size=2).map(tuple))
speculations = st.builds(SpeculationStats, u32, u32, u32, u32, ids, double)
stage_times = st.builds(StageTimes, double, double, double, double)
timings = st.builds(Timing, double, double, double, double, double, double, double, double, stage_times)
results = st.builds(
    GenerationResult,
    text=text,
    token_ids=ids,
    finish_reason=st.sampled_from(FinishReason),
    matched_stop=st.one_of(st.none(), u32, text),
    logprobs=st.none() | st.lists(emitted, max_size=3).map(tuple),
    prompt_logprobs=st.none() | st.lists(emitted, max_size=3).map(lambda rest: (None, *rest)),
    usage=st.builds(Usage, u32, u32, u32),
    speculation=speculations,
    seed=u64,
    request_id=text,
    timing=timings,
)
deltas = st.builds(
    Delta,
    text,
    ids,
    st.none() | st.lists(emitted, max_size=2).map(tuple),
    progress=st.none() | st.builds(Progress, speculations, timings),
)
started = st.builds(Started, u64, st.none() | ids, u32, methods, text, text, u32)
placements = st.builds(ModelPlacement, text, text, st.integers(1, 64), text, u32, u32)
infos = st.builds(
    ModelInfo,
    target_model=text,
    draft_model=text,
    max_model_len=u32,
    num_token_ids=u32,
    eos_token_ids=ids,
    num_speculative_tokens=u32,
    acceptance_method=methods,
    draft_attached=st.booleans(),
    version=text,
    num_running=u32,
    num_waiting=u32,
    target_pages_free=u32,
    draft_pages_free=u32,
    draft_length_mode=st.sampled_from(["auto", "fixed"]),
    draft_length=st.floats(0.0, 128.0),
    target_placement=placements,
    draft_placement=placements,
    tensor_planes=st.lists(text, max_size=2).map(tuple),
    draft_length_reason=text,
)
