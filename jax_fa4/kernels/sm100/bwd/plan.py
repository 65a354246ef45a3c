"""How the Blackwell backward kernel does its work: tiles, tensor memory, shared memory, registers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.errors import Unsupported
from jax_fa4.kernels.common.planning import check_slopes, pad_head_dim
from jax_fa4.kernels.sm100.plans import REGISTERS, SMEM_BYTES, TMEM_COLUMNS
from jax_fa4.spec import AttentionSpec

BLOCK = 128
"""Query rows of a step and keys of a tile: the tensor core's M, and the lanes of tensor memory."""

DQ_CHUNK = 32
"""Columns of dQ that leave in one bulk reduction."""
DQ_STAGES = 2
"""Buffers for such chunks."""

_BARRIER_BYTES = 512
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
    other: int = 96

    def __post_init__(self) -> None:
        total = self.reduce + 2 * self.compute + self.other
        if total > REGISTERS:
            raise ValueError(f"registers: the four warpgroups take {total} of {REGISTERS}: {self}")


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory where each product begins, behind dV at 0 and dK after it (r = tile_e + tile_d):

        form           apart               shared              serial
        S, then P      [r, r + 128)        [r, r + 128)        [r, r + 128)
        dP, then dS    [r + 128, r + 256)  [r + 128, r + 256)  [r + 64, r + 192): over half of S
        dQ             from r + 256        from r + 128        from r: over S and dP
        head dims      64 and 64           up to 128 and 128   up to 192 and 128

    P and dS are 16-bit: of each half of the queries (64 columns of S or dP, one computing warpgroup's) they take the
    lower 32 columns of that half, so that no warpgroup overwrites what the other has still to read. In the serial form
    P has to make room for dP: it takes [r, r + 64), and the warpgroups meet before they store it.

    What lies over something else is issued after the products that read that, and those complete in order. The reduce
    role is waited for before dQ is overwritten.
    """

    tile_d: int
    tile_e: int

    @property
    def free(self) -> int:
        """Columns that dV and dK leave."""
        return TMEM_COLUMNS - self.scores

    @property
    def apart(self) -> bool:
        return self.free >= 2 * BLOCK + self.tile_d

    @property
    def serial(self) -> bool:
        return self.free < 2 * BLOCK or self.tile_d > BLOCK

    @property
    def scores(self) -> int:
        return self.dk + self.tile_d

    @property
    def p_distance(self) -> int:
        """From P of one half of the queries to that of the other."""
        return BLOCK // 4 if self.serial else BLOCK // 2

    @property
    def dp(self) -> int:
        return self.scores + (BLOCK // 2 if self.serial else BLOCK)

    @property
    def dq(self) -> int:
        if self.serial:
            return self.scores
        return self.dp + (BLOCK if self.apart else 0)

    @property
    def dv(self) -> int:
        return 0

    @property
    def dk(self) -> int:
        return self.tile_e

    def __post_init__(self) -> None:
        end = max(self.dp + BLOCK, self.dq + self.tile_d)
        if end > TMEM_COLUMNS:
            raise ValueError(f"tensor memory columns: {self} needs {end}, an SM has {TMEM_COLUMNS}")


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles and stages of the backward kernel; rows of the transposed scores are keys, columns are queries.

    Attributes:
      tile_d, tile_e: head dims in shared memory, padded to multiples of 64.
      q_stages, do_stages: tiles of Q (with LSE and delta) and of dO in flight.
      l2_bytes: heads are grouped so that what one group reads and reduces into stays within this size (of 126 MB).
    """

    tile_d: int
    tile_e: int
    q_stages: int = 2
    do_stages: int = 1
    block_q: int = BLOCK
    block_k: int = BLOCK
    l2_bytes: int = 48 << 20
    registers: Registers = Registers()
    warps: Warps = Warps()

    @property
    def tmem(self) -> TensorMemory:
        return TensorMemory(self.tile_d, self.tile_e)

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
    def shared_bytes(self) -> int:
        elements = BLOCK * ((1 + self.q_stages) * self.tile_d + (1 + self.do_stages) * self.tile_e + BLOCK)
        small = 4 * BLOCK * 2 * self.q_stages + _BARRIER_BYTES
        aligned = -(-small // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return aligned + 2 * elements + 4 * BLOCK * DQ_STAGES * DQ_CHUNK

    def __post_init__(self) -> None:
        if self.shared_bytes > SMEM_BYTES:
            raise ValueError(f"shared memory: {self} needs {self.shared_bytes} bytes, a block has {SMEM_BYTES}")
        _ = self.tmem  # checks itself


def backward_plan(spec: AttentionSpec) -> BackwardPlan:
    """The plan for a spec, by head dims. Raises `Unsupported`."""
    check_slopes(spec)
    tile_d, tile_e = pad_head_dim(spec.head_dim), pad_head_dim(spec.value_head_dim)
    try:
        serial = TensorMemory(tile_d, tile_e).serial
    except ValueError as error:
        raise Unsupported(
            f"the sm_100a backward kernel has no room for head dims {spec.head_dim} and {spec.value_head_dim}: {error}"
        ) from error
    if serial:  # the mma role has more operands' descriptors to hold
        return BackwardPlan(tile_d, tile_e, q_stages=1, registers=Registers(compute=144, other=120))
    return BackwardPlan(tile_d, tile_e, do_stages=1 if tile_d + tile_e > 192 else 2)
