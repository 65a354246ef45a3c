"""Forward plans for Blackwell (sm_100a): tiles, memory, registers and strategies, and the budgets they must fit.

A CTA has 16 warps: two softmax warpgroups, one correction warpgroup, and the single warps of the other roles. Two
shapes of the same kernel exist. With two query tiles each has its score slot and its softmax warpgroup, and they share
the K/V tiles: while one tile is in softmax the tensor core works for the other. With one query tile (its O alone takes
half of tensor memory) the two score slots hold successive key blocks of that one tile.

Plain Python: choosing a plan imports no compiler.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jax_fa4 import masks
from jax_fa4.spec import AttentionSpec

BLOCK_Q = 128
"""Rows of one query tile: the tensor core's M, and the threads of a softmax warpgroup."""
BLOCK_K = 128
"""Keys of one K/V tile."""
SLOTS = 2
"""Score slots in tensor memory."""
GROUP_SLOTS = 2
GROUP_WORDS = 12
"""Of the queue of key blocks by ids: 32-bit words of a slot, with padding to 16 bytes."""
MAX_STAGES = 8
"""More do not hide more latency."""
TMEM_COLUMNS = 512
SMEM_BYTES = 227 * 1024
REGISTERS = 64 * 1024 // 128
"""What a thread of each of the block's four warpgroups can have in all."""
TILE_DIMS = (32, 64, 96, 128, 160, 192, 256)
"""Sizes of D and E that kernels are compiled for; others are padded by TMA, which fills with zeros."""


