"""Choice of the next address and of the pause before it, and errors that are final."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from outrider import AsyncClient, Client
from outrider.cli.stack.held_ports import hold_port
from outrider.client.addresses import DOWN_S, Addresses, parse_addresses
from outrider.client.attempts import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_FRUITLESS, Attempts
from outrider.errors import (
    CapacityError,
    ConfigError,
    DeadlineError,
    InvalidRequestError,
    LoadingError,
    LostTooOftenError,
    OutriderError,
    ProtocolError,
    RequestCancelledError,
    TlsError,
    UnavailableError,
)
from tests.client.conftest import Service
from tests.support.scripted_generator import INFO

GONE = UnavailableError("gone")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts_at(
    *names: str, clock: Clock | None = None, timeout: float | None = None, resume: float | None = None
) -> Attempts:
    clock = clock or Clock()
    return Attempts(
        Addresses(names, clock=clock),
        timeout_s=timeout,
        resume_timeout_s=resume,
        is_closed=lambda: False,
        clock=clock,
        jitter=lambda: 1.0,
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (("a:1",), ("a:1",)),
        (("a:1", "b:2"), ("a:1", "b:2")),
        ((["a:1", "b:2"],), ("a:1", "b:2")),
        ((("a:1", "unix:/x,y"),), ("a:1", "unix:/x,y")),
        (("a:1, b:2,a:1",), ("a:1", "b:2")),
    ],
)
def test_addresses_are_given_in_several_ways(given: tuple[str, ...], names: tuple[str, ...]) -> None:
    assert parse_addresses(*given) == names


@pytest.mark.parametrize("given", [("",), ("a:1,",), ([],), ("a:1", ""), (["a:1", 2],)])
def test_an_address_that_is_none_is_refused(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_addresses(*given)
    assert caught.value.field == "address"


def test_every_address_is_checked_when_the_client_is_made() -> None:
    for make in (Client, AsyncClient):
        with pytest.raises(ConfigError, match="65535"):
            make("127.0.0.1:1", "127.0.0.1:65536")


def test_an_address_that_did_not_answer_is_tried_last_for_a_while() -> None:
    clock = Clock()
    addresses = Addresses(("a", "b", "c"), clock=clock)
    assert addresses.in_order() == ["a", "b", "c"]
    addresses.note_down("a")
    clock.now += 1
    addresses.note_down("b")
    assert addresses.in_order() == ["c", "a", "b"]
    clock.now += DOWN_S - 0.5
    assert addresses.in_order() == ["a", "c", "b"]
    addresses.note_up("b")
    assert addresses.in_order() == ["a", "b", "c"]


def test_without_resuming_each_address_has_one_chance() -> None:
    attempts = attempts_at("a", "b")
    assert attempts.begin()[0] == "a"
    assert attempts.failed(GONE) == 0
    assert attempts.begin()[0] == "b"
    with pytest.raises(UnavailableError):
        attempts.failed(GONE)


def test_without_resuming_nothing_is_begun_again_once_an_address_has_answered() -> None:
    attempts = attempts_at("a", "b")
    attempts.begin()
    attempts.note_message(is_output=True)
    with pytest.raises(UnavailableError):
        attempts.failed(GONE)


def test_pauses_grow_once_all_addresses_were_tried_and_begin_anew_with_output() -> None:
    attempts = attempts_at("a", "b", resume=60)
    pauses = [failed_once(attempts) for _ in range(20)]
    assert pauses[::2] == [0] * 10
    assert pauses[1::2][:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    attempts.begin()
    attempts.note_message(is_output=True)
    assert [attempts.failed(GONE), failed_once(attempts)] == [FIRST_PAUSE_S, 0]


def failed_once(attempts: Attempts, error: OutriderError = GONE) -> float:
    attempts.begin()
    return attempts.failed(error)


def test_an_interruption_ends_with_its_error_when_it_lasts_too_long() -> None:
    clock = Clock()
    attempts = attempts_at("a", clock=clock, resume=10)
    for _ in range(20):
        clock.now += failed_once(attempts)
        if clock.now > 109:
            break
    clock.now = 109.9
    assert failed_once(attempts) == pytest.approx(0.1), "the last attempt is made when the time is over"
    clock.now = 110.0
    with pytest.raises(UnavailableError):
        failed_once(attempts)


def test_a_request_that_is_taken_up_has_all_the_time_again() -> None:
    """Servers that restart again and again before there is output are waited for each time."""
    clock = Clock()
    attempts = attempts_at("a", clock=clock, resume=10)
    for _ in range(5):
        attempts.begin()
        attempts.note_message(is_output=False)
        attempts.failed(GONE)
        clock.now += 9
    clock.now += 9
    with pytest.raises(UnavailableError):
        failed_once(attempts)


def test_a_request_that_is_taken_up_without_output_is_not_sent_for_ever() -> None:
    attempts = attempts_at("a", resume=10)
    for _ in range(MAX_FRUITLESS):
        attempts.begin()
        attempts.note_message(is_output=False)
        attempts.failed(GONE)
    attempts.begin()
    attempts.note_message(is_output=False)
    with pytest.raises(UnavailableError):
        attempts.failed(GONE)


def test_the_callers_timeout_is_over_all_attempts() -> None:
    clock = Clock()
    attempts = attempts_at("a", clock=clock, resume=60, timeout=5)
    assert attempts.begin() == ("a", 5)
    clock.now += 4.99
    pause = attempts.failed(GONE)
    assert 0 < pause <= 0.01 + 1e-9
    clock.now += pause
    with pytest.raises(DeadlineError, match="5 s"):
        attempts.begin()


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (GONE, True),
        (LoadingError("still loads"), True),
        (LostTooOftenError("the target was lost 6 times over this request"), False),
        (RequestCancelledError("shut down"), True),
        (CapacityError("the queue is full", retry_after_ms=300), True),
        (InvalidRequestError("prompt", "is wrong"), False),
        (DeadlineError("too late"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_is_about_availability_is_tried_again(error: OutriderError, passes: bool) -> None:
    attempts = attempts_at("a", resume=60)
    attempts.begin()
    attempts.note_message(is_output=True)
    if passes:
        assert attempts.failed(error) >= (0.3 if isinstance(error, CapacityError) else 0)
        return
    with pytest.raises(type(error)):
        attempts.failed(error)


def test_a_full_queue_refuses_what_was_never_taken_in() -> None:
    attempts = attempts_at("a", "b", resume=60)
    attempts.begin()
    with pytest.raises(CapacityError):
        attempts.failed(CapacityError("the queue is full"))


@pytest.mark.parametrize(("error", "following"), [(GONE, "b"), (CapacityError("the queue is full"), "a")])
def test_an_address_that_is_full_is_not_down(error: OutriderError, following: str) -> None:
    attempts = attempts_at("a", "b", resume=60)
    attempts.begin()
    attempts.note_message(is_output=True)
    attempts.failed(error)
    assert attempts.begin()[0] == following


# Over the wire.


def dead_address() -> str:
    return f"127.0.0.1:{hold_port()}"


def test_the_first_address_that_answers_serves(service: Service) -> None:
    dead = dead_address()
    with Client(dead, service.address) as client:
        assert client.model_info() == INFO
        assert client.generate(prompt="x", max_tokens=2).token_ids == (0, 1)
        assert [delta.token_ids for delta in client.stream(prompt="x", max_tokens=1)] == [(0,), ()]


async def test_the_first_address_that_answers_serves_asyncio(service: Service) -> None:
    async with AsyncClient([dead_address(), service.address]) as client:
        assert await client.model_info() == INFO
        assert (await client.generate(prompt="x", max_tokens=2)).token_ids == (0, 1)
        assert [delta.token_ids async for delta in client.stream(prompt="x", max_tokens=1)] == [(0,), ()]


def test_an_address_without_a_target_is_passed_over(services: tuple[Service, Service]) -> None:
    first, second = services
    first.generator.error = UnavailableError("the target cannot be reached")
    with Client(first.address, second.address) as client:
        assert client.generate(prompt="x", max_tokens=2).token_ids == (0, 1)


@pytest.mark.parametrize("options", [{}, {"resume": True}])
@pytest.mark.parametrize("error", [CapacityError("the queue is full"), InvalidRequestError("prompt", "is wrong")])
def test_an_error_that_is_not_about_availability_is_raised_at_once(
    services: tuple[Service, Service], error: OutriderError, options: dict[str, Any]
) -> None:
    first, second = services
    first.generator.error = error
    with Client(first.address, second.address) as client:
        with pytest.raises(type(error)):
            client.generate(prompt="x", **options)
        with pytest.raises(type(error)):
            list(client.stream(prompt="x", **options))
    assert second.generator.requests == []


def test_when_none_answers_the_last_one_is_named() -> None:
    first, second = dead_address(), dead_address()
    with Client(first, second) as client, pytest.raises(UnavailableError, match=second):
        client.generate(prompt="x")


def test_a_silent_address_is_given_up_for_one_that_speaks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connecting succeeds but nothing is answered; remembered, the address costs the next call nothing."""
    monkeypatch.setattr("outrider.client.addresses.CONNECT_ATTEMPT_MS", 1000)
    down, note_down = list[str](), Addresses.note_down

    def noted(self: Addresses, name: str) -> None:
        down.append(name)
        note_down(self, name)

    monkeypatch.setattr(Addresses, "note_down", noted)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with Client(address, service.address) as client:
            assert client.generate(prompt="x", max_tokens=1).token_ids == (0,)
            assert client.generate(prompt="x", max_tokens=1).token_ids == (0,)
            assert down == [address]


