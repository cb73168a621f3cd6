"""Measurement of one part: services, and a benchmark command for each row."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time

from outrider.benchmarks.figures.rows import AnyRow, CommandRow, LoadRow, Part, PeerRow, ServedPair
from outrider.benchmarks.figures.services import Addresses, make_pair, serving, token_before_fall
from outrider.benchmarks.figures.session import MeasuringSession, stop
from outrider.benchmarks.figures.table import lines_of


def measure_part(session: MeasuringSession, part: Part, limit_s: float) -> None:
    """All rows; those with the same services share them. A row that fails leaves the others alone."""
    session.deadline = time.monotonic() + limit_s
    rows = list(part.rows)
    while rows:
        services = _services_of(rows[0])
        same = [row for row in rows if _services_of(row) == services]
        rows = [row for row in rows if _services_of(row) != services]
        try:
            if services is None:
                _measure_rows(session, same, None)
            else:
                with serving(session, services, part.name) as addresses:
                    _measure_rows(session, same, addresses)
        except RuntimeError as error:
            session.failures.update({row.name: str(error) for row in same})


def _services_of(row: AnyRow) -> ServedPair | None:
    """Services that must run; None of a row that measures without any."""
    needs_services = isinstance(row, LoadRow) or (isinstance(row, CommandRow) and row.reads("{address}"))
    return row.services if needs_services else None


def _measure_rows(session: MeasuringSession, rows: list[AnyRow], addresses: Addresses | None) -> None:
    for row in rows:
        try:
            if isinstance(row, PeerRow):
                print(
                    f"{row.name}: {'done' if measure_peer(session, row) else 'skipped, no --vllm COMMAND'}", flush=True
                )
                continue
            command = load_command(session, row, addresses) if isinstance(row, LoadRow) and addresses else None
            if isinstance(row, CommandRow):
                command = bench_command(session, row, None if addresses is None else addresses[0])
            if command is not None:
                session.run(command, row.name)
            if not session.results_of(row.name):
                raise RuntimeError("no result was saved")
            print("\n".join(lines_of(session, row)), flush=True)  # a run that is ended before its table has told these
        except RuntimeError as error:
            session.failures[row.name] = str(error)


def load_command(session: MeasuringSession, row: LoadRow, addresses: Addresses) -> list[str]:
    """One ``outrider bench serve``, whose result is saved under the row's name."""
    users, input_len, output_len = row.users, row.input_len, row.output_len
    if session.is_tiny:
        users, input_len, output_len = min(users, 2), min(input_len, 32), min(output_len, 16)
    chosen, fixed = addresses
    command = ["-m", "outrider.cli", "bench", "serve", "--address", chosen, "--baseline", "--first-tokens"]
    command += ["--device", session.device, "--dtype", session.dtype, "--dataset-name", "random"]
    command += ["--runs", "1" if session.is_tiny else "3", "--num-warmups", str(users)]
    num_requests = users if session.is_tiny else users * row.requests
    command += ["--num-prompts", str(max(num_requests, 3)), "--max-concurrency", str(users)]
    command += ["--input-len", str(input_len), "--output-len", str(output_len)]
    command += ["--client-processes", str(min(users, 8)), "--save", f"{session.name}-{row.name}"]
    command += ["--num-gpus", str(row.num_gpus)] if row.num_gpus else []
    command += ["--cached-prompts"] if row.cached_prompts else []
    if row.acceptance_falls:
        target = make_pair(session, row.services) / "target"
        command += ["--last-token", str(token_before_fall(target, output_len // 2))]
    if fixed is not None and row.fixed:
        command += ["--fixed-address", fixed, *(word for k in row.fixed for word in ("--fixed-length", str(k)))]
    if row.sampling is not None:
        command += [f"--{name.replace('_', '-')}={value}" for name, value in json.loads(row.sampling).items()]
    command += [word for sampling in row.samplings for word in ("--also-sampling", sampling)]
    return session.command(*command)


def bench_command(session: MeasuringSession, row: CommandRow, address: str | None) -> list[str]:
    """The row's command, its placeholders filled in."""
    placeholders = {"{device}": session.device, "{dtype}": session.dtype, "{address}": address or ""}
    if row.reads("{pair}"):
        placeholders["{pair}"] = str(make_pair(session, row.services))
    words = [_filled(word, placeholders) for word in (*row.words, *(row.tiny if session.is_tiny else row.full))]
    return session.command("-m", "outrider.cli", "bench", *words, "--save", f"{session.name}-{row.name}")


def _filled(word: str, placeholders: dict[str, str]) -> str:
    for placeholder, value in placeholders.items():
        word = word.replace(placeholder, value)
    return word


def measure_peer(session: MeasuringSession, row: PeerRow) -> bool:
    """The command of ``--vllm``, its output kept; False where there is none.

    It runs in this process's environment, without our packages. ``{pair}`` is the folder of a pair with weights on the
    disk, ``{shapes}`` of one without.
    """
    if session.vllm is None:
        return False
    placeholders = {}
    for placeholder, with_weights in (("{pair}", True), ("{shapes}", False)):
        if placeholder in session.vllm:
            placeholders[placeholder] = str(make_pair(session, row.services, with_weights=with_weights))
    command = [_filled(word, placeholders) for word in shlex.split(session.vllm)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": session.environment["CUDA_VISIBLE_DEVICES"]}
    errors = session.log(f"{row.name}-errors")
    with session.log(row.name).open("w") as output, errors.open("w") as told:
        process = subprocess.Popen(
            command, cwd=session.out, env=environment, stdout=output, stderr=told, start_new_session=True
        )
        try:
            code = process.wait(max(1.0, session.deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise RuntimeError("the part took too long") from error
        finally:
            stop(process)
    if code:
        raise RuntimeError(f"exit {code}: {' / '.join(errors.read_text(errors='replace').splitlines()[-3:])}")
    return True
