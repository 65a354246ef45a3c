"""How the rows of a sequence are laid over the devices of a ring.

A layout says which global positions a device holds and in which order. Each device holds `chunks` runs of rows, and
inside a run the positions are affine: position = offset + stride * row. That is all the ring and the kernels need.

`contiguous` is the plain split. `zigzag` gives device i the chunks i and 2n-1-i of 2n, and `striped` every n-th row
(Brandon et al. 2023, arXiv:2311.09431); both spread the work of a causal mask evenly.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from .errors import invalid


class Layout(Protocol):
    """Where the rows of one device sit in the whole sequence."""

    name: str
    chunks: int  # runs of affine positions a device holds

    def multiple(self, devices: int) -> int:
        """The sequence length must be a multiple of this."""
        ...

    def affine(self, device, chunk, devices: int, rows: int):
        """(offset, stride) of a device's chunk when each device holds `rows` rows; device and chunk may be traced."""
        ...


@dataclasses.dataclass(frozen=True)
class Contiguous:
    """Device i holds rows [i * S/n, (i + 1) * S/n)."""

    name = "contiguous"
    chunks = 1

    def multiple(self, devices: int) -> int:
        return devices

    def affine(self, device, chunk, devices: int, rows: int):
        return device * rows, 1


@dataclasses.dataclass(frozen=True)
class Zigzag:
    """Device i holds chunks i and 2n - 1 - i of 2n: the work of a causal mask is the same on each device and step."""

    name = "zigzag"
    chunks = 2

    def multiple(self, devices: int) -> int:
        return 2 * devices

    def affine(self, device, chunk, devices: int, rows: int):
        half = rows // 2
        # chunk is 0 or 1, perhaps traced: i for the first, 2n - 1 - i for the second.
        return (device + chunk * (2 * devices - 1 - 2 * device)) * half, 1

    @staticmethod
    def across(owner_first, rows: int):
        """((offset, stride) of a device's rows, the same of another's keys) that decide a causal mask as their own do.

        If the owner of the keys comes first (perhaps traced), all rows see the first half of its keys and none of the
        last; otherwise the last half of the rows see all keys, and the first half none. So it is enough to count the
        keys, or the rows, from the middle, and to have all of the other kind at one position.
        """
        half = rows // 2
        q_offset = jnp.where(owner_first, half - 1, -half)
        return (q_offset, jnp.where(owner_first, 0, 1)), (0, jnp.where(owner_first, 1, 0))


@dataclasses.dataclass(frozen=True)
class Striped:
    """Device i holds rows i, i + n, i + 2n, ..."""

    name = "striped"
    chunks = 1

    def multiple(self, devices: int) -> int:
        return devices

    def affine(self, device, chunk, devices: int, rows: int):
        return device, devices


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Striped())}


def get_layout(name: str) -> Layout:
    """The layout of that name; InvalidArgument names the known ones."""
    if not isinstance(name, str) or name not in LAYOUTS:
        raise invalid("layout", repr(name), ", ".join(LAYOUTS), "Choose one of them")
    return LAYOUTS[name]


def check_length(argument: str, length: int, layout: Layout, devices: int) -> None:
    """Refuses a sequence length that the layout cannot split evenly."""
    multiple = layout.multiple(devices)
    if length % multiple:
        raise invalid(
            argument,
            f"sequence length {length}",
            f"multiples of {multiple} ({layout.name} layout over {devices} devices)",
            f"Pad the sequence to {-(-length // multiple) * multiple} and pass q_lengths and kv_lengths",
        )


def layout_positions(length: int, layout: str, devices: int) -> np.ndarray:
    """Global position of each row in layout order.

    Args:
      length: sequence length S; a multiple of `devices` (of 2 * `devices` for zigzag).
      layout: "contiguous", "zigzag" or "striped".
      devices: number of devices n in the ring, at least 1.

    Returns:
      int32 [S]; rows r*S/n to (r+1)*S/n - 1 are those that device r holds. Use it for RoPE, labels and masks:
      `to_layout(x, layout, n) == x[:, layout_positions(S, layout, n)]`.
    """
    kind = get_layout(layout)
    if devices < 1:
        raise invalid("devices", devices, "at least 1", "Pass the size of the ring's mesh axis")
    check_length("length", length, kind, devices)
    rows = length // devices
    run = rows // kind.chunks
    parts = []
    for device in range(devices):
        for chunk in range(kind.chunks):
            offset, stride = kind.affine(device, chunk, devices, rows)
            parts.append(offset + stride * np.arange(run, dtype=np.int32))
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros((0,), np.int32)


def to_layout(x: jax.Array, layout: str, devices: int) -> jax.Array:
    """Reorders the sequence axis (axis 1) of `x` [B, S, ...] from natural order into a layout's order.

    The result keeps the sharding of `x`, on Auto and on Explicit mesh axes. Errors as `layout_positions`.
    """
    return _take(x, layout_positions(x.shape[1], layout, devices))


def from_layout(x: jax.Array, layout: str, devices: int) -> jax.Array:
    """Undoes `to_layout`: reorders the sequence axis (axis 1) of `x` [B, S, ...] into natural order."""
    return _take(x, np.argsort(layout_positions(x.shape[1], layout, devices)))


def _take(x: Any, order: np.ndarray) -> jax.Array:
    x = jnp.asarray(x)
    mesh = jax.typeof(x).sharding.mesh
    if not mesh.empty and AxisType.Explicit in mesh.axis_types:
        return x.at[:, order].get(out_sharding=jax.typeof(x).sharding, unique_indices=True)
    return x[:, order]
