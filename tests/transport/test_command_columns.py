"""Commands of many sessions as columns: the same values as one by one, and every malformed column a clear error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from outrider import ports
from outrider.errors import ProtocolError
from outrider.limits import LINK_COMMANDS, LINK_DRAFT_TOKEN_IDS
from outrider.planes import ID_BYTES, PlaneReference
from outrider.prefix_hash import BLOCK_TOKENS, CHAIN_BYTES, PrefixHash
from outrider.transport.convert.commands import (
    draft_commands_from_proto,
    draft_commands_to_proto,
    target_commands_from_proto,
    target_commands_to_proto,
)
from outrider.types import HiddenStates, Support
from outrider.v1 import link_pb2 as pb

CommandT = TypeVar("CommandT", ports.Extend, ports.Score)
BYTES = pb.CommandColumns.DESCRIPTOR.fields_by_name["sessions"].type
COLUMNS = tuple(field.name for field in pb.CommandColumns.DESCRIPTOR.fields if field.type == BYTES)
STATE_COLUMNS = tuple(field.name for field in pb.StateColumns.DESCRIPTOR.fields if field.type == BYTES)
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


def told(message: Any, commands: Any) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for command in commands:
        found.setdefault(command.session, []).append(plain(command))
    return found


SIDES: list[tuple[Any, Any, Any]] = [
    (draft_commands_to_proto, draft_commands_from_proto, pb.DraftCommands),
    (target_commands_to_proto, target_commands_from_proto, pb.TargetCommands),
]


def random_command(chance: random.Random, session: int, *, is_draft: bool) -> list[Any]:
    """What may be said of one session in one message, steady mostly."""
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


@pytest.mark.parametrize("is_draft", [True, False])
def test_both_forms_say_the_same(is_draft: bool) -> None:
    write, read, kind = SIDES[not is_draft]
    chance = random.Random(11)
    num_columns = 0
    for _ in range(200):
        sessions = chance.sample(range(1 << 40), chance.choice([1, 3, 5, 40]))
        commands = [command for session in sessions for command in random_command(chance, session, is_draft=is_draft)]
        message = write(commands, columns=True)
        num_columns += len(message.columns)
        found = read(kind.FromString(message.SerializeToString()))
        one_by_one = read(kind.FromString(write(commands).SerializeToString()))
        assert told(message, found) == told(message, one_by_one) == told(message, commands)
    assert num_columns > 50


def test_the_largest_values_travel() -> None:
    biggest = [extend(LAST - index, (1 << 32) - 1, generation=LAST, draft_length=(1 << 32) - 1) for index in range(4)]
    message = draft_commands_to_proto(biggest, columns=True)
    assert len(message.columns) == 1 and not message.commands
    assert list(draft_commands_from_proto(message)) == biggest


def test_what_is_said_twice_of_a_session_stays_in_order() -> None:
    commands: list[Any] = [*(score(index) for index in range(8)), ports.Prepare(3, 6, 64), ports.Release(5, 9)]
    message = target_commands_to_proto(commands, columns=True)
    assert (len(message.commands), len(message.columns)) == (4, 1)
    read: tuple[Any, ...] = target_commands_from_proto(message)
    found = [command for command in read if command.session in (3, 5)]
    assert found == [commands[3], commands[5], commands[8], commands[9]]


def test_few_plain_commands_and_services_that_read_no_columns_get_them_one_by_one() -> None:
    assert not target_commands_to_proto([score(index, num_drafted=0) for index in range(3)], columns=True).columns
    assert not draft_commands_to_proto([extend(1, draft_length=0)], columns=True).columns
    assert not target_commands_to_proto([score(index) for index in range(30)]).columns


@pytest.mark.parametrize("command", [score(1, num_drafted=1), score(1, drawn=True), extend(1)])
def test_a_single_command_with_drafts_is_a_column(command: Any) -> None:
    write, read, kind = SIDES[isinstance(command, ports.Score)]
    message = write([command], columns=True)
    assert (len(message.commands), len(message.columns)) == (0, 1)
    assert list(map(plain, read(kind.FromString(message.SerializeToString())))) == [plain(command)]


def test_a_command_that_is_too_long_ends_its_session_alone() -> None:
    commands = [score(index, num_drafted=LINK_DRAFT_TOKEN_IDS.most + (index == 2)) for index in range(5)]
    found = target_commands_from_proto(target_commands_to_proto(commands, columns=True))
    assert isinstance(found[2], ports.Rejected) and found[2].session == 2
    assert [command for index, command in enumerate(found) if index != 2] == [*commands[:2], *commands[3:]]


def test_a_support_that_does_not_fit_its_drafts_is_for_its_service_to_refuse() -> None:
    torn = score(9, drawn=True)
    torn.support.counts[0] = 5  # type: ignore[union-attr]
    message = target_commands_to_proto([torn, *(score(index, drawn=True) for index in range(5))], columns=True)
    assert (len(message.commands), len(message.columns)) == (1, 1)


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 16])
def test_columns_that_do_not_fit_each_other_are_told(name: str, change: int) -> None:
    for make in (lambda index: score(index, 300, drawn=True), lambda index: extend(index, 300)):
        commands = [make(index) for index in range(8)]
        write, read, _ = SIDES[isinstance(commands[0], ports.Score)]
        message = write(commands, columns=True)
        content = getattr(message.columns[0], name)
        if not content:
            continue
        setattr(message.columns[0], name, content[:change] if change < 0 else content + bytes(change))
        with pytest.raises(ProtocolError, match="columns"):
            read(message)


@pytest.mark.parametrize("keeps_columns", [False, True])
@pytest.mark.parametrize("name", STATE_COLUMNS)
@pytest.mark.parametrize("change", [-1, 1, -4, 16])
def test_states_that_do_not_fit_their_commands_are_told(name: str, change: int, *, keeps_columns: bool) -> None:
    message = draft_commands_to_proto([extend(i, 300, hidden_states=referred(i, 2)) for i in range(8)], columns=True)
    states = message.columns[0].states
    content = getattr(states, name)
    setattr(states, name, content[:change] if change < 0 else content + bytes(change))
    with pytest.raises(ProtocolError, match=name):
        draft_commands_from_proto(message, keeps_columns=keeps_columns)


@pytest.mark.parametrize("keeps_columns", [False, True])
@pytest.mark.parametrize(
    "changed", [{"dtype": "int32"}, {"width": 0}, {"width": 1 << 30}, {"counts": bytes(4 * 8)}], ids=str
)
def test_states_of_no_sense_are_told(changed: dict[str, Any], *, keeps_columns: bool) -> None:
    message = draft_commands_to_proto([extend(i, 300, hidden_states=referred(i, 2)) for i in range(8)], columns=True)
    for name, value in changed.items():
        setattr(message.columns[0].states, name, value)
    with pytest.raises(ProtocolError, match="states"):
        draft_commands_from_proto(message, keeps_columns=keeps_columns)


def test_states_are_no_part_of_scores_nor_their_first_positions_of_extends() -> None:
    scores = target_commands_to_proto([score(i) for i in range(8)], columns=True)
    scores.columns[0].states.width = 3
    extends = draft_commands_to_proto([extend(i) for i in range(8)], columns=True)
    extends.columns[0].hidden_states_from = bytes(4 * 8)
    for keeps_columns in (False, True):
        with pytest.raises(ProtocolError, match="belong to"):
            target_commands_from_proto(scores, keeps_columns=keeps_columns)
        with pytest.raises(ProtocolError, match="belong to"):
            draft_commands_from_proto(extends, keeps_columns=keeps_columns)


def test_columns_with_states_are_the_items_that_they_were() -> None:
    extends = [extend(i, 300, hidden_states=referred(i, 1 + i % 3)) for i in range(8)]
    (columns,) = draft_commands_from_proto(draft_commands_to_proto(extends, columns=True), keeps_columns=True)
    assert list(columns.items()) == extends
    scores = [score(i, 300, hidden_states_from=300 + i, plane=3) for i in range(8)]
    (scored,) = target_commands_from_proto(target_commands_to_proto(scores, columns=True), keeps_columns=True)
    assert list(scored.items()) == scores
    again: Any = draft_commands_to_proto([columns], columns=True), target_commands_to_proto([scored], columns=True)
    assert list(draft_commands_from_proto(again[0])) == extends
    assert list(target_commands_from_proto(again[1])) == scores


def test_sizes_are_bounded_before_anything_is_made_of_them() -> None:
    many = pb.TargetCommands(columns=[pb.CommandColumns(sessions=bytes(8 * LINK_COMMANDS.most))] * 2)
    with pytest.raises(Exception, match=f"at most {LINK_COMMANDS.most}"):
        target_commands_from_proto(many)
    message = target_commands_to_proto([score(index) for index in range(4)], columns=True)
    message.columns[0].draft_lengths = np.array([LAST >> 32] * 4, dtype="<u4").tobytes()
    with pytest.raises(ProtocolError, match="draft_lengths"):
        target_commands_from_proto(message)


@pytest.mark.parametrize(("is_draft", "make"), [(True, extend), (False, lambda index: score(index, drawn=True))])
def test_random_columns_are_read_or_refused(is_draft: bool, make: Callable[[int], Any]) -> None:
    """Nothing but ``ProtocolError`` comes of them, and what is read has a command for each row."""
    write, read, _ = SIDES[not is_draft]
    chance = random.Random(6)
    num_read = 0
    for _ in range(1500):
        message = write([make(index) for index in range(5)], columns=True)
        group = message.columns[0]
        for _ in range(chance.choice([1, 2])):
            name = chance.choice(COLUMNS)
            content = bytearray(getattr(group, name))
            if content and chance.random() < 0.6:
                content[chance.randrange(len(content))] = chance.randrange(256)
            else:
                content = bytearray(chance.randbytes(chance.choice([0, 1, 4, 20, 40])))
            setattr(group, name, bytes(content))
        try:
            found = read(message)
        except ProtocolError:
            continue
        num_read += 1
        assert len(found) == len(group.sessions) // 8
        assert all(isinstance(command, ports.Extend | ports.Score | ports.Rejected) for command in found)
    assert 100 < num_read < 1400
