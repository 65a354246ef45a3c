"""One device's share of ring attention: which part of which block it attends to, and the merge of the parts."""

import dataclasses
import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..layout import Layout, Zigzag
from ..masks import Causal, Full, Lengths, Mask, MaskArray, Predicate, Segments, Window
from ..operands import Operands
from ..scores import ScoreMap, SoftCap
from ..spec import AttentionSpec
from .merge import merge
from .schedule import Cut, Level
from .sweep import Halves, Visit

MOST_ROWS_IN_ONE = 1 << 16
"""For `backward_in_one`. With more rows a head's Q, dO and dQ leave a GPU's L2 cache between two tiles of keys, and
taking half of them at a time is faster, in spite of copies."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """The static shape of a ring.

    Attributes:
      levels: mesh axes, outermost first; their product is the ring's size.
      layout: how rows lie on devices.
    """

    levels: tuple[Level, ...]
    layout: Layout

    @property
    def size(self) -> int:
        return math.prod(level.size for level in self.levels)

    def index(self) -> jax.Array:
        """This device's place in the ring (inside shard_map)."""
        return lax.axis_index(tuple(level.axis for level in self.levels))

    def owner(self, shifts: tuple[Any, ...]) -> Any:
        """The device whose block is here after the given shifts."""
        owner: Any = 0
        for level, shift in zip(self.levels, shifts, strict=True):
            owner = owner * level.size + (lax.axis_index(level.axis) - shift) % level.size
        return owner

    def affine(self, device: Any, chunk: Any, rows: int) -> tuple[Any, Any]:
        """(offset, stride) of the first chunk (None), a given one, or a range of rows of a device that holds `rows`."""
        if isinstance(chunk, range):
            offset, stride = self.layout.affine(device, 0, self.size, rows)
            return offset + chunk.start * stride, stride
        return self.layout.affine(device, 0 if chunk is None else chunk, self.size, rows)

    def cut(self, shifts: tuple[Any, ...]) -> Cut | None:
        """What the blocks that arrive after these shifts are cut down to."""
        if len(self.levels) != 1 or not isinstance(shifts[0], int):
            return None
        cuts = [chain.cut for chain in self.levels[0].chains if chain.hops[0].shift == shifts[0]]
        return cuts[0] if cuts else None


class Block(NamedTuple):
    """The arrays that travel."""

    k: jax.Array
    v: jax.Array
    segment_ids: jax.Array | None


class Part(NamedTuple):
    """A call of the backend: a chunk (or a range) of query rows against a chunk of keys (None: all of them).

    `mask` is what it must apply; with `positions` it needs to know where its rows and keys sit. `owner_first` says, of
    a whole zigzag block of another device, whether that device comes first (see `Zigzag.across`).
    """

    q_chunk: Any
    kv_chunk: Any
    mask: Mask
    positions: bool
    owner_first: Any = None


def depends_on_position(spec: AttentionSpec) -> bool:
    """Whether moving a block along the sequence changes its scores."""
    return any(isinstance(part, Causal | Window | Predicate) for part in spec.mask.parts) or any(
        isinstance(mod, ScoreMap) for mod in spec.score_mods
    )


def parts(
    ring: Ring, spec: AttentionSpec, lengths_equal: bool, own: bool, owner: Any, in_one: bool = True
) -> list[Part]:
    """The backend calls for one block.

    Args:
      lengths_equal: S == T, so that a device's rows and keys have the same positions.
      own: the block is this device's own.
      owner: its owner's index, perhaps traced.
      in_one: whether a zigzag block of another device is taken in one call, or one for each pair of chunks.
    """
    whole = Part(None, None, spec.mask, positions=False)
    moves = depends_on_position(spec)
    # Rows within a length are the first of each chunk, not of the device.
    lengths = any(isinstance(part, Lengths) for part in spec.mask.parts)
    if not moves and not (lengths and ring.layout.chunks > 1):
        return [whole]
    ordered = lengths_equal and not spec.positions and _order_suffices(spec, ring.layout)
    if own and ordered:
        return [whole]
    if ring.layout.chunks == 1:
        return [whole._replace(positions=moves)]
    if ordered and isinstance(ring.layout, Zigzag):
        owner_first = owner < ring.index()
        if in_one:  # no array is taken apart
            return [Part(None, None, spec.mask, positions=True, owner_first=owner_first)]
        # Of the four pairs of chunks the mask rules two out, keeps one always, and of the two that are left one:
        # which one, depends on the side the owner is on. So both calls are dense and no device branches.
        dense, side = _without_causal(spec.mask), jnp.where(owner_first, 0, 1)
        return [Part(1, 0, dense, False), Part(side, side, dense, False)]
    chunks = range(ring.layout.chunks)
    return [Part(a, b, spec.mask, moves) for a in chunks for b in chunks]


