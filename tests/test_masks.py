"""The four views of a mask agree: block ranges, their full parts, the elementwise decision, and a naive loop."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_fa4 import masks
from jax_fa4.errors import InvalidArgument
from jax_fa4.masks import And, Causal, Full, Geometry, Lengths, Predicate, Segments, Window
from jax_fa4.operands import Operands
from jax_fa4.spec import Arguments, make_spec

BOUND = st.one_of(st.none(), st.integers(0, 12))
PART = st.one_of(st.just(Causal()), st.builds(Window, BOUND, BOUND), st.builds(Lengths, st.booleans(), st.booleans()))


def naive(mask, row, column, g):
    """One score's fate, straight from the definitions."""
    position_q, position_k = g.q_offset + row * g.q_stride, g.kv_offset + column * g.kv_stride
    keep = row < g.q_length and column < g.kv_length
    for part in mask.parts:
        if isinstance(part, Causal):
            keep &= position_k <= position_q
        elif isinstance(part, Window):
            keep &= part.left is None or position_q - part.left <= position_k
            keep &= part.right is None or position_k <= position_q + part.right
    return keep


LENGTH = st.integers(1, 20)


@st.composite
def situations(draw, rows=LENGTH, columns=LENGTH):
    mask = Full()
    for part in draw(st.lists(PART, max_size=3)):
        mask &= part
    rows, columns = draw(rows), draw(columns)
    q_length, kv_length = draw(st.integers(0, rows)), draw(st.integers(0, columns))
    if draw(st.booleans()):
        geometry = Geometry.bottom_right(q_length, kv_length)
    else:
        offset, stride = st.integers(-30, 30), st.integers(0, 4)
        geometry = Geometry(q_length, kv_length, draw(offset), draw(stride), draw(offset), draw(stride))
    return mask, rows, columns, geometry


