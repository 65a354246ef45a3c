"""What a compiled kernel is called with: its buffers, in order, and the run-time sizes.

The host function of every kernel takes, in this order, six Int32 (the fields of `Dims`), the CUDA stream, and one
global-memory pointer per entry of ``kernel.buffers``. Only what a buffer's shape writes as a number is known to the
compiler; B, S, T, H and K are read at run time, so one artifact serves every length and batch. Offsets are 64-bit
(`entry.py` gives every stride that is not a number the type Int64).

Nothing here imports the compiler: a cache hit must not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

from jax_fa4 import masks
from jax_fa4.scalar import ScalarFunction
from jax_fa4.scores import ScoreMap
from jax_fa4.spec import AttentionSpec

ALIGNMENT_BYTES = 16
"""Every buffer's alignment; TMA asks for 16, XLA gives more."""

# A size is a number, a field of Dims by name, or (operator, size, size): see `evaluate`.
Size = int | str | tuple[str, Any, Any]

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "ceil": lambda a, b: (a + (b - 1)) // b,
    "round_up": lambda a, b: (a + (b - 1)) // b * b,
}


@dataclasses.dataclass(frozen=True)
class Dims:
    """Run-time sizes: batch, query and key length, query and KV heads, and the device's number of SMs.

    Fields are Python ints where a call is made and DSL Int32 values inside a kernel's host function.
    """

    B: Any
    S: Any
    T: Any
    H: Any
    K: Any
    sm_count: Any


DIM_NAMES = tuple(field.name for field in dataclasses.fields(Dims))


def evaluate(size: Size, dims: Dims) -> Any:
    """The value of `size` for `dims`: ``("ceil", "S", 64)`` is ceil(S / 64), ``("round_up", "S", 64)`` its multiple.

    Operators: add, mul, ceil (quotient rounded up), round_up (to a multiple). Works on ints and on DSL values alike.
    """
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        if size not in DIM_NAMES:
            raise ValueError(f"unknown symbol {size!r} in a buffer's shape; known are {', '.join(DIM_NAMES)}")
        return getattr(dims, size)
    operator, left, right = size
    if operator not in _OPERATORS:
        raise ValueError(f"unknown operator {operator!r} in a buffer's shape; known are {', '.join(_OPERATORS)}")
    return _OPERATORS[operator](evaluate(left, dims), evaluate(right, dims))


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One array of a kernel: contiguous, row-major, in global memory, aligned to `ALIGNMENT_BYTES`.

    `kind` "in" and "out" are arrays of the caller; "scratch" is uninitialised memory that lives for the call.
    """

    name: str
    kind: Literal["in", "out", "scratch"]
    dtype: str
    shape: tuple[Size, ...]

    def dims(self, dims: Dims) -> tuple[int, ...]:
        """The shape for one call's sizes."""
        return tuple(evaluate(size, dims) for size in self.shape)

    def size_bytes(self, dims: Dims) -> int:
        return math.prod(self.dims(dims)) * itemsize(self.dtype)


_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
             "uint8": 1, "uint16": 2, "uint32": 4, "bool": 1}


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    if dtype not in _ITEMSIZE:
        raise ValueError(f"dtype {dtype!r} has no place in a kernel's buffers; allowed are {', '.join(_ITEMSIZE)}")
    return _ITEMSIZE[dtype]


def scratch(name: str, dtype: str, shape: tuple[Size, ...]) -> Buffer:
    """Uninitialised memory for the length of a call; a kernel that needs zeros writes them."""
    return Buffer(name, "scratch", dtype, shape)


def _in(name: str, dtype: str, *shape: Size) -> Buffer:
    return Buffer(name, "in", dtype, shape)


def _out(name: str, dtype: str, *shape: Size) -> Buffer:
    return Buffer(name, "out", dtype, shape)


def _function_buffers(prefix: str, functions: list[ScalarFunction]) -> tuple[Buffer, ...]:
    """The arrays that user functions read, numbered across all of them; their shapes are part of the function."""
    avals = [aval for f in functions for aval in f.jaxpr.in_avals[len(f.jaxpr.in_avals) - f.operand_count :]]
    return tuple(_in(f"{prefix}_{i}", str(aval.dtype), *aval.shape) for i, aval in enumerate(avals))


def operand_buffers(spec: AttentionSpec) -> tuple[Buffer, ...]:
    """The arrays of `Operands` that the spec uses, in its order: ``mask_operands[i]`` is "mask_operands_i"."""
    parts = spec.mask.parts
    lengths = next((part for part in parts if isinstance(part, masks.Lengths)), masks.Lengths())
    segments = any(isinstance(part, masks.Segments) for part in parts)
    runtime_window = any(isinstance(part, masks.Window) and masks.RUNTIME in (part.left, part.right) for part in parts)
    optional = [
        (spec.sink, _in("sinks", "float32", "H")),
        (segments, _in("q_segment_ids", "int32", "B", "S")),
        (segments, _in("kv_segment_ids", "int32", "B", "T")),
        (lengths.q, _in("q_lengths", "int32", "B")),
        (lengths.kv, _in("kv_lengths", "int32", "B")),
        (spec.positions, _in("positions", "int32", "B", 4)),
        (runtime_window, _in("window", "int32", 2)),
    ]
    return (
        _in("q", spec.dtype, "B", "S", "H", spec.head_dim),
        _in("k", spec.dtype, "B", "T", "K", spec.head_dim),
        _in("v", spec.dtype, "B", "T", "K", spec.value_head_dim),
        *(buffer for used, buffer in optional if used),
        *_function_buffers("mask_operands", [p.function for p in parts if isinstance(p, masks.Predicate)]),
        *_function_buffers("score_operands", [m.function for m in spec.score_mods if isinstance(m, ScoreMap)]),
    )


def forward_buffers(spec: AttentionSpec) -> tuple[Buffer, ...]:
    """Operands, then ``o`` [B, S, H, E] and ``lse`` float32 [B, H, S]; a kernel adds its scratch."""
    return (
        *operand_buffers(spec),
        _out("o", str(spec.out_dtype), "B", "S", "H", spec.value_head_dim),
        _out("lse", "float32", "B", "H", "S"),
    )


def backward_buffers(spec: AttentionSpec) -> tuple[Buffer, ...]:
    """Operands, ``lse`` and ``delta`` float32 [B, H, S], ``do`` [B, S, H, E]; then ``dq``, ``dk``, ``dv``."""
    out = str(spec.out_dtype)
    return (
        *operand_buffers(spec),
        _in("lse", "float32", "B", "H", "S"),
        _in("delta", "float32", "B", "H", "S"),
        _in("do", spec.dtype, "B", "S", "H", spec.value_head_dim),
        _out("dq", out, "B", "S", "H", spec.head_dim),
        _out("dk", out, "B", "T", "K", spec.head_dim),
        _out("dv", out, "B", "T", "K", spec.value_head_dim),
    )
