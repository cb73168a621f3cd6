"""Hidden states of a forward, on their way to a draft: which rows and arrays are whose, and how they go.

Shape letters: ``T`` tokens of a forward, ``F`` values of a position, ``H`` those of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from outrider.batched import ScoreBatch, StateBatch
from outrider.types import HiddenStates
from outrider_target.jobs import ScoreJob

if TYPE_CHECKING:
    from outrider.planes import PlaneReference
    from outrider.serving.decode.step import DecodeBatch
    from outrider.tensor_plane.writer import PlaneWriter
    from outrider_target.planes import TargetPlanes


def layers_wanted(jobs: Sequence[ScoreJob]) -> tuple[int, ...]:
    """All layers that any job of a forward asks for; mostly none."""
    wanted = {layer for job in jobs if job.wants_states for layer in job.open.hidden_state_layers}
    return tuple(sorted(wanted))


def rows_of(
    job: ScoreJob,
    start: int,
    states: torch.Tensor,  # [T, F] of the job's tokens, the first at position ``start``
    layers: Sequence[int],
) -> tuple[int, torch.Tensor] | None:
    """The first position, and the states [N, F], of what the job asks for of its tokens; ``states`` hold those of
    ``layers``. None: nothing of them.
    """
    first = job.score.hidden_states_from
    if first is None or first >= start + states.shape[0]:
        return None
    rows = states[max(0, first - start) :]
    return max(first, start), in_order(rows, job.open.hidden_state_layers, layers)


def in_order(rows: torch.Tensor, wanted: Sequence[int], layers: Sequence[int]) -> torch.Tensor:  # [N, F]
    """States of the wanted layers, in their order, contiguous, out of those of ``layers``."""
    size = rows.shape[1] // len(layers)
    places = [layers.index(layer) for layer in wanted]
    if places != list(range(len(layers))):
        rows = torch.cat([rows[:, place * size : (place + 1) * size] for place in places], dim=-1)
    return rows.contiguous()


class StepStates:
    """States of a step that came as arrays: all rows of its forward, session after session, in one copy."""

    def __init__(
        self, planes: TargetPlanes | None, step: DecodeBatch, batched: ScoreBatch, states: torch.Tensor
    ) -> None:
        """Queue the copy, with the forward's stream. ``states`` [T, F] are of all tokens of the step."""
        self._planes, self._states = planes, states
        self._starts, sizes = step.kept, batched.counts.astype(np.int64) + step.draft_lengths
        self._sizes: list[int] = sizes.tolist()
        self.batched: StateBatch | None = None
        """References to the states, once the forward has ended; None where they go inline."""
        writer = planes.writer(step.link_id, batched.plane) if planes is not None and batched.plane else None
        references = None if writer is None else writer.put(states, self._sizes)
        if writer is not None and planes is not None and references is not None:
            planes.sent_bytes[writer.report.kind] += states.numel() * states.element_size()
            self.batched = StateBatch(
                references[0].plane_id,
                states.shape[1],
                _name(states.dtype),
                self._starts,
                sizes,
                np.array([reference.offset_bytes for reference in references], dtype=np.uint64),
                np.array([reference.sequence for reference in references], dtype=np.uint64),
            )

    def inline(self) -> list[HiddenStates]:
        """The states of each session."""
        rows = torch.split(self._states.cpu(), self._sizes)
        payloads = [part.contiguous().view(torch.uint8).numpy().tobytes() for part in rows]
        if self._planes is not None:
            self._planes.sent_bytes["inline"] += sum(map(len, payloads))
        width, name = self._states.shape[1], _name(self._states.dtype)
        heads = zip(self._starts.tolist(), self._sizes, payloads, strict=True)
        return [HiddenStates(first, size, width, name, payload) for first, size, payload in heads]


class StateHandover:
    """States of one forward. What goes by a plane is copied right behind the forward; the rest waits for its end."""

    def __init__(self, planes: TargetPlanes | None) -> None:
        """``planes``: None where all go inline."""
        self._planes = planes
        self._by_plane: list[tuple[ScoreJob, HiddenStates]] = []
        self._inline: list[tuple[ScoreJob, int, torch.Tensor]] = []

    def begin(self, wanted: Sequence[tuple[ScoreJob, int, torch.Tensor]]) -> None:
        """Queue the copies of (job, first position, states [N, F]); called with the forward's stream."""
        by_writer: dict[PlaneWriter, list[tuple[ScoreJob, int, torch.Tensor]]] = {}
        for each in wanted:
            score, link_id = each[0].score, each[0].link_id
            writer = self._planes.writer(link_id, score.plane) if self._planes is not None and score.plane else None
            if writer is None:
                self._inline.append(each)
            else:
                by_writer.setdefault(writer, []).append(each)
        for writer, group in by_writer.items():
            self._put(writer, group)

    def finish(self) -> dict[int, HiddenStates]:
        """The states by their job's id, once the forward has ended."""
        found = {id(job): states for job, states in self._by_plane}
        for job, first, rows in self._inline:
            payload = rows.cpu().view(torch.uint8).numpy().tobytes()
            found[id(job)] = HiddenStates(first, rows.shape[0], rows.shape[1], _name(rows.dtype), payload)
            self._note("inline", len(payload))
        return found

    def _put(self, writer: PlaneWriter, group: list[tuple[ScoreJob, int, torch.Tensor]]) -> None:
        """All rows for one draft, in one copy where they are of one width and the plane has that much room."""
        tensors, references = [rows for _, _, rows in group], None
        if len({rows.shape[1] for rows in tensors}) == 1:
            references = writer.put(tensors[0] if len(tensors) == 1 else torch.cat(tensors), list(map(len, tensors)))
        if references is None and len(group) > 1:
            middle = len(group) // 2
            self._put(writer, group[:middle])
            self._put(writer, group[middle:])
            return
        if references is None:
            self._inline += group
            return
        for (job, first, rows), reference in zip(group, references, strict=True):
            self._by_plane.append((job, _referred(first, rows, reference)))
        self._note(writer.report.kind, sum(reference.num_bytes for reference in references))

    def _note(self, plane: str, num_bytes: int) -> None:
        if self._planes is not None:
            self._planes.sent_bytes[plane] += num_bytes


def _referred(first: int, rows: torch.Tensor, reference: PlaneReference) -> HiddenStates:
    return HiddenStates(first, rows.shape[0], rows.shape[1], _name(rows.dtype), b"", (reference,))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
