"""Every example and every switch becomes objects that Kubernetes would take, and examples become what they became."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest

from tests.k8s import update_golden
from tests.k8s.cases import ALL, EXAMPLES, golden_file
from tests.k8s.helm import CHART, Helm
from tests.k8s.release import Object, Release

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
CUSTOM: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parent / "schemas").glob("*.json")
}
"""Kinds that are not Kubernetes' own: the fields that the chart uses, written down from the projects' CRDs."""


_passed: set[str] = set()
"""Many cases share most of their objects."""


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """The library reads a version's definitions, a megabyte, for each object anew."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def check(found: Object) -> None:
    text = json.dumps(found, sort_keys=True)
    if text not in _passed:
        validate(found)
        _passed.add(text)


def validate(found: Object) -> None:
    if found["kind"] in CUSTOM:
        jsonschema.Draft202012Validator(CUSTOM[found["kind"]]).validate(found)
        return
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(dict(found), version, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(release: Callable[[str], Release], name: str) -> None:
    rendered = release(name)
    assert rendered.of_kind("Service")
    for found in rendered.objects:
        check(found)
        assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    for template in rendered.pod_templates():
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]})


def test_validation_can_fail(release: Callable[[str], Release]) -> None:
    for name, kind in (("multi-host", "LeaderWorkerSet"), ("multi-host", "Deployment"), ("tls", "Certificate")):
        found = release(name).of_kind(kind)[0]
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check({**found, "spec": {**found["spec"], "replicass": 1}})


@pytest.mark.parametrize("name", ALL)
def test_names_are_unique(release: Callable[[str], Release], name: str) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in release(name).objects]
    assert len(names) == len(set(names))
    assert all(len(found) <= 63 for _, found in names)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_becomes_what_it_became(helm: Helm, name: str) -> None:
    expected = golden_file(name).read_text(encoding="utf-8")
    assert update_golden.render(helm, name) == expected, f"run `{update_golden.COMMAND}` and read the difference"


def test_no_golden_render_is_left_over() -> None:
    assert {path.stem for path in golden_file("x").parent.glob("*.yaml")} == set(EXAMPLES)


def test_helm_lints_the_chart_without_a_remark(helm: Helm) -> None:
    # Severity 1 is information: that the chart has no icon.
    assert [message for message in helm.lint() if message["Severity"] > 1] == []


def test_the_chart_and_the_package_have_one_version() -> None:
    import yaml

    import outrider

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["appVersion"] == outrider.__version__


def test_every_key_of_the_values_is_in_the_schema() -> None:
    import yaml

    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    assert set(schema["properties"]) - {"global"} == set(values)
    assert set(schema["properties"]["common"]["properties"]) == set(values["common"])
