"""The order of tiles and the counter that hands them out, in small kernels on the software GPU."""

import numpy as np
import pytest

from jax_fa4 import compile, emulator
from jax_fa4.kernels.common import abi

cutlass = pytest.importorskip("cutlass", reason="needs the compiler: pip install nvidia-cutlass-dsl")
cute, Int32 = cutlass.cute, cutlass.Int32

from jax_fa4.kernels.common import scheduler  # noqa: E402
from jax_fa4.kernels.common.planning import Cutting  # noqa: E402

COUNT = ("mul", "B", ("mul", "H", "S"))


def schedule(dims) -> scheduler.CountedSchedule:
    """S query blocks of H heads of B examples, in sections of K heads, in turn up to T tiles."""
    return scheduler.CountedSchedule(dims.S, dims.H, dims.B, dims.K, dims.T)


class Listing:
    """Writes down tile n in row n."""

    buffers = (abi.Buffer("tiles", "out", "int32", (COUNT, 3)),)

    @cute.jit
    def __call__(self, g, dims, stream):
        tiles = schedule(dims)
        self.kernel(g.tiles, tiles).launch(grid=(tiles.count, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, rows: cute.Tensor, tiles: scheduler.CountedSchedule):
        number = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            tile = tiles.tile(number)
            rows[number, 0], rows[number, 1], rows[number, 2] = tile.batch, tile.head, tile.q_block


class HandOut:
    """Every CTA adds 1 to the tiles that it gets; launched twice, with one counter."""

    buffers = (abi.Buffer("done", "out", "int32", (COUNT,)), abi.scratch("next_tile", "int32", (1,)))

    @cute.jit
    def __call__(self, g, dims, stream):
        tiles, done, next_tile = schedule(dims), g.done, g.next_tile
        for _ in cutlass.range_constexpr(2):
            scheduler.launch_reset(tiles, next_tile, stream)
            grid = cutlass.min(dims.sm_count, tiles.count)
            self.kernel(done, next_tile, tiles).launch(grid=(grid, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, done: cute.Tensor, next_tile: cute.Tensor, tiles: scheduler.CountedSchedule):
        number = cute.arch.block_idx()[0]
        while number < tiles.count:
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.atomic_add(done.iterator + number, Int32(1), sem="relaxed", scope="gpu")
            number = scheduler.next_number(tiles, number, next_tile)


class Sharing:
    """Tiles of T KV blocks each. A CTA writes down each piece that it gets: at its slot, behind them at its number if
    it is whole, and how often; then the first slot and the slots of each cut tile."""

    buffers = (
        abi.Buffer("pieces", "out", "int32", (("add", scheduler.MOST_PIECES, COUNT), 6)),
        abi.Buffer("times", "out", "int32", (("add", scheduler.MOST_PIECES, COUNT),)),
        abi.Buffer("slots", "out", "int32", (COUNT, 2)),
        abi.scratch("next_tile", "int32", (1,)),
    )

    def __init__(self, equal: bool):
        self.equal = equal

    @cute.jit
    def __call__(self, g, dims, stream):
        counted = scheduler.CountedSchedule(dims.S, dims.H, dims.B, Int32(1), Int32(0))
        tiles = scheduler.share_out(counted, dims.T, dims.sm_count, Cutting(1, 1), self.equal)
        scheduler.launch_reset(tiles, g.next_tile, stream)
        grid = cutlass.min(dims.sm_count, tiles.numbers)
        self.kernel(g.pieces, g.times, g.slots, g.next_tile, tiles).launch(
            grid=(grid, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, pieces, times, slots, counter, tiles):
        position = tiles.begin(cute.arch.block_idx()[0])
        while tiles.is_left(position):
            piece = tiles.piece(position)
            row = Int32(cutlass.select_(piece.slot < 0, scheduler.MOST_PIECES + position.number, piece.slot))
            if cute.arch.thread_idx()[0] == 0:
                tile = piece.tile
                part = piece.part
                values = (tile.batch, tile.head, tile.q_block, part.start, part.end, part.units)
                for i, value in enumerate(values):
                    pieces[row, i] = value
                cute.arch.atomic_add(times.iterator + row, Int32(1), sem="relaxed", scope="gpu")
            position = tiles.following(position, counter)
        if (cute.arch.block_idx()[0] == 0) & (cute.arch.thread_idx()[0] == 0):
            for index in cutlass.range(tiles.cut, unroll=1):
                slots[index, 0], slots[index, 1] = tiles.slots(index)


def run(kernel, artifact, dims: abi.Dims, seed: int = 0):
    """The kernel's first output."""
    return run_all(kernel, artifact, dims, seed)[kernel.buffers[0].name]


def run_all(kernel, artifact, dims: abi.Dims, seed: int) -> dict[str, np.ndarray]:
    """The kernel's outputs; the software GPU fills scratch memory with garbage."""
    arrays = {b.name: np.full(b.dims(dims), -1, np.int32) for b in kernel.buffers if b.kind == "out"}
    report = emulator.launch(artifact, arrays, dims, seed=seed, sm_count=dims.sm_count)
    assert report.complaints == []
    return arrays


@pytest.fixture(scope="module")
def listing(software_gpu):
    return compile.compile_kernel(Listing(), "sm_90a")


@pytest.fixture(scope="module")
def hand_out(software_gpu):
    return compile.compile_kernel(HandOut(), "sm_90a")


@pytest.mark.parametrize(
    "q_blocks, heads, batch, section, widths",
    [
        (5, 2, 3, 1, [1] * 6),
        (4, 6, 1, 3, [3, 3]),
        (4, 4, 2, 3, [3, 5]),  # what is left over joins the last section
        (3, 7, 1, 4, [7]),
        (3, 2, 1, 9, [2]),
        (1, 3, 3, 2, [2, 2, 2, 3]),
    ],
)
def test_sections_of_heads_longest_tiles_first(listing, q_blocks, heads, batch, section, widths):
    expected, first = [], 0
    for width in widths:
        for q_block in reversed(range(q_blocks)):
            expected += [(*divmod(head, heads), q_block) for head in range(first, first + width)]
        first += width
    tiles = run(Listing, listing, abi.Dims(batch, q_blocks, 0, heads, section, 2))
    assert tiles.tolist() == [list(row) for row in expected]


@pytest.mark.parametrize("static_count", [0, 29, 30])
@pytest.mark.parametrize("sm_count", [1, 3, 64])
def test_every_tile_is_handed_out_once_in_each_launch(hand_out, sm_count, static_count):
    for seed in range(4):
        done = run(HandOut, hand_out, abi.Dims(2, 5, static_count, 3, 1, sm_count), seed)
        assert (done == 1).all()  # -1, and twice 1


@pytest.fixture(scope="module", params=[True, False], ids=["equal", "unequal"])
def sharing(request, software_gpu):
    kernel = Sharing(request.param)
    return kernel, compile.compile_kernel(kernel, "sm_90a")


# Query blocks, heads, KV blocks, multiprocessors: an unfilled last wave, few tiles with long lines, tiles as long as a
# share, no whole tile, nothing to cut.
@pytest.mark.parametrize(
    "sizes", [(3, 3, 40, 4), (1, 3, 1000, 64), (2, 2, 3, 8), (5, 1, 7, 6), (4, 2, 9, 4), (1, 1, 1, 132), (7, 9, 77, 16)]
)
def test_every_block_of_a_cut_tile_is_in_one_piece(sharing, sizes):
    kernel, artifact = sharing
    q_blocks, heads, blocks, sm_count = sizes
    tiles = q_blocks * heads * 2
    leftover = tiles % sm_count if kernel.equal or tiles < sm_count else 0
    share = max(-(-leftover * blocks // sm_count), 1)
    cut = leftover if share < blocks else 0
    result = run_all(kernel, artifact, abi.Dims(2, q_blocks, blocks, heads, 1, sm_count), 0)
    pieces, times, whole = result["pieces"], result["times"] + 1, tiles - cut
    numbers = {number: (number // q_blocks // heads, number // q_blocks % heads, q_blocks - 1 - number % q_blocks)
               for number in range(tiles)}  # fmt: skip
    used: list[int] = []
    for index in range(cut):
        first, count = result["slots"][index]
        assert not used or first > used[-1]
        end = 0
        for slot in range(first, first + count):
            assert tuple(pieces[slot, :3]) == numbers[whole + index] and pieces[slot, 3] == end
            assert pieces[slot, 4] - end <= share and pieces[slot, 5] == blocks
            end = pieces[slot, 4]
        assert end == blocks
        used += range(first, first + count)
    assert np.flatnonzero(times[: scheduler.MOST_PIECES]).tolist() == used and times.max() == 1
    for number in range(tiles):
        row = scheduler.MOST_PIECES + number
        assert times[row] == (number < whole)
        assert number >= whole or pieces[row].tolist() == [*numbers[number], 0, 1, 1]
