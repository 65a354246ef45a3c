"""The order of tiles and the counter that hands them out, in small kernels on the software GPU."""

import numpy as np
import pytest

from jax_fa4 import compile, emulator
from jax_fa4.kernels.common import abi

cutlass = pytest.importorskip("cutlass", reason="needs the compiler: pip install nvidia-cutlass-dsl")
cute, Int32 = cutlass.cute, cutlass.Int32

from jax_fa4.kernels.common import scheduler  # noqa: E402

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


def run(kernel, artifact, dims: abi.Dims, seed: int = 0):
    """The kernel's output; the software GPU fills scratch memory with garbage."""
    out = kernel.buffers[0]
    arrays = {out.name: np.full(out.dims(dims), -1, np.int32)}
    report = emulator.launch(artifact, arrays, dims, seed=seed, sm_count=dims.sm_count)
    assert report.complaints == []
    return arrays[out.name]


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
