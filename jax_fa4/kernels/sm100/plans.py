"""Forward plans for Blackwell (sm_100a): tiles, memory, registers and strategies, and the budgets they must fit.

A CTA has 16 warps: two softmax warpgroups, one correction warpgroup, and the single warps of the other roles. Two
shapes of the same kernel exist. With two query tiles each has its score slot and its softmax warpgroup, and they share
the K/V tiles: while one tile is in softmax the tensor core works for the other. With one query tile (its O alone takes
half of tensor memory) the two score slots hold successive key blocks of that one tile.

Plain Python: choosing a plan imports no compiler.
"""

from __future__ import annotations

import dataclasses

BLOCK_Q = 128
"""Rows of one query tile: the tensor core's M, and the threads of a softmax warpgroup."""
BLOCK_K = 128
"""Keys of one K/V tile."""
SLOTS = 2
"""Score slots in tensor memory."""
TMEM_COLUMNS = 512
SMEM_BYTES = 227 * 1024
REGISTERS = 64 * 1024 // 128
"""Registers a thread of each of four warpgroups could have on average, times four: 512."""


@dataclasses.dataclass(frozen=True)
class Warps:
    """Warp indices of the roles. A warpgroup's first index is a multiple of 4: warp w reads TMEM lanes 32 (w % 4)."""

    softmax: tuple[int, ...] = (0, 4)
    correction: int = 8
    mma: int = 12
    load: int = 13
    epilogue: int = 14
    count: int = 16

    @property
    def threads(self) -> int:
        return 32 * self.count

    @property
    def tmem_threads(self) -> int:
        """Of the warps that use tensor memory: those up to mma."""
        return 32 * (self.mma + 1)


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers per thread (setmaxnreg) of each role; "other" are the single warps."""

    softmax: int = 184
    correction: int = 96
    other: int = 48

    def __post_init__(self):
        total = 2 * self.softmax + self.correction + self.other
        if total > 512:
            raise ValueError(f"registers: two softmax, a correction and the other warpgroup take {total} of 512")


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How a forward pass runs on sm_100a.

    Attributes:
      head_dim, value_head_dim: D and E, padded to multiples of 16 (TMA fills the rest with zeros).
      itemsize: bytes of an input element.
      q_tiles: query tiles of 128 rows a CTA works on at once, 2 or 1.
      kv_stages: tiles in the ring that K and V share.
      o_over_q: O leaves through the shared memory that Q came in, so the next Q waits for O's store.
      float32_out: O leaves in float32, from registers.
      exp2_on_fma: of the 16 pairs in each of the four 32-column parts of a row, how many have their exponential
        computed by a polynomial on the FMA units instead of the special-function unit (16 results a cycle).
      rescale_threshold_log2: the running maximum moves only when it grew by more than this, in powers of two; O then
        needs no rescaling otherwise. Sums and O stay exact, P stays below 2**threshold.
      packed_heads: query heads of one KV head whose rows share a tile (GQA packing); 1 without packing.
      longest_first: query tiles are scheduled from the last to the first.
    """

    arch: str
    head_dim: int
    value_head_dim: int
    itemsize: int = 2
    q_tiles: int = 2
    kv_stages: int = 3
    o_over_q: bool = False
    float32_out: bool = False
    exp2_on_fma: tuple[int, int, int, int] = (4, 4, 4, 0)
    rescale_threshold_log2: float = 8.0
    packed_heads: int = 1
    longest_first: bool = False
    l2_bytes: int = 64 * 2**20
    registers: Registers = Registers()
    warps: Warps = Warps()

    @property
    def tmem_columns(self) -> int:
        return SLOTS * BLOCK_K + self.q_tiles * self.value_head_dim

    def score_column(self, slot: int) -> int:
        return slot * BLOCK_K

    def output_column(self, tile: int) -> int:
        return SLOTS * BLOCK_K + tile * self.value_head_dim

    @property
    def q_tile_bytes(self) -> int:
        return BLOCK_Q * max(self.head_dim, self.value_head_dim if self.o_over_q else 0) * self.itemsize

    @property
    def kv_stage_bytes(self) -> int:
        return BLOCK_K * max(self.head_dim, self.value_head_dim) * self.itemsize

    @property
    def o_tile_bytes(self) -> int:
        return 0 if self.float32_out or self.o_over_q else BLOCK_Q * self.value_head_dim * self.itemsize

    @property
    def smem_bytes(self) -> int:
        """Tiles, plus 3 KB for statistics and barriers."""
        return self.q_tiles * (self.q_tile_bytes + self.o_tile_bytes) + self.kv_stages * self.kv_stage_bytes + 3072

    def __post_init__(self):
        for what, need, have in (
            ("tensor memory columns", self.tmem_columns, TMEM_COLUMNS),
            ("shared memory bytes", self.smem_bytes, SMEM_BYTES),
        ):
            if need > have:
                raise ValueError(f"{what}: the plan needs {need}, an SM has {have}: {self}")
