"""Starts the services in order, keeps them running, stops them in order.

Owns the order, the backoff and what is reported. Knows no settings: a plan says what to run, a probe says whether an
address serves. What a listener does with a report never ends the supervision; a bug in the supervision ends the stack.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from outrider.cli.stack.plan import ServiceSpec, StackPlan
from outrider.cli.stack.process import ChildProcess
from outrider.errors import OutriderError, UnavailableError

_log = logging.getLogger(__name__)

_POLL_S = 0.05
"""Interval of the readiness checks while a service starts."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
"""Longest pause before a restart; it doubles from the first with each."""
STABLE_S = 60.0
"""Uptime after which the next pause is the first again."""

ResultT = TypeVar("ResultT")

Probe = Callable[[str], Awaitable[bool]]
"""True if a service, asked at its ``probe``, says that it is serving; answers within a bounded time."""


class SupervisorListener(Protocol):
    """Listener for events of the supervisor, for people."""

    def starting(self, spec: ServiceSpec) -> None:
        """The process is being started."""

    def serving(self, spec: ServiceSpec) -> None:
        """The process serves."""

    def lost(self, spec: ServiceSpec, reason: str, retry_in_s: float) -> None:
        """The process ended by itself and will be started again."""

    def line(self, spec: ServiceSpec, text: str) -> None:
        """The process wrote a line."""


class Stack:
    """The services of one plan, as an async context manager: serving inside, gone outside."""

    def __init__(self, plan: StackPlan, *, probe: Probe, listener: SupervisorListener) -> None:
        self.plan = plan
        self._probe = probe
        self._listener = listener
        self._children: dict[str, ChildProcess] = {}
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def pids(self) -> dict[str, int]:
        """The running processes by service."""
        return {name: child.pid for name, child in self._children.items() if not child.ended}

    async def __aenter__(self) -> Stack:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def watch(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """The work's result; ``OutriderError`` as soon as a service is no longer supervised, which is a bug."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, *self._keepers], return_when=asyncio.FIRST_COMPLETED)
            for keeper in self._keepers:
                if keeper.done() and not task.done():
                    error = None if keeper.cancelled() else keeper.exception()
                    raise OutriderError(
                        f"the supervision of the {keeper.get_name()} service ended: {error!r}"
                    ) from error
            return await task
        finally:
            await _end(task)

    async def stop(self) -> None:
        """Stop gateways and coordinators, which let streams finish, then the models. Cancelled: kill what is left."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._keepers.clear()
        try:
            await self._stop_children(list(self.plan.gateways))
            await self._stop_children(list(self.plan.coordinators))
            await self._stop_children(list(self.plan.models))
        finally:
            for child in self._children.values():
                child.kill()

    async def _start(self) -> None:
        await self._start_models()
        for spec in (*self.plan.coordinators, *self.plan.gateways):
            await self._start_service(spec)
        for spec in (*self.plan.models, *self.plan.coordinators, *self.plan.gateways):
            self._keepers.append(asyncio.create_task(self._keep(spec), name=spec.name))

    async def _start_models(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for spec in self.plan.models:
                    group.create_task(self._start_service(spec))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _start_service(self, spec: ServiceSpec) -> None:
        """Start one and wait until it serves; ``UnavailableError`` with its own words when it ends before."""
        self._tell(self._listener.starting, spec)
        child = await ChildProcess.start(spec, lambda line: self._listener.line(spec, line))
        self._children[spec.name] = child
        ended = asyncio.create_task(child.wait())
        try:
            while not await self._probe(spec.probe):
                if ended.done():
                    raise UnavailableError(f"the {spec.name} service did not start: {ended.result()}")
                await asyncio.wait([ended], timeout=_POLL_S)
        finally:
            ended.cancel()
        self._tell(self._listener.serving, spec)

    async def _keep(self, spec: ServiceSpec) -> None:
        """Start the service again whenever it ends, later and later while it does not last."""
        backoff_s = FIRST_BACKOFF_S
        problem = ""
        while True:
            started = time.monotonic()
            reason = problem or await self._children[spec.name].wait()
            backoff_s = FIRST_BACKOFF_S if time.monotonic() - started > STABLE_S else backoff_s
            self._tell(self._listener.lost, spec, reason, backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            problem = await self._start_again(spec)

    async def _start_again(self, spec: ServiceSpec) -> str:
        """Error message of a restart that left no process to wait for; empty if there is one, even one that has ended
        by now.
        """
        try:
            await self._start_service(spec)
        except UnavailableError:
            return ""
        except OSError as error:  # no process, descriptor or memory left: another time there may be
            return f"it cannot be started: {error}"
        return ""

    @staticmethod
    def _tell(report: Callable[..., None], *facts: object) -> None:
        """Report to people. What goes wrong there is no reason to leave a service unsupervised."""
        try:
            report(*facts)
        except (Exception, SystemExit):  # a console of rich's exits when its reader has gone
            _log.debug("a report could not be made", exc_info=True)

    async def _stop_children(self, specs: list[ServiceSpec]) -> None:
        children = [self._children[spec.name] for spec in specs if spec.name in self._children]
        await asyncio.gather(*(child.stop() for child in children))


async def _end(task: asyncio.Future[Any]) -> None:
    """Cancel what still runs and see it end; how it ended has been told or is of no interest."""
    task.cancel()
    await asyncio.wait([task])