NO_COORDINATOR = ProtocolError("it answered UNIMPLEMENTED")
WRONG_TLS = TlsError("its certificate has expired")


@pytest.mark.parametrize("resume", [None, 60.0])
def test_an_address_that_is_no_coordinator_is_passed_over(resume: float | None) -> None:
    attempts = attempts_at("a", "b", resume=resume)
    assert attempts.begin()[0] == "a"
    assert attempts.failed(NO_COORDINATOR) == 0
    assert attempts.begin()[0] == "b"
    attempts.note_message(is_output=True)


@pytest.mark.parametrize("resume", [None, 60.0])
def test_where_no_address_is_a_coordinator_that_is_the_error_at_once(resume: float | None) -> None:
    attempts = attempts_at("a", "b", resume=resume)
    attempts.begin()
    assert attempts.failed(NO_COORDINATOR) == 0
    attempts.begin()
    with pytest.raises(ProtocolError, match="UNIMPLEMENTED"):
        attempts.failed(NO_COORDINATOR)


def test_a_coordinator_beside_one_that_is_none_is_waited_for() -> None:
    clock = Clock()
    attempts = attempts_at("a", "b", clock=clock, resume=60.0)
    for _ in range(5):
        errors = {"a": NO_COORDINATOR, "b": GONE}
        for _ in range(2):
            clock.now += attempts.failed(errors[attempts.begin()[0]])
    while attempts.begin()[0] != "b":
        attempts.failed(NO_COORDINATOR)
    attempts.note_message(is_output=True)


