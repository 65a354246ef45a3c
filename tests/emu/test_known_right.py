"""flash-attn-4's published kernels, known to be right on real parts, run unchanged on the software GPU and agree with
float64. Optional: see tests/emu/README.md. JAX_FA4_SEEDS sets the number of interleavings (2)."""

import os

import numpy as np
import pytest
from emu import emulated, known_right

from jax_fa4.peers import flash_attn_4

SEEDS = range(int(os.environ.get("JAX_FA4_SEEDS", "2")))
pytestmark = pytest.mark.slow
# The largest relative errors of a right bfloat16 attention on Gaussian inputs, with a margin.
BOUND_O, BOUND_GRADIENT, BOUND_LSE = 2.6e-3, 3.2e-3, 3e-5

FORWARD = [("sm_100a", c) for c in ("d128_causal", "d128_full", "d64_causal", "d64_full", "d128_causal_gqa4",
                                    "d256_full")]
FORWARD += [("sm_90a", c) for c in ("d128_causal", "d128_full", "d64_causal", "d128_causal_gqa4")]
BACKWARD = [("sm_100a", c) for c in ("d128_causal_bwd", "d128_full_bwd", "d64_causal_bwd", "d128_causal_gqa4_bwd",
                                     "d128_full_bwd_deterministic")]
BACKWARD += [("sm_90a", c) for c in ("d128_causal_bwd", "d128_full_bwd", "d64_causal_bwd")]


def problem(case: str, length: int) -> known_right.Problem:
    head_dim, causal, kv_heads, *_ = flash_attn_4.CASES[case]
    heads = 4 if kv_heads == 1 else 2
    return known_right.Problem(length, heads, 1 if kv_heads == 1 else heads, head_dim, causal)


@pytest.mark.parametrize(("arch", "case"), FORWARD)
def test_forward(arch, case):
    emulated.require_library()
    given = problem(case, 333)  # no multiple of any tile
    for seed in SEEDS:
        o, lse, report = known_right.forward(arch, case, given, seed=seed)
        assert known_right.relative(o, given.o) < BOUND_O
        assert np.abs(lse - given.lse).max() < BOUND_LSE
        assert not report.complaints


@pytest.mark.parametrize(("arch", "case"), BACKWARD)
def test_backward(arch, case):
    emulated.require_library()
    given = problem(case, 333 if arch == "sm_100a" else 320)
    exact = given.gradients(given.o.astype(known_right.BF16))
    for seed in SEEDS:
        *gradients, reports = known_right.backward(arch, case, given, seed=seed)
        for name, got, want in zip(("dq", "dk", "dv"), gradients, exact, strict=True):
            assert known_right.relative(got, want) < BOUND_GRADIENT, name
        assert not any(report.complaints for report in reports)
