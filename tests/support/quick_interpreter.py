"""Triton's interpreter without the work that no test reads, which takes most of its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def set_up_quick_interpreter() -> None:
    """For processes with ``TRITON_INTERPRET=1``: kernels compute the same numbers in a fraction of the time.

    Triton 3.7 replaces the functions of ``triton.language`` at every call of a device function: here once, and for
    good. It computes integer sums and products again in 64 bits for an assertion that is off: not here. It derives
    the same facts of few types for every value: here once for each type.
    """
    from triton import language
    from triton.runtime import interpreter

    internals: Any = interpreter
    builder = internals.interpreter_builder
    assert not builder.options.debug, "overflows are asserted"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    internals._patch_attr = _replace_builtin
    internals._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    internals._patch_lang = lambda _function: internals._LangPatchScope()
    _derive_types_once(internals, language.core)
    _round_as_hardware(internals, language.float8e4nv)


def _round_as_hardware(internals: Any, fp8: Any) -> None:
    """To the nearest number of FP8, of two as near to the even one: the interpreter's carry is lost."""
    builder: Any = internals.InterpreterBuilder
    convert = builder.create_fp_to_fp

    def rounding(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.scalar != fp8 or source.data.dtype != np.float32:
            return convert(self, source, target, mode)
        numbers = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn)
        return internals.TensorHandle(numbers.view(torch.uint8).numpy(), fp8)

    builder.create_fp_to_fp = rounding


def _replace_builtin(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """As Triton's function of this purpose, without two calls on the way to the function that does the work."""
    from triton.runtime.interpreter import interpreter_semantic

    while _only_passes_on(member):
        member = member.__wrapped__

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return member(*arguments, **options)

    scope.set_attr(owner, name, call)


def _only_passes_on(member: Any) -> bool:
    """Whether it is the wrapper of ``triton.language.core.builtin``, which checks that it was given a semantic."""
    code = getattr(member, "__code__", None)
    return code is not None and code.co_qualname == "builtin.<locals>.wrapper"


def _derive_types_once(internals: Any, core: Any) -> None:
    """Types are shared by the tensors of that type, as nothing changes them."""
    internals._get_np_dtype = _by_scalar_name(internals._get_np_dtype)
    core._unwrap_if_constexpr = _quick_unwrap(core._unwrap_if_constexpr, core)
    core.block_type.__init__ = _with_checked_shapes(core.block_type.__init__, core.constexpr)
    core.block_type.to_ir = _once_for_each(core.block_type.to_ir)
    core.block_type.with_element_ty = _once_for_each_element(core.block_type.with_element_ty)
    core.tensor.__init__ = _with_shapes_of_types(core.tensor.__init__)


def _by_scalar_name(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    found: dict[str, Any] = {}

    def look_up(type_: Any) -> Any:
        name = type_.scalar.name
        if name not in found:
            found[name] = np_dtype(type_)
        return found[name]

    return look_up


def _quick_unwrap(unwrap: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    constexpr, sequences = core.constexpr, (list, tuple, core.tuple)

    def quick(value: Any) -> Any:
        if isinstance(value, constexpr):
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    return quick


def _with_checked_shapes(
    initialize: Callable[[Any, Any, Any], None], constexpr: type[Any]
) -> Callable[[Any, Any, Any], None]:
    checked: dict[tuple[Any, ...], tuple[Any, int, str]] = {}

    def quick(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
        if sizes not in checked:
            initialize(self, element_ty, shape)
            checked[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = checked[sizes]
        self.name = f"<{text}, {element_ty}>"

    return quick


def _once_for_each(to_ir: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def once(self: Any, builder: Any) -> Any:
        found = vars(self)
        if "ir" not in found:
            found["ir"] = to_ir(self, builder)
        return found["ir"]

    return once


def _once_for_each_element(with_element: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def once(self: Any, scalar: Any) -> Any:
        if scalar.is_ptr():  # whose name does not say all of it
            return with_element(self, scalar)
        found = vars(self).setdefault("with_elements", {})
        if scalar.name not in found:
            found[scalar.name] = with_element(self, scalar)
        return found[scalar.name]

    return once


def _with_shapes_of_types(initialize: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    def quick(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("tensor_shape")
        if known is None:
            initialize(self, handle, type)
            vars(type)["tensor_shape"] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known

    return quick
