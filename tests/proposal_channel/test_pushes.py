"""Pushes: draft tokens that no command has asked for, as bytes, and what channels make of them."""

from __future__ import annotations

import numpy as np

from outrider.batched import U4, U8
from outrider.proposal_channel.messages import take_proposals, to_bytes
from outrider.proposal_channel.pushes import Pushes, pushes_in
from outrider.proposal_channel.pushes import to_bytes as pushes_to_bytes
from tests.proposal_channel.test_channel import proposals


def pushes(rows: list[tuple[int, int, list[int]]]) -> Pushes:
    return Pushes(
        np.array([number for number, _, _ in rows], dtype=U8),
        np.array([base for _, base, _ in rows], dtype=np.int64),
        np.array([len(ids) for _, _, ids in rows], dtype=U4),
        np.array([token_id for _, _, ids in rows for token_id in ids], dtype=U4),
    )


def test_pushes_are_read_as_they_were_written() -> None:
    rows = [(7, 12, [1, 2, 3]), (1 << 40, 1 << 31, [4]), (9, 0, [5, 6])]
    message = take_proposals(bytearray(pushes_to_bytes(pushes(rows))))
    assert message is not None
    found = pushes_in(message)
    assert found is not None and found.rows() == rows


def test_proposals_are_no_pushes() -> None:
    message = take_proposals(bytearray(to_bytes(proposals([1, 2], [2, 1]))))
    assert message is not None and pushes_in(message) is None