@dataclasses.dataclass(frozen=True)
class Warps:
    """Warp indices of the roles. A warpgroup's first index is a multiple of 4: warp w reads TMEM lanes 32 (w % 4)."""

    softmax: tuple[int, ...] = (0, 4)
    correction: int = 8
    mma: int = 12
    load: int = 13
    epilogue: int = 14
    scheduler: int = 15
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

    softmax: int = 192
    correction: int = 80
    other: int = 48

    def __post_init__(self):
        total = 2 * self.softmax + self.correction + self.other
        if total > REGISTERS:
            raise ValueError(f"registers: the four warpgroups take {total} of {REGISTERS}: {self}")


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """How a forward pass runs on sm_100a.

    Attributes:
      head_dim, value_head_dim: D and E, padded (see TILE_DIMS).
      itemsize: bytes of an input element.
      cta_group: CTAs that share each product: 1, or 2 neighbours of which each holds 128 rows of every query tile and
        loads half of each tile of K and V, while the first one issues the products for both.
      q_tiles: query tiles a CTA works on at once, 2 or 1.
      kv_chunks: parts in which a tile of K or V is loaded: with few stages, a part's memory is free before the whole
        product is done.
      kv_stages: chunks in the ring that K and V share.
      o_over_q: O leaves through the shared memory that Q came in, so the next Q waits for O's store.
      float32_out: O leaves in float32, from registers: asked for, or a part under split-KV.
      exp2_on_fma: of the 16 pairs in each of the four 32-column parts of a row, how many have their exponential
        computed by a polynomial on the FMA units instead of the special-function unit (16 results a cycle).
      rescale_threshold_log2: the running maximum moves only when it grew by more than this, in powers of two; O then
        needs no rescaling otherwise. Sums and O stay exact, P stays below 2**threshold.
      exact_blocks: a tile's first blocks, in which the maximum moves at any growth: a maximum of few keys would make
        the largest P of the row some number above 1, which rounds, where 1 does not.
      packed_heads: query heads of one KV head whose rows share a tile (GQA packing); 1 without packing.
      split_kv: the key blocks of a tile are divided among CTAs, and a second kernel combines their results.
      key_blocks: which ones a query tile visits: all in the "range" that its mask leaves, or those among them that
        segment "ids" leave; these the scheduler warp finds and tells the other roles.
      scheduler: who hands out work: "static", CTA i takes i, i + CTAs, ...; or "clc", a CTA that is done asks the
        hardware (cluster launch control) for work of which no CTA has begun, so that unequal work evens out.
      longest_first: query tiles are scheduled from the last to the first, in sections of equally many heads, whose K
        and V take `l2_bytes` (of 126 MB) at most.
    """

    arch: str
    head_dim: int
    value_head_dim: int
    itemsize: int = 2
    cta_group: Literal[1, 2] = 1
    q_tiles: int = 2
    kv_chunks: int = 1
    kv_stages: int = 3
    o_over_q: bool = False
    float32_out: bool = False
    exp2_on_fma: tuple[int, int, int, int] = (5, 5, 5, 0)
    rescale_threshold_log2: float = 8.0
    exact_blocks: int = 2
    packed_heads: int = 1
    split_kv: bool = False
    key_blocks: Literal["range", "ids"] = "range"
    scheduler: Literal["static", "clc"] = "static"
    longest_first: bool = False
    l2_bytes: int = 48 * 2**20
    registers: Registers = Registers()
    warps: Warps = Warps()

    @property
    def q_rows(self) -> int:
        """Rows of a query tile, over the CTAs that share its products."""
        return BLOCK_Q * self.cta_group

    @property
    def tile_positions(self) -> int:
        """Rows of the query sequence in a query tile."""
        return self.q_rows // self.packed_heads

    @property
    def tmem_columns(self) -> int:
        return SLOTS * BLOCK_K + self.q_tiles * self.value_head_dim

    @property
    def group_readers(self) -> int:
        """Warps of a CTA that read which key blocks ids leave: of the roles softmax, correction, load and mma."""
        return 4 * self.q_tiles + 4 + 1 + 1

    @property
    def answer_readers(self) -> int:
        """Warps that go from work to work in all CTAs that share products: two of those roles only in the leader."""
        by_ids = self.key_blocks == "ids"
        everywhere = 4 * self.q_tiles + 4 + 1 + (0 if self.float32_out else 1) + (1 if by_ids else 0)
        return self.cta_group * everywhere + (1 if by_ids else 2)

    def score_column(self, slot: int) -> int:
        return slot * BLOCK_K

    def output_column(self, tile: int) -> int:
        return SLOTS * BLOCK_K + tile * self.value_head_dim

    @property
    def roles(self) -> dict[str, range]:
        """Warps of the main kernel by role."""
        w = self.warps
        groups = {"softmax0": w.softmax[0], "softmax1": w.softmax[1], "correction": w.correction}
        return {
            "load": range(w.load, w.load + 1),
            "mma": range(w.mma, w.mma + 1),
            **{role: range(first, first + 4) for role, first in groups.items()},
            "epilogue": range(w.epilogue, w.epilogue + 1),
            **({"scheduler": range(w.scheduler, w.scheduler + 1)} if self.schedules else {}),
        }

    @property
    def schedules(self) -> bool:
        """Whether the scheduler warp has anything to do."""
        return self.scheduler == "clc" or self.key_blocks == "ids"

    @property
    def accumulators(self) -> dict[int, str]:
        """What the products make, by its first column of tensor memory."""
        scores = {self.score_column(slot): f"S{slot}" for slot in range(SLOTS)}
        return scores | {self.output_column(tile): f"O{tile}" for tile in range(self.q_tiles)}

    @property
    def q_tile_bytes(self) -> int:
        return BLOCK_Q * max(self.head_dim, self.value_head_dim if self.o_over_q else 0) * self.itemsize

    @property
    def kv_stage_bytes(self) -> int:
        """Of one CTA."""
        return BLOCK_K * max(self.head_dim, self.value_head_dim) * self.itemsize // (self.kv_chunks * self.cta_group)

    @property
    def o_tile_bytes(self) -> int:
        return 0 if self.float32_out or self.o_over_q else BLOCK_Q * self.value_head_dim * self.itemsize

    @property
    def smem_bytes(self) -> int:
        """Tiles, plus 3 KB for statistics and barriers."""
        return self.q_tiles * (self.q_tile_bytes + self.o_tile_bytes) + self.kv_stages * self.kv_stage_bytes + 3072

    def __post_init__(self):
        if self.cta_group == 2 and self.split_kv:
            raise ValueError(f"cta_group: 2 does not go with split_kv, which serves few query rows: {self}")
        for what, need, have in (
            ("tensor memory columns", self.tmem_columns, TMEM_COLUMNS),
            ("shared memory bytes", self.smem_bytes, SMEM_BYTES),
        ):
            if need > have:
                raise ValueError(f"{what}: the plan needs {need}, an SM has {have}: {self}")


