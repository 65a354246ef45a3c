"""Ring Attention and Ulysses against attention on one device: outputs and all gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ring_problem import OPTIONS, SEGMENTS, Problem, assert_close, mesh_of

import jax_fa4
from jax_fa4 import backends, registry
from jax_fa4.errors import InvalidArgument
from jax_fa4.layout import from_layout, layout_positions, to_layout
from jax_fa4.ring import local, ring_attention, ulysses_attention

FAST = [
    ("causal", "contiguous", 4), ("causal sinks softcap", "zigzag", 4), ("causal", "striped", 3), ("full", "zigzag", 2),
    ("two-sided window", "contiguous", 8), ("left window", "zigzag", 2), ("segments", "zigzag", 3),
    ("causal", "zigzag", 1), ("lengths", "striped", 4), ("key lengths", "zigzag", 2), ("functions", "contiguous", 3),
    ("two-sided window", "contiguous", 3),
]


@functools.cache
def answered(options):
    """A problem and its results on one device."""
    problem = Problem.draw(1, OPTIONS[options])
    return problem, problem.on_one_device()


def check_ring(options, layout, devices):
    problem, want = answered(options)
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(devices), layout=layout)
    assert_close(problem.spread(run, layout, devices), want)


@pytest.mark.parametrize("options, layout, devices", FAST)
def test_ring(options, layout, devices):
    check_ring(options, layout, devices)


@pytest.mark.parametrize("options", ["causal", "segments"])
def test_zigzag_of_many_rows(options, monkeypatch):
    """Backward then takes a block's chunks apart."""
    monkeypatch.setattr(local, "MOST_ROWS_IN_ONE", 0)
    check_ring(options, "zigzag", 3)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("options", OPTIONS)
def test_ring_all(options, layout, devices):
    check_ring(options, layout, devices)


@pytest.mark.parametrize("options", ["causal", "two-sided window"])
def test_ring_of_rings(options):
    problem, want = answered(options)
    mesh = jax.make_mesh((2, 4), ("data", "sp"), axis_types=(AxisType.Auto,) * 2)
    run = functools.partial(ring_attention, axis=("data", "sp"), mesh=mesh)
    assert_close(problem.spread(run, "contiguous", 8), want)


@pytest.mark.parametrize("rows, keys, options", [
    (16, 48, {}), (48, 16, {}), (48, 16, OPTIONS["functions"]),
    (48, 48, OPTIONS["functions"] | {"q_lengths": jnp.array([40, 9]), "kv_lengths": jnp.array([30, 48])})])
def test_unequal_lengths_align_bottom_right(rows, keys, options):
    """But functions get the indices of rows and keys, as in `attention`."""
    problem = Problem.draw(2, {"causal": True, **options}, rows, keys)
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(4))
    assert_close(problem.spread(run, "contiguous", 4), problem.on_one_device())


def three_axes(kind=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("data", "tensor", "sp"), axis_types=(kind,) * 3)


def test_three_axes_with_user_functions():
    """Functions see global heads and examples, and nothing but KV blocks is communicated."""
    problem = Problem.draw(3, OPTIONS["functions"] | {"sinks": jnp.linspace(-1.0, 2.0, 4)})
    place = {"axis": "sp", "batch_axis": "data", "head_axis": "tensor", "mesh": three_axes()}
    run = functools.partial(ring_attention, **place)
    assert_close(problem.spread(run, "contiguous", 2), problem.on_one_device())


def test_nothing_else_is_gathered():
    sharding = NamedSharding(three_axes(), P("data", "sp", "tensor", None))
    arrays = [jax.device_put(x, sharding) for x in (Problem.draw(0, {}).q,) * 3]
    place = {"axis": "sp", "batch_axis": "data", "head_axis": "tensor", "mesh": three_axes()}

    def loss(q, k, v):
        return ring_attention(q, k, v, causal=True, layout="zigzag", backend="xla", **place).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile().as_text()
    assert "collective-permute" in text
    for other in ("all-gather(", "all-to-all(", "reduce-scatter("):
        assert other not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(check_vma):
    problem = Problem.draw(4, OPTIONS["causal"] | {"q_lengths": jnp.array([40, 17]), "kv_lengths": jnp.array([40, 17])})
    mesh = mesh_of(4)
    rows = P(None, "sp")

    def run(q, k, v, sinks, **options):
        lengths = [options.pop(name) for name in ("q_lengths", "kv_lengths")]

        def body(q, k, v, q_lengths, kv_lengths):
            return ring_attention(q, k, v, axis_name="sp", q_lengths=q_lengths, kv_lengths=kv_lengths, **options)

        mapped = jax.shard_map(
            body, mesh=mesh, in_specs=(rows, rows, rows, P(), P()), out_specs=(rows, P(None, None, "sp")),
            check_vma=check_vma)
        return mapped(q, k, v, *lengths)

    assert_close(problem.spread(run, "contiguous", 4), problem.on_one_device())


