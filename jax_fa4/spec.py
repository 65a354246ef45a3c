"""What is asked: `AttentionSpec`, and `make_spec`, the one place that validates a call."""

import numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import masks
from .errors import invalid
from .masks import RUNTIME, Mask, MaskFn
from .operands import Operands
from .scalar import trace
from .scores import Bias, ScoreFn, ScoreMap, ScoreMod, SoftCap

DTYPES = ("bfloat16", "float16", "float32", "float64")

LARGEST = float(np.finfo(np.float32).max)
"""Of a scale or soft cap: scores are float32 unless the inputs are float64."""


def compute_dtype(dtype: Any) -> Any:
    """Of scores, statistics, accumulators and LSE: float32, or float64 for float64 inputs."""
    return jnp.dtype("float64" if dtype == "float64" else "float32")


@dataclass(frozen=True)
class AttentionSpec:
    """What one attention call computes; hashable, without arrays, lengths, tiles or architecture.

    Attributes:
      dtype: of q, k, v; one of DTYPES.
      head_dim: D, of q and k.
      value_head_dim: E, of v and the output.
      group: query heads per KV head, G = H // K.
      scale: factor on q.k.
      mask: in canonical form (`masks.canonical`).
      score_mods: what happens to scores after scaling, in order: SoftCap, Bias, ScoreMap.
      sink: whether each query head has a logit that takes part in the softmax's denominator alone.
      positions: whether the call gives positions (`Operands.positions`).
      deterministic: gradients are to be bitwise equal from run to run.
      float32_out: O, dQ, dK, dV leave in float32 instead of dtype (partial results of a ring).
    """

    dtype: str
    head_dim: int
    value_head_dim: int
    group: int = 1
    scale: float = 1.0
    mask: Mask = field(default_factory=masks.Full)
    score_mods: tuple[ScoreMod, ...] = ()
    sink: bool = False
    positions: bool = False
    deterministic: bool = False
    float32_out: bool = False

    @property
    def compute_dtype(self) -> Any:
        """`compute_dtype(self.dtype)`."""
        return compute_dtype(self.dtype)

    @property
    def out_dtype(self) -> Any:
        """Of O, dQ, dK and dV."""
        return self.compute_dtype if self.float32_out else jnp.dtype(self.dtype)

    @property
    def has_bias(self) -> bool:
        return Bias() in self.score_mods


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments of `attention` that make a spec and its operands; `api.attention` documents them."""

    q: Any
    k: Any
    v: Any
    causal: bool = False
    window: tuple[Any, Any] | None = None
    mask: Any = None
    softcap: float | None = None
    score_mods: Sequence[Callable | ScoreFn] | Callable | ScoreFn = ()
    sinks: Any = None
    bias: Any = None
    q_segment_ids: Any = None
    kv_segment_ids: Any = None
    q_lengths: Any = None
    kv_lengths: Any = None
    q_position: tuple[Any, Any] | None = None
    kv_position: tuple[Any, Any] | None = None
    scale: float | None = None
    deterministic: bool = False


def make_spec(arguments: Arguments) -> tuple[AttentionSpec, Operands]:
    """Validates a call and splits it into what is static and its arrays.

    Raises:
      InvalidArgument: an argument that no backend could accept.
    """
    a = arguments
    q, k, v, group = _check_qkv(a)
    scale = q.shape[3] ** -0.5 if a.scale is None else positive("scale", a.scale)
    wide = compute_dtype(q.dtype)
    window, window_array = _make_window(a.window)
    mask, mask_array, mask_operands = _make_mask(a)
    mods, score_operands = _make_score_mods(a, wide)
    positions = _make_positions(a)
    spec = AttentionSpec(
        dtype=str(q.dtype), head_dim=q.shape[3], value_head_dim=v.shape[3], group=group, scale=scale,
        mask=masks.canonical(mask & window), score_mods=mods, sink=a.sinks is not None,
        positions=positions is not None, deterministic=flag("deterministic", a.deterministic))
    batch, rows, heads = q.shape[:3]
    columns = k.shape[1]
    operands = Operands(
        q, k, v,
        bias=_array("bias", a.bias, ((batch, 1), (heads, 1), (rows, 1), columns), jnp.floating),
        sinks=_array("sinks", a.sinks, (heads,), jnp.floating, wide),
        q_segment_ids=_array("q_segment_ids", a.q_segment_ids, (batch, rows), jnp.integer, jnp.int32),
        kv_segment_ids=_array("kv_segment_ids", a.kv_segment_ids, (batch, columns), jnp.integer, jnp.int32),
        q_lengths=_lengths("q_lengths", a.q_lengths, batch, rows),
        kv_lengths=_lengths("kv_lengths", a.kv_lengths, batch, columns),
        positions=positions, window=window_array,
        mask_array=_array("mask", mask_array, ((batch, 1), (heads, 1), (rows, 1), columns), jnp.bool_),
        mask_operands=mask_operands, score_operands=score_operands)
    return spec, operands


def flag(argument: str, value: Any) -> bool:
    """A static bool, or InvalidArgument."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    received = "a traced array" if isinstance(value, jax.core.Tracer) else _shown(value)
    raise invalid(argument, received, "True or False, known when the program is traced",
                  "Pass a Python bool; under jax.jit name the argument in static_argnames")


