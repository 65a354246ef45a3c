"""How the Blackwell backward kernel does its work: tiles, tensor memory, shared memory, registers. Plain Python."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from jax_fa4 import masks
from jax_fa4.kernels.common.planning import check_slopes, pad_head_dim
from jax_fa4.kernels.sm100.plans import REGISTERS, SMEM_BYTES, TMEM_COLUMNS
from jax_fa4.spec import AttentionSpec

BLOCK = 128
"""Query rows of a step, and lanes of tensor memory."""

COMPUTED = ("p", "ds", "ds_out")
"""Tiles in shared memory that are not loaded."""

NUMBER_BYTES = 16
"""Between tile numbers in shared memory: what one bulk copy moves."""

_SMALL_BYTES = 1024
"""At most, of barriers and single words."""
_ALIGNMENT_BYTES = 1024
"""Swizzled tiles begin at multiples of this."""


@dataclass(frozen=True)
class Warps:
    """Warp indices of the roles; the four warps of a group reach the lanes of tensor memory by index modulo 4."""

    reduce: int = 0
    compute: int = 4
    mma: int = 12
    load: int = 13
    count: int = 16

    @property
    def threads(self) -> int:
        return 32 * self.count

    @property
    def tmem_threads(self) -> int:
        """Of the warps that use tensor memory: those up to mma."""
        return 32 * (self.mma + 1)

    @property
    def numbers_readers(self) -> int:
        """Warps that hear of tile numbers: all roles but load."""
        return self.mma + 1


@dataclass(frozen=True)
class Registers:
    """Registers per thread (setmaxnreg): the reducing warpgroup, each of two computing ones, the rest."""

    reduce: int = 104
    compute: int = 152
    other: int = 104

    def __post_init__(self) -> None:
        total = self.reduce + 2 * self.compute + self.other
        if total > REGISTERS:
            raise ValueError(f"registers: the four warpgroups take {total} of {REGISTERS}: {self}")


class DqOver(enum.Enum):
    """What dQ lies over in tensor memory."""

    NOTHING = enum.auto()
    DP = enum.auto()
    SCORES = enum.auto()


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory where each product begins, behind dV at 0 and dK after it (r: where dK ends).

        form           S, then P         dP, then dS            dQ                        head dims, at most
        one CTA        [r, r + 128)      [r + 128, r + 256)     from r + 256              64 and 64
                                                                from r + 128, over dP     128 and 128
        pair           [r, r + 128)      [r + 128, r + 256)     from r + 256              128 and 64
                                                                [r + 64, ...), over S     128 and 128
        narrow pair    [r, r + 64)       [r + 64, r + 128)      from r + 128              256 and 256

    In a pair dQ is split by queries: each of a CTA's 64 has two lanes, with half of the columns in each. In a narrow
    pair each CTA has 64 keys: so it is with all products, and P and dS lie in shared memory.

    P and dS are 16-bit: of each half of the queries (64 columns of S or dP, one computing warpgroup's) they take the
    lower 32 columns of that half, so that no warpgroup overwrites what the other has still to read. Where P has to make
    room for dQ it takes [r, r + 64), and warps meet before they store it.

    What lies over something else is issued after the products that read that, and those complete in order. The reduce
    role is waited for before dQ is overwritten, the compute role before dQ overwrites the S of the next step.
    """

    tile_d: int
    tile_e: int
    ctas: int = 1
    keys: int = BLOCK

    def _columns(self, width: int) -> int:
        return width * self.keys // BLOCK

    @property
    def score_columns(self) -> int:
        return self._columns(BLOCK)

    @property
    def dv_columns(self) -> int:
        return self._columns(self.tile_e)

    @property
    def dk_columns(self) -> int:
        return self._columns(self.tile_d)

    @property
    def dq_columns(self) -> int:
        return self.tile_d // self.ctas

    @property
    def free(self) -> int:
        """Columns that dV and dK leave."""
        return TMEM_COLUMNS - self.scores

    @property
    def dq_over(self) -> DqOver:
        if self.free >= 2 * self.score_columns + self.dq_columns:
            return DqOver.NOTHING
        return DqOver.SCORES if self.ctas == 2 else DqOver.DP

    @property
    def scores(self) -> int:
        return self.dk + self.dk_columns

    @property
    def p_packed(self) -> bool:
        """Whether P of both halves of the queries lies together."""
        return self.dq_over is DqOver.SCORES

    @property
    def p_distance(self) -> int:
        """From P of one half of the queries to that of the other."""
        return BLOCK // 4 if self.p_packed else BLOCK // 2

    @property
    def dp(self) -> int:
        return self.scores + self.score_columns

    @property
    def dq(self) -> int:
        over = {DqOver.SCORES: self.scores + BLOCK // 2, DqOver.DP: self.dp}
        return over.get(self.dq_over, self.dp + self.score_columns)

    @property
    def dv(self) -> int:
        return 0

    @property
    def dk(self) -> int:
        return self.dv_columns

    def __post_init__(self) -> None:
        end = max(self.dp + self.score_columns, self.dq + self.dq_columns)
        if end > TMEM_COLUMNS:
            raise ValueError(f"tensor memory columns: {self} needs {end}, an SM has {TMEM_COLUMNS}")


@dataclass(frozen=True)
class Tile:
    """A 16-bit tile in shared memory, in swizzled panels of 64 or 32 columns."""

    rows: int
    columns: int
    stages: int = 1

    @property
    def panel(self) -> int:
        return 32 if self.columns % 64 else 64

    @property
    def stage_bytes(self) -> int:
        return 2 * self.rows * self.columns


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles and stages of the backward kernel; rows of the transposed scores are keys, columns are queries.

    Attributes:
      tile_d, tile_e: head dims in shared memory, padded to multiples of 64.
      ctas: 1, or 2 that work as a pair: each has keys of its own, and makes dQ of half of the queries over all keys.
      keys: of a CTA; 64 in a narrow pair.
      q_stages, do_stages: tiles of Q and of dO in flight; `statistic_stages`, of LSE and delta.
      dq_chunk: columns of dQ that leave in one bulk reduction; `dq_stages`, buffers for such chunks.
      exp2_on_fma: of so many exponentials one runs on FMA units; 0: none.
      l2_bytes: heads are grouped so that what one group reads and reduces into stays within this size (of 126 MB).
    """

    tile_d: int
    tile_e: int
    ctas: int = 1
    keys: int = BLOCK
    q_stages: int = 2
    do_stages: int = 1
    statistic_stages: int = 2
    dq_chunk: int = 32
    dq_stages: int = 2
    exp2_on_fma: int = 0
    block_q: int = BLOCK
    l2_bytes: int = 48 << 20
    registers: Registers = Registers()
    warps: Warps = Warps()

    @property
    def paired(self) -> bool:
        return self.ctas == 2

    @property
    def narrow(self) -> bool:
        return self.keys < BLOCK

    @property
    def block_k(self) -> int:
        """Keys of a tile of work."""
        return self.ctas * self.keys

    @property
    def tmem(self) -> TensorMemory:
        return TensorMemory(self.tile_d, self.tile_e, self.ctas, self.keys)

    @property
    def roles(self) -> dict[str, range]:
        """Warps of the main kernel by role."""
        w = self.warps
        groups = {"compute0": w.compute, "compute1": w.compute + 4, "reduce": w.reduce}
        return {
            "load": range(w.load, w.load + 1),
            "mma": range(w.mma, w.mma + 1),
            **{role: range(first, first + 4) for role, first in groups.items()},
        }

    @property
    def accumulators(self) -> dict[int, str]:
        """What the products make, by its first column of tensor memory."""
        tmem, names = self.tmem, {}
        for name, column in (("S", tmem.scores), ("dP", tmem.dp), ("dQ", tmem.dq), ("dV", tmem.dv), ("dK", tmem.dk)):
            names[column] = f"{names[column]} or {name}" if column in names else name
        return names

    @property
    def dq_floats(self) -> int:
        """Elements of one tile of the dQ accumulator."""
        return self.block_q * self.tile_d

    @property
    def tiles(self) -> dict[str, Tile]:
        """In shared memory.

        In a pair a product's right operand is split by its columns of the result. A matrix that is such an operand of
        two products has two tiles: Q's own queries, and its own half of the columns for all queries (`q_columns`); so
        has dO, and K. `ds` has the keys of the whole tile and, in a pair, the own queries.

        `ds_out` is what the other CTA's dQ needs: the other's queries, or in a narrow pair all, for dK. There Q and dO
        come in parts of their product's depth: fewer columns, or fewer queries of the own columns.
        """
        d, e, k = self.tile_d, self.tile_e, self.keys
        if not self.paired:
            return {
                "q": Tile(BLOCK, d, self.q_stages), "k": Tile(k, d), "v": Tile(k, e),
                "do": Tile(BLOCK, e, self.do_stages), "ds": Tile(k, BLOCK),
            }  # fmt: skip
        half, q_parts, do_parts = BLOCK // 2, self.parts("q"), self.parts("do")
        tiles = {
            "q": Tile(half, d // q_parts, q_parts * self.q_stages), "k": Tile(k, d), "v": Tile(k, e),
            "do": Tile(half, e // do_parts, do_parts * self.do_stages),
            "q_columns": Tile(BLOCK // q_parts, d // 2, q_parts * self.q_stages),
            "do_columns": Tile(BLOCK // do_parts, e // 2, do_parts * self.do_stages),
            "k_columns": Tile(self.block_k, d // 2), "ds": Tile(self.block_k, half),
            "ds_out": Tile(k, BLOCK if self.narrow else half),
        }  # fmt: skip
        return tiles | ({"p": Tile(k, BLOCK)} if self.narrow else {})

    @property
    def aliases(self) -> dict[str, str]:
        """Tiles that take turns in the buffers of another."""
        return {"q_columns": "q", "do_columns": "do"} if self.narrow else {}

    def parts(self, name: str) -> int:
        """In which a tile comes: several where two take turns, so that buffers are soon filled again."""
        shared = {*self.aliases, *self.aliases.values()}
        return narrow_parts(self.tile_d if name.startswith("q") else self.tile_e) if name in shared else 1

    @property
    def exchange_bytes(self) -> int:
        """Of dS that a CTA of a pair is sent every step."""
        return 2 * self.keys * (BLOCK // 2) if self.paired else 0

    @property
    def shared_bytes(self) -> int:
        own = [tile for name, tile in self.tiles.items() if name not in self.aliases]
        small = 4 * BLOCK * 2 * self.statistic_stages + _SMALL_BYTES
        aligned = -(-small // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return aligned + sum(t.stages * t.stage_bytes for t in own) + 4 * BLOCK * self.dq_stages * self.dq_chunk

    def __post_init__(self) -> None:
        if self.shared_bytes > SMEM_BYTES:
            raise ValueError(f"shared memory: {self} needs {self.shared_bytes} bytes, a block has {SMEM_BYTES}")
        _ = self.tmem  # checks itself


def backward_plan(spec: AttentionSpec) -> BackwardPlan:
    """The plan for a spec, by head dims and mask. Raises `Unsupported`."""
    check_slopes(spec)
    return plan_of(pad_head_dim(spec.head_dim), pad_head_dim(spec.value_head_dim), _has_edges(spec.mask))


def _has_edges(mask: masks.Mask) -> bool:
    """Whether a tile of keys meets blocks of queries of which some of its keys see nothing."""
    return any(isinstance(part, masks.Causal | masks.Window) for part in mask.parts)


def plan_of(tile_d: int, tile_e: int, edges: bool) -> BackwardPlan:
    """The plan for padded head dims.

    Two CTAs share a tile of 256 keys, of which more lies beyond an edge of the mask than of one of 128: at head dim 64,
    where pairs gain little else, they lose by it.
    """
    if max(tile_d, tile_e) > BLOCK:
        return narrow_plan(tile_d, tile_e)
    return single_plan(tile_d, tile_e) if edges and tile_d + tile_e <= BLOCK else pair_plan(tile_d, tile_e)


def single_plan(tile_d: int, tile_e: int) -> BackwardPlan:
    """CTAs of their own."""
    return BackwardPlan(tile_d, tile_e, do_stages=1 if tile_d + tile_e > 192 else 2, exp2_on_fma=_exp2(tile_d, tile_e))


def pair_plan(tile_d: int, tile_e: int) -> BackwardPlan:
    """Pairs of CTAs with 128 keys each."""
    stages = 1 if tile_d + tile_e > 128 else 2
    registers = Registers(reduce=64, compute=176, other=96) if tile_d == 64 else Registers()  # by dQ's columns
    return BackwardPlan(
        tile_d, tile_e, ctas=2, q_stages=stages, do_stages=stages, dq_chunk=16, exp2_on_fma=_exp2(tile_d, tile_e),
        registers=registers,
    )  # fmt: skip


def narrow_plan(tile_d: int, tile_e: int) -> BackwardPlan:
    """Pairs of CTAs with 64 keys each."""
    plan = BackwardPlan(tile_d, tile_e, ctas=2, keys=64, q_stages=1, dq_chunk=16)
    for name, stages in (("q", "q_stages"), ("do", "do_stages")):
        if plan.shared_bytes + plan.parts(name) * plan.tiles[name].stage_bytes <= SMEM_BYTES:
            plan = dataclasses.replace(plan, **{stages: 2})
    return plan


def narrow_parts(columns: int) -> int:
    """Parts of at least 64 columns, or halves."""
    return 4 if columns > 192 else 2


def _exp2(tile_d: int, tile_e: int) -> int:
    """Where products are short, exponentials bound the kernel: in timed runs 7 % faster at 64, no change at 128."""
    return 4 if tile_d + tile_e <= 128 else 0
