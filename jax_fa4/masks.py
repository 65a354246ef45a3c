"""Masks: which scores survive.

A standard mask keeps, for each query row, an interval [low, high) of keys; `&` intersects. From that one definition
come the KV blocks to visit and which of them need no element mask (`block_range`, `query_block_range`), the
elementwise decision (`allowed`), and the dense array (`dense`). Segments, mask arrays and predicates decide
elementwise and are never intervals: with one of them every block in range counts as masked.

Masks compare positions. Row i of an example sits at `q_offset + i * q_stride`, key j at `kv_offset + j * kv_stride`;
bottom-right alignment is `q_offset = kv_length - q_length` with strides of 1. `Geometry` carries those numbers as
Python ints, numpy, JAX or DSL values alike: all formulas here use `+ - *`, comparisons and the four functions of
`Numbers`.
"""

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import invalid
from .scalar import ScalarFunction, Tile

UNBOUNDED = 1 << 30
"""A window bound that excludes nothing; larger ones are cut to it, so that position arithmetic stays within int32."""


class Runtime(enum.Enum):
    """The type of RUNTIME, which marks a window bound that is an array (in `Operands.window`), not part of the spec."""

    RUNTIME = "run-time"

    def __repr__(self) -> str:
        return self.name


RUNTIME = Runtime.RUNTIME
Bound = int | None | Runtime


@dataclass(frozen=True)
class Mask:
    """Base of masks. `a & b` keeps what both keep."""

    @property
    def parts(self) -> tuple["Mask", ...]:
        """The masks of which this one is the intersection; () for `Full`."""
        return (self,)

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        parts = self.parts + other.parts
        return parts[0] if len(parts) == 1 else And(parts) if parts else Full()

    def show(self, rows: int, columns: int | None = None, block: tuple[int, int] = (128, 128)) -> Any:
        """A picture of the mask for S = rows, T = columns (rows by default), with the blocks a kernel would visit."""
        from .draw import mask_picture  # imported here: it draws by `attention`'s arguments, and needs this module

        return mask_picture(rows, rows if columns is None else columns, block, mask=self)


@dataclass(frozen=True)
class Full(Mask):
    """Keeps every score."""

    @property
    def parts(self) -> tuple[Mask, ...]:
        return ()


@dataclass(frozen=True)
class Causal(Mask):
    """Keeps keys at or before the query's position."""


@dataclass(frozen=True)
class Window(Mask):
    """Keeps keys with position_q - left <= position_k <= position_q + right.

    None is unbounded; RUNTIME takes the bound from `Operands.window`.
    """

    left: Bound = None
    right: Bound = None


@dataclass(frozen=True)
class Lengths(Mask):
    """Keeps rows below each example's query length (if `q`) and keys below its key length (if `kv`)."""

    q: bool = False
    kv: bool = False


@dataclass(frozen=True)
class Segments(Mask):
    """Keeps scores whose query and key have equal segment ids."""


@dataclass(frozen=True)
class MaskArray(Mask):
    """Keeps scores where a boolean array holds: `Operands.mask_array` [B|1, H|1, S|1, T]."""


@dataclass(frozen=True)
class Predicate(Mask):
    """Keeps scores where a traced `f(b, h, q, k, *operands)` holds; `MaskFn` says what the arguments are."""

    function: ScalarFunction


@dataclass(frozen=True, eq=False)
class MaskFn(Mask):
    """A user's predicate and the arrays it reads, as given to `attention(mask=...)`; a spec holds `Predicate` instead.

    Attributes:
      function: `f(b, h, q, k, *operands) -> bool`, written with jax.numpy for one score. b and h are the indices of
        example and query head; q and k those of query row and key, or their positions where the call gives positions.
      operands: arrays that it reads.
    """

    function: Callable
    operands: Sequence[Any] = ()


@dataclass(frozen=True)
class And(Mask):
    """The intersection of two or more masks."""

    members: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return tuple(part for member in self.members for part in member.parts)

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.members))


def canonical(mask: Mask) -> Mask:
    """The same mask in the one form a spec holds.

    At most one window with static bounds (`Causal` if it is that), one with RUNTIME bounds, one `Lengths`, one
    `Segments`, one `MaskArray`, then the distinct predicates in order; parts that keep everything are left out.
    """
    static: dict[str, int | None] = {"left": None, "right": None}
    runtime: dict[str, Bound] = {"left": None, "right": None}
    lengths_q = lengths_kv = segments = array = False
    predicates: list[Mask] = []
    for part in mask.parts:
        match part:
            case Causal():
                static["right"] = _tighter(static["right"], 0)
            case Window():
                for side in ("left", "right"):
                    bound = getattr(part, side)
                    if bound is RUNTIME:
                        runtime[side] = RUNTIME
                    else:
                        static[side] = _tighter(static[side], bound)
            case Lengths():
                lengths_q, lengths_kv = lengths_q or part.q, lengths_kv or part.kv
            case Segments():
                segments = True
            case MaskArray():
                array = True
            case Predicate():
                predicates += [part] if part not in predicates else []
            case _:
                raise invalid("mask", repr(part), "Causal, Window, Lengths, Segments, Predicate and their `&`",
                              "Wrap a function in MaskFn(f, operands=...)")
    result: Mask = Full()
    if static == {"left": None, "right": 0}:
        result &= Causal()
    elif static != {"left": None, "right": None}:
        result &= Window(**static)
    if RUNTIME in runtime.values():
        result &= Window(**runtime)
    if lengths_q or lengths_kv:
        result &= Lengths(lengths_q, lengths_kv)
    if segments:
        result &= Segments()
    if array:
        result &= MaskArray()
    for predicate in predicates:
        result &= predicate
    return result


