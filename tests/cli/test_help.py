"""Help pages: every name can be read and found, on the narrowest usual terminal too."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.config.fields import DraftMethod
from outrider.config.flag_groups import GROUPS, group_of
from outrider.config.flags import build_parser
from outrider.config.schema import SECTIONS

runner = CliRunner()


def _commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, *names, name)
        elif name not in SECTIONS:
            yield (*names, name), command


COMMANDS = dict(_commands(typer.main.get_command(app)))


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_no_name_of_an_option_is_cut_at_80_columns(names: tuple[str, ...]) -> None:
    text = runner.invoke(app, [*names, "-h"]).output
    words = set(re.findall(r"(?<![\w-])-{1,2}[\w-]+", text))
    for option in COMMANDS[names].params:
        if option.param_type_name == "option":
            assert {*option.opts, *option.secondary_opts} <= words
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_switches_show_no_value_and_every_option_has_a_text(names: tuple[str, ...]) -> None:
    assert "bool" not in runner.invoke(app, [*names, "-h"]).output
    assert [each.opts for each in COMMANDS[names].params if each.param_type_name == "option" and not each.help] == []


@pytest.mark.parametrize("flag", ["--gpu-memory-utilization", "--block-size"])
def test_a_line_of_serves_help_begins_with_the_flags(flag: str) -> None:
    lines = runner.invoke(app, ["serve", "-h"]).output.splitlines()
    assert any(line.lstrip().startswith("-") and flag in line for line in lines)


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        (
            "generate",
            {
                "Input",
                "Output",
                "Server",
                "Sampling",
                "Structured output",
                "Length and stops",
                "Speculation",
                "Request",
            },
        ),
        ("chat", {"Conversation", "Server", "Sampling", "Speculation"}),
        ("info", {"Server"}),
    ],
)
def test_flags_are_in_groups(command: str, groups: set[str]) -> None:
    text = runner.invoke(app, [command, "-h"]).output
    found = dict(re.findall(r"^(\w[\w ]*):\n((?: .*\n)+)", text, re.MULTILINE))
    assert groups < found.keys()
    assert {"--address", "--tls", "--token-file"} <= set(re.findall(r"--[\w-]+", found["Server"]))
    assert not re.search(r"--(tls|token)", found["Options"])


def test_the_list_of_commands_shows_whole_sentences() -> None:
    text = " ".join(runner.invoke(app, ["-h"]).output.split())
    assert "on this host, and print the addresses when all are ready." in text


def test_serve_names_every_method() -> None:
    text = " ".join(runner.invoke(app, ["serve", "-h"]).output.split())
    known = {method.value for method in DraftMethod if method is not DraftMethod.CUSTOM_CLASS}
    said = text.split("How to draft: ")[1].split(" --num-speculative-tokens")[0]
    assert {*known, "module:Class"} <= set(re.findall(r"[\w:]+", said))


@pytest.mark.parametrize("name", SECTIONS)
def test_a_service_has_its_flags_in_groups_with_types(name: str) -> None:
    text = build_parser(SECTIONS[name]).format_help()
    assert "``" not in text
    assert "VALUE" not in text
    assert {group_of(key) for key in SECTIONS[name].model_fields} <= set(re.findall(r"^(\w.*):$", text, re.MULTILINE))


def test_each_group_holds_settings_that_exist_and_each_setting_one_group() -> None:
    listed = [key for keys in GROUPS.values() for key in keys.split()]
    assert sorted(listed) == sorted({key for section in SECTIONS.values() for key in section.model_fields})


def test_the_gateway_shows_what_its_documents_use() -> None:
    text = textwrap.dedent(build_parser(SECTIONS["gateway"]).format_help())
    assert "--coordinator ADDRESS [ADDRESS ...]" in text
    assert "--enabled" not in text
    assert "--num-processes" not in text
