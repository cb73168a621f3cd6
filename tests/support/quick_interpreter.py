"""Triton's interpreter without the work that no test reads, which takes most of its time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


def set_up_quick_interpreter() -> None:
    """Interpreter for processes with ``TRITON_INTERPRET=1``: kernels compute the same numbers in a fraction of the
    time.

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
    _match_operands_once(internals.interpreter_semantic.__class__, language.core)
    _round_as_hardware(internals, language.float8e4nv)
    internals.InterpreterBuilder.create_fma = _fused_multiply_add(internals)


def _round_as_hardware(internals: Any, fp8: Any) -> None:
    """Round to the nearest number of FP8, ties to even: the interpreter's carry is lost."""
    builder: Any = internals.InterpreterBuilder
    convert = builder.create_fp_to_fp

    def rounding(self: Any, source: Any, target: Any, mode: Any) -> Any:
        if target.scalar != fp8 or source.data.dtype != np.float32:
            return convert(self, source, target, mode)
        numbers = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn)
        return internals.TensorHandle(numbers.view(torch.uint8).numpy(), fp8)

    builder.create_fp_to_fp = rounding


def _fused_multiply_add(internals: Any) -> Callable[..., Any]:
    """Products and sums of float32 rounded once, as hardware does."""

    def create_fma(_builder: Any, x: Any, y: Any, z: Any) -> Any:
        total = x.data.astype(np.float64) * y.data + z.data
        return internals.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    return create_fma


def _match_operands_once(semantic: Any, core: Any) -> None:
    """Types and shapes of operands: nothing is done for equal ones, and the outcome is kept for others."""
    constants = _with_kept_constants(semantic.scalar_constant)
    semantic.scalar_constant = constants
    semantic.broadcast_impl_value = _with_kept_shapes(semantic.broadcast_impl_value, core)
    semantic.binary_op_type_checking_impl = _with_kept_types(semantic.binary_op_type_checking_impl, core.tensor)
    convert = semantic.cast

    def cast(self: Any, value: Any, target: Any, *options: Any) -> Any:
        return value if value.type.scalar is target and not options else convert(self, value, target, *options)

    semantic.cast = cast


def _with_kept_constants(make: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    kept: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, value: Any, dtype: Any) -> Any:
        key = (type(value), value, dtype.name)
        if key not in kept:
            kept[key] = make(self, value, dtype)
        return kept[key]

    return quick


def _with_kept_shapes(broadcast: Callable[[Any, Any, Any], Any], core: Any) -> Callable[[Any, Any, Any], Any]:
    """Block types of the same sizes share one shape, which identifies it."""
    kept: dict[tuple[int, int], tuple[Any, ...]] = {}

    def spread(self: Any, value: Any, shape: Any) -> Any:
        if value.type.shape is shape:
            return value
        type_ = core.block_type(value.type.scalar, shape)
        return core.tensor(self.builder.create_broadcast(value.handle, shape.values), type_)

    def quick(self: Any, lhs: Any, rhs: Any) -> Any:
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(self, lhs, rhs)
        left, right = lhs.type.shape, rhs.type.shape
        if left is right:
            return lhs, rhs
        if (found := kept.get((id(left), id(right)))) is not None:
            return spread(self, lhs, found[0]), spread(self, rhs, found[0])
        matched = broadcast(self, lhs, rhs)
        if len(left) == len(right):
            kept[id(left), id(right)] = matched[0].type.shape, left, right  # kept alive with their ids
        return matched

    return quick


def _with_kept_types(check: Callable[..., Any], tensor: type[Any]) -> Callable[..., Any]:
    """Two tensors of one number type need no conversion, except that halves are divided as float32."""
    kept: dict[tuple[Any, ...], Any] = {}

    def quick(self: Any, lhs: Any, rhs: Any, *flags: bool) -> Any:
        is_left, is_right = isinstance(lhs, tensor), isinstance(rhs, tensor)
        if is_left == is_right:
            is_known = is_left and lhs.type.scalar is rhs.type.scalar and not lhs.type.scalar.is_ptr() and not flags[3:]
            return self.broadcast_impl_value(lhs, rhs) if is_known else check(self, lhs, rhs, *flags)
        scalar, number = (lhs.type.scalar, rhs) if is_left else (rhs.type.scalar, lhs)
        key = (scalar.name, is_left, type(number), number, flags)
        if (found := kept.get(key)) is not None:
            lhs = self.cast(lhs, found) if is_left else self.scalar_constant(lhs, found)
            rhs = self.cast(rhs, found) if is_right else self.scalar_constant(rhs, found)
            return self.broadcast_impl_value(lhs, rhs)
        matched = check(self, lhs, rhs, *flags)
        if not scalar.is_ptr():
            kept[key] = matched[0].type.scalar
        return matched

    return quick


def _replace_builtin(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
    """Replacement of Triton's function of this purpose, without two calls on the way to the one that does the work."""
    from triton.runtime.interpreter import interpreter_semantic

    while _only_passes_on(member):
        member = member.__wrapped__

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return member(*arguments, **options)

    scope.set_attr(owner, name, call)


def _only_passes_on(member: Any) -> bool:
    """True if it is the wrapper of ``triton.language.core.builtin``, which checks that it was given a semantic."""
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
