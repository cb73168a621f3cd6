"""Documentation of options: the keys of a ``TypedDict`` as parameters with types and texts in ``help()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

from annotated_doc import Doc

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


class _Unset:
    def __repr__(self) -> str:
        return "..."


_UNSET = _Unset()


def with_options_of(options: type) -> Callable[[FunctionT], FunctionT]:
    """Show the keys of ``options`` instead of ``**options`` in a function's signature. Calls are unchanged."""
    hints = get_type_hints(options, include_extras=True)

    def document(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        own = [item for item in signature.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        named = {item.name for item in own}
        shown = [_parameter(name, hint) for name, hint in hints.items() if name not in named]
        function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
        lines = [f"    {name}: {_text(hint)}" for name, hint in hints.items()]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Options:", *lines])
        return function

    return document


def _parameter(name: str, hint: Any) -> inspect.Parameter:  # noqa: ANN401 - a type
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_UNSET, annotation=kind)


def _text(hint: Any) -> str:  # noqa: ANN401 - a type
    texts = [item.documentation for item in getattr(hint, "__metadata__", ()) if isinstance(item, Doc)]
    return " ".join(texts)