def backward_in_one(operands: Operands) -> bool:
    """Whether backward takes a zigzag block of another device in one call, as forward does."""
    return operands.q.shape[1] <= MOST_ROWS_IN_ONE


def part_spec(spec: AttentionSpec, part: Part) -> AttentionSpec:
    """What the backend is asked for one part of an attention."""
    return dataclasses.replace(spec, mask=part.mask, sink=False, float32_out=True, positions=part.positions)


def _order_suffices(spec: AttentionSpec, layout: Layout) -> bool:
    """Whether, among rows of one device, comparing indices decides as comparing positions does."""
    if any(isinstance(mod, ScoreMap) for mod in spec.score_mods):
        return False
    kinds = (Causal, Segments, Window) if layout.name == "contiguous" else (Causal, Segments)
    return all(isinstance(part, kinds) for part in spec.mask.parts)


def _without_causal(mask: Mask) -> Mask:
    return functools.reduce(operator.and_, (part for part in mask.parts if not isinstance(part, Causal)), Full())


class Call(NamedTuple):
    """What the visits of one pass share."""

    ring: Ring
    spec: AttentionSpec
    operands: Operands
    backend: Any

    def forward(self, block: Block, state: Any, shifts: tuple[Any, ...]) -> tuple:
        """A visit (see `sweep`) whose state is (o float32, lse), None before the first; leaves nothing."""
        for part in self._parts(shifts):
            new = self.backend.forward(*self._part_call(part, block, shifts))
            if part.q_chunk is None:
                state = new if state is None else merge(state, new)
            else:
                o, lse = self._nothing(new) if state is None else state
                merged_o, merged_lse = merge((self._rows(o, part.q_chunk), self._rows(lse, part.q_chunk, 2)), new)
                state = self._put(o, merged_o, part.q_chunk), self._put(lse, merged_lse, part.q_chunk, 2)
        return state, ()

    def backward(self, lse: jax.Array, delta: jax.Array, do: jax.Array) -> Visit:
        """A visit whose state is (dq, score operands' gradients) in float32, and which leaves (dk, dv) for its block.

        Args:
          lse, delta: this device's, [B, H, S] float32.
          do: this device's, [B, S, H, E].
        """

        def visit(block: Block, state: Any, shifts: tuple[Any, ...]) -> tuple:
            left: tuple[jax.Array, jax.Array] | None = None
            for part in self._parts(shifts, backward_in_one(self.operands)):
                rows = (self._rows(x, part.q_chunk, axis) for x, axis in ((lse, 2), (delta, 2), (do, 1)))
                new = self.backend.backward(*self._part_call(part, block, shifts), *rows)
                dq, dscores = (None, None) if state is None else state
                dscores = new.dscore_operands if state is None else jax.tree.map(jnp.add, dscores, new.dscore_operands)
                state = self._add(dq, new.dq, part.q_chunk), dscores
                dk, dv = left or (None, None)
                left = self._add(dk, new.dk, part.kv_chunk), self._add(dv, new.dv, part.kv_chunk)
            return state, left

        return visit

    def backward_in_halves(self, lse: jax.Array, delta: jax.Array, do: jax.Array) -> Halves | None:
        """`backward` of half of the heads, and of the others; None where heads cannot be taken apart."""
        kv_heads, group = self.operands.k.shape[2], self.spec.group
        head_matters = any(isinstance(part, Predicate | MaskArray) for part in self.spec.mask.parts) or any(
            not isinstance(mod, SoftCap) for mod in self.spec.score_mods
        )
        if head_matters or kv_heads < 2:
            return None

        def visit(start: int, stop: int) -> Visit:
            heads, kv = slice(start * group, stop * group), slice(start, stop)
            call = self._replace(operands=dataclasses.replace(self.operands, q=self.operands.q[:, :, heads]))
            of_heads = call.backward(lse[:, heads], delta[:, heads], do[:, :, heads])
            return lambda block, *rest: of_heads(block._replace(k=block.k[:, :, kv], v=block.v[:, :, kv]), *rest)

        def join(first: Any, rest: Any) -> Any:
            return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), first, rest)

        return Halves(visit(0, kv_heads // 2), visit(kv_heads // 2, kv_heads), join)

    def _parts(self, shifts: tuple[Any, ...], in_one: bool = True) -> list[Part]:
        cut = self.ring.cut(shifts)
        if cut is not None:
            return [Part(cut.rows, None, self.spec.mask, positions=True)]
        equal = self.operands.q.shape[1] == self.operands.k.shape[1]
        own = all(isinstance(shift, int) and shift == 0 for shift in shifts)
        return parts(self.ring, self.spec, equal, own, self.ring.owner(shifts), in_one)

    def _part_call(self, part: Part, block: Block, shifts: tuple[Any, ...]) -> tuple[AttentionSpec, Operands]:
        """The spec and the operands of one backend call."""
        o = self.operands
        q, q_ids = (self._rows(x, part.q_chunk) for x in (o.q, o.q_segment_ids))
        k, v, kv_ids = (self._rows(x, part.kv_chunk) for x in block)
        cut = self.ring.cut(shifts)
        q_affine = self.ring.affine(self.ring.index(), part.q_chunk, o.q.shape[1])
        kv_affine = self.ring.affine(self.ring.owner(shifts), cut.keys if cut else part.kv_chunk, o.k.shape[1])
        if part.owner_first is not None:
            q_affine, kv_affine = Zigzag.across(part.owner_first, o.q.shape[1])
        spec = part_spec(self.spec, part)
        lengths = any(isinstance(p, Lengths) for p in part.mask.parts)
        return spec, dataclasses.replace(
            o,
            q=q, k=k, v=v, sinks=None, q_segment_ids=q_ids, kv_segment_ids=kv_ids,
            q_lengths=_local_lengths(o.q_lengths, q_affine, q.shape[1]) if lengths else None,
            kv_lengths=_local_lengths(o.kv_lengths, kv_affine, k.shape[1]) if lengths else None,
            positions=self._positions(q_affine, kv_affine) if part.positions else None,
        )

    def _positions(self, q_affine: tuple, kv_affine: tuple) -> jax.Array:
        """int32 [B, 4]: positions of a part's rows and keys in the whole sequence."""
        o = self.operands
        batch = o.q.shape[0]
        if o.positions is not None:
            base = [o.positions[:, i] for i in range(4)]
        else:
            q_length = o.q.shape[1] * self.ring.size if o.q_lengths is None else o.q_lengths
            kv_length = o.k.shape[1] * self.ring.size if o.kv_lengths is None else o.kv_lengths
            base = [jnp.asarray(x) for x in (kv_length - q_length, 1, 0, 1)]
        columns = [
            base[0] + base[1] * q_affine[0], base[1] * q_affine[1],
            base[2] + base[3] * kv_affine[0], base[3] * kv_affine[1],
        ]
        return jnp.stack([jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch,)) for x in columns], axis=1)

    def _rows(self, x: Any, chunk: Any, axis: int = 1) -> Any:
        """A chunk of rows, all of them for None."""
        if x is None or chunk is None:
            return x
        if isinstance(chunk, range):
            return lax.slice_in_dim(x, chunk.start, chunk.stop, axis=axis)
        run = x.shape[axis] // self.ring.layout.chunks
        return lax.dynamic_slice_in_dim(x, chunk * run, run, axis)

    def _put(self, x: jax.Array, update: jax.Array, chunk: Any, axis: int = 1) -> jax.Array:
        start = chunk.start if isinstance(chunk, range) else chunk * update.shape[axis]
        return lax.dynamic_update_slice_in_dim(x, update, start, axis)

    def _nothing(self, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Attention of all this device's rows over no keys, given that of one chunk."""
        o, lse = part
        return self._widen(o, 0.0), self._widen(lse, -jnp.inf, 2)

    def _add(self, whole: jax.Array | None, new: jax.Array, chunk: Any) -> jax.Array:
        """Adds a chunk's gradient to the gradient of all rows (None: nothing yet)."""
        if chunk is None:
            return new if whole is None else whole + new
        whole = self._widen(new, 0.0) if whole is None else whole
        return self._put(whole, self._rows(whole, chunk) + new, chunk)

    def _widen(self, chunk: jax.Array, value: float, axis: int = 1) -> jax.Array:
        shape = list(chunk.shape)
        shape[axis] *= self.ring.layout.chunks
        return jnp.full(shape, value, chunk.dtype)


def _local_lengths(lengths: jax.Array | None, affine: tuple, rows: int) -> jax.Array | None:
    """How many of a part's rows lie within each example's length: they are its first ones, for positions ascend."""
    if lengths is None:
        return None
    offset, stride = affine
    return jnp.clip((lengths - offset + stride - 1) // stride, 0, rows).astype(jnp.int32)
