"""Hidden states on a link: what does not agree with itself, and what is too large, is refused before it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.errors import InvalidRequestError, ProtocolError
from outrider.limits import LINK_HIDDEN_LAYERS, LINK_HIDDEN_STATE_BYTES
from outrider.ports import Extend, Rejected, Scores, SessionFailed
from outrider.prefix_hash import EMPTY_PREFIX
from outrider.transport.convert import commands, events
from outrider.types import HiddenStates
from outrider.v1 import link_pb2 as pb
from outrider.v1 import tensor_pb2

STATES = HiddenStates(4, 3, 2, "bfloat16", bytes(range(12)))


def message(change: Callable[[tensor_pb2.Tensor], None]) -> pb.DraftCommands:
    inline = HiddenStates(0, 2, 3, "float32", bytes(24))
    found = commands.draft_commands_to_proto([Extend(1, 2, 0, EMPTY_PREFIX, (3, 4), 1, "", inline)])
    commands.draft_commands_from_proto(found)
    change(found.commands[0].steps.hidden_states[0].values)
    return found


def set_shape(*shape: int) -> Callable[[tensor_pb2.Tensor], None]:
    def change(tensor: tensor_pb2.Tensor) -> None:
        del tensor.shape[:]
        tensor.shape.extend(shape)

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_shape(2),
        set_shape(2, 4),
        set_shape(0, 3),
        set_shape(24, 0),
        lambda tensor: setattr(tensor, "dtype", "int32"),
        lambda tensor: setattr(tensor, "dtype", "bfloat16"),
        lambda tensor: setattr(tensor, "inline", bytes(23)),
        lambda tensor: tensor.ClearField("inline"),
    ],
)
def test_states_that_do_not_agree_with_themselves_break_the_contract(
    change: Callable[[tensor_pb2.Tensor], None],
) -> None:
    with pytest.raises(ProtocolError, match="hidden_states"):
        commands.draft_commands_from_proto(message(change))


@pytest.mark.parametrize("shape", [(1, LINK_HIDDEN_STATE_BYTES.most // 4 + 1), (1 << 40, 1 << 40), (1, 2, 3)])
def test_too_many_end_their_link(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="hidden_states: has"):
        commands.draft_commands_from_proto(message(set_shape(*shape)))


def test_too_many_layers_end_their_session_alone() -> None:
    found = pb.TargetCommands()
    found.commands.add().open.hidden_state_layers.extend(range(LINK_HIDDEN_LAYERS.most + 1))
    (rejected,) = commands.target_commands_from_proto(found)
    assert isinstance(rejected, Rejected)


def test_too_many_in_an_answer_fail_their_session_alone() -> None:
    found = pb.TargetEvents()
    states = found.events.add().hidden_states.states.values
    states.dtype = "float32"
    states.shape.extend((1, LINK_HIDDEN_STATE_BYTES.most))
    states.inline = b""
    (event,) = events.target_events_from_proto(found).events
    assert isinstance(event, SessionFailed)
    assert not isinstance(event, Scores)


def test_rows_are_cut_and_joined() -> None:
    assert STATES.end == 7
    assert STATES.between(4, 7) is STATES
    assert STATES.between(5, 6) == HiddenStates(5, 1, 2, "bfloat16", bytes(range(4, 8)))
    first, rest = STATES.between(4, 5), [STATES.between(5, 6), STATES.between(6, 7)]
    assert first.followed_by(rest) == STATES
    assert first.followed_by([]) is first
    assert STATES.between(5, 5).payload == b""