@pytest.mark.parametrize("other, kind", [
    (AxisType.Explicit, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
def test_explicit_mesh_reshards(other, kind):
    """Also where the call leaves an axis of the mesh alone."""
    problem = Problem.draw(5, {"causal": True})
    mesh = jax.make_mesh((2, 4), ("other", "sp"), axis_types=(other, kind))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("other"))) for x in (problem.q, problem.k, problem.v)]
        o = jax.jit(lambda q, k, v: ring_attention(q, k, v, axis="sp", causal=True, backend="xla"))(*placed)
        assert jax.typeof(o).sharding.spec[1] == ("sp" if kind is AxisType.Explicit else None)
        exchanged = ulysses_attention(*placed, axis="sp", causal=True, backend="xla")  # not under jit
    want = jax_fa4.attention(problem.q, problem.k, problem.v, causal=True, backend="xla")
    np.testing.assert_allclose(o, want, atol=1e-5)
    np.testing.assert_allclose(exchanged, want, atol=1e-5)


@pytest.mark.parametrize(
    "place, layout, ring",
    [
        ({"axis": "sp"}, "contiguous", 1),
        ({"axis": "sp", "batch_axis": "data"}, "contiguous", 1),
        ({"axis": "sp", "ring_axis": "data"}, "zigzag", 2),
    ],
)
def test_ulysses(place, layout, ring):
    mesh = jax.make_mesh((2, 4), ("data", "sp"), axis_types=(AxisType.Auto,) * 2)
    problem, want = answered("causal sinks softcap")
    run = functools.partial(ulysses_attention, mesh=mesh, layout=layout, **place)
    assert_close(problem.spread(run, layout, ring), want)


def test_ulysses_segments_and_functions():
    options = OPTIONS["functions"] | {"q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS}
    problem = Problem.draw(7, options)
    run = functools.partial(ulysses_attention, axis="sp", mesh=mesh_of(2))
    assert_close(problem.spread(run), problem.on_one_device())


def relative_errors(got, want):
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(got, want, strict=True)]


def test_bfloat16_error_does_not_grow_with_the_ring():
    problem = Problem.draw(8, {"causal": True}, rows=256, dtype="bfloat16")
    exact = dataclasses.replace(problem, **{x: getattr(problem, x).astype(jnp.float32) for x in ("q", "k", "v")})
    want = exact.on_one_device()
    alone = relative_errors(problem.on_one_device(), want)
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(8), layout="zigzag")
    ring = relative_errors(problem.spread(run, "zigzag", 8), want)
    for a, b in zip(ring, alone, strict=True):
        assert a <= 1.2 * b + 1e-5, (ring, alone)


def test_float64():
    with jax.enable_x64(True):
        problem = Problem.draw(6, {"causal": True, "sinks": jnp.linspace(-1, 2, 4) / 3}, dtype="float64")
        run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(2), layout="zigzag")
        assert_close(problem.spread(run, "zigzag", 2), problem.on_one_device(), 1e-12)


def test_huge_scores_do_not_overflow():
    problem = Problem.draw(9, {"causal": True})
    large = dataclasses.replace(problem, q=problem.q * 1e4)
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(4), layout="zigzag")
    got, want = large.spread(run, "zigzag", 4), large.on_one_device()
    np.testing.assert_allclose(got[0], want[0], atol=1e-4)
    assert all(np.isfinite(x).all() for x in got)


@pytest.mark.slow
def test_forward_mode_and_second_derivatives():
    problem = Problem.draw(10, {}, rows=8)
    mesh = mesh_of(2)

    def ring(q):
        return ring_attention(q, problem.k, problem.v, axis="sp", mesh=mesh, causal=True, backend="xla").sum(-1)

    def alone(q):
        return jax_fa4.attention(q, problem.k, problem.v, causal=True, backend="xla").sum(-1)

    for transform in (
        lambda f: jax.jvp(f, (problem.q,), (problem.do,))[1],
        lambda f: jax.grad(lambda q: (jax.grad(lambda q: (f(q) ** 2).sum())(q) * problem.do).sum())(problem.q),
    ):
        np.testing.assert_allclose(jax.jit(lambda t=transform: t(ring))(), transform(alone), atol=1e-4)


def test_remat_runs_the_ring_once():
    q, mesh = Problem.draw(11, {}).q, mesh_of(2)
    policies = jax.checkpoint_policies

    def transfers(policy):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x):
            return x + jnp.sin(ring_attention(x, x, x, axis="sp", mesh=mesh, backend="xla"))

        text = jax.jit(jax.grad(lambda x: (layer(layer(x)) ** 2).sum())).lower(q).as_text()  # before XLA merges reruns
        return text.count("stablehlo.collective_permute")

    saved = transfers(policies.save_only_these_names(*jax_fa4.CHECKPOINT_NAMES))
    assert 0 < saved == transfers(policies.everything_saveable)
    assert saved < transfers(policies.nothing_saveable)


