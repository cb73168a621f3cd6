"""The engine and the releases that tests of the chart share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator

import pytest

from tests.k8s.cases import ALL
from tests.k8s.helm import Helm, HelmMissingError
from tests.k8s.release import Release


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
def release(helm: Helm) -> Callable[[str], Release]:
    """The release that a case of ``cases.ALL`` becomes, rendered once."""
    rendered: dict[str, Release] = {}

    def render(name: str) -> Release:
        if name not in rendered:
            rendered[name] = helm.render(ALL[name])
        return rendered[name]

    return render