def positive(argument: str, value: Any) -> float:
    """A static, finite, positive float, or InvalidArgument."""
    if isinstance(value, jax.core.Tracer):
        raise invalid(argument, "a traced array", "a positive finite number known when the program is traced",
                      "Pass a Python float; multiply q by a traced factor yourself")
    number = isinstance(value, numbers.Real | np.ndarray | jax.Array) and not isinstance(value, bool)
    # An int may be too large for a float, and a bound too large for a 16-bit float.
    if number and np.ndim(value) == 0 and 0 < (value if isinstance(value, int) else float(value)) <= LARGEST:
        return float(value)
    raise invalid(argument, _shown(value), "a positive finite number (of float32)",
                  f"Leave {argument} out for the default")


def _check_qkv(a: Arguments) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """q, k, v as arrays without a weak type, and query heads per KV head."""
    arrays = {name: _check_array(name, getattr(a, name)) for name in ("q", "k", "v")}
    q, k, v = arrays.values()
    if not q.dtype == k.dtype == v.dtype:
        raise invalid("q, k, v", f"dtypes {q.dtype}, {k.dtype}, {v.dtype}", "one dtype for all three",
                      "Convert them to the same dtype with .astype(...)")
    for name, axis, of, what in (("k", 0, "q", "batch"), ("v", 0, "q", "batch"), ("k", 3, "q", "head dim"),
                                 ("v", 1, "k", "sequence length"), ("v", 2, "k", "number of heads")):
        if arrays[name].shape[axis] != arrays[of].shape[axis]:
            raise invalid(name, f"shape {list(arrays[name].shape)}", f"the {what} of {of}, {arrays[of].shape[axis]}",
                          f"Make axis {axis} of {of} and {name} agree; arrays are [batch, sequence, heads, head dim]")
    for name in ("q", "v"):
        if arrays[name].shape[3] == 0:
            raise invalid(name, f"shape {list(arrays[name].shape)}", "a head dim of at least 1",
                          "Give the last axis a positive size")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads and (not kv_heads or heads % kv_heads):
        raise invalid("q", f"{heads} heads with {kv_heads} KV heads", "a multiple of the number of KV heads",
                      "Make q.shape[2] divisible by k.shape[2] (grouped-query attention)")
    return q, k, v, heads // kv_heads if heads else 1


def _check_array(name: str, value: Any) -> jax.Array:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise invalid(name, type(value).__name__, "an array [batch, sequence, heads, head dim]",
                      "Convert it with jnp.asarray")
    if len(value.shape) != 4:
        raise invalid(name, f"shape {list(value.shape)}", "rank 4, [batch, sequence, heads, head dim]",
                      "Add the missing axes, for example x[None] for a single example")
    if str(value.dtype) not in DTYPES:
        raise invalid(name, f"dtype {value.dtype}", ", ".join(DTYPES), f"Convert it with {name}.astype(...)")
    array = _converted(name, value, "an array [batch, sequence, heads, head dim]")
    return jax.lax.convert_element_type(array, array.dtype)  # without a weak type


