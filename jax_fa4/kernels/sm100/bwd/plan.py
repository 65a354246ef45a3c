"""How the Blackwell backward kernel does its work: tiles, tensor memory, shared memory, registers. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from jax_fa4.errors import Unsupported
from jax_fa4.kernels.sm90.bwd.plan import _check_slopes, pad_head_dim
from jax_fa4.kernels.sm100.plans import REGISTERS, SMEM_BYTES, TMEM_COLUMNS
from jax_fa4.spec import AttentionSpec

BLOCK = 128
"""Query rows of a step and keys of a tile: the tensor core's M, and the lanes of tensor memory."""

DQ_CHUNK = 32
"""Columns of dQ that leave in one bulk reduction."""
DQ_STAGES = 2
"""Buffers for such chunks."""

_REST_BYTES = 1280
"""Barriers, and what aligning the tiles loses."""


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

    reduce: int = 152
    compute: int = 136
    other: int = 88

    def __post_init__(self) -> None:
        total = self.reduce + 2 * self.compute + self.other
        if total > REGISTERS:
            raise ValueError(f"registers: the four warpgroups take {total} of {REGISTERS}: {self}")


@dataclass(frozen=True)
class TensorMemory:
    """Columns of tensor memory where each product begins.

        columns       tile_d, tile_e > 64      both 64
        S, then P     [0, 128)                 [0, 128)
        dP, then dS   [128, 256)               [128, 256)
        dQ            [128, 256): over dP      [256, 320)
        dV, dK        behind                   behind

    P and dS are 16-bit: of each half of the queries (64 columns of S or dP, one computing warpgroup's), they take the
    lower 32 columns of that half, so that no warpgroup overwrites what the other has still to read. dQ over dP is free
    to be written when dS has been read by dK's product, which is issued before; the next dP waits for the reduce role.
    """

    tile_d: int
    tile_e: int
    scores: int = 0
    dp: int = BLOCK

    @property
    def dq_over_dp(self) -> bool:
        return 2 * BLOCK + 2 * self.tile_d + self.tile_e > TMEM_COLUMNS

    @property
    def dq(self) -> int:
        return self.dp if self.dq_over_dp else self.dp + BLOCK

    @property
    def dv(self) -> int:
        return self.dp + BLOCK + (0 if self.dq_over_dp else self.tile_d)

    @property
    def dk(self) -> int:
        return self.dv + self.tile_e

    def __post_init__(self) -> None:
        end = self.dk + self.tile_d
        if end > TMEM_COLUMNS:
            raise ValueError(f"tensor memory columns: {self} needs {end}, an SM has {TMEM_COLUMNS}")


@dataclass(frozen=True)
class BackwardPlan:
    """Tiles and stages of the backward kernel; rows of the transposed scores are keys, columns are queries.

    Attributes:
      tile_d, tile_e: head dims in shared memory, padded to multiples of 64.
      q_stages, do_stages: tiles of Q (with LSE) and dO (with delta) in flight.
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
    def dq_floats(self) -> int:
        """Elements of one tile of the dQ accumulator."""
        return self.block_q * self.tile_d

    @property
    def shared_bytes(self) -> int:
        elements = BLOCK * ((1 + self.q_stages) * self.tile_d + (1 + self.do_stages) * self.tile_e + BLOCK)
        floats = BLOCK * (DQ_STAGES * DQ_CHUNK + self.q_stages + self.do_stages)
        return 2 * elements + 4 * floats + _REST_BYTES

    def __post_init__(self) -> None:
        if self.shared_bytes > SMEM_BYTES:
            raise ValueError(f"shared memory: {self} needs {self.shared_bytes} bytes, a block has {SMEM_BYTES}")
        _ = self.tmem


def backward_plan(spec: AttentionSpec) -> BackwardPlan:
    """The plan for a spec, by head dims. Raises `Unsupported`."""
    _check_slopes(spec)
    tile_d, tile_e = pad_head_dim(spec.head_dim), pad_head_dim(spec.value_head_dim)
    if max(tile_d, tile_e) > 128:
        raise Unsupported(
            f"the sm_100a backward kernel takes head dims up to 128, not {spec.head_dim} and {spec.value_head_dim}: "
            f"dK and dV of {BLOCK} keys leave no tensor memory for the scores"
        )
    return BackwardPlan(tile_d, tile_e, do_stages=1 if tile_d + tile_e > 192 else 2)
