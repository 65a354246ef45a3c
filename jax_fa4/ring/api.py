"""`ring_attention`: attention over a sequence that is spread over devices."""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import invalid
from ..layout import Layout, check_length, get_layout
from ..masks import Full, Mask, MaskArray, Predicate
from ..operands import Operands
from ..scalar import trace
from ..scores import ScoreMap
from ..spec import Arguments, AttentionSpec, make_spec
from .attend import attend
from .local import Ring
from .schedule import make_levels, needed_blocks

Axes = str | tuple[str, ...]


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
    Blocks that the mask rules out are neither sent nor computed. The backward pass is a ring of its own, in which dK
    and dV travel in float32; a device saves its q, k, v, o and LSE alone.

    Two ways to call it: on global arrays with `axis`, under jit or not, or inside `jax.shard_map` on a device's arrays
    with `axis_name`. The two differ in what `q_lengths`, `kv_lengths` and positions mean in neither way: they speak of
    the whole sequence in natural order.

    Args:
      q: [B, S, H, D], rows in the order of `layout` (`jax_fa4.to_layout`).
      k: [B, T, K, D], likewise. S and T are multiples of the ring's size n, of 2n for zigzag.
      v: [B, T, K, E], likewise.
      axis: mesh axis of the ring, for global arrays; of any sharding, they are resharded. A pair (outer, inner) makes
        a ring of rings: blocks turn inside the inner axis while the outer neighbour's blocks arrive.
      axis_name: the same, inside shard_map.
      mesh: the mesh of `axis`; the one of `jax.set_mesh` by default.
      layout: "contiguous", "zigzag" (balances causal masks) or "striped" (likewise).
      batch_axis, head_axis: mesh axes over which batch and heads are sharded, with `axis`.
      return_lse: return (o, lse), LSE float32 [B, H, S] as in `attention`.
      backend: as in `attention`.
      **options: every other keyword of `attention` but `bias` (and mask arrays): they would be as large as the scores.
        Segment ids are in the order of `layout`; lengths count rows of the natural order. `MaskFn` and `ScoreFn`
        get positions in the whole sequence and, with `axis`, global b and h.

    Returns:
      o [B, S, H, E] in the dtype of q and the order of `layout`; with `return_lse`, (o, lse).

    Raises:
      InvalidArgument: an axis unknown to the mesh, sizes that don't divide, an unknown layout, or what `attention`
        refuses.
    """
    kind = get_layout(layout)
    _check_options(options)
    if (axis is None) == (axis_name is None):
        raise invalid("axis, axis_name", f"axis={axis!r}, axis_name={axis_name!r}", "exactly one of the two",
                      "Pass axis= for global arrays, axis_name= inside jax.shard_map")
    arguments = Arguments(q, k, v, **options)
    if axis_name is not None:
        if mesh is not None or batch_axis is not None or head_axis is not None:
            raise invalid("mesh, batch_axis, head_axis", "given with axis_name", "none of them inside jax.shard_map",
                          "Leave them out: the arrays are a device's own already")
        result = _on_device(_bound_axes(axis_name), kind, arguments, backend)
    else:
        assert axis is not None
        result = _on_mesh(_Placement(mesh, axis, batch_axis, head_axis), kind, arguments, backend)
    return result if return_lse else result[0]


def _check_options(options: dict[str, Any]) -> None:
    known = {f.name for f in dataclasses.fields(Arguments)} - {"q", "k", "v", "bias"}
    for name in options:
        if name not in known:
            remedy = "Use ScoreFn, which computes its part from positions" if name == "bias" else "Check the spelling"
            raise invalid(name, "a keyword of ring_attention", ", ".join(sorted(known)), remedy)


def _on_device(axes: dict[str, int], layout: Layout, arguments: Arguments, backend: str) -> tuple:
    """The call inside shard_map, on this device's arrays."""
    lengths = {name: getattr(arguments, name) for name in ("q_lengths", "kv_lengths")}
    spec, operands = make_spec(arguments)
    _check_mask(spec.mask)
    size = math.prod(axes.values())
    for name, array in (("q", operands.q), ("k", operands.k)):
        if array.shape[1] % layout.chunks:
            raise invalid(name, f"{array.shape[1]} rows a device", f"multiples of {layout.chunks} ({layout.name} layout)",
                          "Pad the sequence and pass q_lengths and kv_lengths")
    # make_spec cut the lengths to this device's rows, but they count those of the whole sequence.
    whole = {name: None if value is None else jnp.clip(jnp.asarray(value, jnp.int32), 0, rows * size)
             for (name, value), rows in zip(lengths.items(), (operands.q.shape[1], operands.k.shape[1]), strict=True)}
    operands = dataclasses.replace(operands, **whole)
    return attend(_make_ring(axes, layout, spec, operands), spec, operands, backend)


