"""Client processes: shares of a load, and records that are those of one process."""

import multiprocessing
import os
import signal

import pytest

from outrider.benchmarks.serving.client_processes import ClientProcesses
from outrider.benchmarks.serving.load import Decoding, divide, join
from outrider.benchmarks.serving.records import Record
from outrider.benchmarks.serving.workload import Traffic, random_prompts
from outrider.errors import UnavailableError
from tests.client.conftest import Service, service

__all__ = ["service"]

PROMPTS = tuple(random_prompts(7, 5, 100, seed=1))
DECODING = Decoding(max_tokens=4, seed=40)


@pytest.mark.parametrize(("max_concurrency", "concurrencies"), [(None, [None] * 3), (5, [2, 2, 1]), (2, [1, 1])])
def test_users_are_divided_and_every_request_is_sent_once(
    max_concurrency: int | None, concurrencies: list[int | None]
) -> None:
    shares = divide(PROMPTS, Traffic(max_concurrency=max_concurrency), DECODING, 3)
    assert [share.max_concurrency for share in shares] == concurrencies
    assert sorted(index for share in shares for index in share.indexes) == list(range(7))
    for share in shares:
        assert share.prompts == tuple(PROMPTS[index] for index in share.indexes)


def test_due_times_are_those_of_the_whole_load() -> None:
    traffic = Traffic(request_rate=3.0)
    (whole,) = divide(PROMPTS, traffic, DECODING, 1)
    for share in divide(PROMPTS, traffic, DECODING, 3):
        assert share.due_times == tuple(whole.due_times[index] for index in share.indexes)


def test_records_are_joined_in_the_order_of_the_prompts() -> None:
    shares = divide(PROMPTS, Traffic(max_concurrency=4), DECODING, 3)
    parts = [(s, [Record(5, 0.0, 1.0 + index, error=str(index)) for index in s.indexes], 2.0) for s in shares]
    run = join(parts, num_users=4)
    assert [record.error for record in run.records] == list("0123456")
    assert (run.duration, run.num_users, run.client_load) == (7.0, 4, 2.0 / 7.0)


async def test_processes_send_what_one_process_would(service: Service) -> None:
    async with ClientProcesses(service.address, 2, tls=False) as processes:
        done: list[None] = []
        run = await processes.run_load(PROMPTS, Traffic(), DECODING, on_done=lambda: done.append(None))
        again = await processes.run_load(PROMPTS[:1], Traffic(max_concurrency=1), DECODING)
    assert len(done) == len(PROMPTS) == len(run.completed)
    assert all(record.num_tokens == 4 and record.token_counts == (1, 1, 1, 1) for record in run.records)
    assert all(0 <= record.sent_at <= record.token_times[0] <= record.ended_at for record in run.records)
    assert run.duration == max(record.ended_at for record in run.records)
    assert run.client_load > 0
    sent = {request.prompt_token_ids: request.seed for request in service.generator.requests[: len(PROMPTS)]}
    assert sent == {prompt: 40 + index for index, prompt in enumerate(PROMPTS)}
    assert len(again.completed) == 1


async def test_a_process_that_ends_is_an_error_and_not_a_missing_part(service: Service) -> None:
    async with ClientProcesses(service.address, 2, tls=False) as processes:
        await processes.run_load(PROMPTS, Traffic(), DECODING)
        victim = multiprocessing.active_children()[0]
        os.kill(victim.pid or 0, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="client process ended with exit code -9"):
            await processes.run_load(PROMPTS, Traffic(), DECODING)


async def test_processes_that_cannot_connect_are_an_error() -> None:
    async with ClientProcesses("127.0.0.1:1", 2, tls=False) as processes:
        with pytest.raises(UnavailableError):
            await processes.run_load(PROMPTS, Traffic(), DECODING)