def forward_plan(spec: AttentionSpec, arch: str, size) -> ForwardPlan:
    """The plan for a spec on `arch` for a `plan.SizeClass`."""
    head_dim, value_head_dim = _padded(spec.head_dim), _padded(spec.value_head_dim)
    bounded, by_ids = _bounded(spec.mask), any(isinstance(part, masks.Segments) for part in spec.mask.parts)
    uneven = bounded or by_ids
    q_tiles = 2 if value_head_dim <= 128 else 1
    few = size.name == "FEW_TILES"
    float32_out = spec.float32_out or few
    common = dict(
        arch=arch,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        q_tiles=q_tiles,
        o_over_q=not float32_out and max(head_dim, value_head_dim) > 128,
        float32_out=float32_out,
        exp2_on_fma=(0, 0, 0, 0) if arch == "sm_103a" else _exp2_on_fma(q_tiles, value_head_dim),
        packed_heads=spec.group if few and BLOCK_Q % spec.group == 0 else 1,
        split_kv=few,
        key_blocks="ids" if by_ids else "range",
        scheduler="clc" if uneven and not few else "static",
        longest_first=bounded,
    )
    plan = _with_most_stages(ForwardPlan(kv_stages=2, **common))
    # With two stages a tile's memory is awaited at every block. In pairs a CTA holds half of each.
    short_of_stages = plan.kv_stages == 2
    if head_dim % 64 or value_head_dim % 64:
        return plan
    if few:
        return _with_most_stages(ForwardPlan(kv_stages=4, kv_chunks=2, **common)) if short_of_stages else plan
    # Otherwise a pair takes as many cycles for a key block, or less from D = 128 on, but both CTAs visit every block
    # that either needs: under causal masks, windows and segments that outweighs it.
    if short_of_stages or (value_head_dim == 128 and not uneven):
        return _with_most_stages(ForwardPlan(kv_stages=4, cta_group=2, **common))
    return plan


def _with_most_stages(plan: ForwardPlan) -> ForwardPlan:
    spare = SMEM_BYTES - plan.smem_bytes
    return dataclasses.replace(plan, kv_stages=min(plan.kv_stages + spare // plan.kv_stage_bytes, MAX_STAGES))


def _exp2_on_fma(q_tiles: int, value_head_dim: int) -> tuple[int, int, int, int]:
    """The share on FMA units: a quarter, or 23 % from D = 128 on, as the software GPU's clock model has it best.

    FlashAttention-4 takes 12.5 and 18.75 % at D = 128. At D = 64 the products take half as long as the exponentials,
    and the share brings the special-function unit's cycles for two tiles from 2048 to 1536, against the tensor core's
    1024. At D = 128, where they take equally long, it shortens the way from S to P, which the next product waits for.
    The last part of a row has none: nothing follows that would hide its latency. With one query tile the products
    alone bound the kernel. (sm_103a has twice the special-function rate, and none are moved.)
    """
    if q_tiles == 1:
        return 0, 0, 0, 0
    return (5, 5, 6, 0) if value_head_dim <= 64 else (5, 5, 5, 0)


def _padded(dim: int) -> int:
    return next(size for size in TILE_DIMS if size >= dim)


def _bounded(mask: masks.Mask) -> bool:
    """Whether query tiles differ in length by their place in the sequence."""
    return any(isinstance(part, masks.Causal | masks.Window) for part in mask.parts)
