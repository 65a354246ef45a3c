"""Differentiation of attention: what is saved, and how a backend's backward becomes JAX's.

`attend` runs a backend's forward outside differentiation, names its two results for remat policies, and lets `attach`
tie them to the operands: an identity on (o, lse) whose derivative is attention's. Only operands, o and lse are saved;
since they are named where they are made, `save_only_these_names(*CHECKPOINT_NAMES)` runs the forward once. `attach` is
a `jax.custom_jvp` whose tangent is a `linear_call`, so reverse mode runs the backend's backward, and forward mode and
second derivatives exist where the backend is plain JAX.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .blockwise import Gradients
from .errors import Unsupported
from .linear import linear_call
from .operands import Operands
from .spec import AttentionSpec, compute_dtype
from .varying import match_varying

CHECKPOINT_NAMES = ("fa4_out", "fa4_lse")
"""The names of attention's residuals, for `jax.checkpoint_policies.save_only_these_names`; save both."""

Forward = Callable[[AttentionSpec, Operands], tuple[jax.Array, jax.Array]]
Backward = Callable[[AttentionSpec, Operands, jax.Array, jax.Array, jax.Array], Gradients]


@dataclass(frozen=True)
class Rule:
    """How one way of computing attention is differentiated. Static and hashable: functions are module-level ones.

    Attributes:
      spec: what is computed.
      backward: the backend's backward, `(spec, operands, lse, delta, do) -> Gradients`.
      plain_forward, plain_backward: the same mathematics as code that JAX can differentiate, for forward mode and
        second derivatives; None where those are refused.
      name: of the backend, for the refusal.
    """

    spec: AttentionSpec
    backward: Backward
    plain_forward: Forward | None = None
    plain_backward: Backward | None = None
    name: str = ""


def attend(rule: Rule, forward: Forward, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Differentiable attention: o [B, S, H, E] and LSE [B, H, S], by a backend's forward and a rule."""
    operands = match_varying(operands)
    o, lse = forward(rule.spec, jax.tree.map(jax.lax.stop_gradient, operands))
    return attach(rule, operands, checkpoint_name(o, CHECKPOINT_NAMES[0]), checkpoint_name(lse, CHECKPOINT_NAMES[1]))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def attach(rule: Rule, operands: Operands, o: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(o, lse), as functions of the operands with the derivatives of `rule` (o, lse themselves are constants)."""
    return o, lse


@attach.defjvp
def _attach_jvp(rule, primals, tangents):
    operands, o, lse = primals
    o, lse = attach(rule, operands, o, lse)  # attached, so that this rule's own derivatives see how they depend
    leaves, treedef = jax.tree.flatten(operands)
    moving = tuple(jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves)
    inputs = [t for t, m in zip(jax.tree.leaves(tangents[0]), moving, strict=True) if m]
    d_o, d_lse = linear_call(_Differential(rule, treedef, moving), (*leaves, o, lse), inputs)
    return (o, lse), (d_o, d_lse)


@dataclass(frozen=True)
class _Differential:
    """The `LinearMap` from tangents of the floating operands to those of (o, lse).

    Its residuals are all leaves of the operands, then o and lse.
    """

    rule: Rule
    treedef: Any
    moving: tuple[bool, ...]

    def _operands(self, residuals) -> Operands:
        return jax.tree.unflatten(self.treedef, residuals[:-2])

    def apply(self, residuals, inputs):
        if self.rule.plain_forward is None:
            return residuals[-2:]  # of the right types; `refusal` keeps it from running
        return self.plain(residuals, inputs)

    def plain(self, residuals, inputs):
        if self.rule.plain_forward is None:
            raise Unsupported(self.refusal)
        leaves = residuals[:-2]

        def forward(*values):
            values = iter(values)
            merged = [next(values) if m else x for x, m in zip(leaves, self.moving, strict=True)]
            return self.rule.plain_forward(self.rule.spec, jax.tree.unflatten(self.treedef, merged))

        primals = [x for x, m in zip(leaves, self.moving, strict=True) if m]
        return jax.jvp(forward, primals, list(inputs))[1]

    def transpose(self, residuals, cotangents):
        return self._gradients(self.rule.backward, residuals, cotangents)

    def plain_transpose(self, residuals, cotangents):
        if self.rule.plain_backward is None:
            raise Unsupported(f"backend {self.rule.name!r} has no second derivatives; use backend='xla' for them")
        return self._gradients(self.rule.plain_backward, residuals, cotangents)

    def _gradients(self, backward, residuals, cotangents) -> Sequence[jax.Array]:
        operands, (o, lse) = self._operands(residuals), residuals[-2:]
        do, dlse = cotangents
        gradients = operand_gradients(backward, self.rule.spec, operands, (o, lse), (do, dlse))
        by_leaf = zip(jax.tree.leaves(gradients), self.moving, strict=True)
        return [g for g, m in by_leaf if m]

    @property
    def refusal(self):
        if self.rule.plain_forward is None:
            return (f"backend {self.rule.name!r} has no forward-mode derivatives (jax.jvp, jax.jacfwd); "
                    "use backend='xla' for them")
        return None

    transpose_refusal = None


def operand_gradients(
    backward: Backward,
    spec: AttentionSpec,
    operands: Operands,
    results: tuple[jax.Array, jax.Array],
    cotangents: tuple[jax.Array, jax.Array],
) -> Operands:
    """Cotangents of all operands, in their own dtypes (zeros for those without a gradient)."""
    (o, lse), (do, dlse) = results, cotangents
    # Where LSE is constant its cotangent may be NaN: that of `where(isfinite(lse), f(lse), 0)` is, for many an f.
    d = delta(o, do, jnp.where(lse == -jnp.inf, 0, dlse))
    g = backward(spec, operands, lse, d, do)
    zeros = jax.tree.map(jnp.zeros_like, operands)
    score_operands = tuple(
        z if x is None else x for x, z in zip(g.dscore_operands, zeros.score_operands, strict=True))
    sinks = None if operands.sinks is None else sink_gradient(operands.sinks, lse, d)
    values = Operands(
        **{**vars(zeros), "q": g.dq, "k": g.dk, "v": g.dv, "bias": g.dbias, "sinks": sinks,
           "score_operands": score_operands})
    return jax.tree.map(lambda x, like: x.astype(like.dtype), values, operands)


def delta(o: jax.Array, do: jax.Array, dlse: jax.Array | None = None) -> jax.Array:
    """rowsum(o * do) - dlse, [B, H, S] in float32 or wider: what every score's cotangent in a row has subtracted."""
    wide = compute_dtype(o.dtype)
    rows = (o.astype(wide) * do.astype(wide)).sum(axis=-1).transpose(0, 2, 1)
    return rows if dlse is None else rows - dlse.astype(wide)


def sink_gradient(sinks: jax.Array, lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The cotangent of sinks [H]: -sum(exp(sink - lse) * delta) over examples and rows."""
    sinks = sinks[None, :, None]
    p = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - jnp.where(lse == -jnp.inf, 0, lse)))
    return -(p * delta).sum(axis=(0, 2))
