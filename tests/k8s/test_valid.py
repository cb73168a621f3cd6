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
from tests.k8s.cases import ALL, EXAMPLES, MODELS, golden_file, over
from tests.k8s.helm import CHART, Helm, RefusedError
from tests.k8s.release import Object, Release

OLDEST, NEWEST = "1.30", kubernetes_validate.latest_version()
SINCE = {"model-images": "1.31", "shared-gpus": "1.34", "one-gpu-dra": "1.34"}
"""Cases that the chart refuses on older versions of Kubernetes."""
CUSTOM: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in (Path(__file__).parent / "schemas").glob("*.json")
}
"""Kinds that are not Kubernetes' own: the fields that the chart uses, written down from the projects' CRDs."""


_passed: set[tuple[str, str]] = set()
"""(object, oldest version): many cases share most of their objects."""


@pytest.fixture(autouse=True, scope="module")
def schemas_are_read_once() -> Iterator[None]:
    """The library reads a version's definitions, a megabyte, for each object anew."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def check(found: Object, oldest: str = OLDEST) -> None:
    key = json.dumps(found, sort_keys=True), oldest
    if key not in _passed:
        validate(found, oldest)
        _passed.add(key)


def validate(found: Object, oldest: str) -> None:
    if found["kind"] in CUSTOM:
        jsonschema.Draft202012Validator(CUSTOM[found["kind"]]).validate(found)
        return
    for version in (oldest, NEWEST):
        kubernetes_validate.validate(dict(found), version, strict=True)


@pytest.mark.parametrize("name", ALL)
def test_every_object_is_valid(release: Callable[[str], Release], name: str) -> None:
    rendered = release(name)
    assert rendered.of_kind("Service")
    oldest = SINCE.get(name, OLDEST)
    for found in rendered.objects:
        check(found, oldest)
        assert found["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
    for template in rendered.pod_templates():
        check({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]}, oldest)


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


@pytest.mark.parametrize("length", [40, 41, 53])
def test_names_that_differ_at_the_end_stay_distinct_at_any_length(helm: Helm, length: int) -> None:
    values = over(MODELS, {"gateway": {"enabled": True}})
    seen: set[tuple[str, str]] = set()
    for ending in ("a", "b"):
        found = helm.render(values, release="r" * (length - 1) + ending).objects
        names = {(each["kind"], each["metadata"]["name"]) for each in found}
        assert all(len(name) <= 63 for _, name in names)
        assert not names & seen
        seen |= names


def test_a_long_name_of_ones_own_keeps_its_beginning_and_is_the_same_every_time(helm: Helm) -> None:
    given = over(MODELS, {"fullnameOverride": "the-" + "very-" * 9 + "long-one"})
    (first, *_), (second, *_) = (helm.render(given).of_kind("Deployment") for _ in range(2))
    assert first["metadata"]["name"] == second["metadata"]["name"]
    assert first["metadata"]["name"].startswith("the-very-very-")


@pytest.mark.parametrize("name", sorted(SINCE))
def test_an_older_kubernetes_is_told_what_it_lacks(helm: Helm, name: str) -> None:
    with pytest.raises(RefusedError, match=f"from {SINCE[name]} on, this is v1.30.0"):
        helm.render(ALL[name], kubernetes="v1.30.0")


def test_the_oldest_kubernetes_takes_the_rest(helm: Helm) -> None:
    for name in set(EXAMPLES) - set(SINCE):
        assert helm.render(EXAMPLES[name], kubernetes="v1.30.0").workloads()


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
