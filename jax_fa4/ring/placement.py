"""How the arrays of a call lie on a mesh, and what is refused because it cannot lie so."""

import dataclasses
import math
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import invalid
from ..layout import Layout, check_length
from ..operands import Operands

Axes = str | tuple[str, ...]


def axis_names(axes: Axes | None) -> tuple[str, ...]:
    """One, several or no mesh axes as a tuple."""
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


@dataclasses.dataclass(frozen=True)
class SequenceAxes:
    """The mesh axes that a sequence is spread over: outermost first, the exchange of heads innermost.

    Attributes:
      ring: sizes of the axes around which KV blocks travel.
      exchange: sizes of the axes (at most one) over which heads are exchanged for rows.
    """

    ring: dict[str, int]
    exchange: dict[str, int]

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ring, *self.exchange)

    @property
    def ring_size(self) -> int:
        return math.prod(self.ring.values())

    @property
    def exchange_size(self) -> int:
        return math.prod(self.exchange.values())

    @property
    def size(self) -> int:
        return self.ring_size * self.exchange_size


def bound_axes(argument: str, names: Axes | None) -> dict[str, int]:
    """Sizes of axes of the surrounding shard_map."""
    sizes = {}
    for name in axis_names(names):
        try:
            sizes[name] = lax.axis_size(name)
        except NameError as error:
            raise invalid(argument, repr(name), "axes of the surrounding jax.shard_map",
                          "Call it inside jax.shard_map over that axis, or pass axis= and mesh=") from error
    return sizes


def check_sequence(axes: SequenceAxes, layout: Layout, lengths: dict[str, int]) -> None:
    """Refuses lengths of the whole sequence that neither the layout nor the exchange can split evenly."""
    for name, length in lengths.items():
        check_length(name, length, layout, axes.ring_size)
        if length % axes.size:
            raise invalid(name, f"sequence length {length}", f"multiples of {axes.size}, the devices of {axes.names}",
                          "Pad the sequence and pass q_lengths and kv_lengths")


def check_heads(axes: SequenceAxes, heads: int, kv_heads: int) -> None:
    """Refuses head counts of one device that the exchange cannot split; fewer KV heads than devices are repeated."""
    size = axes.exchange_size
    if heads % size:
        raise invalid("q", f"{heads} query heads on a device", f"multiples of {size} (axis {tuple(axes.exchange)})",
                      "Exchange over fewer devices, or use ring_attention")
    if kv_heads % size and size % kv_heads:
        raise invalid("k", f"{kv_heads} KV heads on a device", f"multiples or divisors of {size}",
                      "Repeat KV heads, or use ring_attention")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes of a call on global arrays."""

    mesh: Any
    sequence: SequenceAxes
    batch: Axes | None
    heads: str | None

    @classmethod
    def make(cls, mesh: Any, ring: Axes | None, exchange: Axes | None, batch: Axes | None, heads: str | None) -> Any:
        """Checks that the mesh has the axes and that no two arguments name the same one."""
        mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        if mesh.empty:
            raise invalid("mesh", "None, and no mesh is set", "a jax.sharding.Mesh",
                          "Pass mesh=, or call inside `with jax.set_mesh(mesh):`")
        used: set[str] = set()
        for argument, axes in (("axis", ring), ("axis", exchange), ("batch_axis", batch), ("head_axis", heads)):
            for name in axis_names(axes):
                if name not in mesh.shape:
                    raise invalid(argument, repr(name), f"axes of the mesh: {', '.join(map(repr, mesh.shape))}",
                                  "Name an axis of the mesh")
                if name in used:
                    raise invalid(argument, repr(name), "axes that no other argument names", "Give each its own axis")
                used.add(name)
        sizes = ({name: mesh.shape[name] for name in axis_names(axes)} for axes in (ring, exchange))
        return cls(mesh, SequenceAxes(*sizes), batch, heads)

    @property
    def explicit(self) -> set[str]:
        """The mesh's Explicit axes, which are part of the types of arrays."""
        types = zip(self.mesh.axis_names, self.mesh.axis_types, strict=True)
        return {name for name, kind in types if kind == AxisType.Explicit}

    def in_type(self, spec: P) -> NamedSharding:
        """How an array that lies by `spec` is sharded as far as its type says."""
        kept = (tuple(name for name in axis_names(axes) if name in self.explicit) for axes in spec)
        return NamedSharding(self.mesh, P(*(names or None for names in kept)))

    @property
    def names(self) -> set[str]:
        """All mesh axes that the call uses."""
        return {*self.sequence.names, *axis_names(self.batch), *axis_names(self.heads)}

    def check(self, operands: Operands, layout: Layout) -> None:
        """Refuses sizes that do not divide."""
        batch, rows, heads, _ = operands.q.shape
        kv_heads = operands.k.shape[2]
        check_sequence(self.sequence, layout, {"q": rows, "k": operands.k.shape[1]})
        for argument, axes, name, count, what in (
            ("batch_axis", self.batch, "q", batch, "examples"),
            ("head_axis", self.heads, "q", heads, "query heads"),
            ("head_axis", self.heads, "k", kv_heads, "KV heads"),
        ):
            if count % self._size(axes):
                raise invalid(name, f"{count} {what} over {argument}={axes!r} of size {self._size(axes)}",
                              f"multiples of {self._size(axes)}", f"Leave {argument} out, pad, or repeat KV heads")
        check_heads(self.sequence, heads // self._size(self.heads), kv_heads // self._size(self.heads))

    def _size(self, axes: Axes | None) -> int:
        return math.prod(self.mesh.shape[name] for name in axis_names(axes))

    def specs(self, operands: Operands) -> Operands:
        """A PartitionSpec for every array of a call; arrays of user functions are whole on every device."""
        batch, heads, rows = self.batch, self.heads, self.sequence.names
        qkv = P(batch, rows, heads, None)
        known = {
            "q": qkv, "k": qkv, "v": qkv, "sinks": P(heads), "q_segment_ids": P(batch, rows),
            "kv_segment_ids": P(batch, rows), "q_lengths": P(batch), "kv_lengths": P(batch),
            "positions": P(batch, None),
        }

        def spec(name: str) -> Any:
            return jax.tree.map(lambda _: known.get(name, P()), getattr(operands, name))

        return Operands(**{field.name: spec(field.name) for field in dataclasses.fields(Operands)})
