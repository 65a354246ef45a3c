"""Which blocks travel where: the static part of a ring.

At shift s, device i works on the KV block of device (i - s) mod n. Shifts that the mask rules out for every device are
not visited, and a block is sent on only while some later device needs it. Blocks that are needed a few steps ahead
and a few behind (a two-sided window) travel in two chains, one each way.
"""

import dataclasses

import numpy as np

from ..layout import Layout
from ..masks import RUNTIME, Causal, Lengths, Mask, Window
from ..spec import AttentionSpec

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Hop:
    """One transfer of a chain.

    Attributes:
      shift: after the hop, device i holds the block of device (i - shift) mod n.
      pairs: (source, destination) of the blocks that travel on.
      home: (holder, owner) of the blocks that travel no further: their gradients go home at this moment.
    """

    shift: int
    pairs: Pairs
    home: Pairs


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a block and its work are cut down to when a window reaches into a part of the block alone.

    Attributes:
      keys: the rows of the block that travel.
      rows: the query rows that see any of them.
    """

    keys: range
    rows: range


@dataclasses.dataclass(frozen=True)
class Chain:
    """Hops that one copy of the KV blocks makes; `final` takes the gradients of the last blocks home.

    Attributes:
      cut: of the blocks before they set out, in a chain of one hop; None if they travel whole.
    """

    hops: tuple[Hop, ...]
    final: Pairs
    cut: Cut | None = None

    @property
    def uniform(self) -> bool:
        """Whether every hop makes the same transfer, so that one loop body serves all."""
        return all(hop.pairs == self.hops[0].pairs and not hop.home for hop in self.hops)


@dataclasses.dataclass(frozen=True)
class Level:
    """One mesh axis of a ring: its chains visit every shift but 0, which is a device's own block."""

    axis: str
    size: int
    chains: tuple[Chain, ...]


def needed_blocks(spec: AttentionSpec, layout: Layout, devices: int, q_rows: int, kv_rows: int) -> np.ndarray:
    """Which blocks the mask lets a device attend to.

    Args:
      spec: only the static bounds of its mask rule blocks out.
      layout: how rows lie on devices; causal and windows align bottom-right in the whole sequence.
      devices: ring size n.
      q_rows, kv_rows: query and key rows of one device.

    Returns:
      bool [n, n]: entry (i, j) tells whether device i needs the block of device j.
    """
    needed = np.ones((devices, devices), bool)
    if not _aligned_statically(spec):
        return needed
    left, right = _static_reach(spec.mask)
    align = devices * (kv_rows - q_rows)
    for device in range(devices):
        rows = _spans(layout, device, devices, q_rows, align)
        for owner in range(devices):
            keys = _spans(layout, owner, devices, kv_rows, 0)
            needed[device, owner] = any(
                k_low <= q_high + right and k_high >= q_low - left for q_low, q_high in rows for k_low, k_high in keys
            )
    return needed


def _aligned_statically(spec: AttentionSpec) -> bool:
    """Whether the position of each row and key is known before run time."""
    return not spec.positions and not any(isinstance(part, Lengths) for part in spec.mask.parts)


def _static_reach(mask: Mask) -> tuple[float, float]:
    """How far left and right of its own position a row sees at most."""
    left = right = float("inf")
    for part in mask.parts:
        if isinstance(part, Causal):
            right = min(right, 0)
        elif isinstance(part, Window):
            if part.left is not None and part.left is not RUNTIME:
                left = min(left, part.left)
            if part.right is not None and part.right is not RUNTIME:
                right = min(right, part.right)
    return left, right


def _spans(layout: Layout, device: int, devices: int, rows: int, align: int) -> list[tuple[int, int]]:
    """Lowest and highest position of each chunk of a device."""
    run = rows // layout.chunks
    spans = []
    for chunk in range(layout.chunks if run else 0):
        offset, stride = layout.affine(device, chunk, devices, rows)
        spans.append((offset + align, offset + align + stride * (run - 1)))
    return spans


