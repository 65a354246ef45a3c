"""A user's callable as a value: traced once to a scalar jaxpr, which is hashed, differentiated, vectorised and lowered.

Mask predicates and score functions are written for one score: `f(b, h, q, k, *operands)` and `f(score, b, h, q, k,
*operands)`. `trace` turns one into a `ScalarFunction`, whose text is its identity, so that two equal lambdas share one
compiled kernel. Every array that the callable reads is an argument of the jaxpr, named in `operands=`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .errors import InvalidArgument, invalid


@dataclass(frozen=True)
class ScalarFunction:
    """A traced callable; equality and hash are those of its text.

    Attributes:
      text: the scalar jaxpr, printed, and that of its derivative where the function has a rule of its own; the key.
      jaxpr: a ClosedJaxpr without constants. Its inputs are scalars (an optional floating `score`, then int32 b, h, q,
        k), then `operand_count` arrays of any shape. Its one output is a scalar, boolean or of the score's dtype.
      operand_count: how many arrays it reads.
      source: the callable. It reads nothing but its arguments, so that equal texts mean equal functions.
    """

    text: str
    jaxpr: Any = field(compare=False, repr=False)
    operand_count: int
    source: Callable = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> jax.Array:
        """The function of scalars and operands; traceable and differentiable by JAX, and for scores of any dtype."""
        result = jnp.asarray(self.source(*args))
        return result if result.dtype == jnp.bool_ else result.astype(args[0].dtype)

    def on_tile(self, tile: "Tile", operands: Sequence[jax.Array], score: jax.Array | None = None) -> jax.Array:
        """The function at every score of a tile: [B, H, Q, K].

        Vectorised one axis at a time, so that what depends on the head alone, say, is computed once a head.
        """
        scalars = () if score is None else (score,)
        lead, rest = (0,) * len(scalars), (None,) * len(operands)
        q_axis, k_axis = (0 if x.ndim == 2 else None for x in (tile.q, tile.k))
        function = self.__call__
        for axes in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, q_axis, k_axis)):
            function = jax.vmap(function, in_axes=(*lead, *axes, *rest))
        return function(*scalars, tile.b, tile.h, tile.q, tile.k, *operands)


@dataclass(frozen=True)
class Tile:
    """Where a tile of scores lies, in int32.

    Attributes:
      b, h: batch [B] and query head [H] indices.
      rows, columns: consecutive query row [Q] and key [K] indices.
      q, k: what user functions get: positions [B, Q] and [B, K] where the call gives positions, else rows and columns.
    """

    b: jax.Array
    h: jax.Array
    rows: jax.Array
    columns: jax.Array
    q: jax.Array
    k: jax.Array


def trace(
    argument: str, function: Callable, operands: Sequence[Any], score_dtype: Any | None
) -> tuple[ScalarFunction, tuple[Any, ...]]:
    """Traces a user's callable.

    Args:
      argument: the public argument it came in, for error messages.
      function: `f(score, b, h, q, k, *operands)`, or without `score` when `score_dtype` is None.
      operands: the arrays that it reads.
      score_dtype: the dtype of scores; None for a mask predicate, which returns a boolean.

    Returns:
      the traced function, and `operands` as JAX arrays.

    Raises:
      InvalidArgument: it fails on scalars, captures an array, or returns something else than one scalar.
    """
    scalar = () if score_dtype is None else (jax.ShapeDtypeStruct((), score_dtype),)
    indices = (jax.ShapeDtypeStruct((), jnp.int32),) * 4
    arrays = _arrays(argument, operands)
    signature = "f(b, h, q, k, *operands)" if score_dtype is None else "f(score, b, h, q, k, *operands)"
    try:
        closed = jax.make_jaxpr(function)(*scalar, *indices, *arrays)
    except InvalidArgument:
        raise
    except Exception as error:
        raise invalid(
            argument,
            f"{function!r}, which failed when called with scalars: {type(error).__name__}: {error}",
            f"a traceable function {signature} of scalars",
            "Write it with jax.numpy for one score; use jnp.where instead of `if`",
        ) from error
    wrapper = "MaskFn" if score_dtype is None else "ScoreFn"
    remedy = (f"Pass it as an operand, {wrapper}(f, operands=(array,)), and read it in {signature}, where it also has "
              "a gradient; Python numbers may be captured")
    _refuse_captured(argument, function, closed, remedy)
    wanted = jnp.bool_ if score_dtype is None else score_dtype
    outputs = closed.out_avals
    if len(outputs) != 1 or outputs[0].shape != () or (outputs[0].dtype == jnp.bool_) != (wanted == jnp.bool_):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in outputs)
        raise invalid(argument, f"{function!r}, which returns {got}", f"one scalar of dtype {jnp.dtype(wanted)}",
                      f"Make {signature} return the {'decision' if wanted == jnp.bool_ else 'new score'} for one score")
    if score_dtype is not None and outputs[0].dtype != wanted:
        closed = jax.make_jaxpr(lambda *args: jnp.asarray(function(*args)).astype(wanted))(*scalar, *indices, *arrays)
    text = _text(closed)
    if score_dtype is not None and "custom_" in text:  # it has a rule of its own, of which the text tells nothing

        def derivative(*args):
            return jax.vjp(lambda *x: jnp.asarray(function(*x)).astype(wanted), *args)[1](jnp.ones((), wanted))

        types = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)  # inside shard_map arrays vary, 1.0 does not
        rule = jax.make_jaxpr(derivative)(*scalar, *indices, *types)
        _refuse_captured(argument, function, rule, remedy)
        text += f" derivative {_text(rule)}"
    return ScalarFunction(text, closed, len(arrays), function), arrays


def _arrays(argument: str, operands: Any) -> tuple[jax.Array, ...]:
    """The operands of a callable as arrays."""
    received = type(operands).__name__
    if isinstance(operands, tuple | list):
        try:
            return tuple(jnp.asarray(x) for x in operands)
        except (TypeError, ValueError):
            received += f" of {', '.join(type(x).__name__ for x in operands)}"
    raise invalid(f"{argument} (operands)", received, "a tuple of arrays", "Write operands=(array,) for a single one")


def _refuse_captured(argument: str, function: Callable, closed: Any, remedy: str) -> None:
    """Refuses a function whose jaxpr, or a function called in it, holds arrays."""
    captured = dict.fromkeys(f"{jnp.result_type(c)}{list(jnp.shape(c))}" for c in _constants(closed))
    if captured:
        raise invalid(argument, f"{function!r}, which captures an array ({', '.join(captured)})",
                      "functions that get every array as an argument", remedy)


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The arrays that a jaxpr and those within it hold; a function under `jax.jit` keeps its own."""
    yield from getattr(jaxpr, "consts", ())
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "eqns"):
                yield from _constants(inner)


def _text(closed: Any) -> str:
    return " ".join(re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr)).split())
