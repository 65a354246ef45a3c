"""`ring_attention` and `ulysses_attention`: attention over a sequence that is spread over devices."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from ..errors import invalid
from ..layout import Layout, get_layout
from ..masks import Mask, MaskArray, Predicate
from ..operands import Operands
from ..scores import ScoreMap
from ..spec import Arguments, AttentionSpec, as_int32, flag, make_spec
from .attend import attend
from .exchange import heads_for_rows, rows_for_heads
from .indices import with_global_indices
from .local import Ring
from .placement import Axes, Placement, SequenceAxes, axis_names, bound_axes, check_heads, check_sequence
from .schedule import cut_blocks, make_levels, needed_blocks


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: Axes | None = None,
    axis_name: Axes | None = None,
    mesh: Any = None,
    layout: str = "contiguous",
    batch_axis: Axes | None = None,
    head_axis: str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Attention whose sequence is spread over the devices of one or two mesh axes (Ring Attention).

    KV blocks travel around the ring while each device attends to the block it has; partial results are merged in
    float32 by their LSE (Liu et al. 2023, arXiv:2310.01889). Each transfer is issued before the attention of its step.
    Blocks that the mask rules out are neither sent nor computed, and where a window reaches into the neighbour alone
    (contiguous layout) only the rows that it reaches are. The backward pass is a ring of its own, in which dK
    and dV travel in float32; a device saves its q, k, v, o and LSE alone.

    Call it on global arrays with `axis`, under jit or not, or inside `jax.shard_map` on a device's own arrays with
    `axis_name`. Lengths and positions speak of the whole sequence in natural order in both.

    Args:
      q: [B, S, H, D], rows in the order of `layout` (`jax_fa4.to_layout`).
      k: [B, T, K, D], likewise. S and T are multiples of the ring's size n, of 2n for zigzag.
      v: [B, T, K, E], likewise.
      axis: mesh axis of the ring, for global arrays of any sharding (they are resharded). A pair (outer, inner) makes
        a ring of rings: blocks turn inside the inner axis while the outer neighbour's blocks arrive.
      axis_name: the same, inside shard_map.
      mesh: the mesh of `axis`; the one of `jax.set_mesh` by default.
      layout: "contiguous", "zigzag" (balances causal masks) or "striped" (likewise).
      batch_axis, head_axis: mesh axes over which batch and heads are sharded, with `axis`.
      return_lse: return (o, lse), LSE float32 [B, H, S] as in `attention`.
      backend: as in `attention`.
      **options: every other keyword of `attention` but `bias` and mask arrays, which would be as large as the scores.
        Segment ids are in the order of `layout`; lengths count rows of the natural order. `MaskFn` and `ScoreFn` get
        q and k of the whole sequence in natural order, and with `axis` the b and h of the whole arrays.

    Returns:
      o [B, S, H, E] in the dtype of q and the order of `layout`; with `return_lse`, (o, lse).

    Raises:
      InvalidArgument: an axis unknown to the mesh, sizes that don't divide, an unknown layout, or what `attention`
        refuses.
    """
    arguments = Arguments(q, k, v, **_checked(options))
    call = _Call(get_layout(layout), backend, flag("return_lse", return_lse), arguments)
    if _is_inside(axis, axis_name, mesh, batch_axis, head_axis):
        return call.on_device(SequenceAxes(bound_axes("axis_name", axis_name), {}))
    return call.on_mesh(Placement.make(mesh, axis, None, batch_axis, head_axis))


def ulysses_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str | None = None,
    axis_name: str | None = None,
    ring_axis: Axes | None = None,
    mesh: Any = None,
    layout: str = "contiguous",
    batch_axis: Axes | None = None,
    head_axis: str | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> Any:
    """Attention over a spread sequence by exchanging heads for rows (DeepSpeed-Ulysses, arXiv:2309.14509).

    An all_to_all gives each device of `axis` all rows of its share of the heads, and another takes the output back.
    With `ring_axis` the two ways combine: the sequence is sharded over (ring_axis, axis), heads are exchanged along
    `axis`, and KV blocks travel along `ring_axis`.

    Args:
      q, k, v, mesh, batch_axis, head_axis, return_lse, backend, **options: as in `ring_attention`. The query heads of
        a device are a multiple of the size of `axis`; its KV heads a multiple or a divisor (then they are repeated).
      axis: mesh axis of the exchange, for global arrays; `axis_name`: the same, inside shard_map.
      ring_axis: mesh axis (or axes) of the ring around the exchange, in either way of calling.
      layout: of the rows over `ring_axis`; within a ring device the rows of the exchange follow one another.

    Returns:
      As `ring_attention`.

    Raises:
      InvalidArgument: as `ring_attention`, and head counts that the exchange cannot split.
    """
    arguments = Arguments(q, k, v, **_checked(options))
    call = _Call(get_layout(layout), backend, flag("return_lse", return_lse), arguments)
    if _is_inside(axis, axis_name, mesh, batch_axis, head_axis):
        return call.on_device(SequenceAxes(bound_axes("ring_axis", ring_axis), bound_axes("axis_name", axis_name)))
    return call.on_mesh(Placement.make(mesh, ring_axis, axis, batch_axis, head_axis))


