"""Lowers a user's scalar jaxpr to DSL values: a small interpreter, run while the kernel is traced.

Scalars are DSL numbers; arrays that the function reads are global tensors, read by index where the jaxpr reads them
(`gather`, `slice` and `dynamic_slice` of single elements). `scalar_check` refuses what is not in the table, by name.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import jax
import jax.extend
import numpy as np
from cutlass import Boolean, Float32, Int32, Uint32

from jax_fa4.kernels.common.scalar_check import check as check
from jax_fa4.kernels.common.scalar_check import inner_jaxpr

_LN_2 = math.log(2.0)


def call(function: Any, scalars: Sequence[Any], operands: Sequence[cute.Tensor]) -> Any:
    """`function` (a `ScalarFunction`) of DSL scalars and global tensors, as a DSL scalar."""
    closed = function.jaxpr
    avals = closed.in_avals[len(scalars) :]
    arrays = [x if a.shape else _element(x, (), _dtype(a.dtype)) for x, a in zip(operands, avals, strict=True)]
    (result,) = _evaluate(closed.jaxpr, closed.consts, (*scalars, *arrays))
    return result


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return _literal(atom.val, atom.aval) if isinstance(atom, jax.extend.core.Literal) else values[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        inner = inner_jaxpr(equation)
        if inner is not None:
            outputs = _evaluate(inner.jaxpr, inner.consts, inputs)
        else:
            outputs = [_RULES[equation.primitive.name](equation, *inputs)]
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _literal(value: Any, aval: Any) -> Any:
    return _dtype(aval.dtype)(np.asarray(value).item())


def _dtype(dtype: Any) -> Any:
    """The DSL type that stands for a jax dtype: 16-bit floats are computed in float32, small integers in int32."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return Boolean
    if jax.numpy.issubdtype(dtype, np.floating):
        return Float32
    return Uint32 if jax.numpy.issubdtype(dtype, np.unsignedinteger) else Int32


def _select(condition: Any, yes: Any, no: Any) -> Any:
    return type(yes)(cutlass.select_(condition, yes, no))


def _element(array: cute.Tensor, indices: Sequence[Any], result: Any) -> Any:
    """array[indices], each index clamped to its axis; without indices the one element of a scalar operand."""
    if not indices:
        return result(array[0])
    bounds = zip(indices, array.shape, strict=True)
    return result(array[tuple(Int32(cutlass.max(Int32(0), cutlass.min(Int32(i), Int32(n - 1)))) for i, n in bounds)])


def _gather(equation: Any, array: Any, index: Any) -> Any:
    start = index if isinstance(index, list) else [index]
    dims = equation.params["dimension_numbers"].start_index_map
    indices: list[Any] = [0] * len(equation.params["slice_sizes"])
    for axis, value in zip(dims, start, strict=True):
        indices[axis] = value
    return _element(array, indices, _dtype(equation.outvars[0].aval.dtype))


def _dynamic_slice(equation: Any, array: Any, *starts: Any) -> Any:
    return _element(array, starts, _dtype(equation.outvars[0].aval.dtype))


def _slice(equation: Any, array: Any) -> Any:
    starts = equation.params["start_indices"]
    if isinstance(array, list):
        return array[starts[0]]
    return _element(array, starts, _dtype(equation.outvars[0].aval.dtype))


def _concatenate(equation: Any, *parts: Any) -> list[Any]:
    """Index vectors of a gather: kept as lists of scalars."""
    return [x for part in parts for x in (part if isinstance(part, list) else [part])]


def _convert(equation: Any, x: Any) -> Any:
    if isinstance(x, list):
        return [_dtype(equation.params["new_dtype"])(v) for v in x]
    target = _dtype(equation.params["new_dtype"])
    if target is Boolean:
        return x != 0
    return _select(x, target(1), target(0)) if isinstance(x, Boolean) else target(x)


def _is_float(x: Any) -> bool:
    return isinstance(x, Float32)


def _maximum(_: Any, a: Any, b: Any) -> Any:
    return cute.arch.fmax(a, b) if _is_float(a) else _select(a > b, a, b)


def _minimum(_: Any, a: Any, b: Any) -> Any:
    return cute.arch.fmin(a, b) if _is_float(a) else _select(a < b, a, b)


