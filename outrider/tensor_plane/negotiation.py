"""Choice of a plane: what both ends can do, tried and measured. The writer's part; the reader only answers.

For each kind: the writer opens its end, the reader opens its own, random bytes go across and come back as a digest, and
the quickest of several probes is the kind's time. The fastest kind is used.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.planes import ID_BYTES, PlaneKind, PlaneReport
from outrider.tensor_plane.control import ControlConnection, Message
from outrider.tensor_plane.endpoints import PeerFacts, PlaneLimits, WriterEnd, why_not
from outrider.tensor_plane.opening import OPENING_ERRORS, open_writer

PROBE_BYTES = 147_456
"""States of 6 tokens of an 8B model at 3 layers."""
_NUM_PROBES = 5
"""Timed round trips of a plane, of which the fastest counts."""


@dataclass(slots=True)
class Chosen:
    """A plane that both ends have open."""

    kind: PlaneKind
    plane_id: bytes
    end: WriterEnd
    round_trip_s: float = 0.0
    trouble: str | None = None
    """Problem that the reader reports."""


class Negotiation:
    """One choice with one reader."""

    def __init__(self, control: ControlConnection, device: torch.device, host: str, limits: PlaneLimits) -> None:
        self._control, self._device, self._host, self._limits = control, device, host, limits

    def choose(self, kinds: Sequence[PlaneKind], failed: Mapping[PlaneKind, str]) -> tuple[Chosen | None, PlaneReport]:
        """The fastest plane that works, None for inline; ``OSError`` when the reader is gone."""
        self._control.send({"type": "hello"})
        theirs = PeerFacts.from_message(self._expect("hello", self._limits.silence_s))
        ours = PeerFacts.of(self._device)
        reasons = {kind: "it is not among those that may be used" for kind in PlaneKind if kind not in kinds}
        reasons.pop(PlaneKind.INLINE, None)
        opened: list[Chosen] = []
        try:
            for kind in kinds:
                reasons[kind] = failed.get(kind, "") or why_not(kind, ours, theirs)
                if not reasons[kind]:
                    found = self._try(kind)
                    if isinstance(found, Chosen):
                        opened.append(found)
                    else:
                        reasons[kind] = found
            return self.take_fastest(
                opened, reasons, on_one_gpu=bool(ours.device_id) and ours.device_id == theirs.device_id
            )
        except OSError:
            for each in opened:
                each.end.close()
            raise

    def take_fastest(
        self, opened: list[Chosen], reasons: dict[PlaneKind, str], *, on_one_gpu: bool
    ) -> tuple[Chosen | None, PlaneReport]:
        """The fastest by its probes; on one GPU CUDA IPC, whose probes wait for the GPU's turn between two processes.

        In a step the forwards around it wait for that turn anyway, and it costs half of what shared memory does
        (docs/decisions/hidden-states-and-planes.md).
        """
        opened.sort(key=lambda each: (not (on_one_gpu and each.kind is PlaneKind.CUDA_IPC), each.round_trip_s))
        for slower in opened[1:]:
            reasons[slower.kind] = f"{1e3 * slower.round_trip_s:.2f} ms a probe"
            self._control.send({"type": "drop", "plane": slower.plane_id.hex()})
            slower.end.close()
        best = opened[0] if opened else None
        report = PlaneReport(
            best.kind if best else PlaneKind.INLINE,
            1e3 * best.round_trip_s if best else 0.0,
            tuple((str(kind), reason) for kind, reason in reasons.items() if reason),
        )
        return best, report

    def tell(self, report: PlaneReport) -> None:
        """Tell the reader of the choice, once the writer is ready for its answers."""
        reasons = [list(reason) for reason in report.reasons]
        self._control.send({"type": "use", "kind": report.kind, "ms": report.round_trip_ms, "reasons": reasons})

    def _try(self, kind: PlaneKind) -> Chosen | str:
        """A plane that has carried its probes, or why there is none; ``OSError`` when the reader is gone."""
        plane_id = secrets.token_bytes(ID_BYTES)

        def announce(message: Message) -> None:
            self._control.send({**message, "plane": plane_id.hex()})

        try:
            end = open_writer(
                kind,
                self._device,
                host=self._host,
                limits=self._limits,
                announce=announce,
            )
        except OPENING_ERRORS as error:
            return _one_line(error)
        tried = Chosen(kind, plane_id, end)
        problem = "the reader is gone"
        try:
            self._control.send({"type": "try", "kind": kind, "plane": plane_id.hex(), "details": end.details()})
            problem = self._connect(tried) or self.probe(tried)
            if problem:
                self._control.send({"type": "drop", "plane": plane_id.hex()})
        finally:
            if problem:
                end.close()
        return problem or tried

    def _connect(self, tried: Chosen) -> str:
        problem = ""
        try:
            tried.end.connect()
        except OPENING_ERRORS as error:
            problem = _one_line(error)
        answer = self._expect("opened", self._limits.opening_s)
        tried.end.opened()
        return str(answer.get("reason", ""))[:200] or problem

    def probe(self, tried: Chosen) -> str:
        """Send probes and time them; what went wrong, empty when all arrived as they were."""
        content = secrets.token_bytes(PROBE_BYTES)
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self._device)
        quickest = float("inf")
        for number in range(-1, _NUM_PROBES):
            begin = time.perf_counter()
            tried.end.write(sent, 0, {number: (0, PROBE_BYTES)})
            tried.end.synchronize()
            self._control.send(
                {
                    "type": "probe",
                    "plane": tried.plane_id.hex(),
                    "sequence": number,
                    "bytes": PROBE_BYTES,
                    "digest": number < 0,
                }
            )
            answer = self._expect("probed", self._limits.opening_s)
            if answer.get("reason"):
                return str(answer["reason"])[:200]
            if number < 0 and answer.get("digest") != hashlib.sha256(content).hexdigest():
                return "what arrived was not what was sent"
            if number >= 0:
                quickest = min(quickest, time.perf_counter() - begin)
        tried.round_trip_s = quickest
        return ""

    def _expect(self, kind: str, timeout_s: float) -> Message:
        """The next message of that type; others are heartbeats. ``TimeoutError`` when it does not come."""
        until = time.monotonic() + timeout_s
        while (left := until - time.monotonic()) > 0:
            for message in self._control.receive(min(left, 0.5)):
                if message["type"] == kind:
                    return message
        raise TimeoutError(f"it did not answer within {timeout_s:g} s")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
