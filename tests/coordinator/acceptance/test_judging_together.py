"""Proposals and scores of many sessions as arrays: the verdicts are those of ``judge_one`` on each, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from outrider.batched import AnswerBatch, SupportBatch
from outrider.errors import ProtocolError
from outrider.ports import Proposal
from outrider.types import JudgingRule, SparseEvidence, SparseScores
from outrider_coordinator.acceptance import JudgeRules, Verdict, is_sound_proposal, judge_one
from outrider_coordinator.acceptance.joint_verdicts import JointVerdicts
from outrider_coordinator.acceptance.rejection import coin
from outrider_coordinator.acceptance.vectorized import SupportRows
from outrider_coordinator.acceptance.vectorized import are_sound as are_sound_rows

VOCAB_SIZE = 50
RULES = JudgeRules(JudgingRule.REJECTION, VOCAB_SIZE)
Generator = np.random.Generator


@dataclass(frozen=True)
class ProposalCase:
    draft_token_ids: tuple[int, ...]
    evidence: SparseEvidence


@dataclass(frozen=True)
class ScoredCase:
    proposal: ProposalCase
    scores: SparseScores
    seed: int
    base: int


def as_batch(cases: Sequence[ProposalCase]) -> AnswerBatch[Proposal]:
    evidence = [case.evidence for case in cases]
    nothing = np.zeros(len(cases), dtype="<u8")
    return AnswerBatch(
        nothing,
        nothing,
        nothing,
        np.array([len(case.draft_token_ids) for case in cases], dtype="<u4"),
        np.array([token_id for case in cases for token_id in case.draft_token_ids], dtype="<u4"),
        (),
        Proposal,
        supports=SupportBatch(
            np.concatenate([each.counts for each in evidence]),
            np.concatenate([each.token_ids for each in evidence]),
            np.concatenate([each.probs for each in evidence]),
        ),
    )


def are_sound(cases: Sequence[ProposalCase]) -> bool:
    return are_sound_rows(SupportRows.of_batch(as_batch(cases)), np.full(len(cases), VOCAB_SIZE))


def judge_together(cases: Sequence[ScoredCase]) -> list[Verdict] | None:
    """None where each has to be judged by itself."""
    rows = SupportRows.of_batch(as_batch([case.proposal for case in cases]))
    verdicts = JointVerdicts.of(
        rows,
        limits=np.full(len(cases), VOCAB_SIZE),
        seeds=np.array([case.seed for case in cases], dtype=np.uint64),
        bases=np.array([case.base for case in cases], dtype=np.int64),
    )
    judged = verdicts.on(
        np.concatenate([case.scores.support_probs for case in cases]),
        np.concatenate([case.scores.outside_mass for case in cases]),
        np.concatenate([case.scores.outside_token_ids for case in cases]),
    )
    if judged is None:
        return None
    return list(map(Verdict, judged[0].tolist(), judged[1].tolist()))


def are_all_kept(verdicts: Sequence[Verdict], cases: Sequence[ScoredCase]) -> list[bool]:
    lengths = [len(case.proposal.draft_token_ids) for case in cases]
    return [verdict.num_accepted == length for verdict, length in zip(verdicts, lengths, strict=True)]


def made_case(random: Generator, *, closeness: float = 0.5) -> ScoredCase:
    """A proposal of 1 to 5 tokens over supports of 1 to 12 ids, and what a target of some distribution says of it."""
    length = int(random.integers(1, 6))
    counts = random.integers(1, 13, length)
    rows = [random.choice(VOCAB_SIZE, count, replace=False) for count in counts]
    drafts = [random.dirichlet(np.ones(count)) + 1e-3 for count in counts]
    drafts = [row / row.sum() for row in drafts]
    proposal = ProposalCase(
        tuple(int(random.choice(ids, p=row)) for ids, row in zip(rows, drafts, strict=True)),
        SparseEvidence(
            counts.astype(np.int32), np.concatenate(rows).astype(np.int32), np.concatenate(drafts).astype(np.float32)
        ),
    )
    outside = random.uniform(0, 0.6, length) * random.integers(0, 2, length)
    inside = [
        (1 - mass) * (closeness * row + (1 - closeness) * random.dirichlet(np.ones(len(row))))
        for mass, row in zip(outside, drafts, strict=True)
    ]
    drawn = random.integers(0, VOCAB_SIZE, length + 1)
    drawn[:-1][outside == 0] = -1
    scores = SparseScores(
        np.concatenate(inside).astype(np.float32),
        np.append(outside, 1.0).astype(np.float32),
        drawn.astype(np.int32),
    )
    return ScoredCase(proposal, scores, int(random.integers(0, 2**64, dtype=np.uint64)), int(random.integers(1, 9999)))


def made_cases(seed: int, count: int = 40, *, closeness: float = 0.5) -> list[ScoredCase]:
    random = np.random.default_rng(seed)
    return [made_case(random, closeness=closeness) for _ in range(count)]


def alone(case: ScoredCase) -> Verdict:
    proposal = case.proposal
    return judge_one(RULES, proposal.draft_token_ids, proposal.evidence, case.scores, seed=case.seed, base=case.base)


def is_sound_alone(case: ProposalCase) -> bool:
    count = len(case.draft_token_ids)
    return is_sound_proposal(
        case.draft_token_ids, case.evidence, needs_evidence=True, asked=count, num_token_ids=VOCAB_SIZE
    )


@pytest.mark.parametrize("closeness", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("seed", range(8))
def test_the_same_verdicts(seed: int, closeness: float) -> None:
    cases = made_cases(seed, closeness=closeness)
    assert are_sound([case.proposal for case in cases])
    together = judge_together(cases)
    assert together == [alone(case) for case in cases]
    assert together and set(are_all_kept(together, cases)) == {True, False}


def test_the_order_and_the_company_do_not_matter() -> None:
    cases = made_cases(3)
    together = judge_together(cases)
    assert together is not None
    assert judge_together(cases[::-1]) == together[::-1]
    assert [judge_together([case]) for case in cases] == [[verdict] for verdict in together]


def test_a_target_that_agrees_exactly_keeps_all() -> None:
    cases = made_cases(4)
    agreeing = [
        replace(
            case,
            scores=SparseScores(
                case.proposal.evidence.probs,
                np.append(np.zeros(len(case.proposal.draft_token_ids)), 1.0).astype(np.float32),
                case.scores.outside_token_ids,
            ),
        )
        for case in cases
    ]
    together = judge_together(agreeing)
    assert together == [alone(case) for case in agreeing]
    assert together and all(are_all_kept(together, agreeing))


def spoilt_evidence(evidence: SparseEvidence, how: str) -> SparseEvidence:
    counts, ids, probs = evidence.counts.copy(), evidence.token_ids.copy(), evidence.probs.copy()
    if how == "range":
        ids[0] = VOCAB_SIZE
    elif how == "negative id":
        ids[0] = -1
    elif how == "twice":
        ids[: counts[0]] = ids[0]
    elif how == "sum":
        probs[0] += 0.5
    elif how == "nan":
        probs[0] = np.nan
    elif how == "zero":
        probs[0] = 0.0
    else:
        counts[0] = 0
    return SparseEvidence(counts, ids, probs)


@pytest.mark.parametrize("how", ["range", "negative id", "twice", "sum", "nan", "zero", "empty"])
def test_one_bad_proposal_is_found_among_all(how: str) -> None:
    cases = [case.proposal for case in made_cases(6)]
    index = next(index for index, case in enumerate(cases) if case.evidence.counts[0] > 2)
    cases[index] = replace(cases[index], evidence=spoilt_evidence(cases[index].evidence, how))
    assert not is_sound_alone(cases[index])
    assert not are_sound(cases)


def even_proposal(random: Generator) -> ProposalCase:
    """Two tokens, each with a support of four ids."""
    ids = np.concatenate([random.choice(VOCAB_SIZE, 4, replace=False) for _ in range(2)]).astype(np.int32)
    evidence = SparseEvidence(np.full(2, 4, dtype=np.int32), ids, np.full(8, 0.25, dtype=np.float32))
    return ProposalCase((int(ids[0]), int(ids[4])), evidence)


def test_an_id_that_is_twice_in_a_support_is_seen_where_all_have_one_length_too() -> None:
    random = np.random.default_rng(12)
    cases = [even_proposal(random) for _ in range(8)]
    assert are_sound(cases) and all(map(is_sound_alone, cases))
    ids = cases[3].evidence.token_ids.copy()
    ids[7] = ids[6]  # neither is the draft token
    cases[3] = replace(cases[3], evidence=replace(cases[3].evidence, token_ids=ids))
    assert not is_sound_alone(cases[3])
    assert not are_sound(cases)


def test_a_draft_token_outside_its_support_is_seen() -> None:
    cases = [case.proposal for case in made_cases(7)]
    first = cases[0]
    free = next(
        token for token in range(VOCAB_SIZE) if token not in first.evidence.token_ids[: first.evidence.counts[0]]
    )
    cases[0] = replace(first, draft_token_ids=(free, *first.draft_token_ids[1:]))
    assert not is_sound_alone(cases[0])
    assert not are_sound(cases)


def spoilt_scores(scores: SparseScores, how: str) -> SparseScores:
    inside, outside, drawn = scores.support_probs.copy(), scores.outside_mass.copy(), scores.outside_token_ids.copy()
    if how == "no bonus":
        drawn[-1] = -1
    elif how == "range":
        drawn[-1] = VOCAB_SIZE
    elif how == "negative":
        inside[0] = -0.1
    elif how == "nan":
        inside[0] = np.nan
    else:
        outside[0] += 0.5
    return SparseScores(inside, outside, drawn)


@pytest.mark.parametrize("how", ["no bonus", "range", "negative", "nan", "sum"])
def test_scores_that_do_not_fit_send_all_to_be_judged_alone(how: str) -> None:
    cases = made_cases(8)
    cases[3] = replace(cases[3], scores=spoilt_scores(cases[3].scores, how))
    with pytest.raises(ProtocolError):
        alone(cases[3])
    assert judge_together(cases) is None


def test_an_empty_residual_is_left_to_who_judges_alone() -> None:
    cases = made_cases(9)
    # The target has less than the draft everywhere, within what is forgiven, and nothing outside: whatever is rejected
    # leaves nothing to draw from.
    short = [
        replace(
            case,
            scores=SparseScores(
                case.proposal.evidence.probs * np.float32(0.991),
                np.append(np.zeros(len(case.proposal.draft_token_ids)), 1.0).astype(np.float32),
                case.scores.outside_token_ids,
            ),
        )
        for case in (*cases, *made_cases(10, 400))
    ]
    assert all(are_all_kept([alone(case) for case in short], short))
    assert judge_together(short) is None, "some coin falls above 0.991"


def test_a_draft_token_that_no_32_bits_hold_is_out_of_order_like_any_other() -> None:
    proposals = [case.proposal for case in made_cases(3)]
    assert are_sound(proposals)
    first = proposals[0]
    wild = replace(first, draft_token_ids=(2**31 + 3, *first.draft_token_ids[1:]))
    assert not is_sound_alone(wild)
    assert not are_sound([wild, *proposals[1:]])


def test_the_comparison_is_strict() -> None:
    """A coin equal to the ratio rejects; a ratio one step above the coin accepts."""
    base = 10
    seed = next(seed for seed in range(10_000) if float(np.float32(coin(seed, base, base))) == coin(seed, base, base))
    equal = np.float32(coin(seed, base, base) / 2)  # over a draft probability of a half
    halves = SparseEvidence(np.array([2], "<i4"), np.array([0, 2], "<i4"), np.array([0.5, 0.5], "<f4"))
    for prob, accepted in ((equal, 0), (np.nextafter(equal, np.float32(1)), 1)):
        scores = SparseScores(np.array([prob, 0], "<f4"), np.array([1 - prob, 1], "<f4"), np.array([1, 0], "<i4"))
        case = ScoredCase(ProposalCase((0,), halves), scores, seed, base)
        judged = judge_together([case])
        assert judged is not None and judged[0].num_accepted == accepted
