"""Memory and compile time of one backend beside jax.nn's dense attention, read off compiled programs."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jax_fa4 import attention

SHORT, LONG = 4096, 8192  # lengths between which temporary memory should double, not quadruple
LONGEST = 65_536  # compile time must not grow towards it


def _compiled(attend: Callable, length: int, heads: int = 4, head_dim: int = 64) -> tuple[jax.stages.Compiled, float]:
    """Forward plus backward at batch 1, compiled from shapes alone, and the seconds that took."""
    shape = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.float32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v).sum()

    began = time.perf_counter()
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(shape, shape, shape).compile()
    return compiled, time.perf_counter() - began


def memory_rows(backend: str) -> list[dict]:
    """Temporary bytes of forward plus backward (B1 H4 D64, float32) at two lengths, against dense attention.

    Returns:
      One row per mask, with keys ``mask``, ``short_bytes``, ``long_bytes``, ``growth`` (long over short) and
      ``of_dense`` (long over jax.nn's at the same length).
    """

    def temporary_bytes(attend: Callable, length: int) -> int:
        analysis = _compiled(attend, length)[0].memory_analysis()
        if analysis is None:
            raise RuntimeError(f"the {jax.default_backend()} backend tells no memory use of a compiled program")
        return analysis.temp_size_in_bytes

    rows = []
    for causal in (False, True):
        ours = partial(attention, causal=causal, backend=backend)
        dense = partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla")
        short, long, of_dense = (
            temporary_bytes(attend, length)
            for attend, length in ((ours, SHORT), (ours, LONG), (dense, LONG))
        )
        mask = "causal" if causal else "full"
        rows.append(
            {
                "mask": mask,
                "short_bytes": short,
                "long_bytes": long,
                "growth": long / short,
                "of_dense": long / of_dense,
            }
        )
    return rows


def compile_rows(backend: str, rounds: int = 3) -> list[dict]:
    """Seconds to trace and compile forward plus backward at S = 4k and 64k (fastest of ``rounds``), and the ratio."""
    _compiled(partial(attention, causal=True, backend=backend), SHORT)  # JAX's own first-use costs are not ours
    rows = []
    for causal in (False, True):
        seconds = {}
        for length in (SHORT, LONGEST):
            samples = []
            for _ in range(rounds):
                jax.clear_caches()
                samples.append(_compiled(partial(attention, causal=causal, backend=backend), length)[1])
            seconds[length] = min(samples)
        mask = "causal" if causal else "full"
        ratio = seconds[LONGEST] / seconds[SHORT]
        rows.append({"mask": mask, "short_s": seconds[SHORT], "long_s": seconds[LONGEST], "ratio": ratio})
    return rows
