"""Hidden states on a link: bounds checked on the message, then the bytes as they are.

The coordinator passes them on without a look, so they are kept in the type that the target computed them in.
"""

from __future__ import annotations

from outrider.errors import ProtocolError
from outrider.limits import LINK_HIDDEN_STATE_BYTES, TENSOR_DIMENSIONS
from outrider.types import HiddenStates
from outrider.v1 import link_pb2 as pb

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def write_hidden_states(message: pb.HiddenStates, states: HiddenStates) -> None:
    """Hidden states, into an empty message."""
    message.start = states.start
    values = message.values
    values.dtype = states.dtype
    values.shape.extend((states.num_rows, states.width))
    values.inline = states.payload


def hidden_states_from_proto(message: pb.HiddenStates) -> HiddenStates:
    """Hidden states; ``ProtocolError`` when type, shape and length disagree, ``InvalidRequestError`` for too many."""
    values = message.values
    TENSOR_DIMENSIONS.check("hidden_states", len(values.shape))
    if values.dtype not in ITEM_BYTES or values.WhichOneof("payload") != "inline" or len(values.shape) != 2:
        raise ProtocolError(
            f"hidden_states: must be a tensor of {', '.join(ITEM_BYTES)}, inline, of two dimensions, not"
            f" {values.dtype[:20] or 'nothing'}"
        )
    num_rows, width = values.shape
    num_bytes = num_rows * width * ITEM_BYTES[values.dtype]
    LINK_HIDDEN_STATE_BYTES.check("hidden_states", num_bytes)
    payload = values.inline
    if not width or len(payload) != num_bytes:
        raise ProtocolError(f"hidden_states: {len(payload)} bytes do not fill {num_rows} x {width} {values.dtype}")
    return HiddenStates(message.start, num_rows, width, values.dtype, payload)
