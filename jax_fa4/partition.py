"""How a kernel call splits over devices: by batch and heads without communication, by query rows with K and V gathered.

The partitioner (Shardy) learns from a rule which dims may be split together; it then asks `_partition` for the layout
of every operand and for the program of one device. Batch dims, heads and query rows keep the layout that q has. KV
heads are split with the query heads where their number allows; where a mesh axis has more devices than there are KV
heads, each device slices the ones its query heads read, and backward adds dK and dV over those devices. Keys are
gathered: a device with some of the query rows attends to all keys, its rows at their positions in the whole sequence,
and backward adds dK and dV over the devices of a sequence. (`ring_attention` sends keys around instead.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from jax_fa4 import masks
from jax_fa4.indexing import has_functions, shifted
from jax_fa4.kernels.common.abi import Buffer
from jax_fa4.launch import KernelCall, launch
from jax_fa4.plan import refusal
from jax_fa4.spec import AttentionSpec


@functools.lru_cache(maxsize=512)
def partitioned(call: KernelCall) -> Callable[..., Sequence[jax.Array]]:
    """`launch` for `call` as a function of global arrays that the partitioner can split."""

    def whole(*arrays):
        return tuple(launch(call, *_restore_scalars(call, arrays)))

    function = custom_partitioning(whole)
    function.def_partition(
        partition=functools.partial(_partition, call), sharding_rule=functools.partial(_rule, call)
    )
    return lambda *arrays: function(*(jnp.atleast_1d(x) for x in arrays))


def _restore_scalars(call: KernelCall, arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The rule has no way to write an operand without dims, so scalars travel as [1]."""
    return [x if b.shape else x.reshape(()) for b, x in zip(call.inputs, arrays, strict=True)]


def _rule(call: KernelCall, mesh: jax.sharding.Mesh, values: Any, results: Any) -> tuple[str, dict[str, Any]]:
    """The einsum-like sharding rule, and what goes with it."""
    heads, kv_heads = values[0].shape[-2], values[1].shape[-2]
    group = heads // max(kv_heads, 1)
    whole_groups = all(kv_heads % size == 0 for size in mesh.shape.values())
    sizes: dict[str, int] = {}
    if group <= 1:
        q_head, kv_head = "h", "h"
    elif whole_groups:
        q_head, kv_head, sizes = "(h g)", "h", {"g": group}
    else:
        q_head, kv_head = "h", "k"
    names: dict[Any, str] = {"S": "s", "T": "t", "H": q_head, "K": kv_head}
    factors: list[str] = []

    def text(index: int, buffer: Buffer) -> str:
        words = []
        for axis, size in enumerate(buffer.shape or (1,)):
            word = "..." if size == "B" else names.get(size, f"x{index}y{axis}")
            words.append(word)
            for factor in word.strip("()").split():
                if factor not in factors and factor != "...":
                    factors.append(factor)
        return " ".join(words)

    sides = [[text(i, b) for i, b in enumerate(call.buffers) if b.kind == kind] for kind in ("in", "out")]
    kept = {"h"} if has_functions(call) else {"h", "s"}
    replicated = tuple(f for f in factors if f not in kept)
    return f"{', '.join(sides[0])} -> {', '.join(sides[1])}", {"need_replication_factors": replicated, **sizes}


@dataclasses.dataclass(frozen=True)
class Split:
    """How one call is split: mesh axes of the batch dims, of the query rows and of the heads.

    `kv_split`: KV heads are split like the query heads; else every device has all of them.
    """

    mesh: jax.sharding.Mesh
    lead: tuple[Any, ...]
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    kv_split: bool

    def sharding(self, buffer: Buffer) -> NamedSharding:
        dims: list[Any] = []
        for size in buffer.shape or (1,):
            if size == "B":
                dims += self.lead
            elif size == "S":
                dims.append(self.rows or None)
            elif size == "H" or (size == "K" and self.kv_split):
                dims.append(self.heads or None)
            else:
                dims.append(None)
        return NamedSharding(self.mesh, PartitionSpec(*dims))


def _split(call: KernelCall, q: Any, k: Any) -> Split:
    mesh, rank = q.sharding.mesh, len(q.shape)
    spec = [*q.sharding.spec, *[None] * (rank - len(q.sharding.spec))]

    def axes(dim: int) -> tuple[str, ...]:
        entry = spec[dim]
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return names if q.shape[dim] % math.prod(mesh.shape[name] for name in names) == 0 else ()

    heads = axes(rank - 2)
    shards = math.prod(mesh.shape[name] for name in heads)
    rows = axes(rank - 3) if _splits_rows(call) else ()
    return Split(mesh, tuple(axes(i) or None for i in range(rank - 3)), rows, heads, k.shape[-2] % shards == 0)


