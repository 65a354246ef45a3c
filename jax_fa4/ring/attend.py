"""Ring attention on one device's arrays, and its backward: a ring of its own."""

import dataclasses

import jax

from .. import backends, vjp
from ..blockwise import Gradients
from ..operands import Operands
from ..spec import AttentionSpec
from .local import Block, Call, Ring, backward_in_one, part_spec, parts
from .merge import with_sink
from .sweep import Pass, Send, sweep
from .transfer import send, send_together


def attend(ring: Ring, spec: AttentionSpec, operands: Operands, backend: str) -> tuple[jax.Array, jax.Array]:
    """Differentiable attention of this device's rows over the keys of all devices (inside shard_map).

    Args:
      ring: the ring.
      spec: of the whole attention.
      operands: this device's arrays; lengths and positions speak of the whole sequence.
      backend: name of the backend that runs each step.

    Returns:
      o [B, S, H, E] of `spec.out_dtype` and LSE [B, H, S].
    """
    step = _step_backend(ring, spec, operands, backend)
    plain_forward = plain_backward = None
    if step.plain_forward is not None:
        plain_forward, plain_backward = Forward(ring, backends.XLA, send), Backward(ring, backends.XLA, send)
    rule = vjp.Rule(spec, Backward(ring, step, send_together), plain_forward, plain_backward, backend)
    return vjp.attend(rule, Forward(ring, step, send_together), operands)


def _step_backend(ring: Ring, spec: AttentionSpec, operands: Operands, backend: str) -> backends.Backend:
    """The backend that all steps run on; `auto` takes kernels only where they can do every part of every step."""
    equal = operands.q.shape[1] == operands.k.shape[1]
    visits_others = any(level.chains for level in ring.levels)
    wanted = {
        part_spec(spec, part)
        for own in ((True, False) if visits_others else (True,))
        for in_one in {True, backward_in_one(operands)}
        for part in parts(ring, spec, equal, own, ring.index(), in_one)
    }
    found = {backends.resolve(backend, asked, operands) for asked in wanted}
    return found.pop() if len(found) == 1 else backends.XLA


@dataclasses.dataclass(frozen=True)
class Forward:
    """A backend's forward that runs a ring of another backend's calls."""

    ring: Ring
    step: backends.Backend
    send: Send

    def __call__(self, spec: AttentionSpec, operands: Operands) -> tuple[jax.Array, jax.Array]:
        call = Call(self.ring, spec, operands, self.step)
        (o, lse), _ = sweep(self.ring.levels, _own_block(operands), None, Pass(call.forward, self.send))
        if operands.sinks is not None:
            o, lse = with_sink((o, lse), operands.sinks)
        return o.astype(spec.out_dtype), lse


@dataclasses.dataclass(frozen=True)
class Backward:
    """The same for backward: dK and dV ride behind their block and come home, dQ stays."""

    ring: Ring
    step: backends.Backend
    send: Send

    def __call__(
        self, spec: AttentionSpec, operands: Operands, lse: jax.Array, delta: jax.Array, do: jax.Array
    ) -> Gradients:
        call = Call(self.ring, spec, operands, self.step)
        own = call.backward_in_halves(lse, delta, do) if _whole_blocks_come_home(self.ring) else None
        work = Pass(call.backward(lse, delta, do), self.send, own)
        (dq, dscore_operands), (dk, dv) = sweep(self.ring.levels, _own_block(operands), None, work)
        return Gradients(dq, dk, dv, None, dscore_operands)


def _whole_blocks_come_home(ring: Ring) -> bool:
    """Whether gradients of whole blocks come home after the last visit, for which there is work to be kept."""
    if len(ring.levels) != 1:
        return False
    chains = ring.levels[0].chains
    return any(chain.final for chain in chains) and all(chain.cut is None for chain in chains)


def _own_block(operands: Operands) -> Block:
    return Block(operands.k, operands.v, operands.kv_segment_ids)
