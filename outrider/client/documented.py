"""Documentation of options: the keys of a ``TypedDict`` as parameters with types and texts in ``help()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from annotated_doc import Doc

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Unset:
    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def with_options_of(
    options: type, defaults: Mapping[str, object], *, without: Collection[str] = ()
) -> Callable[[FunctionT], FunctionT]:
    """Show the keys of ``options`` instead of ``**options`` in a function's signature. Calls are unchanged.

    ``defaults``: what an option that cannot be None is without being given; one that is not named shows as "...", as
    its text says what it depends on. ``without``: keys that another parameter of the function stands for.
    """
    every = get_type_hints(options, include_extras=True)
    hints = {name: hint for name, hint in every.items() if name not in without}

    def document(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        named = {item.name for item in own}
        shown = [_parameter(name, hint, defaults) for name, hint in hints.items() if name not in named]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        lines = [f"    {name}: {_text(hint)}" for name, hint in hints.items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return document


def _parameter(name: str, hint: Any, defaults: Mapping[str, object]) -> inspect.Parameter:  # noqa: ANN401 - a type
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    default = None if type(None) in get_args(kind) else defaults.get(name, _UNSET)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _text(hint: Any) -> str:  # noqa: ANN401 - a type
    texts = [item.documentation for item in getattr(hint, "__metadata__", ()) if isinstance(item, Doc)]
    return " ".join(texts)