def test_a_stream_that_breaks_its_contract_is_final() -> None:
    attempts = attempts_at("a", "b", resume=60.0)
    attempts.begin()
    attempts.note_message(is_output=True)
    with pytest.raises(ProtocolError):
        attempts.failed(NO_COORDINATOR)


def test_wrong_tls_at_all_addresses_is_told_at_the_second_time() -> None:
    clock = Clock()
    attempts = attempts_at("a", "b", clock=clock, resume=60.0)
    for _ in range(3):
        attempts.begin()
        clock.now += attempts.failed(WRONG_TLS)  # a server that is ending may look like it
    attempts.begin()
    with pytest.raises(TlsError, match="expired"):
        attempts.failed(WRONG_TLS)
    assert clock.now < 100.0 + LONGEST_PAUSE_S


def test_wrong_tls_at_one_address_and_none_at_the_other_is_waited_for() -> None:
    clock = Clock()
    attempts = attempts_at("a", "b", clock=clock, resume=60.0)
    errors = {"a": WRONG_TLS, "b": GONE}
    for _ in range(8):
        clock.now += attempts.failed(errors[attempts.begin()[0]])
    assert clock.now < 160.0


def test_tls_that_was_wrong_once_is_no_reason_to_end() -> None:
    attempts = attempts_at("a", resume=60.0)
    for error in (WRONG_TLS, GONE, WRONG_TLS, GONE):
        attempts.begin()
        attempts.failed(error)