def _is_inside(axis: Any, axis_name: Any, *of_mesh: Any) -> bool:
    """Whether a call is one inside shard_map, by the axes that it names."""
    if (axis is None) == (axis_name is None):
        raise invalid("axis, axis_name", f"axis={axis!r}, axis_name={axis_name!r}", "exactly one of the two",
                      "Pass axis= for global arrays, axis_name= inside jax.shard_map")
    if axis is None and any(value is not None for value in of_mesh):
        raise invalid("mesh, batch_axis, head_axis", "given with axis_name", "none of them inside jax.shard_map",
                      "Leave them out: the arrays are a device's own already")
    return axis is None


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in dataclasses.fields(Arguments)} - {"q", "k", "v", "bias"}
    for name in options:
        if name not in known:
            remedy = "Use ScoreFn, which computes its part from positions" if name == "bias" else "Check the spelling"
            raise invalid(name, "as a keyword", ", ".join(sorted(known)), remedy)
    return options


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call whose axes are still to be said."""

    layout: Layout
    backend: str
    return_lse: bool
    arguments: Arguments

    def on_device(self, axes: SequenceAxes) -> Any:
        """Inside shard_map, on this device's arrays."""
        lengths = [self.arguments.q_lengths, self.arguments.kv_lengths]
        spec, operands = make_spec(self.arguments)
        _check_mask(spec.mask)
        whole = {"q": operands.q.shape[1] * axes.size, "k": operands.k.shape[1] * axes.size}
        check_sequence(axes, self.layout, whole)
        check_heads(axes, operands.q.shape[2], operands.k.shape[2])
        # make_spec cut the lengths to this device's rows, but they count those of the whole sequence.
        q_lengths, kv_lengths = (
            None if given is None else jnp.clip(as_int32(jnp.asarray(given)), 0, longest)
            for given, longest in zip(lengths, whole.values(), strict=True)
        )
        operands = dataclasses.replace(operands, q_lengths=q_lengths, kv_lengths=kv_lengths)
        return self._asked(self._run(axes, spec, operands, (0, 0)))

    def on_mesh(self, place: Placement) -> Any:
        """On global arrays."""
        spec, operands = make_spec(self.arguments)
        _check_mask(spec.mask)
        place.check(operands, self.layout)
        specs = place.specs(operands)
        leaves, tree = jax.tree.flatten(operands)
        leaf_specs = tuple(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)))
        if place.explicit:
            leaves = [jax.sharding.reshard(x, place.in_type(spec)) for x, spec in zip(leaves, leaf_specs, strict=True)]

        def body(*leaves: jax.Array) -> tuple[jax.Array, jax.Array]:
            local = jax.tree.unflatten(tree, leaves)
            batch, heads = (
                lax.axis_index(axis_names(axes)) * count if axes else 0
                for axes, count in ((place.batch, local.q.shape[0]), (place.heads, local.q.shape[2]))
            )
            return self._run(place.sequence, spec, local, (batch, heads))

        mapped = jax.shard_map(
            body, mesh=place.mesh, in_specs=leaf_specs, axis_names=place.names,
            out_specs=(specs.q, P(place.batch, place.heads, place.sequence.names)),
        )
        return self._asked(mapped(*leaves))

    def _asked(self, result: tuple[jax.Array, jax.Array]) -> Any:
        """What the caller gets of (o, lse)."""
        return result if self.return_lse else result[0]

    def _run(
        self, axes: SequenceAxes, spec: AttentionSpec, local: Operands, first: tuple[Any, Any]
    ) -> tuple[jax.Array, jax.Array]:
        """One device's work; `first` are the indices of its first example and head in the whole arrays."""
        local = rows_for_heads(local, axes)
        batch_offset, head_offset = first
        for axis in axes.exchange:
            head_offset = head_offset + lax.axis_index(axis) * local.q.shape[2]
        if _has_functions(spec) and local.q.shape[0]:
            # Steps count rows by aligned positions; functions get their indices, unless the call gives positions.
            rows, keys = (x.shape[1] * axes.ring_size if lengths is None else lengths for x, lengths in (
                (local.q, local.q_lengths), (local.k, local.kv_lengths)))
            offsets = batch_offset, head_offset, 0 if spec.positions else rows - keys
            if any(not isinstance(offset, int) or offset for offset in offsets):
                spec, local = with_global_indices(spec, local, offsets)
        spec = dataclasses.replace(spec, group=local.q.shape[2] // max(1, local.k.shape[2]))
        needed = needed_blocks(spec, self.layout, axes.ring_size, local.q.shape[1], local.k.shape[1])
        levels = make_levels(axes.ring, needed)
        ring = Ring(cut_blocks(levels, spec, self.layout, local.q.shape[1], local.k.shape[1]), self.layout)
        return heads_for_rows(*attend(ring, spec, local, self.backend), axes)


def _has_functions(spec: AttentionSpec) -> bool:
    return any(isinstance(item, ScoreMap | Predicate) for item in (*spec.score_mods, *spec.mask.parts))


def _check_mask(mask: Mask) -> None:
    if any(isinstance(part, MaskArray) for part in mask.parts):
        raise invalid("mask", "an array", "masks of jax_fa4.masks and functions",
                      "Use MaskFn, causal, window or segment ids: an array would be as large as the scores")
