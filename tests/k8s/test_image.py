"""The Dockerfile, as far as it can be tested without building an image: its form, and the scripts that it runs, run."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.cli.stack.held_ports import hold_port
from tests.end_to_end.commands import wait_until
from tests.k8s.helm import ROOT

SCRIPTS = ROOT / "scripts" / "image"
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
LINES = [line.strip() for line in TEXT.splitlines() if line.strip() and not line.startswith("#")]


def stages() -> dict[str, list[str]]:
    """The lines of each stage, those of the stages it is built on first."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in LINES:
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            current = found[match[2]] = [*found.get(match[1], []), line]
        else:
            current.append(line)
    return found


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("target", ["coordinator", "cpu", "cuda"])
def test_an_image_runs_as_nobody_and_has_a_health_check(target: str) -> None:
    lines = stages()[target]
    assert [line for line in lines if line.startswith("USER ")][-1] == "USER 10001:10001"
    assert any(line.startswith("HEALTHCHECK ") for line in lines)
    assert lines[-1].startswith("CMD [")


@pytest.mark.parametrize("target", ["coordinator", "cpu", "cuda"])
def test_an_image_is_labelled_with_its_version_and_commit(target: str) -> None:
    lines = stages()[target]
    (label,) = [line for line in lines if line.startswith("LABEL ")]
    labels = dict(word.partition("=")[::2] for word in shlex.split(label.removeprefix("LABEL ")))
    release = (ROOT / "scripts" / "release.sh").read_text(encoding="utf-8")
    for name, value in (("version", "version"), ("revision", "commit")):
        assert f'--label org.opencontainers.image.{name}="${value}"' in release
    assert {"title", "description", "licenses"} <= {name.rpartition(".")[2] for name in labels}


@pytest.mark.parametrize("variant", ["coordinator", "cpu", "cuda"])
def test_a_change_of_sources_keeps_the_layer_of_the_packages(variant: str) -> None:
    lines = stages()[f"dependencies-{variant}"]
    (install,) = [index for index, line in enumerate(lines) if line.endswith(f"{variant} dependencies")]
    before = {word for line in lines[:install] if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert before == {"pyproject.toml", "constraints.txt", "scripts/image"}
    copies = [line.split()[1:] for line in stages()[variant] if line.startswith("COPY --from=")]
    assert copies == [
        [f"--from=dependencies-{variant}", "/opt/outrider", "/opt/outrider"],
        [f"--from=build-{variant}", "/opt/project", "/opt/outrider"],
    ]


def test_bases_are_pinned_to_a_release() -> None:
    assert "ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm" in LINES
    named = set(stages())
    for line in LINES:
        if line.startswith("FROM "):
            assert line.split()[1] in {"${PYTHON_IMAGE}", *named}


def test_what_is_run_is_a_script_that_exists() -> None:
    for line in LINES:
        if line.startswith("RUN "):
            for command in line.removeprefix("RUN ").split("&&"):
                words = [word for word in command.split() if "=" not in word]
                name = Path(words[0]).name
                assert (SCRIPTS / name).is_file() or words[0] == "install", command


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for path in copied():
        assert (ROOT / path).exists()
        assert any(rule.startswith("!") and Path(path).is_relative_to(rule[1:]) for rule in ignored), path


def copied() -> list[str]:
    """Files that the build stages take from the project's folder."""
    lines = [line for stage in stages().values() for line in stage if line.startswith("COPY ") and "--from" not in line]
    return sorted({word for line in lines for word in line.split()[1:-1]})


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script: Path) -> None:
    assert run("bash", "-n", script).returncode == 0
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    assert os.access(script, os.X_OK)


