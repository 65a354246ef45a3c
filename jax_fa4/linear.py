"""A linear function with a transpose of our own, as a JAX primitive.

`jax.custom_vjp` has no forward mode, and `jax.custom_derivatives.linear_call` neither batches nor has derivatives with
respect to its residuals. This primitive has all of them: reverse mode transposes the function with the transpose that
comes with it, forward mode runs the function, and derivatives with respect to residuals differentiate plain JAX code
(`LinearMap.plain`), where there is some.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .errors import Unsupported

Arrays = Sequence[jax.Array]


class LinearMap(Protocol):
    """A function of (residuals, inputs), linear in its inputs; both are sequences of arrays. Hashable."""

    def apply(self, residuals: Arrays, inputs: Arrays) -> Arrays:
        """The function."""

    def transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        """Its transpose: one cotangent per input."""

    def plain(self, residuals: Arrays, inputs: Arrays) -> Arrays:
        """`apply`, written so that JAX can differentiate it; raises Unsupported where that is impossible."""

    def plain_transpose(self, residuals: Arrays, cotangents: Arrays) -> Arrays:
        """`transpose`, written so that JAX can differentiate it; raises Unsupported where that is impossible."""

    @property
    def refusal(self) -> str | None:
        """Why `apply` cannot run (it still has to be traceable, for its types), or None."""

    @property
    def transpose_refusal(self) -> str | None:
        """The same for `transpose`."""


def linear_call(linear: LinearMap, residuals: Arrays, inputs: Arrays) -> list[jax.Array]:
    """`linear.apply(residuals, inputs)`, differentiated and transposed as `linear` says."""
    count = len(residuals)
    jaxpr = jax.make_jaxpr(lambda *args: tuple(linear.apply(args[:count], args[count:])))(*residuals, *inputs)
    return linear_p.bind(*residuals, *inputs, jaxpr=jaxpr, linear=linear, count=count)


@dataclass(frozen=True)
class _Transposed:
    inner: LinearMap

    def apply(self, residuals, inputs):
        return self.inner.transpose(residuals, inputs)

    def transpose(self, residuals, cotangents):
        return self.inner.apply(residuals, cotangents)

    def plain(self, residuals, inputs):
        return self.inner.plain_transpose(residuals, inputs)

    def plain_transpose(self, residuals, cotangents):
        return self.inner.plain(residuals, cotangents)

    @property
    def refusal(self):
        return self.inner.transpose_refusal

    @property
    def transpose_refusal(self):
        return self.inner.refusal


@dataclass(frozen=True)
class _Batched:
    """A map over axis 0 of all inputs, and of the residuals that `axes` marks 0 (None: shared)."""

    inner: LinearMap
    axes: tuple[int | None, ...]
    axis_name: Any
    spmd_axis_name: Any

    def _map(self, function, residuals, inputs):
        spmd = {} if self.spmd_axis_name is None else {"spmd_axis_name": self.spmd_axis_name}
        return jax.vmap(function, in_axes=(self.axes, 0), axis_name=self.axis_name, **spmd)(
            tuple(residuals), tuple(inputs))

    def apply(self, residuals, inputs):
        return self._map(self.inner.apply, residuals, inputs)

    def transpose(self, residuals, cotangents):
        return self._map(self.inner.transpose, residuals, cotangents)

    def plain(self, residuals, inputs):
        return self._map(self.inner.plain, residuals, inputs)

    def plain_transpose(self, residuals, cotangents):
        return self._map(self.inner.plain_transpose, residuals, cotangents)

    @property
    def refusal(self):
        return self.inner.refusal

    @property
    def transpose_refusal(self):
        return self.inner.transpose_refusal


linear_p = Primitive("fa4_linear")
linear_p.multiple_results = True


@linear_p.def_abstract_eval
def _abstract_eval(*_, jaxpr, linear, count):
    return jaxpr.out_avals


def _run(*args, jaxpr, linear, count):
    if linear.refusal:
        raise Unsupported(linear.refusal)
    return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *args)


linear_p.def_impl(_run)
mlir.register_lowering(linear_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals, tangents, *, jaxpr, linear, count):
    residuals, inputs = primals[:count], primals[count:]
    d_residuals, d_inputs = tangents[:count], tangents[count:]
    out = linear_p.bind(*primals, jaxpr=jaxpr, linear=linear, count=count)
    parts = []
    if not all(type(t) is ad.Zero for t in d_inputs):
        parts.append(linear_call(linear, residuals, [ad.instantiate_zeros(t) for t in d_inputs]))
    moving = [i for i, t in enumerate(d_residuals) if type(t) is not ad.Zero]
    if moving:

        def of_moving(*values):
            all_residuals = list(residuals)
            for i, value in zip(moving, values, strict=True):
                all_residuals[i] = value
            return list(linear.plain(all_residuals, inputs))

        parts.append(jax.jvp(of_moving, [residuals[i] for i in moving], [d_residuals[i] for i in moving])[1])
    if not parts:
        return out, [ad.Zero.from_primal_value(x) for x in out]
    return out, parts[0] if len(parts) == 1 else [a + b for a, b in zip(*parts, strict=True)]


ad.primitive_jvps[linear_p] = _jvp


def _transpose(cotangents, *args, jaxpr, linear, count):
    residuals, inputs = args[:count], args[count:]
    cotangents = [ad.instantiate_zeros(c) if type(c) is ad.Zero else c for c in cotangents]
    out = linear_call(_Transposed(linear), residuals, cotangents)
    return [None] * count + [g if ad.is_undefined_primal(x) else None for g, x in zip(out, inputs, strict=True)]


ad.primitive_transposes[linear_p] = _transpose


def _batch(axis_data, args, dims, *, jaxpr, linear, count):
    if all(d is None for d in dims):  # JAX asks even then, and a result that varies with nothing must stay unbatched
        out = linear_p.bind(*args, jaxpr=jaxpr, linear=linear, count=count)
        return out, [None] * len(out)
    moved = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True)]
    residuals, inputs = moved[:count], moved[count:]
    inputs = [
        batching.broadcast(x, axis_data.size, 0, axis_data.explicit_mesh_axis) if d is None else x
        for x, d in zip(inputs, dims[count:], strict=True)]
    batched = _Batched(linear, tuple(None if d is None else 0 for d in dims[:count]), axis_data.name,
                       axis_data.spmd_name)
    out = linear_call(batched, residuals, inputs)
    return out, [0] * len(out)


batching.fancy_primitive_batchers[linear_p] = _batch
