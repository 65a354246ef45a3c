"""What attention's kernels execute, counted: exact, and the same every time."""

import jax
import jax.numpy as jnp
import pytest
from emu import emulated

import jax_fa4
from jax_fa4 import counting, emulator

pytest.importorskip("cutlass")


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def counted(seed: int = 0, threads: int = 0, causal: bool = False, **settings) -> dict:
    q, k, v = (jax.random.normal(key, (1, 512, 2, 128), jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    emulator.take_reports()
    with emulator.emulate(seed, threads=threads, **settings):
        jax.block_until_ready(jax_fa4.attention(q, k, v, causal=causal, backend="emulate:sm_100a"))
    return counting.counters()


@pytest.mark.slow
def test_tensor_work_is_that_of_the_blocks():
    heads, rows, keys, width = 2, 512, 512, 128
    full = counted()
    assert full["tensor_flops"] == 4 * heads * rows * keys * width
    # Causal: query tiles of 256 rows against key blocks of 128, and the halves of a tile end at their own diagonals.
    blocks = sum(1 for tile in range(4) for block in range(4) if block <= tile)
    assert counted(causal=True)["tensor_flops"] == 4 * heads * blocks * 128 * 128 * width


@pytest.mark.slow
def test_counts_repeat_at_any_thread_count():
    first = counted(seed=3)
    assert first == counted(seed=3, threads=1) == counted(seed=3, threads=2)
    assert first["units"]["mufu"] > 0 and first["complaints"] == []
    names = first["kernel_names"]
    assert first["kernels"][names[-1]]["bound_cycles"]["tensor"] > 0
    text = counting.table(first)
    assert "tcgen05.cta_group" in text and "mufu" in text
