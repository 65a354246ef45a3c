"""Any combination of variants, drawn at random, against the float64 oracle."""

import pytest
from blocks import blocks_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_fa4 import accuracy, cases

EXCLUSIVE = [{"window", "window_left", "window_right", "window_zero", "window_runtime"},
             {"bias", "bias_shared", "bias_infinite"}, {"segments", "segments_unsorted"},
             {"alibi", "score_function"}, {"mask_function", "mask_operands", "mask_array"}, {"kv_lengths", "no_keys"}]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with blocks_of(6):
        yield


@st.composite
def any_case(draw):
    variants = draw(st.lists(st.sampled_from(sorted(cases.VARIANTS)), max_size=7, unique=True))
    for group in EXCLUSIVE:  # they give the same argument
        variants = [v for i, v in enumerate(variants) if v not in group or not group.intersection(variants[:i])]
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    length, dim = st.integers(1, 20), st.integers(1, 8)
    shape = cases.Shape(draw(st.integers(1, 3)), draw(length), draw(length), kv_heads * group, kv_heads, draw(dim),
                        draw(dim))
    return cases.Case("drawn", tuple(variants), shape, draw(st.sampled_from(["float32", "bfloat16"])),
                      draw(st.sampled_from(["gaussian", "heavy"])))


def judge(case, seed):
    bad = [f"seed {s}: {row}" for s in range(seed, seed + 3)
           for row in accuracy.check(case.make(s), "xla", s) if not row.ok]
    assert not bad, "\n".join(bad)


QUIET = dict(deadline=None, suppress_health_check=list(HealthCheck), database=None)


@settings(max_examples=4, derandomize=True, **QUIET)
@given(any_case(), st.integers(0, 2**31))
def test_any_combination(case, seed):
    judge(case, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=150, **QUIET)
@given(any_case(), st.integers(0, 2**31))
def test_many_combinations(case, seed):
    judge(case, seed)