def _converted(argument: str, value: Any, allowed: str) -> jax.Array:
    """The value as a JAX array, or InvalidArgument."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):  # as of None, a jax.ShapeDtypeStruct, a jax.Ref
        raise invalid(argument, type(value).__name__, allowed,
                      "Pass an array; of a jax.Ref its value, ref[...]") from None


def _array(argument: str, value: Any, shape: tuple, kind: Any, dtype: Any = None) -> jax.Array | None:
    """The value as an array of that kind (and dtype); an entry of `shape` that is a tuple lists the sizes allowed."""
    if value is None:
        return None
    allowed = [size if isinstance(size, tuple) else (size,) for size in shape]
    wanted = f"shape [{', '.join(' or '.join(map(str, dict.fromkeys(sizes))) for sizes in allowed)}]"
    array = _converted(argument, value, f"an array of {wanted}")
    if array.ndim != len(shape) or any(n not in sizes for n, sizes in zip(array.shape, allowed, strict=True)):
        raise invalid(argument, f"shape {list(array.shape)}", wanted, "Reshape or broadcast it")
    if not (array.dtype == kind if kind is jnp.bool_ else jnp.issubdtype(array.dtype, kind)):
        name = {jnp.bool_: "bool", jnp.integer: "an integer dtype", jnp.floating: "a floating dtype"}[kind]
        raise invalid(argument, f"dtype {array.dtype}", name, f"Convert it with {argument}.astype(...)")
    return array if dtype is None else array.astype(dtype)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) or hasattr(value, "__jax_array__")


def _shown(value: Any) -> str:
    """A value for an error message: of an array with axes its type, not its contents."""
    return f"{value.dtype}{list(value.shape)}" if _is_array(value) and value.shape else repr(value)


def _lengths(argument: str, value: Any, batch: int, longest: int) -> jax.Array | None:
    array = _array(argument, value, (batch,), jnp.integer)
    return None if array is None else jnp.clip(as_int32(array), 0, longest)


def as_int32(x: jax.Array) -> jax.Array:
    """Integers of any dtype as int32, those beyond its range cut and not wrapped."""
    own, wanted = jnp.iinfo(x.dtype), jnp.iinfo(jnp.int32)
    return jnp.clip(x, max(own.min, wanted.min), min(own.max, wanted.max)).astype(jnp.int32)


def _make_window(window: Any) -> tuple[Mask, jax.Array | None]:
    if window is None:
        return masks.Full(), None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise invalid("window", _shown(window), "None or a pair (left, right)",
                      "Pass (left, right); None on a side leaves it unbounded")
    bounds: list[masks.Bound] = []
    arrays: list[Any] = []
    for side, value in zip(("left", "right"), window, strict=True):
        integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if value is None or (integer and value >= 0):
            bounds.append(None if value is None else min(int(value), masks.UNBOUNDED))
            arrays.append(0)
        elif _is_array(value) and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
            bounds.append(RUNTIME)
            arrays.append(jnp.clip(as_int32(jnp.asarray(value)), -masks.UNBOUNDED, masks.UNBOUNDED))
        else:
            raise invalid(f"window ({side})", _shown(value),
                          "None, an integer of at least 0, or an integer scalar array",
                          "Use None for an unbounded side")
    return masks.Window(*bounds), jnp.stack(arrays) if RUNTIME in bounds else None


def _make_positions(a: Arguments) -> jax.Array | None:
    """int32 [B, 4] (q offset, q stride, kv offset, kv stride), or None."""
    if a.q_position is None and a.kv_position is None:
        return None
    columns = []
    for name in ("q_position", "kv_position"):
        pair = (0, 1) if getattr(a, name) is None else getattr(a, name)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise invalid(name, _shown(pair), "a pair (offset, stride)", "Pass (offset, 1) for consecutive positions")
        for what, value in zip(("offset", "stride"), pair, strict=True):
            allowed = f"integers, a scalar or one per example [{a.q.shape[0]}]"
            array = _converted(f"{name} ({what})", value, allowed)
            if array.shape not in ((), (a.q.shape[0],)) or not jnp.issubdtype(array.dtype, jnp.integer):
                raise invalid(f"{name} ({what})", f"{array.dtype}{list(array.shape)}", allowed, "Convert it to int32")
            if what == "stride" and (_known(value, default=1) <= 0).any():
                raise invalid(f"{name} (stride)", _shown(value), "at least 1", "Order the sequence by position")
            columns.append(jnp.broadcast_to(as_int32(array), (a.q.shape[0],)))
    return jnp.stack(columns, axis=1)


def _known(value: Any, default: int) -> np.ndarray:
    """An array's numbers where this process knows them when the program is traced; else `default`."""
    try:
        return np.asarray(value)
    except (jax.errors.TracerArrayConversionError, RuntimeError):  # traced; on devices of other processes
        return np.asarray(default)


