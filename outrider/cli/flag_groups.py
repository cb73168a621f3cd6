"""Groups of flags: dataclasses whose fields are the flags of a command."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def with_flag_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each parameter that is a dataclass by the fields of it: the command's flags, which the command gets as
    that dataclass.
    """
    signature = inspect.signature(command, eval_str=True)
    groups = {name: own.annotation for name, own in signature.parameters.items() if _is_group(own.annotation)}
    shown: list[inspect.Parameter] = []
    for name, own in signature.parameters.items():
        shown += _flags_of(groups[name]) if name in groups else [own]

    @functools.wraps(command)
    def run(*given: Any, **options: Any) -> None:  # noqa: ANN401 - what the command takes
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in dataclasses.fields(group)})
        command(*given, **options)

    run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return run


def _is_group(annotation: Any) -> bool:  # noqa: ANN401 - any annotation
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _flags_of(group: Any) -> list[inspect.Parameter]:  # noqa: ANN401 - a dataclass
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(group)
    ]