def _tighter(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return a if b is None else min(b, UNBOUNDED)
    return min(a, b)


@dataclass(frozen=True)
class Numbers:
    """The four functions that mask formulas need beyond operators, for one kind of number."""

    minimum: Callable[[Any, Any], Any]
    maximum: Callable[[Any, Any], Any]
    where: Callable[[Any, Any, Any], Any]
    floor_divide: Callable[[Any, Any], Any] = operator.floordiv


PYTHON = Numbers(min, max, lambda condition, yes, no: yes if condition else no)
NUMPY = Numbers(np.minimum, np.maximum, np.where)
JAX = Numbers(jnp.minimum, jnp.maximum, jnp.where)


@dataclass(frozen=True)
class Geometry:
    """Lengths, positions and run-time window bounds: of one example, or arrays that broadcast against rows and keys.

    Attributes:
      q_length, kv_length: rows and keys that exist (S and T, or the example's own lengths).
      q_offset, q_stride, kv_offset, kv_stride: position = offset + stride * index; a stride is not negative, and with
        0 all rows, or all keys, share one position.
      window_left, window_right: the bounds of a RUNTIME window.
      numbers: the arithmetic of these values.
    """

    q_length: Any
    kv_length: Any
    q_offset: Any
    q_stride: Any = 1
    kv_offset: Any = 0
    kv_stride: Any = 1
    window_left: Any = None
    window_right: Any = None
    numbers: Numbers = PYTHON

    @classmethod
    def bottom_right(cls, q_length: Any, kv_length: Any, **rest: Any) -> "Geometry":
        """Positions such that the last query row and the last key coincide."""
        return cls(q_length, kv_length, q_offset=kv_length - q_length, **rest)


def is_interval(mask: Mask) -> bool:
    """Whether the mask keeps an interval of keys for each row (no segments, no predicates)."""
    return all(isinstance(part, Causal | Window | Lengths) for part in mask.parts)


def bounds(mask: Mask, geometry: Geometry) -> tuple[list[Any], list[Any]]:
    """All (left bounds, right bounds) on positions that the mask's windows set, as numbers."""
    left: list[Any] = []
    right: list[Any] = []
    for part in mask.parts:
        if isinstance(part, Causal):
            right.append(0)
        elif isinstance(part, Window):
            if part.left is not None:
                left.append(geometry.window_left if part.left is RUNTIME else part.left)
            if part.right is not None:
                right.append(geometry.window_right if part.right is RUNTIME else part.right)
    return left, right


def row_interval(mask: Mask, row: Any, geometry: Geometry) -> tuple[Any, Any]:
    """The keys [low, high) that interval masks keep for a query row (low == high where there are none)."""
    g, n = geometry, geometry.numbers
    lefts, rights = bounds(mask, g)
    low, high = 0, g.kv_length
    relative = g.q_offset - g.kv_offset + row * g.q_stride
    for left in lefts:
        low = n.maximum(low, -_floor_divide(n, left - relative, g.kv_stride))
    for right in rights:
        high = n.minimum(high, _floor_divide(n, relative + right, g.kv_stride) + 1)
    high = n.where(row < g.q_length, n.maximum(high, 0), 0)
    return n.minimum(low, high), high


def column_interval(mask: Mask, column: Any, geometry: Geometry) -> tuple[Any, Any]:
    """The query rows [low, high) for which interval masks keep a key: `row_interval` seen from the key."""
    g, n = geometry, geometry.numbers
    lefts, rights = bounds(mask, g)
    low, high = 0, g.q_length
    relative = g.kv_offset - g.q_offset + column * g.kv_stride
    for right in rights:
        low = n.maximum(low, -_floor_divide(n, right - relative, g.q_stride))
    for left in lefts:
        high = n.minimum(high, _floor_divide(n, relative + left, g.q_stride) + 1)
    high = n.where(column < g.kv_length, n.maximum(high, 0), 0)
    return n.minimum(low, high), high


def block_range(mask: Mask, q_block: Any, block_q: int, block_k: int, geometry: Geometry) -> tuple[Any, Any, Any, Any]:
    """The KV blocks that a block of query rows visits: (start, full_start, full_end, end), in blocks.

    Blocks outside [start, end) hold no score that survives. Within [full_start, full_end) every score of every row
    below q_length survives, and no element mask is needed. Rows at or past q_length do not count: a backend gives them
    O = 0 and LSE = -inf by their row, and treats LSE = -inf as P = 0 in backward.
    """
    g = geometry
    first = q_block * block_q
    last = g.numbers.minimum(first + block_q, g.q_length) - 1
    return _range(g, first < g.q_length, row_interval(mask, first, g), row_interval(mask, last, g), block_k,
                  is_interval(mask))


def most_keys(mask: Mask, rows: int) -> int | None:
    """How many keys so many neighbouring rows see at the most, with strides of 1; None if the mask does not say."""
    windows = [part for part in mask.parts if isinstance(part, Window)]
    causal = [0] if any(isinstance(part, Causal) for part in mask.parts) else []
    left, right = ([bound for bound in bounds if isinstance(bound, int)] for bounds in (
        [window.left for window in windows], [window.right for window in windows] + causal))
    return max(min(left) + min(right) + rows, 0) if left and right else None


def query_block_range(
    mask: Mask, kv_block: Any, block_q: int, block_k: int, geometry: Geometry
) -> tuple[Any, Any, Any, Any]:
    """The query blocks that a block of keys visits: `block_range` transposed.

    A block of keys that reaches past kv_length has no full blocks: its missing keys are to be masked.
    """
    g = geometry
    first = kv_block * block_k
    last = g.numbers.minimum(first + block_k, g.kv_length) - 1
    start, full_start, full_end, end = _range(
        g, first < g.kv_length, column_interval(mask, first, g), column_interval(mask, last, g), block_q,
        is_interval(mask))
    return start, full_start, g.numbers.where(first + block_k <= g.kv_length, full_end, full_start), end


def _range(g: Geometry, exists: Any, first: Any, last: Any, block: int, interval: bool) -> tuple[Any, Any, Any, Any]:
    """(start, full_start, full_end, end) from the intervals of the first and the last line; both ends only grow."""
    n = g.numbers
    end = n.where(exists, _ceil_divide(n, last[1], block), 0)
    start = n.minimum(_floor_divide(n, first[0], block), end)
    if not interval:
        return start, start, start, end
    full_start = n.minimum(n.maximum(_ceil_divide(n, last[0], block), start), end)
    full_end = n.minimum(n.maximum(_floor_divide(n, first[1], block), full_start), end)
    return start, full_start, full_end, end


def _floor_divide(n: Numbers, x: Any, divisor: Any) -> Any:
    """floor(x / divisor); by 0, which a stride may be, its limit from above."""
    if isinstance(divisor, int) and divisor > 0:
        return x if divisor == 1 else n.floor_divide(x, divisor)
    return n.where(divisor == 0, n.where(x < 0, -UNBOUNDED, UNBOUNDED), n.floor_divide(x, n.maximum(divisor, 1)))


def _ceil_divide(n: Numbers, x: Any, divisor: int) -> Any:
    return n.floor_divide(x + (divisor - 1), divisor)


def allowed(mask: Mask, tile: Tile, geometry: Geometry, operands: Any) -> jax.Array:
    """Which scores of a tile survive: bool, broadcastable to [B, H, Q, K].

    Args:
      mask: any mask.
      tile: where the scores lie.
      geometry: numbers JAX, fields scalar or [B, 1, 1, 1].
      operands: the call's `Operands`, for segment ids, the mask array and the arrays of predicates.
    """
    low, high = row_interval(mask, tile.rows[None, None, :, None], geometry)
    columns = tile.columns[None, None, None]
    keep = (columns >= low) & (columns < high)
    read = 0
    for part in mask.parts:
        if isinstance(part, Segments):
            q_ids = jax.lax.dynamic_slice_in_dim(operands.q_segment_ids, tile.rows[0], tile.rows.size, 1)
            kv_ids = jax.lax.dynamic_slice_in_dim(operands.kv_segment_ids, tile.columns[0], tile.columns.size, 1)
            keep &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
        elif isinstance(part, MaskArray):
            keep &= slice_tile(operands.mask_array, tile)
        elif isinstance(part, Predicate):
            count = part.function.operand_count
            keep &= part.function.on_tile(tile, operands.mask_operands[read : read + count])
            read += count
    return keep


def slice_tile(array: jax.Array, tile: Tile) -> jax.Array:
    """The tile's part of a bias or mask array [B|1, H|1, S|1, T], which must reach to the tile's end."""
    if array.shape[2] != 1:
        array = jax.lax.dynamic_slice_in_dim(array, tile.rows[0], tile.rows.size, 2)
    return jax.lax.dynamic_slice_in_dim(array, tile.columns[0], tile.columns.size, 3)


def dense(mask: Mask, operands: Any) -> jax.Array:
    """The whole mask of a call: bool [B, H, S, T]."""
    from .operands import geometry, tile  # imported here: operands.py needs this module

    (batch, rows, heads), columns = operands.q.shape[:3], operands.k.shape[1]
    if 0 in (batch, rows, heads, columns):
        return jnp.zeros((batch, heads, rows, columns), bool)
    whole = tile(operands, jnp.arange(rows, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32))
    keep = allowed(mask, whole, geometry(operands), operands)
    return jnp.broadcast_to(keep, (batch, heads, rows, columns))