@pytest.fixture(scope="module")
def coordinator_image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The environment of the coordinator's image, made as the Dockerfile makes it, of what the Dockerfile copies."""
    source, prefix = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("image") / "env"
    for path in copied():
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, source / path, ignore=shutil.ignore_patterns("__pycache__", "pair", "results"))
        else:
            shutil.copy(ROOT / path, source / path)
    # No test needs what is installed compiled. (pip wants "no" for yes here.)
    made = run(source / "scripts/image/install_packages.sh", prefix, "coordinator",
               cwd=source, PYTHON=sys.executable, PIP_NO_COMPILE="no")  # fmt: skip
    assert made.returncode == 0, made.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as in the image: what runs there adds nothing to a layer
        yield prefix
    shutil.rmtree(prefix)


def test_the_coordinators_image_has_no_torch_and_runs(coordinator_image: Path) -> None:
    checked = run(SCRIPTS / "check_packages.sh", coordinator_image, "coordinator", PYTHON=sys.executable)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    python = coordinator_image / "bin" / "python"
    wrong = run(SCRIPTS / "check_packages.sh", coordinator_image, "cpu")
    assert "torch is not in the image for cpu" in wrong.stderr
    port = str(hold_port())
    arguments = ["-m", "outrider_coordinator", f"--port={port}", "--target-address=127.0.0.1:1"]
    process = subprocess.Popen([python, *arguments], cwd="/", stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: listens(int(port)), "a coordinator")
        checked = run(python, SCRIPTS / "healthy.py", HEALTHCHECK_PORT=port)
        assert checked.returncode == 0, checked.stderr
    finally:
        process.terminate()
        process.wait(120)
    assert run(python, SCRIPTS / "healthy.py", HEALTHCHECK_PORT=port).returncode == 1


def test_the_layer_of_the_project_has_all_of_it_and_nothing_else(coordinator_image: Path, tmp_path: Path) -> None:
    made = run(SCRIPTS / "collect_project.sh", coordinator_image.parent, tmp_path / "project")
    assert made.returncode == 0, made.stderr
    (packages,) = (tmp_path / "project" / "env").glob("lib/python*/site-packages")
    assert {path.name.partition("-")[0] for path in packages.iterdir()} == {
        "outrider",
        "outrider_coordinator",
        "outrider_draft",
        "outrider_target",
    }
    (installed,) = coordinator_image.glob("lib/python*/site-packages")
    for package in ("outrider", "outrider_coordinator"):
        names = {path.relative_to(installed) for path in (installed / package).rglob("*.py")}
        assert names == {path.relative_to(packages) for path in (packages / package).rglob("*.py")}
    assert [path.name for path in (tmp_path / "project" / "env" / "bin").iterdir()] == ["outrider"]


def test_an_environment_with_torch_is_what_the_check_asks_for(tmp_path: Path) -> None:
    import torch

    variant = "cuda" if torch.version.cuda else "cpu"
    checked = run(SCRIPTS / "check_packages.sh", Path(sys.prefix), variant, PYTHON=sys.executable)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    other = run(SCRIPTS / "check_packages.sh", Path(sys.prefix), "coordinator")
    assert "torch is in the coordinator's image" in other.stderr
    linked = run(SCRIPTS / "link_pair.sh", Path(sys.prefix), tmp_path / "opt" / "pair")
    assert linked.returncode == 0, linked.stderr
    assert (tmp_path / "opt" / "pair" / "target" / "config.json").is_file()


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("python -m outrider_target --host=0.0.0.0 --port=50077", "50077"),
        ("python -m outrider_draft --port 50078 --device cpu", "50078"),
        ("python -m outrider_target --model /m", "50051"),
        ("torchrun --nnodes=2 -m outrider_target --device=cuda", "50051"),
        ("outrider serve /m", None),
    ],
)
def test_the_health_check_finds_the_port(command: str, port: str | None) -> None:
    assert runpy.run_path(str(SCRIPTS / "healthy.py"))["port_of"](command.split()) == port


def test_an_unknown_variant_is_refused(tmp_path: Path) -> None:
    made = run(SCRIPTS / "install_packages.sh", tmp_path / "env", "tpu", cwd=ROOT, PYTHON=sys.executable)
    assert made.returncode == 2
    assert "no such variant: tpu" in made.stderr