def _make_mask(a: Arguments) -> tuple[Mask, Any, tuple[jax.Array, ...]]:
    """(mask without the window, mask array or None, arrays of predicates)."""
    mask: Mask = masks.Causal() if flag("causal", a.causal) else masks.Full()
    array = None
    operands: dict[Mask, tuple[jax.Array, ...]] = {}
    if _is_array(a.mask):
        array = a.mask
        mask &= masks.MaskArray()
    elif a.mask is not None:
        given = MaskFn(a.mask) if callable(a.mask) and not isinstance(a.mask, type) else a.mask
        if not isinstance(given, Mask):
            raise invalid("mask", repr(a.mask), "a mask of jax_fa4.masks, a function f(b, h, q, k), a boolean array",
                          "Combine masks with `&`; wrap a function that reads arrays in MaskFn(f, operands=...)")
        for part in given.parts:
            _check_mask_part(part)
            if isinstance(part, MaskFn):
                function, arrays = trace("mask", part.function, part.operands, None)
                part = masks.Predicate(function)
                if part in operands and arrays:
                    raise invalid("mask", f"{function} twice", "distinct functions", "Join the two into one function")
                operands[part] = arrays
            mask &= part
    if (a.q_segment_ids is None) != (a.kv_segment_ids is None):
        one, other = ("q", "kv") if a.kv_segment_ids is None else ("kv", "q")
        raise invalid(f"{other}_segment_ids", f"None, with {one}_segment_ids given", "both or neither",
                      f"Pass {other}_segment_ids too; for self-attention it is the same array")
    if a.q_segment_ids is not None:
        mask &= masks.Segments()
    mask &= masks.Lengths(a.q_lengths is not None, a.kv_lengths is not None)
    return mask, array, tuple(x for arrays in operands.values() for x in arrays)


def _check_mask_part(part: Mask) -> None:
    """Refuses parts that belong to other arguments, and windows that `window` would refuse."""
    if isinstance(part, masks.Window):
        bounds = part.left, part.right
        if any(bound is RUNTIME or _is_array(bound) for bound in bounds):
            raise invalid("mask", repr(part), "windows with static bounds",
                          "Pass traced bounds as window=(left, right)")
        _make_window(bounds)
    elif not isinstance(part, masks.Causal | MaskFn | masks.Predicate):
        remedy = {masks.Segments: "Pass q_segment_ids and kv_segment_ids",
                  masks.Lengths: "Pass q_lengths or kv_lengths",
                  masks.MaskArray: "Pass the array itself"}.get(type(part), "Wrap a function in MaskFn")
        raise invalid("mask", repr(part), "Causal, Window, MaskFn and their `&`", remedy)


def _make_score_mods(a: Arguments, score_dtype: Any) -> tuple[tuple[ScoreMod, ...], tuple[jax.Array, ...]]:
    mods: list[ScoreMod] = []
    operands: tuple[jax.Array, ...] = ()
    if a.softcap is not None:
        mods.append(SoftCap(positive("softcap", a.softcap)))
    if a.bias is not None:
        mods.append(Bias())
    several = isinstance(a.score_mods, Iterable) and not callable(a.score_mods)
    for mod in a.score_mods if several else [a.score_mods]:
        wrapped = ScoreFn(mod) if callable(mod) else mod
        if not isinstance(wrapped, ScoreFn):
            raise invalid("score_mods", repr(mod), "functions f(score, b, h, q, k) and ScoreFn(f, operands=...)",
                          "Leave score_mods out for none; soft-capping and bias have arguments of their own")
        function, arrays = trace("score_mods", wrapped.function, wrapped.operands, score_dtype)
        mods.append(ScoreMap(function))
        operands += arrays
    return tuple(mods), operands