def make_levels(axes: dict[str, int], needed: np.ndarray) -> tuple[Level, ...]:
    """The transfers that bring every needed block to its devices.

    Args:
      axes: mesh axes and their sizes, outermost first.
      needed: see `needed_blocks`; devices are numbered as the mesh axes are, the last one running fastest.
    """
    sizes = tuple(axes.values())
    grid = needed.reshape(sizes + sizes)
    levels = []
    for index, (axis, size) in enumerate(axes.items()):
        others = tuple(d for d in range(2 * len(sizes)) if d % len(sizes) != index)
        levels.append(Level(axis, size, _chains(np.asarray(grid.any(axis=others)))))
    return tuple(levels)


def cut_blocks(
    levels: tuple[Level, ...], spec: AttentionSpec, layout: Layout, q_rows: int, kv_rows: int
) -> tuple[Level, ...]:
    """The levels of one ring in contiguous layout with `Chain.cut` where a window makes it worth it; others as given.

    Args:
      levels: see `make_levels`.
      spec, layout, q_rows, kv_rows: see `needed_blocks`.
    """
    if len(levels) != 1 or layout.name != "contiguous" or not _aligned_statically(spec):
        return levels
    (level,) = levels
    chains = tuple(
        dataclasses.replace(chain, cut=_cut(chain.hops[0], level.size, _static_reach(spec.mask), q_rows, kv_rows))
        if len(chain.hops) == 1 else chain
        for chain in level.chains
    )
    return (dataclasses.replace(level, chains=chains),)


def _cut(hop: Hop, devices: int, reach: tuple[float, float], q_rows: int, kv_rows: int) -> Cut | None:
    """What the pairs of a hop need; None if that is all."""
    left, right = reach
    keys, rows = [], []
    for _, device in hop.pairs:
        # The first query row's position, counted from the block's first key.
        first = device * q_rows + devices * (kv_rows - q_rows) - (device - hop.shift) % devices * kv_rows
        keys += [max(first - left, 0), min(first + q_rows + right, kv_rows)]
        rows += [max(-first - right, 0), min(kv_rows - first + left, q_rows)]
    cut = Cut(range(int(min(keys)), int(max(keys))), range(int(min(rows)), int(max(rows))))
    return cut if len(cut.keys) < kv_rows or len(cut.rows) < q_rows else None


def _chains(needed: np.ndarray) -> tuple[Chain, ...]:
    devices = len(needed)
    device, shift = np.indices(needed.shape)
    needed = needed[device, (device - shift) % devices]  # from owners to shifts
    wanted = [shift for shift in range(1, devices) if needed[:, shift].any()]
    stops = [0, *wanted, devices]
    gaps = np.diff(stops)
    widest = int(gaps.argmax())
    if gaps[widest] == 1:  # all blocks: once around, one way
        ahead, behind = wanted, []
    else:
        ahead, behind = wanted[:widest], wanted[widest:][::-1]
    return tuple(_chain(shifts, needed) for shifts in (ahead, behind) if shifts)


def _chain(shifts: list[int], needed: np.ndarray) -> Chain:
    devices = len(needed)

    def wanted_from(index: int, owner: int) -> bool:
        return any(needed[(owner + shift) % devices, shift] for shift in shifts[index:])

    hops = []
    previous, travelling = 0, list(range(devices))
    for index, shift in enumerate(shifts):
        going = [owner for owner in travelling if wanted_from(index, owner)]
        home = [owner for owner in travelling if owner not in going] if index else []
        hops.append(
            Hop(
                shift,
                tuple(sorted(((owner + previous) % devices, (owner + shift) % devices) for owner in going)),
                tuple(((owner + previous) % devices, owner) for owner in home),
            )
        )
        previous, travelling = shift, going
    return Chain(tuple(hops), tuple(((owner + previous) % devices, owner) for owner in travelling))
