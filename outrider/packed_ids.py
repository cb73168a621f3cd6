"""Packed token ids, made with numpy: what services and coordinators keep of a long prompt. The SDK does without."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import numpy as np

from outrider.cooperative import SLICE_ENTRIES, Work, is_long
from outrider.types import PackedTokenIds

MIN_PACKED_IDS = 256
"""Minimum number of ids that are kept packed: for fewer, packing takes more than it saves."""
_LARGEST = (1 << 31) - 1


def pack_long(token_ids: Sequence[int]) -> tuple[int, ...]:
    """Checked ids, packed if they are many."""
    if len(token_ids) < MIN_PACKED_IDS or isinstance(token_ids, PackedTokenIds):
        return token_ids if isinstance(token_ids, tuple) else tuple(token_ids)
    values = np.frombuffer(array("i", token_ids), dtype=np.int32)
    return PackedTokenIds.known(
        token_ids, values.astype("<i4", copy=False).tobytes(), int(values.min()), int(values.max())
    )


def unpack_long(content: bytes) -> tuple[int, ...]:
    """The ids of bytes as ``PackedTokenIds.packed`` has them; packed if they are many."""
    token_ids = array("i", content)
    if sys.byteorder == "big":
        token_ids.byteswap()
    if len(token_ids) < MIN_PACKED_IDS:
        return tuple(token_ids)
    values = np.frombuffer(token_ids, dtype=np.int32)
    return PackedTokenIds.known(token_ids, content, int(values.min()), int(values.max()))


def reading_long(field: Sequence[int]) -> Work[tuple[int, ...]]:
    """The ids of a repeated field of 32 bits, with pauses; packed if they are many and all fit."""
    if len(field) < MIN_PACKED_IDS:
        return tuple(field)
    values = np.array(field, dtype=np.uint32)  # a copy of the field's memory
    token_ids: list[int] = []
    for start in range(0, len(field), SLICE_ENTRIES):
        token_ids += values[start : start + SLICE_ENTRIES].tolist()
        if is_long(field):
            yield
    least, largest = int(values.min()), int(values.max())
    if largest > _LARGEST:
        return tuple(token_ids)  # for the checks of the request to refuse
    return PackedTokenIds.known(token_ids, values.astype("<i4").tobytes(), least, largest)
