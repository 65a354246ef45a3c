"""Plans of the Hopper forward kernel: tiles, stages, warp roles and strategies for each spec."""

from __future__ import annotations

import dataclasses

from jax_fa4 import masks
from jax_fa4.spec import AttentionSpec

SHARED_BYTES = 227 * 1024
REGISTERS = 65536
L2_SECTION_BYTES = 24 << 20
"""K and V of the heads that are worked on together: half of the L2 cache of an H100."""

_TILE_DIMS = (32, 64, 96, 128, 192, 256)


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How the forward kernel runs.

    Attributes:
        block_q: query rows of a CTA, 64 per consumer warpgroup.
        block_k: keys of a KV block.
        stages: K buffers, and as many V buffers.
        tile_dim, value_tile_dim: D and E rounded up to a size that the tensor cores' shared memory layouts take; TMA
            fills the difference with zeros.
        longest_first: order tiles so that those with most KV blocks start first.
        exp2_emulated_eighths, rescale_threshold_log2: see `kernels.common.softmax.SoftmaxStrategy`.
        producer_registers, consumer_registers: per thread, set at the start of the roles.
    """

    block_q: int
    block_k: int
    stages: int
    tile_dim: int
    value_tile_dim: int
    longest_first: bool
    exp2_emulated_eighths: int = 0
    rescale_threshold_log2: float = 0.0
    arch: str = "sm_90a"

    def __post_init__(self):
        if self.block_q % 64 or not 64 <= self.block_q <= 192:
            raise ValueError(f"block_q={self.block_q}: one warpgroup takes 64 rows, allowed are 64, 128 and 192")
        if self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"block_k={self.block_k}: allowed are multiples of 16 up to 256")
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"the plan needs {self.shared_bytes} bytes of shared memory, a block has {SHARED_BYTES}")
        total = 128 * (self.producer_registers + self.warpgroups * self.consumer_registers)
        if total > REGISTERS:
            raise ValueError(f"the plan needs {total} registers, a multiprocessor has {REGISTERS}")

    @property
    def warpgroups(self) -> int:
        """Consumer warpgroups."""
        return self.block_q // 64

    @property
    def producer_registers(self) -> int:
        return {1: 56, 2: 24, 3: 32}[self.warpgroups]

    @property
    def consumer_registers(self) -> int:
        return {1: 256, 2: 240, 3: 160}[self.warpgroups]

    @property
    def shared_bytes(self) -> int:
        tiles = self.block_q * self.tile_dim + self.stages * self.block_k * (self.tile_dim + self.value_tile_dim)
        return 2 * tiles + 16 * (1 + 2 * self.stages) + 1024


def round_up_dim(dim: int) -> int:
    """The smallest tile dim that holds `dim`."""
    return next(size for size in _TILE_DIMS if size >= dim)


def is_causal(mask: masks.Mask) -> bool:
    """Whether later query rows see more keys, so that tiles differ in length."""
    lefts = [part for part in mask.parts if isinstance(part, masks.Window) and part.left is not None]
    rights = [p for p in mask.parts if isinstance(p, masks.Causal) or (isinstance(p, masks.Window) and p.right is not None)]
    return bool(rights) and not lefts


def forward_plan(spec: AttentionSpec) -> ForwardPlan:
    """The plan for a spec, by head dims and mask."""
    tile_dim, value_tile_dim = round_up_dim(spec.head_dim), round_up_dim(spec.value_head_dim)
    masked = bool(spec.mask.parts)
    largest = max(tile_dim, value_tile_dim)
    if largest <= 64:
        block_q, block_k, stages = 192, 128, 2
    elif largest <= 128:
        block_q, block_k, stages = 128, 128 if masked else 176, 2
    elif value_tile_dim <= 128:
        block_q, block_k, stages = 128, 128, 2
    elif largest <= 192:
        block_q, block_k, stages = 128, 112, 2
    else:
        block_q, block_k, stages = 128, 80, 2
    return ForwardPlan(
        block_q, block_k, stages, tile_dim, value_tile_dim, longest_first=is_causal(spec.mask)
    )
