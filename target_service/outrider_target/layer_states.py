"""Hidden states of a forward, on their way to a draft: which rows and columns are whose, and their bytes.

Shape letters: ``T`` tokens of a forward, ``F`` values of a position, ``H`` those of one layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.types import HiddenStates
from outrider_target.jobs import ScoreJob


def layers_wanted(jobs: Sequence[ScoreJob]) -> tuple[int, ...]:
    """All layers that any job of a forward asks for; mostly none."""
    wanted = {layer for job in jobs if job.wants_states for layer in job.open.hidden_state_layers}
    return tuple(sorted(wanted))


def states_of(
    job: ScoreJob,
    start: int,
    states: torch.Tensor,  # [T, F] of the job's tokens, the first at position ``start``
    layers: Sequence[int],
) -> HiddenStates | None:
    """What the job asks for of its tokens' states, which hold those of ``layers``; None: nothing of them.

    It waits for the device.
    """
    first = job.score.hidden_states_from
    end = start + states.shape[0]
    if first is None or first >= end:
        return None
    size = states.shape[1] // len(layers)
    places = [layers.index(layer) for layer in job.open.hidden_state_layers]
    rows = states[max(0, first - start) :]
    if places != list(range(len(layers))):
        rows = torch.cat([rows[:, place * size : (place + 1) * size] for place in places], dim=-1)
    host = rows.contiguous().cpu()
    payload = host.view(torch.uint8).numpy().tobytes()
    dtype = str(states.dtype).removeprefix("torch.")
    return HiddenStates(max(first, start), host.shape[0], host.shape[1], dtype, payload)