@pytest.mark.slow
def test_memory_grows_with_rows_per_device():
    def temp_bytes(devices, rows):
        mesh = mesh_of(devices)
        shape = jax.ShapeDtypeStruct((1, rows, 2, 32), jnp.float32, sharding=NamedSharding(mesh, P(None, "sp")))

        def loss(q, k, v):
            return ring_attention(q, k, v, axis="sp", mesh=mesh, layout="zigzag", causal=True, backend="xla").sum()

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(shape, shape, shape).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temp_bytes(8, 8 * 1024), temp_bytes(8, 16 * 1024)
    assert large <= 2.2 * small
    assert large <= 0.7 * temp_bytes(4, 16 * 1024)


def call(**changes):
    problem = Problem.draw(0, {}, rows=changes.pop("rows", 48), heads=changes.pop("heads", 4))
    function = changes.pop("function", ring_attention)
    arguments = {"axis": "sp", "mesh": jax.make_mesh((2, 4), ("data", "sp"), axis_types=(AxisType.Auto,) * 2)} | changes
    return function(problem.q, problem.k, problem.v, **arguments)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"axis": "seq"}, "axis: received 'seq'; allowed: axes of the mesh: 'data', 'sp'"),
        ({"axis": None}, "exactly one of the two"),
        ({"axis": None, "axis_name": "sp"}, "none of them inside jax.shard_map"),
        ({"axis": None, "axis_name": "sp", "mesh": None}, "surrounding jax.shard_map"),
        ({"mesh": None}, "Pass mesh="),
        ({"batch_axis": "sp"}, "axes that no other argument names"),
        ({"rows": 50}, "Pad the sequence to 52"),
        ({"layout": "zigzag", "rows": 52}, "multiples of 8"),
        ({"layout": "spiral"}, "contiguous, zigzag, striped"),
        ({"axis": "data", "head_axis": "sp", "heads": 6}, "6 query heads over head_axis='sp' of size 4"),
        ({"bias": jnp.zeros((1, 1, 48, 48))}, "Use ScoreFn"),
        ({"mask": np.ones((1, 1, 48, 48), bool)}, "Use MaskFn"),
        ({"casual": True}, "Check the spelling"),
        ({"return_lse": 2}, "return_lse: received 2"),
        ({"backend": "cudnn"}, "backend: received 'cudnn'"),
        ({"function": ulysses_attention, "heads": 6}, "6 query heads on a device"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        call(**changes)


@pytest.mark.parametrize("devices, asked", [(1, {False}), (2, {False, True})])
def test_only_blocks_that_are_visited_need_a_kernel(devices, asked, monkeypatch):
    """The own block needs no positions; those of others do."""
    resolve, positions = backends.resolve, set()

    def recording(name, spec, operands):
        positions.add(spec.positions)
        return resolve(name, spec, operands)

    monkeypatch.setattr(backends, "resolve", recording)
    problem = Problem.draw(0, {})
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(devices), causal=True, backend="xla")
    jax.eval_shape(run, problem.q, problem.k, problem.v)
    assert positions == asked


def test_layout_positions_match_rope():
    """Rotating by layout_positions before the ring equals rotating in natural order."""
    problem = Problem.draw(12, {"causal": True})
    angles = jnp.arange(48)[:, None, None] * 0.1

    def rotate(x, angles):
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    laid = angles[layout_positions(48, "striped", 4)]
    q, k, v = (to_layout(x, "striped", 4) for x in (problem.q, problem.k, problem.v))
    run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(4), layout="striped", causal=True, backend="xla")
    o = from_layout(run(rotate(q, laid), rotate(k, laid), v), "striped", 4)
    q, k = (rotate(x, angles) for x in (problem.q, problem.k))
    want = jax_fa4.attention(q, k, problem.v, causal=True, backend="xla")
    np.testing.assert_allclose(o, want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["emulate:sm_90a", "emulate:sm_100a"])
def test_on_the_software_gpu(backend):
    """The ring runs the kernels: float32 parts, LSE and delta from outside, run-time positions."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, the kernels' compiler")
    try:
        registry.library()
    except OSError as error:
        pytest.skip(str(error))
    random = np.random.default_rng(13)
    q, k, v, do = (
        jnp.asarray(random.standard_normal((1, 256, heads, 64)), jnp.bfloat16) for heads in (2, 1, 1, 2)
    )
    for layout, options in (("zigzag", {"causal": True}), ("contiguous", {"causal": True, "window": (100, None)})):
        run = functools.partial(ring_attention, axis="sp", mesh=mesh_of(2), layout=layout, backend=backend, **options)

        def ring(q, k, v, do, run=run, layout=layout):
            there = functools.partial(to_layout, layout=layout, devices=2)
            o, pull = jax.vjp(run, *map(there, (q, k, v)))
            return [from_layout(x, layout, 2) for x in (o, *pull(there(do)))]

        def exact(*arrays, options=options):
            o, pull = jax.vjp(functools.partial(jax_fa4.attention, backend="xla", **options), *arrays[:3])
            return o, *pull(arrays[3])

        want = exact(*(x.astype(jnp.float32) for x in (q, k, v, do)))
        errors = relative_errors([np.asarray(x, np.float64) for x in jax.jit(ring)(q, k, v, do)], map(np.asarray, want))
        assert max(errors) < 6e-3, (layout, errors)
