"""What a draft loop drew, read on the host.

Owns the meaning of the records. Refuses to know devices and layouts of launches.

Shape letters: ``K`` steps, ``R`` rows of the launch, ``S`` the most tokens of a support.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.drafting.rows import DraftRow
from outrider.engine.kernels.draft_sampling.layout import Field
from outrider.engine.sampling.checks import row_error
from outrider.engine.sampling.proposing import Drawn
from outrider.engine.sampling.rows import needs_evidence
from outrider.errors import IntegrityError, OutriderError

Numbers = NDArray[np.int32]


def read_draws(
    rows: Sequence[DraftRow],
    records: Numbers,  # [K, R, NUM_FIELDS]
    supports: Numbers | None,  # [K, R, 2, S]; None: no row needs evidence
) -> list[list[Drawn]]:
    """Each row's draws in order; one that failed is the row's last."""
    return [
        _read_row(row, records[:, i], supports[:, i] if supports is not None else None) for i, row in enumerate(rows)
    ]


def _read_row(row: DraftRow, records: Numbers, supports: Numbers | None) -> list[Drawn]:
    supports = supports if needs_evidence(row.open) else None
    drawn: list[Drawn] = []
    for step, record in enumerate(records[: row.num_drafts].tolist()):
        if record[Field.TOKEN] < 0:
            drawn.append(Drawn(-1, error=_error(record)))
            break
        support = None if supports is None else supports[step, :, : record[Field.WIDTH]]
        drawn.append(_read(record[Field.TOKEN], support))
    return drawn


def _read(token_id: int, support: Numbers | None) -> Drawn:  # [2, S]
    if support is None:
        return Drawn(token_id)
    return Drawn(token_id, support[0].copy(), support[1].copy().view(np.float32))


def _error(record: list[int]) -> OutriderError:
    largest = float(np.int32(record[Field.LARGEST]).view(np.float32))
    error = row_error(finite=bool(record[Field.IS_FINITE]), largest=largest)
    return error or IntegrityError(f"a draft loop drew nothing from logits whose largest is {largest}")
