"""Commands as arrays: every value comes back, in its order, and every malformed column is a clear error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from outrider import ports
from outrider.batched import ScoreBatch, one_by_one
from outrider.errors import ProtocolError
from outrider.limits import LINK_COMMANDS, LINK_DRAFT_TOKEN_IDS, LINK_SUPPORT_IDS, LINK_TOKEN_IDS, REQUEST_ID
from outrider.packed_ids import pack_long
from outrider.planes import ID_BYTES, PlaneReference
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES, PrefixHash
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.types import HiddenStates, PackedTokenIds, Support
from outrider.v1 import link_pb2 as pb

CommandT = TypeVar("CommandT", ports.Extend, ports.Score)
BYTES = pb.StepCommands.DESCRIPTOR.fields_by_name["sessions"].type
COLUMNS = tuple(field.name for field in pb.StepCommands.DESCRIPTOR.fields if field.type == BYTES)
STATE_COLUMNS = tuple(field.name for field in pb.StateBatch.DESCRIPTOR.fields if field.type == BYTES)
PLANES = (bytes(ID_BYTES), b"p" * ID_BYTES)
LAST = (1 << 64) - 1


def prefix(kept: int) -> PrefixHash:
    return (bytes([kept % 251]) * CHAIN_BYTES if kept >= BLOCK_TOKENS else b"", kept * 7919 % LAST)


def extend(session: int, kept: int = 20, **changed: Any) -> ports.Extend:
    command = ports.Extend(session, session + 3, kept, prefix(kept), (session % 9, 4)[: 1 + kept % 2], session % 6)
    return changed_by(command, changed)


def score(session: int, kept: int = 20, num_drafted: int = 3, *, drawn: bool = False, **changed: Any) -> ports.Score:
    drafted = tuple(range(session % 50, session % 50 + num_drafted))
    support = None
    if drawn and num_drafted:
        counts = np.arange(1, num_drafted + 1, dtype=np.int32)
        support = Support(counts, np.arange(counts.sum(), dtype=np.int32) + session % 1000)
    return changed_by(ports.Score(session, session + 3, kept, prefix(kept), (session % 9,), drafted, support), changed)


def referred(session: int, num_rows: int, plane: int = 0) -> HiddenStates:
    """States of 8 bytes a position, somewhere in a plane."""
    reference = PlaneReference(PLANES[plane], 512 * session % LAST, 8 * num_rows, session + 9)
    return HiddenStates(session % 1000, num_rows, 4, "bfloat16", b"", (reference,))


def changed_by(command: CommandT, changed: dict[str, Any]) -> CommandT:
    for name, value in changed.items():
        setattr(command, name, value)
    return command


def plain(command: Any) -> Any:
    """Values that can be compared."""
    if isinstance(command, ports.Score) and command.support is not None:
        support = command.support
        whole = [(part.dtype, part.tolist()) for part in (support.counts, support.token_ids)]
        states = command.hidden_states_from, command.plane
        return command.session, command.generation, command.prefix_hash, command.draft_token_ids, whole, states
    return command


def told(commands: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for command in commands:
        found.setdefault(command.session, []).append(plain(command))
    return found


SIDES: list[tuple[Any, Any, Any]] = [
    (draft_commands_to_proto, draft_commands_from_proto, pb.DraftCommands),
    (target_commands_to_proto, target_commands_from_proto, pb.TargetCommands),
]


def random_command(chance: random.Random, session: int, *, is_draft: bool) -> list[Any]:
    """Random commands for one session in one message, mostly of decode steps."""
    kept = chance.choice([0, 1, 255, 256, 257, 5000])
    kind = chance.random()
    if kind < 0.1:
        return [ports.Release(session, 5)]
    if kind < 0.2:
        return [
            extend(session, kept, trace_parent="t") if is_draft else changed_by(score(session), {"trace_parent": "t"})
        ]
    if is_draft:
        brought = extend(session, kept, token_ids=tuple(range(chance.choice([0, 1, 2, 9, 300]))))
        if kind > 0.97:
            brought = changed_by(brought, {"hidden_states": HiddenStates(3, 2, 4, "float32", bytes(32))})
        elif kind > 0.6:
            brought = changed_by(brought, {"hidden_states": referred(session, chance.randint(1, 9), int(kind > 0.7))})
        return [brought]
    command = score(session, kept, chance.randrange(5), drawn=chance.random() < 0.5)
    if kind > 0.6:
        command = changed_by(command, {"hidden_states_from": kept, "plane": int(kind > 0.7)})
    return [command, ports.Prepare(session, command.generation, 64)] if kind > 0.95 else [command]


def steps_of(message: Any) -> list[pb.StepCommands]:
    return [command.steps for command in message.commands if command.HasField("steps")]


def items_of(commands: Any) -> list[Any]:
    return one_by_one(commands)


@pytest.mark.parametrize("is_draft", [True, False])
def test_commands_come_back_equal_and_in_the_order_of_each_session(is_draft: bool) -> None:
    write, read, kind = SIDES[not is_draft]
    chance = random.Random(11)
    num_rows = 0
    for _ in range(200):
        sessions = chance.sample(range(1 << 40), chance.choice([1, 3, 5, 40]))
        commands = [command for session in sessions for command in random_command(chance, session, is_draft=is_draft)]
        message = write(commands)
        num_rows += sum(len(steps.sessions) // 8 for steps in steps_of(message))
        found = items_of(read(kind.FromString(message.SerializeToString())))
        assert told(found) == told(commands)
    assert num_rows > 1000


def test_the_largest_values_travel() -> None:
    biggest = [extend(LAST - index, (1 << 32) - 1, generation=LAST, draft_length=(1 << 32) - 1) for index in range(4)]
    message = draft_commands_to_proto(biggest)
    assert len(message.commands) == 1
    assert items_of(draft_commands_from_proto(message)) == biggest


def test_what_is_said_twice_of_a_session_stays_in_order() -> None:
    again = [score(2, generation=9), ports.Prepare(2, 9, 64)]
    commands: list[Any] = [*(score(index) for index in range(8)), ports.Prepare(3, 6, 64), ports.Release(5, 9), *again]
    message = target_commands_to_proto(commands)
    assert len(message.commands) == 5
    found = items_of(target_commands_from_proto(message))
    assert told(found) == told(commands)


def test_items_of_other_sessions_come_before_columns_and_those_of_theirs_after() -> None:
    (batched,) = target_commands_from_proto(target_commands_to_proto([score(index) for index in range(4)]))
    sent = [batched, ports.Prepare(2, 6, 64), ports.Release(9, 5)]
    found = target_commands_from_proto(target_commands_to_proto(sent))
    assert [type(command) for command in found] == [ports.Release, ScoreBatch, ports.Prepare]


@pytest.mark.parametrize(
    "command",
    [score(1, num_drafted=0), score(1, num_drafted=1), score(1, drawn=True), extend(1), extend(1, draft_length=0)],
)
def test_a_single_command_travels_as_columns(command: Any) -> None:
    write, read, kind = SIDES[isinstance(command, ports.Score)]
    message = write([command])
    assert [len(steps.sessions) for steps in steps_of(message)] == [8]
    assert list(map(plain, items_of(read(kind.FromString(message.SerializeToString()))))) == [plain(command)]


def test_traces_and_inline_states_travel_with_their_rows() -> None:
    states = HiddenStates(3, 2, 4, "float32", bytes(range(32)))
    several = HiddenStates(3, 2, 4, "bfloat16", b"", (*referred(1, 1).references, *referred(2, 1, 1).references))
    commands = [
        extend(1, trace_parent="00-a"),
        extend(2, hidden_states=states),
        extend(3, hidden_states=several),
        extend(4, trace_parent="00-b", hidden_states=referred(4, 2)),
    ]
    assert told(items_of(draft_commands_from_proto(draft_commands_to_proto(commands)))) == told(commands)


def test_a_prompt_stays_packed() -> None:
    prompt = pack_long(range(5, 900))
    (found,) = items_of(draft_commands_from_proto(draft_commands_to_proto([extend(1, 0, token_ids=prompt)])))
    assert found.token_ids == prompt and isinstance(found.token_ids, PackedTokenIds)


def test_commands_whose_parts_do_not_fit_are_not_sent() -> None:
    torn = score(9, drawn=True)
    torn.support.counts[0] = 5  # type: ignore[union-attr]
    with pytest.raises(ProtocolError, match="support"):
        target_commands_to_proto([torn, *(score(index, drawn=True) for index in range(5))])
    with pytest.raises(ProtocolError, match="prefix_hash: its chain has 0 bytes; 300 kept tokens have 16"):
        target_commands_to_proto([score(1, 300, prefix_hash=(b"", 0))])
    for command, kind in ((score(1), "ScoreBatch"), (ports.Prepare(1, 1, 1), "Prepare")):
        with pytest.raises(ProtocolError, match=kind):
            draft_commands_to_proto([command])


LIMITS: dict[str, Callable[[], Any]] = {
    "counts": lambda: extend(1, 0, token_ids=pack_long([1] * (LINK_TOKEN_IDS.most + 1))),
    "trace_parents": lambda: extend(1, trace_parent="x" * (REQUEST_ID.most + 1)),
    "draft_lengths": lambda: score(1, num_drafted=LINK_DRAFT_TOKEN_IDS.most + 1),
    "support_counts": lambda: score(1, num_drafted=5, support=wide_support(5, LINK_SUPPORT_IDS.most // 4)),
}


def wide_support(num_rows: int, width: int) -> Support:
    return Support(np.full(num_rows, width, dtype=np.int32), np.zeros(num_rows * width, dtype=np.int32))


@pytest.mark.parametrize("name", LIMITS)
def test_a_row_beyond_a_limit_ends_its_link(name: str) -> None:
    write, read, _ = SIDES[name in ("draft_lengths", "support_counts")]
    with pytest.raises(ProtocolError, match=f"{name}.*at most"):
        read(write([LIMITS[name]()]))


@pytest.mark.parametrize("name", ["trace_parents", "hidden_states"])
def test_lists_of_rows_have_one_entry_for_each(name: str) -> None:
    message = draft_commands_to_proto([extend(index) for index in range(4)])
    steps = message.commands[0].steps
    if name == "trace_parents":
        steps.trace_parents.extend(["00-a"] * 3)
    else:
        steps.hidden_states.add()
    with pytest.raises(ProtocolError, match=f"{name} are not one for each of 4 rows"):
        draft_commands_from_proto(message)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 16])
def test_columns_that_do_not_fit_each_other_are_told(name: str, change: int) -> None:
    for make in (lambda index: score(index, 300, drawn=True), lambda index: extend(index, 300)):
        commands = [make(index) for index in range(8)]
        write, read, _ = SIDES[isinstance(commands[0], ports.Score)]
        message = write(commands)
        content = getattr(message.commands[0].steps, name)
        if not content:
            continue
        setattr(message.commands[0].steps, name, content[:change] if change < 0 else content + bytes(change))
        with pytest.raises(ProtocolError, match="columns"):
            read(message)


@pytest.mark.parametrize("name", STATE_COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 16])
def test_states_that_do_not_fit_their_commands_are_told(name: str, change: int) -> None:
    message = draft_commands_to_proto([extend(i, 300, hidden_states=referred(i, 2)) for i in range(8)])
    states = message.commands[0].steps.states
    content = getattr(states, name)
    setattr(states, name, content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ProtocolError, match=name):
        draft_commands_from_proto(message)


@pytest.mark.parametrize(
    "changed", [{"dtype": "int32"}, {"width": 0}, {"width": 1 << 30}, {"counts": bytes(4 * 8)}], ids=str
)
def test_states_of_no_sense_are_told(changed: dict[str, Any]) -> None:
    message = draft_commands_to_proto([extend(i, 300, hidden_states=referred(i, 2)) for i in range(8)])
    for name, value in changed.items():
        setattr(message.commands[0].steps.states, name, value)
    with pytest.raises(ProtocolError, match="states"):
        draft_commands_from_proto(message)


def test_columns_with_states_are_the_items_that_they_were() -> None:
    extends = [extend(i, 300, hidden_states=referred(i, 1 + i % 3)) for i in range(8)]
    (batched,) = draft_commands_from_proto(draft_commands_to_proto(extends))
    assert list(batched.items()) == extends
    scores = [score(i, 300, hidden_states_from=300 + i, plane=3) for i in range(8)]
    (scored,) = target_commands_from_proto(target_commands_to_proto(scores))
    assert list(scored.items()) == scores
    again: Any = draft_commands_to_proto([batched]), target_commands_to_proto([scored])
    assert items_of(draft_commands_from_proto(again[0])) == extends
    assert items_of(target_commands_from_proto(again[1])) == scores


def test_sizes_are_bounded_before_anything_is_made_of_them() -> None:
    steps = pb.TargetCommand(steps=pb.StepCommands(sessions=bytes(8 * LINK_COMMANDS.most)))
    many = pb.TargetCommands(commands=[steps] * 2)
    with pytest.raises(Exception, match=f"at most {LINK_COMMANDS.most}"):
        target_commands_from_proto(many)
    message = target_commands_to_proto([score(index) for index in range(4)])
    message.commands[0].steps.draft_lengths = np.array([LAST >> 32] * 4, dtype="<u4").tobytes()
    with pytest.raises(ProtocolError, match="draft_lengths"):
        target_commands_from_proto(message)


@pytest.mark.parametrize(("is_draft", "make"), [(True, extend), (False, lambda index: score(index, drawn=True))])
def test_random_columns_are_read_or_refused(is_draft: bool, make: Callable[[int], Any]) -> None:
    """Nothing but ``ProtocolError`` comes of them, and what is read has a command for each row."""
    write, read, _ = SIDES[not is_draft]
    chance = random.Random(6)
    num_read = 0
    for _ in range(1500):
        message = write([make(index) for index in range(5)])
        (group,) = steps_of(message)
        for _ in range(chance.choice([1, 2])):
            name = chance.choice(COLUMNS)
            content = bytearray(getattr(group, name))
            if content and chance.random() < 0.6:
                content[chance.randrange(len(content))] = chance.randrange(256)
            else:
                content = bytearray(chance.randbytes(chance.choice([0, 1, 4, 20, 40])))
            setattr(group, name, bytes(content))
        try:
            found = items_of(read(message))
        except ProtocolError:
            continue
        num_read += 1
        assert len(found) == len(group.sessions) // 8
        assert all(isinstance(command, ports.Extend | ports.Score) for command in found)
    assert 100 < num_read < 1400
