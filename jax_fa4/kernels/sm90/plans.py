"""Plans of the Hopper forward kernel: tiles, stages, warp roles and strategies for each spec."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_fa4 import masks
from jax_fa4.kernels.common.planning import Cutting
from jax_fa4.spec import AttentionSpec

SHARED_BYTES = 227 * 1024
REGISTERS = 65536
L2_SECTION_BYTES = 32 << 20
"""K and V of the heads that are worked on together, of the 50 MB of L2 cache."""

STATIC_BLOCKS = 256
"""Up to so many KV blocks a CTA, tiles of equal length are dealt out in turn: zeroing the counter that hands them out
is a launch of its own, and takes 4 to 7 us."""

SHORT_ROWS = 1536
"""Up to here tiles of 128 rows are faster than tiles of 192 (D = 64)."""

_TILE_DIMS = (32, 64, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How the forward kernel runs.

    Attributes:
        block_q: query rows of a CTA, 64 per consumer warpgroup.
        block_k: keys of a KV block.
        stages: K buffers, and as many V buffers.
        q_stages: Q buffers; with 2 the next tile's Q is loaded while this tile is worked on.
        turns: what warpgroups do in turns: "none"; "tiles", their first softmax of a tile, so that from there on one's
            exponentials meet another's products; "blocks", the products of every KV block (ping-pong).
        tile_dim, value_tile_dim: D and E rounded up to a size that the tensor cores' shared memory layouts take; TMA
            fills the difference with zeros.
        packed_heads: query heads of a KV head that share a tile: row r is query row r // packed_heads of head
            r % packed_heads of the group. 1, or the whole group.
        longest_first: order tiles so that those with most KV blocks start first.
        equal_length: whether all tiles have as many, but for causality and for what is known before the run.
        lazy_maximum: in which blocks a row's reference is kept while its exponentials stay small enough
            (`kernels.common.softmax`), instead of finding the maximum and rescaling: "full blocks", those without the
            element mask, or "all blocks". Where few keys are left to a row, an exact maximum gives the heaviest key a P
            of exactly 1; rounded, it costs accuracy.
        short: the plan for up to `short_rows` query rows, where tall tiles would end half empty; both are in one
            artifact, and the host function picks by the length.
        cutting: when tiles of a wave that would not fill the device are cut along the keys; None: never.
        few: the plan for calls that gain much from cutting, those with few tiles. Code for tiles that may be cut is up
            to 3 % slower in short tiles (D = 64, causal, windows), so the others keep a kernel without.
        producer_registers, consumer_registers: per thread, set at the start of the roles.
    """

    block_q: int
    block_k: int
    stages: int
    tile_dim: int
    value_tile_dim: int
    longest_first: bool
    equal_length: bool = False
    packed_heads: int = 1
    q_stages: int = 1
    turns: Literal["none", "tiles", "blocks"] = "none"
    lazy_maximum: Literal["full blocks", "all blocks"] = "full blocks"
    short: ForwardPlan | None = None
    short_rows: int = 0
    cutting: Cutting | None = None
    few: ForwardPlan | None = None
    arch: str = "sm_90a"

    def __post_init__(self):
        if self.block_q % 64 or not 64 <= self.block_q <= 192:
            raise ValueError(f"block_q={self.block_q}: one warpgroup takes 64 rows, allowed are 64, 128 and 192")
        if self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"block_k={self.block_k}: allowed are multiples of 16 up to 256")
        if self.block_q % self.packed_heads:
            raise ValueError(f"packed_heads={self.packed_heads} does not divide block_q={self.block_q}")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"the plan needs {self.shared_bytes} bytes of shared memory, a block has {SHARED_BYTES}")
        total = 128 * (self.producer_registers + self.warpgroups * self.consumer_registers)
        if total > REGISTERS:
            raise ValueError(f"the plan needs {total} registers, a multiprocessor has {REGISTERS}")

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.block_q // 64

    def is_lazy(self, masked: bool) -> bool:
        """Whether steps on blocks with (`masked`) or without the element mask are lazy."""
        return not masked or self.lazy_maximum == "all blocks"

    @property
    def roles(self) -> dict[str, range]:
        """Warps of the kernel by role."""
        return {"load": range(1)} | {f"consumer{g}": range(4 * g + 4, 4 * g + 8) for g in range(self.warpgroups)}

    @property
    def block_positions(self) -> int:
        """Query rows of one head in a tile."""
        return self.block_q // self.packed_heads

    @property
    def q_tile(self) -> tuple:
        """What TMA brings of Q (rows, D): with packed heads the rows are (heads, positions)."""
        rows = self.block_q if self.packed_heads == 1 else (self.packed_heads, self.block_positions)
        return rows, self.tile_dim

    @property
    def k_tile(self) -> tuple:
        """What TMA brings of K (keys, D)."""
        return self.block_k, self.tile_dim

    @property
    def v_tile(self) -> tuple:
        """What TMA brings of V (E, keys)."""
        return self.value_tile_dim, self.block_k

    @property
    def producer_registers(self) -> int:
        return {1: 56, 2: 24, 3: 32}[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        return {1: 256, 2: 240, 3: 160}[self.warpgroups]

    @property
    def buffers_output(self) -> bool:
        """Whether O of 16 bits has a place in shared memory from which TMA stores it, a warp's 16 rows at a time."""
        box = 16 % self.packed_heads == 0 or self.packed_heads % 16 == 0
        return self.value_tile_dim % 64 == 0 and box and self._shared_bytes(with_output=True) <= SHARED_BYTES

    @property
    def shared_bytes(self) -> int:
        return self._shared_bytes(self.buffers_output)

    def _shared_bytes(self, with_output: bool) -> int:
        q = self.q_stages * self.block_q * self.tile_dim
        kv = self.stages * self.block_k * (self.tile_dim + self.value_tile_dim)
        o = self.block_q * self.value_tile_dim if with_output else 0
        return 2 * (q + kv + o) + 1024  # barriers, rounded up to the tiles' alignment

    @property
    def store_tile(self) -> tuple:
        """What a warp stores of O with one instruction: 16 rows (with packed heads: heads, positions), 64 columns."""
        heads = min(self.packed_heads, 16)
        return 16 if self.packed_heads == 1 else (heads, 16 // heads), 64


def round_up_dim(dim: int) -> int:
    """The smallest tile dim that holds `dim`."""
    return next(size for size in _TILE_DIMS if size >= dim)


def is_causal(mask: masks.Mask) -> bool:
    """Whether later query rows see more keys, so that tiles differ in length."""
    windows = [part for part in mask.parts if isinstance(part, masks.Window)]
    causal = any(isinstance(part, masks.Causal) for part in mask.parts) or any(w.right is not None for w in windows)
    return causal and all(w.left is None for w in windows)


def _is_even(mask: masks.Mask) -> bool:
    """Whether all examples have the same lengths, and windows are known before the run."""
    windows = [part for part in mask.parts if isinstance(part, masks.Window)]
    lengths = any(isinstance(part, masks.Lengths) for part in mask.parts)
    return not lengths and not any(masks.RUNTIME in (window.left, window.right) for window in windows)


FEW_TILES = Cutting(gain_percent=6)
"""Beside a kernel that cuts no tiles."""


def forward_plan(spec: AttentionSpec) -> ForwardPlan:
    """The plan for a spec, by head dims and mask."""
    plan = _uncut_plan(spec)
    if any(isinstance(part, masks.Segments) for part in spec.mask.parts):
        return plan  # a tile visits few blocks, side by side
    bounded = plan.longest_first or any(isinstance(part, masks.Window) for part in spec.mask.parts)
    if max(plan.tile_dim, plan.value_tile_dim) > 64 and not bounded:
        return dataclasses.replace(plan, cutting=Cutting())
    return dataclasses.replace(plan, few=dataclasses.replace(plan.short or plan, cutting=FEW_TILES))


def _uncut_plan(spec: AttentionSpec) -> ForwardPlan:
    tile_dim, value_tile_dim = round_up_dim(spec.head_dim), round_up_dim(spec.value_head_dim)
    largest = max(tile_dim, value_tile_dim)
    causal = is_causal(spec.mask)

    def plan(block_q: int, block_k: int, stages: int, q_stages: int, **rest) -> ForwardPlan:
        packed_heads = spec.group if block_q % spec.group == 0 else 1
        return ForwardPlan(
            block_q, block_k, stages, tile_dim, value_tile_dim, longest_first=causal,
            equal_length=_is_even(spec.mask),
            packed_heads=packed_heads, q_stages=q_stages,
            lazy_maximum="all blocks" if causal and is_simple(spec) else "full blocks", **rest,
        )  # fmt: skip

    if largest <= 64:
        short = plan(128, 128, 3, 2, turns="none" if causal else "tiles")
        if is_simple(spec):
            return plan(192, 96, 3, 2, short=short, short_rows=SHORT_ROWS)
        return short
    if largest <= 128:
        return plan(128, 128, 2, 2, turns="blocks" if causal else "none")
    if value_tile_dim <= 128:
        return plan(128, 128, 2, 1)
    return plan(128, 96 if largest <= 192 else 80, 2, 1, turns="tiles" if causal else "none")


def is_simple(spec: AttentionSpec) -> bool:
    """Whether no score function and no elementwise mask makes the softmax longer, and rows of few keys likely."""
    elementwise = (masks.Segments, masks.Predicate)
    return not spec.score_mods and not any(isinstance(part, elementwise) for part in spec.mask.parts)
