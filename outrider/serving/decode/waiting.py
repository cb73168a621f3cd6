"""Waiting sessions: those that were answered, against which arrays of their next items are checked.

They are registered when their answers have left, while the device computes for others. Owns what the next item may
keep of a session's text; what it may ask for is the executor's.

Shape letters: ``B`` sessions registered together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from outrider.batched import CommandBatch
from outrider.prefix_hash import chain_size
from outrider.serving.decode.sessions import RunningSessions
from outrider.serving.decode.step import DecodeBatch
from outrider.serving.session_registry import SessionRegistry

Indices = Sequence[int]
"""Indices of sessions."""
_ALL: Indices = ()
"""All of them, in their order."""


class WaitingSessions:
    """Sessions of one link that were answered together."""

    def __init__(self, table: SessionRegistry[Any], own: RunningSessions, bases: Sequence[int]) -> None:
        """``bases``: the committed tokens of each, all computed; after them it may hold drafts."""
        sessions = own.sessions
        hashes = [table.hash_ahead(session, base) for session, base in zip(sessions, bases, strict=True)]
        self._table, self._own, self._bases = table, own, list(bases)
        self._is_here = [True] * len(sessions)
        self._are_all_here = True
        self._generations = [session.generation for session in sessions]
        self._hash_tails = [tails for _, tails in hashes]  # [B] of lengths from the base on, within its block
        self._chains = [chain for chain, _ in hashes]
        self._all_chains = b"".join(self._chains)

    def drop(self, row: int) -> None:
        """Invalidate a session for which something else has come."""
        self._is_here[row] = self._are_all_here = False

    def claim(self, row: int, generation: int, base: int) -> None:
        """Claim of a precomputed step, after ``base`` committed tokens, by an item of this generation."""
        self._generations[row] = generation
        if base != self._bases[row]:
            self._bases[row] = base
            self._chains[row], self._hash_tails[row] = self._table.hash_ahead(self._own.sessions[row], base)
            self._all_chains = b"".join(self._chains)

    def find(
        self, link_id: int, batched: CommandBatch, arrived_ns: int, *, is_asked: bool = True
    ) -> DecodeBatch | None:
        """The step that arrays ask for; None unless all their sessions wait here, the items are newer than what was
        answered, and they keep text that these have. Not ``is_asked``: they are known to do so.
        """
        indices = self._indices_of(batched)
        if indices is None or (is_asked and not self._keep_their_text(batched, indices)):
            return None
        own = self._own if indices is _ALL else self._own.selected(np.array(indices, dtype=np.intp))
        kept, lengths = batched.num_kept_tokens.astype(np.int64), batched.draft_lengths.astype(np.int64)
        bases = kept + batched.counts
        return DecodeBatch(link_id, batched, own, kept, bases, lengths, arrived_ns, is_asked=is_asked)

    def take(self, step: DecodeBatch) -> None:
        """The sessions of a step that ``find`` has found wait no more."""
        self._are_all_here = False
        if step.own is self._own:
            self._is_here = [False] * len(self._is_here)
        else:
            indices = self._own.keys
            for key in step.keys:
                self._is_here[indices[key]] = False

    def _indices_of(self, batched: CommandBatch) -> Indices | None:
        """Place of each session; None unless all are here, once."""
        if self._are_all_here and batched.sessions.tobytes() == self._own.number_bytes:  # as nearly always
            return _ALL
        known = self._own.indices
        indices = [known.get(number, -1) for number in batched.sessions.tolist()]
        is_here = min(indices) >= 0 and all(map(self._is_here.__getitem__, indices))
        return indices if is_here and len(set(indices)) == len(indices) else None

    def _keep_their_text(self, batched: CommandBatch, indices: Indices) -> bool:
        """True if every item is new, keeps what was committed, no more than is held, and names the text that it is. A
        session that was answered since then, as plain steps are, has committed more.

        Row by row: of up to some 60 rows arrays take more time, and several times as much where caches are cold.
        """
        generations, bases, tails, sessions = self._generations, self._bases, self._hash_tails, self._own.sessions
        if indices is not _ALL:
            generations, bases = [generations[place] for place in indices], [bases[place] for place in indices]
            tails, sessions = [tails[place] for place in indices], [sessions[place] for place in indices]
        asked = batched.generations.tolist(), batched.num_kept_tokens.tolist(), batched.hash_tails.tolist()
        is_known = True
        rows = zip(*asked, sessions, generations, bases, tails, strict=True)
        for generation, kept, rest, session, answered, base, own in rows:
            if generation <= answered or session.generation != answered or kept < base:
                return False
            is_known = is_known and kept - base < len(own) and own[kept - base] == rest
        if is_known:
            return batched.chains == (
                self._all_chains if indices is _ALL else b"".join([self._chains[place] for place in indices])
            )
        return self._are_their_texts(batched, range(len(bases)) if indices is _ALL else indices)

    def _are_their_texts(self, batched: CommandBatch, indices: Sequence[int]) -> bool:
        """True if all keep the texts whose hashes they bring, hashed again: some end past a block."""
        start = 0
        heads = zip(indices, batched.num_kept_tokens.tolist(), batched.hash_tails.tolist(), strict=True)
        for place, length, rest in heads:
            session, stop = self._own.sessions[place], start + chain_size(length)
            if length > session.sequence.length:
                return False
            if self._table.prefix_hash(session, length) != (batched.chains[start:stop], rest):
                return False
            start = stop
        return start == len(batched.chains)
