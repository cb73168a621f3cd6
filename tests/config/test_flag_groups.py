"""Placeholders of values in the help of flags."""

from typing import Annotated, Any, Literal

import pytest

from outrider.config.flag_groups import value_name


@pytest.mark.parametrize(("key", "annotation", "name"), [
    ("num_pages", int | None, "INTEGER"),
    ("num_pages", Annotated[int | None, "positive"], "INTEGER"),
    ("support_mass", float, "FLOAT"),
    ("host", str | None, "TEXT"),
    ("trace_file", str | None, "FILE"),
    ("target_address", str | None, "ADDRESS"),
    ("draft_length", Literal["auto", "fixed"] | None, "auto|fixed"),
])  # fmt: skip
def test_the_placeholder_of_a_value_is_its_type_or_its_few_values(key: str, annotation: Any, name: str) -> None:
    assert value_name(key, annotation) == name