def _divide(_: Any, a: Any, b: Any) -> Any:
    if _is_float(a):
        return a / b
    quotient = _absolute(None, a) // _absolute(None, b)  # lax.div rounds towards zero
    return _select((a < 0) != (b < 0), -quotient, quotient)


def _remainder(_: Any, a: Any, b: Any) -> Any:
    return a - _divide(None, a, b) * b


def _absolute(_: Any, x: Any) -> Any:
    return cute.arch.fmax(x, -x) if _is_float(x) else _select(x < 0, -x, x)


def _sign(_: Any, x: Any) -> Any:
    kind = type(x)
    return _select(x > 0, kind(1), _select(x < 0, kind(-1), kind(0)))


def _integer_pow(equation: Any, x: Any) -> Any:
    exponent = equation.params["y"]
    power = functools.reduce(operator.mul, [x] * abs(exponent)) if exponent else Float32(1.0)
    return power if exponent >= 0 else 1.0 / power


def _tanh(_: Any, x: Any) -> Any:
    doubled = cute.math.exp2(x * (2.0 / _LN_2), fastmath=True)
    return 1.0 - 2.0 * cute.arch.rcp_approx(doubled + 1.0)


def _logistic(_: Any, x: Any) -> Any:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * (-1.0 / _LN_2), fastmath=True))


def _unary(function: Callable) -> Callable:
    return lambda _, x: function(x)


def _binary(function: Callable) -> Callable:
    return lambda _, a, b: function(a, b)


def _same(_: Any, x: Any, *rest: Any) -> Any:
    """Changes of shape of one element."""
    return x


_RULES: dict[str, Callable] = {
    "abs": _absolute,
    "add": _binary(operator.add),
    "add_any": _binary(operator.add),
    "and": _binary(operator.and_),
    "broadcast_in_dim": _same,
    "ceil": _unary(lambda x: -cute.math.floor(-x)),
    "clamp": lambda _, low, x, high: _minimum(None, _maximum(None, x, low), high),
    "concatenate": _concatenate,
    "convert_element_type": _convert,
    "copy": _same,
    "cos": _unary(lambda x: cute.math.cos(x)),
    "div": _divide,
    "dynamic_slice": _dynamic_slice,
    "slice": _slice,
    "eq": _binary(operator.eq),
    "erf": _unary(lambda x: cute.math.erf(x)),
    "exp": _unary(lambda x: cute.math.exp2(x * (1.0 / _LN_2), fastmath=True)),
    "exp2": _unary(lambda x: cute.math.exp2(x, fastmath=True)),
    "floor": _unary(lambda x: cute.math.floor(x)),
    "gather": _gather,
    "ge": _binary(operator.ge),
    "gt": _binary(operator.gt),
    "integer_pow": _integer_pow,
    "le": _binary(operator.le),
    "log": _unary(lambda x: cute.math.log2(x, fastmath=True) * _LN_2),
    "log1p": _unary(lambda x: cute.math.log2(1.0 + x, fastmath=True) * _LN_2),
    "log2": _unary(lambda x: cute.math.log2(x, fastmath=True)),
    "logistic": _logistic,
    "lt": _binary(operator.lt),
    "max": _maximum,
    "min": _minimum,
    "mul": _binary(operator.mul),
    "ne": _binary(operator.ne),
    "neg": _unary(operator.neg),
    "not": _unary(lambda x: x == Boolean(False) if isinstance(x, Boolean) else ~x),
    "one_minus_square": _unary(lambda x: (1.0 + x) * (1.0 - x)),  # since JAX 0.11, in the derivative of tanh
    "or": _binary(operator.or_),
    "pow": _binary(lambda a, b: cute.math.exp2(cute.math.log2(a, fastmath=True) * b, fastmath=True)),
    "rem": _remainder,
    "reshape": _same,
    "rsqrt": _unary(lambda x: cute.math.rsqrt(x, fastmath=True)),
    "select_n": lambda _, which, no, yes: _select(which, yes, no),
    "shift_left": _binary(operator.lshift),
    "shift_right_arithmetic": _binary(operator.rshift),
    "sign": _sign,
    "sin": _unary(lambda x: cute.math.sin(x)),
    "sqrt": _unary(lambda x: cute.math.sqrt(x, fastmath=True)),
    "square": _unary(lambda x: x * x),
    "squeeze": _same,
    "stop_gradient": _same,
    "sub": _binary(operator.sub),
    "tanh": _tanh,
    "xor": _binary(operator.xor),
}
