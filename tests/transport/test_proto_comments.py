"""The check that every element of the contract is documented: it must see what is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTED = """
syntax = "proto3";
package outrider.v1;
// A colour.
enum Colour {
  // None.
  COLOUR_UNSPECIFIED = 0;
}
// A paint.
message Paint {
  // Its colour.
  Colour colour = 1;
  // Inside.
  message Can {
    // Litres.
    uint32 litres = 1;
  }
}
// A shop.
service Shop {
  // Sells.
  rpc Sell(Paint) returns (Paint);
}
"""


@pytest.fixture(scope="module")
def check() -> ModuleType:
    pytest.importorskip("grpc_tools")
    spec = importlib.util.spec_from_file_location("check_proto_comments", ROOT / "scripts/check_proto_comments.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def undocumented(check: ModuleType, folder: Path, text: str) -> list[str]:
    place = folder / "outrider/v1"
    place.mkdir(parents=True, exist_ok=True)
    (place / "paint.proto").write_text(text)
    return [name for file in check.parse(place) for name in check.undocumented(file)]


def test_a_documented_file_is_fine(check: ModuleType, tmp_path: Path) -> None:
    assert undocumented(check, tmp_path, DOCUMENTED) == []


@pytest.mark.parametrize(
    ("comment", "name"),
    [
        ("// A colour.", "Colour"),
        ("// None.", "Colour.COLOUR_UNSPECIFIED"),
        ("// A paint.", "Paint"),
        ("// Its colour.", "Paint.colour"),
        ("// Inside.", "Paint.Can"),
        ("// Litres.", "Paint.Can.litres"),
        ("// A shop.", "Shop"),
        ("// Sells.", "Shop.Sell"),
    ],
)
def test_what_has_no_comment_is_named(check: ModuleType, tmp_path: Path, comment: str, name: str) -> None:
    assert undocumented(check, tmp_path, DOCUMENTED.replace(comment, "")) == [name]


def test_the_contract_is_documented(check: ModuleType) -> None:
    files = check.parse(ROOT / "proto/outrider/v1")
    assert {Path(file.name).name for file in files} >= {"generation.proto", "link.proto", "sampling.proto"}
    assert [name for file in files for name in check.undocumented(file)] == []
