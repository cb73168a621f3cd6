"""The release that ``scripts/release.sh`` builds, and what the wheel alone needs; ``scripts/check_base_install.sh``
installs it for each Python, with a network.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import marshal
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import outrider
from outrider.demo import DFLASH, DRAFT, EAGLE3, TARGET
from tests.client.conftest import Service

ROOT = Path(__file__).parents[2]
VERSION = outrider.__version__
MOST_BYTES = 60_000_000
"""Bound on the base install with all that it needs, compiled modules included."""
pytestmark = pytest.mark.integration

ONLY = """
import importlib.abc, sys

class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError("not of the base install: " + name, name=name)

sys.meta_path.insert(0, Only())
sys.path.insert(0, WHEEL)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release, without images."""
    folder = tmp_path_factory.mktemp("dist")
    environment = {**os.environ, "PYTHON": sys.executable, "IMAGES": ""}
    command = ["bash", str(ROOT / "scripts" / "release.sh"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(dist / f"outrider-{VERSION}-py3-none-any.whl") as content:
        content.extractall(folder)
    return folder


def test_the_sums_are_those_of_all_files(dist: Path) -> None:
    lines = (dist / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    files = {path for path in dist.iterdir() if path.name != "SHA256SUMS"}
    assert {f"./{path.name}" for path in files} == set(sums)
    assert len(files) == 4
    for path in files:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sums[f"./{path.name}"]


def test_the_wheel_holds_the_packages_and_no_models(wheel: Path) -> None:
    names = {path.name for path in wheel.iterdir()}
    assert names == {
        "outrider",
        "outrider_coordinator",
        "outrider_draft",
        "outrider_target",
        f"outrider-{VERSION}.dist-info",
    }
    files = {str(path.relative_to(wheel)) for path in wheel.rglob("*") if path.is_file()}
    assert {"outrider/py.typed", "outrider/cli/trace/page.html", "outrider_target/py.typed"} <= files
    assert not [name for name in files if name.endswith((".safetensors", "tokenizer.json"))]
    assert not [name for name in files if name.startswith("outrider/benchmarks/")]
    assert sum(path.stat().st_size for path in wheel.rglob("*.py")) < 8_000_000


def test_the_pairs_wheel_holds_what_the_demonstration_needs(dist: Path) -> None:
    with zipfile.ZipFile(dist / f"outrider_demo_pair-{VERSION}-py3-none-any.whl") as content:
        files = set(content.namelist())
        metadata = content.read(f"outrider_demo_pair-{VERSION}.dist-info/METADATA").decode()
    for folder in (TARGET, DRAFT, EAGLE3, DFLASH):
        there = {str(path.relative_to(ROOT)) for path in folder.iterdir()}
        assert {"config.json"} < {Path(name).name for name in there}
        assert there <= files
    assert not [name for name in files if name.endswith(".py")]
    assert f"Requires-Dist: outrider=={VERSION}\n" in metadata


def test_the_sdist_holds_tests_documents_and_the_chart(dist: Path) -> None:
    with tarfile.open(dist / f"outrider-{VERSION}.tar.gz") as content:
        files = {name.partition("/")[2] for name in content.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kept = (
        "outrider/",
        "benchmarks/",
        "coordinator/",
        "draft_service/",
        "target_service/",
        "tests/",
        "docs/",
        "k8s/",
        "proto/",
        "scripts/",
    )
    wanted = {name for name in tracked if name.startswith(kept)}
    missing = {name for name in wanted - files if (ROOT / name).exists()}
    assert not missing
    assert {"README.md", "LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml", "constraints.txt"} <= files


def test_the_chart_is_a_package_of_helm(dist: Path) -> None:
    with tarfile.open(dist / f"outrider-chart-{VERSION}.tgz") as content:
        chart = content.extractfile("outrider/Chart.yaml")
        assert chart is not None
        assert f"version: {VERSION}".encode() in chart.read()
        assert {"outrider/values.yaml", "outrider/values.schema.json", "outrider/templates"} <= set(content.getnames())


def needed(metadata: importlib.metadata.PathDistribution) -> dict[str, importlib.metadata.Distribution]:
    """The distributions that an install without extras brings, of those installed here, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = [(text, "") for text in metadata.requires or ()]
    while pending:
        text, extra = pending.pop()
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            pending += [(more, part) for more in found[name].requires or () for part in ("", *requirement.extras)]
    return found


def num_bytes(files: Iterator[Path]) -> int:
    """Bytes of files, with those of their compiled modules."""
    total = 0
    for path in files:
        if path.is_file() and "__pycache__" not in path.parts:
            content = path.read_bytes()
            total += len(content)
            total += len(marshal.dumps(compile(content, str(path), "exec"))) if path.suffix == ".py" else 0
    return total


def test_the_base_install_is_small(wheel: Path) -> None:
    base = needed(importlib.metadata.PathDistribution(wheel / f"outrider-{VERSION}.dist-info"))
    assert {"grpcio", "protobuf", "pydantic", "typer"} <= set(base)
    assert not {"torch", "numpy", "tokenizers", "pyyaml", "transformers", "huggingface-hub"} & set(base)
    sizes = {name: num_bytes(Path(str(file.locate())) for file in each.files or ()) for name, each in base.items()}
    sizes["outrider"] = num_bytes(wheel.rglob("*"))
    assert sum(sizes.values()) < MOST_BYTES, sizes


def test_the_sdk_and_the_command_line_need_no_more(wheel: Path) -> None:
    """Run with the packages of the base install alone, and the wheel's modules instead of the project's."""
    base = needed(importlib.metadata.PathDistribution(wheel / f"outrider-{VERSION}.dist-info"))
    owners = importlib.metadata.packages_distributions()
    blocked = {
        package
        for package, names in owners.items()
        if not {name.lower().replace("_", "-") for name in names} & {*base, "outrider"}
    }
    head = f"BLOCKED = {blocked!r}\nWHEEL = {str(wheel)!r}\n{ONLY}"
    service = Service()
    try:
        environment = {**os.environ, "OUTRIDER_ADDRESS": service.address}
        for code in (
            "import runpy; runpy.run_path({smoke!r}, run_name='__main__')",
            "import sys; sys.argv = ['outrider', 'generate', 'x', '--max-tokens', '3']; "
            "import outrider; assert outrider.__file__.startswith(WHEEL); from outrider.cli.app import main; main()",
        ):
            smoke = str(ROOT / "tests" / "support" / "sdk_smoke.py")
            command = [sys.executable, "-P", "-c", head + code.replace("{smoke!r}", repr(smoke))]
            done = subprocess.run(
                command, env=environment, cwd=wheel, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.returncode == 0, done.stderr
    finally:
        service.close()
    assert done.stdout == "<0><1><2>\n"
