"""A user's callable as a value: traced once to a scalar jaxpr, which is hashed, differentiated, vectorised and lowered.

Mask predicates and score functions are written for one score: `f(b, h, q, k, *operands)` and `f(score, b, h, q, k,
*operands)`. `trace` turns one into a `ScalarFunction`, whose text is its identity, so that two equal lambdas share one
compiled kernel. Every array that the callable reads is an argument of the jaxpr: those named in `operands=`, and after
them concrete arrays that it captured.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from .errors import InvalidArgument, invalid


@dataclass(frozen=True)
class ScalarFunction:
    """A scalar jaxpr; equality and hash are those of its text.

    Attributes:
      text: the jaxpr, printed; the key.
      jaxpr: a ClosedJaxpr without constants. Its inputs are scalars (an optional floating `score`, then int32 b, h, q,
        k), then `operand_count` arrays of any shape. Its one output is a scalar.
      operand_count: how many arrays it reads.
      explicit_count: how many of them the callable takes as arguments; the rest it captured.
      source: the callable, for scores of another dtype than it was traced for (the float64 oracle).
    """

    text: str
    jaxpr: Any = field(compare=False, repr=False)
    operand_count: int
    explicit_count: int = field(compare=False, repr=False)
    source: Callable = field(compare=False, repr=False)

    def __call__(self, *args: Any) -> jax.Array:
        """Evaluates the function on scalars and operands; traceable and differentiable by JAX."""
        if args[0].dtype != self.jaxpr.in_avals[0].dtype:
            explicit = len(self.jaxpr.in_avals) - self.operand_count + self.explicit_count
            return jnp.asarray(self.source(*args[:explicit])).astype(args[0].dtype)
        (result,) = jax.core.eval_jaxpr(self.jaxpr.jaxpr, self.jaxpr.consts, *args)
        return result

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
      the traced function, and all arrays that it reads: `operands`, then concrete arrays that it captured.

    Raises:
      InvalidArgument: it fails on scalars, captures a tracer, or returns something else than one scalar.
    """
    scalar = () if score_dtype is None else (jax.ShapeDtypeStruct((), score_dtype),)
    indices = (jax.ShapeDtypeStruct((), jnp.int32),) * 4
    arrays = tuple(jnp.asarray(x) for x in operands)
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
    if any(isinstance(c, jax.core.Tracer) for c in closed.consts):
        raise invalid(
            argument,
            f"{function!r}, which captures a traced array",
            "functions that get every traced array as an argument",
            f"Pass the array in operands=(...) and read it in {signature}: only then does it have a gradient",
        )
    wanted = jnp.bool_ if score_dtype is None else score_dtype
    outputs = closed.out_avals
    if len(outputs) != 1 or outputs[0].shape != () or (outputs[0].dtype == jnp.bool_) != (wanted == jnp.bool_):
        got = ", ".join(f"{x.dtype}{list(x.shape)}" for x in outputs)
        raise invalid(argument, f"{function!r}, which returns {got}", f"one scalar of dtype {jnp.dtype(wanted)}",
                      f"Make {signature} return the {'decision' if wanted == jnp.bool_ else 'new score'} for one score")

    def lifted(*args):
        own, consts = args[: len(args) - len(closed.consts)], args[len(args) - len(closed.consts) :]
        (result,) = jax.core.eval_jaxpr(closed.jaxpr, consts, *own)
        return result.astype(wanted)

    arrays += tuple(jnp.asarray(c) for c in closed.consts)
    lifted_jaxpr = jax.make_jaxpr(lifted)(*scalar, *indices, *arrays)
    text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", str(lifted_jaxpr.jaxpr)).split())
    return ScalarFunction(text, lifted_jaxpr, len(arrays), len(operands), function), arrays
