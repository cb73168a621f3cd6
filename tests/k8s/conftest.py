"""The engine and the releases that tests of the chart share."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.k8s.cases import ALL
from tests.k8s.helm import Helm, HelmMissingError
from tests.k8s.release import Release, parse


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """Helm's engine. Where it cannot be had: a failure in CI, elsewhere a skip that is hard to overlook."""
    try:
        engine = Helm()
    except HelmMissingError as error:
        message = f"HELM IS MISSING, THE CHART IS UNTESTED: {error}"
        if os.environ.get("CI"):
            pytest.fail(message)
        warnings.warn(message, stacklevel=1)
        pytest.skip(message)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def release(helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Release]:
    """The release that a case of ``cases.ALL`` becomes, rendered once for all workers."""
    rendered: dict[str, Release] = {}
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of the run

    def render(name: str) -> Release:
        if name not in rendered:
            path = folder / f"release-{name}.json"
            if not path.exists():
                written = folder / f"{path.name}.{os.getpid()}"
                written.write_text(json.dumps(helm.render_text(ALL[name])), encoding="utf-8")
                written.replace(path)
            rendered[name] = parse(*json.loads(path.read_text(encoding="utf-8")))
        return rendered[name]

    return render
