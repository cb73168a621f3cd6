"""Sandbox of chat templates, with the names and filters that templates on the Hub use.

A template comes with a model and is unreviewed code. It reads plain JSON values, cannot change them, and cannot access
attributes that begin with an underscore.
"""

from __future__ import annotations

import datetime
import json
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TOO_DEEP = (RecursionError, SyntaxError, MemoryError)
"""Raised by the parser of templates, and by that of the Python code which they are compiled to."""


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Compile a template; raises ``jinja2.TemplateError`` for an invalid one. Cached."""
    try:
        return _environment().from_string(source)
    except _TOO_DEEP as error:
        raise jinja2.TemplateError(f"it is nested too deeply: {error}") from None


@lru_cache(maxsize=64)
def parse_template(source: str) -> jinja2.nodes.Template:
    """The syntax tree of a template; raises ``jinja2.TemplateError`` for an invalid one. Cached."""
    try:
        return _environment().parse(source)
    except _TOO_DEEP as error:
        raise jinja2.TemplateError(f"it is nested too deeply: {error}") from None


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_MakeDict(), namespace=_Namespace
    )
    return environment


class GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text, for training. Its content is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 - the base class's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements up to ``{% endgeneration %}``, in a scope of their own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [jinja2.nodes.Scope(body, lineno=line)]


class _MakeDict:
    """``dict`` for templates: creates dictionaries and has no other attributes."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:  # noqa: ANN401 - a template's values
        return dict(*args, **entries)

    @staticmethod
    def fromkeys(*args: Any) -> dict[Any, Any]:  # noqa: ANN401 - a template's values
        """Same as ``dict.fromkeys``."""
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates: refuses names that begin with an underscore."""

    def __init__(*args: Any, **attributes: Any) -> None:  # noqa: ANN401 - so that an attribute may be called self
        self, *rest = args
        given = dict(*rest, **attributes)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401 - a template's value
        _check_name(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace has no attribute {name!r}: underscores are not for templates"
        )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,  # noqa: ANN401 - a template's value
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike the filter of jinja2."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