def _make_ring(axes: dict[str, int], layout: Layout, spec: AttentionSpec, local: Operands) -> Ring:
    """The ring for a device's operands."""
    size = math.prod(axes.values())
    needed = needed_blocks(spec, layout, size, local.q.shape[1], local.k.shape[1])
    return Ring(make_levels(axes, needed), layout)


@dataclasses.dataclass(frozen=True)
class _Placement:
    """How global arrays lie on a mesh."""

    given_mesh: Any
    axis: Axes
    batch_axis: Axes | None
    head_axis: str | None

    @property
    def mesh(self) -> Any:
        mesh = jax.sharding.get_abstract_mesh() if self.given_mesh is None else self.given_mesh
        if mesh.empty:
            raise invalid("mesh", "None, and no mesh is set", "a jax.sharding.Mesh",
                          "Pass mesh=, or call inside `with jax.set_mesh(mesh):`")
        return mesh

    def check(self, spec: AttentionSpec, operands: Operands, layout: Layout) -> None:
        """Refuses axes that the mesh lacks or that share a name, and sizes that do not divide."""
        used: list[str] = []
        for argument in ("axis", "batch_axis", "head_axis"):
            for name in _names(getattr(self, argument)):
                if name not in self.mesh.shape:
                    raise invalid(argument, repr(name), f"axes of the mesh: {', '.join(map(repr, self.mesh.shape))}",
                                  "Name an axis of the mesh")
                if name in used:
                    raise invalid(argument, repr(name), "axes that no other argument names", "Give each its own axis")
                used.append(name)
        batch, rows, heads, _ = operands.q.shape
        check_length("q", rows, layout, self.size(self.axis))
        check_length("k", operands.k.shape[1], layout, self.size(self.axis))
        for argument, name, count, what in (
            ("batch_axis", "q", batch, "batch"), ("head_axis", "q", heads, "query heads"),
            ("head_axis", "k", operands.k.shape[2], "KV heads"),
        ):  # fmt: skip
            size = self.size(getattr(self, argument))
            if count % size:
                raise invalid(name, f"{count} {what} over {argument}={getattr(self, argument)!r} of size {size}",
                              f"multiples of {size}", f"Leave {argument} out, or repeat KV heads")

    def size(self, axes: Axes | None) -> int:
        """Devices along some axes."""
        return math.prod(self.mesh.shape[name] for name in _names(axes))

    def specs(self, operands: Operands) -> Operands:
        """A PartitionSpec for every array of a call."""
        batch, heads = self.batch_axis, self.head_axis
        rows = P(batch, self.axis, heads, None)
        by_name = {
            "q": rows, "k": rows, "v": rows, "sinks": P(heads), "q_segment_ids": P(batch, self.axis),
            "kv_segment_ids": P(batch, self.axis), "q_lengths": P(batch), "kv_lengths": P(batch),
            "positions": P(batch, None), "window": P(None),
        }  # fmt: skip
        given = {f.name: getattr(operands, f.name) for f in dataclasses.fields(Operands)}
        return Operands(**{
            name: jax.tree.map(lambda _, name=name: by_name.get(name, P()), value) for name, value in given.items()
        })  # fmt: skip


