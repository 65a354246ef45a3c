"""How the Hopper backward kernel does its work: tiles, stages, shared memory and registers. Plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jax_fa4 import masks
from jax_fa4.kernels.common.planning import STATISTIC_BYTES, PieceCosts, check_slopes, pad_head_dim
from jax_fa4.kernels.sm90.plans import is_simple
from jax_fa4.scores import SoftCap
from jax_fa4.spec import AttentionSpec

SHARED_BYTES = 227 * 1024
"""Shared memory that one block may have on sm_90."""

SHORT_ROWS = 2048
"""Of the queries that see a key: under a window of up to so many, spare warps round dQ in sequences of any length."""

ALIGNMENT_BYTES = 1024
"""Swizzled tiles begin at multiples of this."""


@dataclass(frozen=True)
class Share:
    """A part of dV or dK that a warpgroup of a wide plan sums; the first of each pair is for the first warpgroup.

    Attributes:
      outputs: "dv" or "dk".
      starts: its first column (head dim) and key.
      width, keys: how many.
    """

    outputs: tuple[str, str]
    starts: tuple[tuple[int, int], tuple[int, int]]
    width: int
    keys: int

    def is_before(self, pair) -> bool:
        """Whether columns of (output, first column), one for either warpgroup, come right after its own."""
        here = zip(self.outputs, self.starts, strict=True)
        return all((output, start[0] + self.width) == other for (output, start), other in zip(here, pair, strict=True))


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles and stages of the backward kernel with transposed scores (rows are keys, columns are queries).

    Consumer warpgroups share the keys, 64 each (see `consumer`). In a wide plan, with 64 or 96 keys in all, they take
    turns with the blocks of queries, whose scores are not transposed there, and share dK and dV (see `wide`).

    Attributes:
      block_q: query rows a step (columns of the transposed scores).
      block_k: keys a block owns: 64 for each of two consumer warpgroups, or 64 or 96 in all.
      tile_d, tile_e: head dims in shared memory, padded to multiples of 64, or 96.
      q_stages, do_stages: tiles of Q (with LSE) and dO (with delta) in flight.
      k_stages: buffers of K; with two, a tile's last dQ is made in the first step of the next, so that warpgroups
        need not wait for each other between tiles.
      v_slices: of V's slices of 16 head dims, how many a consumer warpgroup of a narrow plan keeps in registers for a
        tile, as left operand of dP^T, which then reads less of shared memory.
      early_groups: groups of 8 queries whose LSE and delta a thread reads before it waits for their products, into two
        registers each.
      ds_stages: buffers of dS (and of P, in a wide plan, which needs two); with two instead of three, warpgroups keep
        closer step.
      tile_heads: query heads of a KV head that a tile has: all, and dK and dV are summed in its registers; or one, for
        more tiles and of less unequal length, and they are summed in global memory (see `keys`).
      pairs_heads: whether a tile has two of them instead of one where tiles are many, and two heads small enough.
      piece_costs: by what tiles are cut along their steps; None: they never are.
      spares_registers: whether consumers keep nothing that can be had again, as they have more than scores and sums
        to keep: the loading warp tells where each block of queries is (see `load.tell`), and what follows from a
        thread's number is worked out each time. In a wide plan that pays in a fixed order of dQ's sums only.
      dp_after_p: whether dP is issued when P is made instead of before, for what score functions need of registers.
      rounded_rows: up to so many query rows spare warps round dQ, if they do (see `rounds_behind`); with more, tiles
        are so long that it does not pay. None: always, as under a window.
      l2_bytes: heads are grouped so that what one group reads and reduces into stays within this size.
    """

    block_q: int
    block_k: int
    tile_d: int
    tile_e: int
    q_stages: int = 2
    do_stages: int = 2
    k_stages: int = 1
    v_slices: int = 0
    early_groups: int = 0
    ds_stages: int = 3
    tile_heads: int = 1
    pairs_heads: bool = False
    piece_costs: PieceCosts | None = None
    spares_registers: bool = False
    dp_after_p: bool = False
    rounded_rows: int | None = 8192
    l2_bytes: int = 32 << 20

    consumer_registers: int = 240
    producer_registers: int = 24

    def __post_init__(self) -> None:
        if self.shared_bytes > SHARED_BYTES:
            raise ValueError(f"{self} needs {self.shared_bytes} bytes of shared memory, allowed are {SHARED_BYTES}")
        if self.consumers > 2:
            raise ValueError(f"{self}: named barriers suffice for 2 consumer warpgroups")

    @property
    def wide(self) -> bool:
        return self.block_k < 128

    @property
    def dkv_transposed(self) -> bool:
        """Whether a wide plan makes dK^T and dV^T: their rows are head dims, and warpgroups share the keys."""
        return self.wide and self.block_k % 64 != 0

    @property
    def dp_parts(self) -> int:
        """Parts of the keys that a wide plan takes one after the other when it makes dP."""
        return self.consumers if self.dkv_transposed else 1

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return 2 if self.wide else self.block_k // 64

    @property
    def carries_dq(self) -> bool:
        """Whether a tile's last dQ is made in the next tile's first step."""
        return self.k_stages > 1

    @property
    def holds_dq(self) -> bool:
        """Whether a wide plan adds a step's last slice of dQ when the next step's S is under way.

        With two buffers of Q it would wait for Q first. Of a single slice, all is added beside dV and dK.
        """
        return self.wide and self.q_stages > 2 and self.dq_slices > 1

    @property
    def dv_alone(self) -> bool:
        """Whether dV is awaited before dK and dQ are issued, for which registers do not suffice else."""
        return self.block_q > 64 or self.v_slices > 0

    @property
    def dq_before_dk(self) -> bool:
        """Whether a step's dQ is issued before dK, and leaves while that runs; wide blocks lose by it."""
        return self.block_q <= 64

    @property
    def skips_blocks(self) -> bool:
        """Whether a consumer warpgroup skips a tile's first and last block of queries where none sees its keys."""
        return self.block_q <= 64 and not self.wide

    @property
    def zeroes_ahead(self) -> bool:
        """Whether a spare warp zeroes sums of dQ (see `dq_zeros`) instead of a kernel beforehand."""
        return self.wide or self.carries_dq

    @property
    def rounds_behind(self) -> bool:
        """Whether spare warps round dQ (see `rounding`), and a kernel afterwards only what they leave."""
        return self.carries_dq

    @property
    def load_order(self) -> tuple[str, ...]:
        """In what order the loading warp loads K, V and the first Q and dO of a tile, and Q and dO of each later step.

        In a narrow plan in that in which their buffers are given back, so that none waits for another's. In a wide one,
        where that warp also sees to it that the sums of dQ are zeroed before they are added to, Q comes before dO.
        """
        if self.wide:
            return ("k", "q", "v", "zeros", "do") if self.zeroes_ahead else ("k", "q", "v", "do")
        return ("k", "do", "q", "v") if self.carries_dq else ("do", "q", "v", "k")

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def roles(self) -> dict[str, range]:
        """Warps of the main kernel by role."""
        consumers = {f"consumer{g}": range(4 * g + 4, 4 * g + 8) for g in range(self.consumers)}
        single = {"load": True, "store": not self.wide, "round": self.rounds_behind, "zero": self.zeroes_ahead}
        return {role: range(w, w + 1) for w, (role, exists) in enumerate(single.items()) if exists} | consumers

    @property
    def dq_by_rows(self) -> bool:
        """Whether consumers share dQ by rows (64 each) or by columns."""
        return self.block_q == 64 * self.consumers

    @property
    def dq_transposed(self) -> bool:
        """Whether dQ^T = K^T dS^T is made instead of dQ = dS K: its rows are head dims, which the consumers share."""
        return self.block_q % 64 != 0

    @property
    def panel_q(self) -> int:
        """Columns of a swizzled panel of dS, whose columns are queries, or keys in a wide plan."""
        if not self.wide:
            return _panel(self.block_q)
        return _panel(self.block_k // self.consumers if self.dkv_transposed else self.block_k)

    @property
    def dq_columns(self) -> int:
        """Columns of K, and so of dQ: `tile_d`, or more where consumers share them as rows of dQ^T."""
        return max(self.tile_d, 64 * self.consumers) if self.dq_transposed else self.tile_d

    @property
    def dkv_columns(self) -> int:
        """Warpgroups that share the columns of dK, and those of dV."""
        return self.consumers if self.wide and not self.dkv_transposed and self.tile_d != self.tile_e else 1

    @property
    def shares(self) -> tuple[Share, ...]:
        """What either warpgroup of a wide plan sums of dV and dK."""
        keys = self.block_k
        if self.dkv_transposed:
            return _transposed_shares(self.tile_d, self.tile_e, keys)
        if self.dkv_columns == 1:
            return (Share(("dv", "dk"), ((0, 0), (0, 0)), self.tile_d, keys),)
        sides = (("dv", self.tile_e // 2), ("dk", self.tile_d // 2))
        return tuple(Share((side, side), ((0, 0), (width, 0)), width, keys) for side, width in sides)

    @property
    def dq_slices(self) -> int:
        """Parts of 64 columns in which dQ of a step is made in a wide plan."""
        return self.tile_d // 64

    @property
    def dq_parts(self) -> int:
        """Warpgroups that share dQ of a step."""
        return 1 if self.wide else self.consumers

    @property
    def dq_floats(self) -> int:
        """Elements of one tile of the dQ accumulator."""
        return self.block_q * self.dq_columns

    @property
    def part_rows(self) -> int:
        """Rows of a consumer warpgroup's part of dQ of a step."""
        return self.block_q // self.dq_parts if self.dq_by_rows else self.block_q

    @property
    def part_columns(self) -> int:
        """Columns of such a part."""
        return self.dq_columns if self.dq_by_rows else self.dq_columns // self.dq_parts

    @property
    def part_floats(self) -> int:
        """Elements of such a part."""
        return self.dq_floats // self.dq_parts

    @property
    def panel_k(self) -> int:
        """Columns of a swizzled panel of K."""
        return _panel(self.dq_columns)

    @property
    def panel_d(self) -> int:
        """Columns of a swizzled panel of Q."""
        return _panel(self.tile_d // self.dkv_columns)

    @property
    def panel_e(self) -> int:
        """Columns of a swizzled panel of dO and V."""
        return _panel(self.tile_e // self.dkv_columns)

    @property
    def q_stage_bytes(self) -> int:
        """Of one tile of Q, with its LSE."""
        return self.block_q * (2 * self.tile_d + STATISTIC_BYTES)

    @property
    def do_stage_bytes(self) -> int:
        """Of one tile of dO, with its delta."""
        return self.block_q * (2 * self.tile_e + STATISTIC_BYTES)

    @property
    def shared_bytes(self) -> int:
        keys = self.block_k * (self.k_stages * self.dq_columns + self.tile_e)
        ds = self.ds_stages * self.block_q * self.block_k * (2 if self.wide else 1)
        staged = 0 if self.wide else self.dq_floats
        queries = self.q_stages * self.q_stage_bytes + self.do_stages * self.do_stage_bytes
        return 2 * (keys + ds) + queries + 4 * staged + ALIGNMENT_BYTES


def _transposed_shares(tile_d: int, tile_e: int, keys: int) -> tuple[Share, ...]:
    """Of dV^T and dK^T: as many tiles of 64 rows for either warpgroup, and half the keys of one that is left over."""
    tiles = [("dv", i) for i in range(0, tile_e, 64)] + [("dk", i) for i in range(0, tile_d, 64)]
    half, odd = divmod(len(tiles), 2)
    shares: list[Share] = []
    for pair in zip(tiles[:half], tiles[half + odd :], strict=True):
        if shares and shares[-1].is_before(pair):
            shares[-1] = replace(shares[-1], width=shares[-1].width + 64)
        else:
            outputs, starts = zip(*pair, strict=True)
            shares.append(Share(outputs, tuple((start, 0) for start in starts), 64, keys))
    shares += [Share((side, side), ((i, 0), (i, keys // 2)), 64, keys // 2) for side, i in tiles[half : half + odd]]
    return tuple(shares)


def _panel(columns: int) -> int:
    """The widest swizzled panel that divides columns."""
    return next(width for width in (64, 32, 16) if columns % width == 0)


def _window_rows(mask: masks.Mask) -> float:
    """How many query rows see a key at most, as far as the mask's windows say."""
    causal = any(isinstance(part, masks.Causal) for part in mask.parts)
    windows = [part for part in mask.parts if isinstance(part, masks.Window)]
    behind = [w.left for w in windows if isinstance(w.left, int)]
    ahead = [w.right for w in windows if isinstance(w.right, int)] + ([0] if causal else [])
    return min(behind, default=math.inf) + min(ahead, default=math.inf) + 1


def _piece_costs(mask: masks.Mask) -> PieceCosts | None:
    """Only where all tiles have as many steps, but for what only the device knows."""
    unequal = any(isinstance(part, masks.Causal | masks.Window | masks.Segments) for part in mask.parts)
    return None if unequal else PieceCosts()


def backward_plan(spec: AttentionSpec) -> BackwardPlan:
    """The plan for a spec, by head dims and mask. Raises `Unsupported`."""
    check_slopes(spec)
    tile_d, tile_e = pad_head_dim(spec.head_dim), pad_head_dim(spec.value_head_dim)
    largest = max(tile_d, tile_e)
    common = {"tile_d": tile_d, "tile_e": tile_e, "piece_costs": _piece_costs(spec.mask)}
    common["spares_registers"] = spec.deterministic if largest > 128 else not is_simple(spec)
    only_caps = all(isinstance(mod, SoftCap) for mod in spec.score_mods)
    common["dp_after_p"] = bool(spec.score_mods) and largest > (128 if only_caps else 64)
    if _window_rows(spec.mask) <= SHORT_ROWS:
        common["rounded_rows"] = None
    if spec.deterministic:
        common["tile_heads"] = spec.group
    elif spec.group % 2 == 0:
        common["pairs_heads"] = True

    def plan(block_q: int, block_k: int, **rest) -> BackwardPlan:
        return BackwardPlan(block_q, block_k, **(common | rest))

    if largest <= 64:
        rows = 64 if spec.score_mods else 128  # P beside P times the slope of the score: registers for 64
        return plan(rows, 128, ds_stages=2, k_stages=2, l2_bytes=16 << 20)
    if largest <= 128:
        narrow = plan(64, 128, early_groups=8)
        if tile_d < 128 or not is_simple(spec):
            return narrow
        if spec.head_dim <= 96:
            small = spec.value_head_dim <= 96
            return plan(96 if small else 80, 128, tile_d=96, tile_e=96 if small else tile_e, ds_stages=2)
        return plan(64, 128, ds_stages=2, k_stages=2, v_slices=5, early_groups=2, l2_bytes=16 << 20)
    if tile_d + tile_e <= 320:
        wide = plan(64, 96, ds_stages=2, l2_bytes=16 << 20, piece_costs=None)  # 1 to 2 % slower with code to cut tiles
    else:
        wide = plan(64, 64, ds_stages=2, l2_bytes=16 << 20)
    fits = wide.shared_bytes + wide.q_stage_bytes <= SHARED_BYTES
    return replace(wide, q_stages=3) if fits else wide
