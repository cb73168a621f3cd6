"""The table of what is served, held against what there is."""

from __future__ import annotations

from outrider.model_executor.models import families, support
from tests.model_executor import test_fp8, test_parity
from tests.support.fp8_models import FORMATS


def test_every_family_is_in_the_table() -> None:
    assert {one.architecture for one in support.FAMILIES} == families.FAMILIES.keys()


def test_what_is_said_to_be_compared_is_compared() -> None:
    compared = {architecture for architecture, _ in test_parity.MODELS.values()}
    named = {one.architecture for one in support.FAMILIES if one.compared.startswith("transformers")}
    assert named == {families.architecture_of(name) for name in compared}
    assert compared > {architecture for architecture, _ in test_fp8.MODELS.values()}


def test_every_format_of_the_tests_is_in_the_table() -> None:
    assert {name for one in support.FORMATS for name in one.compared} == {*FORMATS, "mxfp4"}