def _on_mesh(place: _Placement, layout: Layout, arguments: Arguments, backend: str) -> tuple:
    """The call on global arrays."""
    spec, operands = make_spec(arguments)
    _check_mask(spec.mask)
    place.check(spec, operands, layout)
    mesh, specs = place.mesh, place.specs(operands)
    axes = {name: mesh.shape[name] for name in _names(place.axis)}
    leaves, tree = jax.tree.flatten(operands)
    leaf_specs = tuple(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)))
    if any(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
        leaves = [jax.sharding.reshard(x, NamedSharding(mesh, s)) for x, s in zip(leaves, leaf_specs, strict=True)]

    def body(*leaves: jax.Array) -> tuple:
        local = jax.tree.unflatten(tree, leaves)
        here, local = _with_global_indices(spec, local, place)
        return attend(_make_ring(axes, layout, here, local), here, local, backend)

    names = {name for axes in (place.axis, place.batch_axis, place.head_axis) for name in _names(axes)}
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=leaf_specs, axis_names=names,
        out_specs=(specs.q, P(place.batch_axis, place.head_axis, place.axis)),
    )  # fmt: skip
    return mapped(*leaves)


def _with_global_indices(spec: AttentionSpec, local: Operands, place: _Placement) -> tuple[AttentionSpec, Operands]:
    """Lets user functions see the indices of batch and head in the whole arrays instead of this device's."""
    if place.batch_axis is None and place.head_axis is None:
        return spec, local
    first = [
        lax.axis_index(_names(axes)) * count if axes else 0
        for axes, count in ((place.batch_axis, local.q.shape[0]), (place.head_axis, local.q.shape[2]))
    ]
    offset = jnp.stack([jnp.asarray(x, jnp.int32) for x in first])
    mods, score_operands = _shift_all(
        spec.score_mods, ScoreMap, local.score_operands, offset,
        lambda f: lambda s, b, h, q, k, *a: f(s, b + a[-1][0], h + a[-1][1], q, k, *a[:-1]), spec.compute_dtype)  # fmt: skip
    parts, mask_operands = _shift_all(
        spec.mask.parts, Predicate, local.mask_operands, offset,
        lambda f: lambda b, h, q, k, *a: f(b + a[-1][0], h + a[-1][1], q, k, *a[:-1]), None)  # fmt: skip
    spec = dataclasses.replace(spec, score_mods=mods, mask=functools.reduce(operator.and_, parts, Full()))
    return spec, dataclasses.replace(local, score_operands=score_operands, mask_operands=mask_operands)


def _shift_all(items: Any, kind: type, operands: tuple, offset: jax.Array, shifted: Any, dtype: Any) -> tuple:
    """Each user function of `items` (those of class `kind`) with `offset` as one more operand."""
    result, arrays, read = [], [], 0
    for item in items:
        if isinstance(item, kind):
            count = item.function.operand_count
            own = (*operands[read : read + count], offset)
            function, own = trace("score_mods" if dtype else "mask", shifted(item.function), own, dtype)
            item = kind(function)
            read += count
            arrays += own
        result.append(item)
    return tuple(result), tuple(arrays)


def _check_mask(mask: Mask) -> None:
    if any(isinstance(part, MaskArray) for part in mask.parts):
        raise invalid("mask", "an array", "masks of jax_fa4.masks and functions", "Use MaskFn, or causal, window, segment ids")


def _names(axes: Axes | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _bound_axes(axis_name: Axes) -> dict[str, int]:
    """Sizes of the axes of the surrounding shard_map."""
    sizes = {}
    for name in _names(axis_name):
        try:
            sizes[name] = lax.axis_size(name)
        except NameError as error:
            raise invalid("axis_name", repr(name), "axes of the surrounding jax.shard_map",
                          "Call it inside jax.shard_map over that axis, or pass axis= and mesh=") from error
    return sizes
