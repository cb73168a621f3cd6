"""Openings and rows for the tests of sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.ports import Open
from outrider.sampling import LogitRow
from outrider.sampling.session import SessionSampling
from outrider.types import AcceptanceMethod, SamplingParams, Support
from outrider_coordinator.acceptance import judging_rule

REJECTION, COUPLED, TYPICAL = AcceptanceMethod.REJECTION, AcceptanceMethod.COUPLED, AcceptanceMethod.TYPICAL

_OPEN_FIELDS = set(Open.__dataclass_fields__)


def opening(method: AcceptanceMethod = REJECTION, *, session: int = 1, seed: int = 7, **fields: Any) -> Open:
    """A session's opening; fields of ``Open`` go there, all others to its sampling parameters."""
    of_open: dict[str, Any] = {"prompt_length": 4, "max_length": 10_000, "num_token_ids": 0}
    of_open.update({name: fields.pop(name) for name in list(fields) if name in _OPEN_FIELDS})
    sampling = SamplingParams(**fields)
    rule = judging_rule(method, temperature=sampling.temperature)
    return Open(session=session, generation=1, sampling=sampling, seed=seed, judging_rule=rule, **of_open)


def row(asked: Open | SessionSampling, tokens: Sequence[int] = (0, 1, 2, 3), base: int | None = None) -> LogitRow:
    """The row after all of ``tokens``."""
    session = asked if isinstance(asked, SessionSampling) else SessionSampling(asked)
    return LogitRow(session, tokens, len(tokens), len(tokens) if base is None else base)


def support_of(rows: Sequence[Sequence[int]]) -> Support:
    """A support from plain lists of ids."""
    counts = np.array([len(ids) for ids in rows], dtype=np.int32)
    return Support(counts, np.array([i for ids in rows for i in ids], dtype=np.int32))
