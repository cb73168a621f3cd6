"""Hidden states on a link: bounds checked on the message, then the bytes as they are.

The coordinator passes them on without a look, so they are kept in the type that the target computed them in.
"""

from __future__ import annotations

from outrider.errors import ProtocolError
from outrider.limits import LINK_HIDDEN_STATE_BYTES, LINK_STATE_REFERENCES, TENSOR_DIMENSIONS
from outrider.transport.convert.plane_messages import reference_from_proto, write_reference
from outrider.types import HiddenStates
from outrider.v1 import link_pb2 as pb

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def write_hidden_states(message: pb.HiddenStates, states: HiddenStates) -> None:
    """Hidden states, into an empty message."""
    message.start = states.start
    values = message.values
    values.dtype = states.dtype
    values.shape.extend((states.num_rows, states.width))
    if states.references:
        for reference in states.references:
            write_reference(message.references.add(), reference)
    else:
        values.inline = states.payload


def hidden_states_from_proto(message: pb.HiddenStates) -> HiddenStates:
    """Hidden states; ``ProtocolError`` when type, shape and length disagree, ``InvalidRequestError`` for too many."""
    values = message.values
    TENSOR_DIMENSIONS.check("hidden_states", len(values.shape))
    expected = None if message.references else "inline"
    if values.dtype not in ITEM_BYTES or values.WhichOneof("payload") != expected or len(values.shape) != 2:
        raise ProtocolError(
            f"hidden_states: must be a tensor of {', '.join(ITEM_BYTES)}, inline or by reference, of two dimensions,"
            f" not {values.dtype[:20] or 'nothing'}"
        )
    num_rows, width = values.shape
    num_bytes = num_rows * width * ITEM_BYTES[values.dtype]
    LINK_HIDDEN_STATE_BYTES.check("hidden_states", num_bytes)
    if message.references:
        return _by_reference(message, num_rows, width, num_bytes)
    payload = values.inline
    if not width or len(payload) != num_bytes:
        raise ProtocolError(f"hidden_states: {len(payload)} bytes do not fill {num_rows} x {width} {values.dtype}")
    return HiddenStates(message.start, num_rows, width, values.dtype, payload)


def _by_reference(message: pb.HiddenStates, num_rows: int, width: int, num_bytes: int) -> HiddenStates:
    LINK_STATE_REFERENCES.check("hidden_states", len(message.references))
    references = tuple(map(reference_from_proto, message.references))
    row_bytes = width * ITEM_BYTES[message.values.dtype]
    has_rows = all(each.num_bytes and each.num_bytes % row_bytes == 0 for each in references) if width else False
    if not has_rows or sum(each.num_bytes for each in references) != num_bytes:
        raise ProtocolError(f"hidden_states: the references are not to {num_rows} rows of {row_bytes} bytes")
    return HiddenStates(message.start, num_rows, width, message.values.dtype, b"", references)