def _splits_rows(call: KernelCall) -> bool:
    """Whether the kernels can compute some of the query rows: they must take positions if the mask compares them."""
    spec = _with_positions(call.spec)
    return not has_functions(call) and all(refusal(spec, arch, (call.pass_,)) is None for arch in call.archs)


def _with_positions(spec: AttentionSpec) -> AttentionSpec:
    compares = any(isinstance(part, masks.Causal | masks.Window) for part in spec.mask.parts)
    return dataclasses.replace(spec, positions=spec.positions or compares)


def _partition(call: KernelCall, mesh: jax.sharding.Mesh, args: Sequence[Any], results: Sequence[Any]) -> tuple:
    split = _split(call, args[0], args[1])
    lengths = args[0].shape[-3], args[1].shape[-3]

    def local(*arrays):
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            here, values = _local_functions(call, _restore_scalars(call, arrays), split)
            if split.rows:
                here, values = _rows_of_device(here, values, split, lengths)
            if split.kv_split:
                results = launch(here, *values)
            else:
                results = _with_kv_heads_of_device(here, values, split)
            return tuple(_added(here, results, split))

    ins = tuple(split.sharding(b) for b in call.inputs)
    outs = tuple(split.sharding(b) for b in call.outputs)
    return split.mesh, local, outs, ins


def _local_functions(
    call: KernelCall, arrays: Sequence[jax.Array], split: Split
) -> tuple[KernelCall, list[jax.Array]]:
    """The call and arrays of one device, with functions that see the indices of the whole call."""
    lead = arrays[0].shape[:-3]
    if not has_functions(call) or (len(lead) == 1 and not any(split.lead) and not split.heads):
        return call, list(arrays)
    inner = split.lead[-1] if split.lead else None
    example = jax.lax.axis_index(inner) * lead[-1] if inner else 0
    head = jax.lax.axis_index(split.heads) * arrays[0].shape[-2] if split.heads else 0
    return shifted(call, arrays, example, head)


def _rows_of_device(
    call: KernelCall, arrays: Sequence[jax.Array], split: Split, lengths: tuple[int, int]
) -> tuple[KernelCall, list[jax.Array]]:
    """The call of a device that has some of the query rows; `lengths` are S and T of the whole call."""
    named = dict(zip((b.name for b in call.inputs), arrays, strict=True))
    lead, rows = arrays[0].shape[:-3], arrays[0].shape[-3]
    first = jax.lax.axis_index(split.rows) * rows
    spec = _with_positions(call.spec)
    if call.spec.positions:
        given = named["positions"]
        named["positions"] = given.at[..., 0].add(given[..., 1] * first)
    elif spec.positions:  # bottom-right, by each example's own lengths
        offset = first + named.get("kv_lengths", lengths[1]) - named.get("q_lengths", lengths[0])
        numbers = (offset, 1, 0, 1)
        named["positions"] = jnp.stack([jnp.broadcast_to(jnp.asarray(x, jnp.int32), lead) for x in numbers], -1)
    if "q_lengths" in named:
        named["q_lengths"] = jnp.clip(named["q_lengths"] - first, 0, rows)
    here = dataclasses.replace(call, spec=spec)
    return here, [named[b.name] for b in here.inputs]


def _added(call: KernelCall, results: Sequence[jax.Array], split: Split) -> list[jax.Array]:
    """Results, with dK and dV added over the devices that each had a part of the queries that read them."""
    axes = (*split.rows, *(() if split.kv_split else split.heads))
    return [
        jax.lax.psum(x.astype(jnp.float32), axes).astype(b.dtype) if axes and "K" in b.shape else x
        for b, x in zip(call.outputs, results, strict=True)
    ]


def _with_kv_heads_of_device(call: KernelCall, arrays: Sequence[jax.Array], split: Split) -> list[jax.Array]:
    """The call of a device that has all KV heads but only some query heads, which read few of them."""
    local_heads, group = arrays[0].shape[-2], call.spec.group
    first = jax.lax.axis_index(split.heads) * local_heads
    if local_heads % group == 0 or group % local_heads == 0:
        count = max(1, local_heads // group)
        heads = first // group + jnp.arange(count)
    else:  # the device's query heads begin within a group: one KV head for each of them
        count = local_heads
        heads = (first + jnp.arange(count)) // group
    spec = dataclasses.replace(call.spec, group=local_heads // count)
    picked = [
        jnp.take(x, heads, axis=x.ndim - 2) if "K" in b.shape else x for b, x in zip(call.inputs, arrays, strict=True)
    ]
    results = launch(dataclasses.replace(call, spec=spec), *picked)
    whole = []
    for buffer, x in zip(call.outputs, results, strict=True):
        if "K" in buffer.shape:
            total = jnp.zeros((*x.shape[:-2], arrays[1].shape[-2], x.shape[-1]), jnp.float32)
            x = total.at[..., heads, :].add(x.astype(jnp.float32))
        whole.append(x)
    return whole