@settings(max_examples=80, deadline=None)
@given(situations(), st.integers(1, 6), st.integers(1, 6))
def test_views_agree(situation, block_q, block_k):
    mask, rows, columns, g = situation
    want = np.array([[naive(mask, i, j, g) for j in range(columns)] for i in range(rows)])
    for i in range(rows):
        low, high = masks.row_interval(mask, i, g)
        assert want[i].nonzero()[0].tolist() == list(range(low, high))
        assert masks.row_interval(masks.canonical(mask), i, g) == (low, high)
    for j in range(columns):
        low, high = masks.column_interval(mask, j, g)
        assert want[:, j].nonzero()[0].tolist() == list(range(low, high))
    for block in range(-(-rows // block_q)):
        start, full_start, full_end, end = masks.block_range(mask, block, block_q, block_k, g)
        assert 0 <= start <= full_start <= full_end <= end <= -(-columns // block_k)
        here = want[block * block_q : (block + 1) * block_q]
        visited = here[:, start * block_k : end * block_k]
        assert visited.sum() == here.sum()
        most = masks.most_keys(mask, block_q)
        assert most is None or g.q_stride * g.kv_stride != 1 or here.any(axis=0).sum() <= most
        existing = here[: max(0, g.q_length - block * block_q)]
        assert existing[:, full_start * block_k : full_end * block_k].all()
        if end > start:  # tight at both ends
            assert here[:, start * block_k : (start + 1) * block_k].any() or not here.any()
            assert here[:, (end - 1) * block_k : end * block_k].any() or not here.any()
    for block in range(-(-columns // block_k)):
        start, full_start, full_end, end = masks.query_block_range(mask, block, block_q, block_k, g)
        assert 0 <= start <= full_start <= full_end <= end <= -(-rows // block_q)
        here = want[:, block * block_k : (block + 1) * block_k]
        assert here[start * block_q : end * block_q].sum() == here.sum()
        assert here[full_start * block_q : full_end * block_q].all()


@settings(max_examples=60, deadline=None)
@given(situations(st.just(13), st.just(17)))  # one shape, which JAX compiles for once
def test_dense_view(situation):
    mask, rows, columns, g = situation
    want = np.array([[naive(mask, i, j, g) for j in range(columns)] for i in range(rows)])
    operands = Operands(
        q=jnp.zeros((1, rows, 1, 1)), k=jnp.zeros((1, columns, 1, 1)), v=jnp.zeros((1, columns, 1, 1)),
        q_lengths=jnp.array([g.q_length]), kv_lengths=jnp.array([g.kv_length]),
        positions=jnp.array([[g.q_offset, g.q_stride, g.kv_offset, g.kv_stride]]))
    np.testing.assert_array_equal(masks.dense(mask, operands)[0, 0], want)


@pytest.mark.parametrize("numbers", [masks.NUMPY, masks.JAX])
def test_formulas_take_any_number(numbers):
    mask = Causal() & Window(3, None)
    as_array = jnp.asarray if numbers is masks.JAX else np.asarray
    got = masks.block_range(mask, as_array([0, 1, 2]), 4, 2, Geometry.bottom_right(10, as_array(11), numbers=numbers))
    want = zip(*(masks.block_range(mask, i, 4, 2, Geometry.bottom_right(10, 11)) for i in range(3)), strict=True)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def test_runtime_window_equals_static():
    static, dynamic = Window(3, 2), Window(masks.RUNTIME, masks.RUNTIME)
    g = Geometry.bottom_right(9, 9, window_left=3, window_right=2)
    for row in range(9):
        assert masks.row_interval(dynamic, row, g) == masks.row_interval(static, row, g)


def test_canonical_form():
    assert masks.canonical(Full()) == Full()
    assert masks.canonical(Window(None, None)) == Full()
    assert masks.canonical(Window(None, 0)) == Causal()
    assert masks.canonical(Window(7, 3) & Causal() & Window(9, None)) == Window(7, 0)
    assert masks.canonical(Segments() & Causal() & Segments()) == And((Causal(), Segments()))
    assert masks.canonical(Lengths(True, False) & Lengths(False, True)) == Lengths(True, True)
    assert masks.canonical(Window(masks.RUNTIME, 4)) == And((Window(None, 4), Window(masks.RUNTIME, None)))
    assert hash(masks.canonical(Causal() & Causal())) == hash(Causal())
    with pytest.raises(InvalidArgument, match="MaskFn"):
        masks.canonical(masks.MaskFn(lambda b, h, q, k: True))


def test_predicates_segments_and_arrays_in_the_dense_view():
    q, k = jnp.zeros((2, 6, 4, 8)), jnp.zeros((2, 7, 2, 8))
    table = jnp.arange(4)
    q_ids, kv_ids = jnp.array([[0, 1] * 3, [2, 2, 5, 5, 0, 0]]), jnp.array([[0, 0, 0, 1, 1, 1, 7], [5] * 7])
    array = np.random.default_rng(0).random((2, 1, 6, 7)) < 0.7

    def first(b, h, q, k, table):
        return (q + k + b) % 3 <= table[h]

    def second(b, h, q, k):
        return k != 2

    common = {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}
    want = np.asarray(q_ids)[:, None, :, None] == np.asarray(kv_ids)[:, None, None, :]
    spec, operands = make_spec(Arguments(q, k, k, mask=masks.MaskFn(first, (table,)) & masks.MaskFn(second), **common))
    assert [type(p) for p in spec.mask.parts] == [Segments, Predicate, Predicate]
    loop = np.zeros((2, 4, 6, 7), bool)
    for b, h, i, j in itertools.product(range(2), range(4), range(6), range(7)):
        loop[b, h, i, j] = (i + j + b) % 3 <= h and j != 2
    np.testing.assert_array_equal(masks.dense(spec.mask, operands), want & loop)
    spec, operands = make_spec(Arguments(q, k, k, mask=array, **common))
    np.testing.assert_array_equal(masks.dense(spec.mask, operands), np.broadcast_to(want & array, (2, 4, 6, 7)))


def test_user_functions_get_positions_where_given():
    q, k = jnp.zeros((2, 3, 1, 8)), jnp.zeros((2, 4, 1, 8))
    positions = {"q_position": (jnp.array([1, 5]), 2), "kv_position": (3, 1)}
    spec, operands = make_spec(Arguments(q, k, k, mask=lambda b, h, q, k: k <= q, **positions))
    want = [[[3 + j <= offset + 2 * i for j in range(4)] for i in range(3)] for offset in (1, 5)]
    np.testing.assert_array_equal(masks.dense(spec.mask, operands)[:, 0], want)
