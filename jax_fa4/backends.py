"""The ways to compute attention, and which of them a call takes.

`xla` is plain JAX (`blockwise`) and does everything. `cuda` and `emulate:<arch>` run the kernels (`call`), which refuse
some specs. `auto` takes the kernels where the program is lowered for a GPU and they can do the spec, else `xla`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax

from . import blockwise
from .errors import Unsupported, invalid
from .operands import Operands
from .spec import AttentionSpec
from .vjp import Backward, Forward, Rule, attend

BACKENDS = ("cuda", "xla", "emulate:sm_90a", "emulate:sm_100a")
"""What `attention(backend=...)` takes beside "auto", in the order in which auto prefers them (it never emulates)."""


@dataclass(frozen=True)
class Backend:
    """One way to compute attention; `Rule` says what the plain functions are for."""

    name: str
    forward: Forward
    backward: Backward
    plain_forward: Forward | None = None
    plain_backward: Backward | None = None

    def attend(self, spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        """Differentiable o [B, S, H, E] and LSE [B, H, S]."""
        return attend(self.rule(spec), self.forward, operands)

    def rule(self, spec: AttentionSpec) -> Rule:
        """How this backend is differentiated."""
        return Rule(spec, self.backward, self.plain_forward, self.plain_backward, self.name)


XLA = Backend("xla", blockwise.forward, blockwise.backward, blockwise.forward, blockwise.backward)


def why_not(name: str, spec: AttentionSpec, operands: Operands) -> str | None:
    """Why a backend cannot run a call on this machine, as a clause; None if it can.

    Raises:
      InvalidArgument: no such backend.
    """
    check_name(name)
    if name in ("auto", "xla"):
        return None
    from . import call

    return call.why_not(name, spec, operands)


def resolve(name: str, spec: AttentionSpec, operands: Operands) -> Backend:
    """The backend for a call.

    Raises:
      InvalidArgument: no such backend.
      Unsupported: the backend asked for by name cannot do the spec.
    """
    check_name(name)
    if name == "xla":
        return XLA
    from . import call

    if name == "auto":
        forward, backward = (call.unsupported("cuda", spec, operands, p) is None for p in ("forward", "backward"))
        return _AUTO[forward, backward]
    reason = call.unsupported(name, spec, operands)
    if reason is not None:
        raise Unsupported(f"backend {name!r} cannot run this call: {reason}. Asked for {spec}. "
                          "Use backend='auto' or 'xla'")
    return _kernels(name)


def check_name(name: Any) -> None:
    """Raises InvalidArgument unless it names a backend."""
    if name != "auto" and name not in BACKENDS:
        raise invalid("backend", repr(name), ", ".join(map(repr, ("auto", *BACKENDS))),
                      "Leave backend out for the fastest one that can run the call")


@functools.cache
def _kernels(name: str) -> Backend:
    from . import call

    return Backend(name, functools.partial(call.forward, name), functools.partial(call.backward, name))


def _auto_forward(spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
    kernels = _kernels("cuda").forward
    return jax.lax.platform_dependent(
        operands, cuda=lambda x: kernels(spec, x), default=lambda x: blockwise.forward(spec, x))


def _auto_backward(
    spec: AttentionSpec, operands: Operands, lse: jax.Array, delta: jax.Array, do: jax.Array
) -> blockwise.Gradients:
    kernels = _kernels("cuda").backward
    return jax.lax.platform_dependent(
        operands, lse, delta, do, cuda=lambda *x: kernels(spec, *x), default=lambda *x: blockwise.backward(spec, *x))


_AUTO = {
    (forward, backward): Backend("auto", _auto_forward if forward else blockwise.forward,
                                 _auto_backward if backward else blockwise.backward,
                                 blockwise.forward, blockwise.backward)
    for forward in (False, True) for backward in (False, True)}
"""`auto` by whether the kernels can do (forward, backward) of a spec."""
