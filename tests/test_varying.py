"""The XLA backend on meshes: Auto and Explicit axes, and inside shard_map with its checks on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4 import cases

LENGTHS = np.array([12, 3, 4, 0])


def attend(q, k, v, lengths):
    """Everything that makes arrays of its own: masks by length, a user function, sinks."""
    return jax_fa4.attention(q, k, v, causal=True, kv_lengths=lengths, score_mods=lambda s, b, h, q, k: s * 2 + h,
                             sinks=jnp.ones(q.shape[2]), backend="xla")


def loss(*args):
    return jnp.sum(attend(*args) ** 2)


@pytest.fixture(scope="module")
def call():
    a = cases.Case("", (), cases.Shape(B=4, S=12, T=12, H=4, K=2, D=8, E=8), "float32").make()
    args = tuple(jnp.asarray(a[name]) for name in "qkv")
    return args, jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args, LENGTHS)


def compare(got, want):
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (tests/conftest.py gives 8 on the CPU)")
@pytest.mark.parametrize(("kind", "spec"), [
    (AxisType.Auto, P("x", None, "y")), (AxisType.Explicit, P("x", None, "y")), (AxisType.Explicit, P(None, "x"))])
def test_meshes(call, kind, spec):
    args, want = call
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
        got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*placed, LENGTHS)
        if kind is AxisType.Explicit:
            assert got[1][0].sharding.is_equivalent_to(placed[0].sharding, 4)
    compare(got, want)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices (tests/conftest.py gives 8 on the CPU)")
def test_shard_map_with_checks(call):
    args, want = call

    def local(q, k, v, lengths):
        return jax.lax.psum(loss(q, k, v, lengths), "x")

    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))):
        mapped = jax.shard_map(local, in_specs=P("x"), out_specs=P(), check_vma=True)
        compare(jax.jit(jax.value_and_grad(mapped, (0, 1, 2)))(*args, LENGTHS), want)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices (tests/conftest.py gives 8 on the CPU)")
def test_gradients_of_replicated_operands_are_summed(call):
    """Queries spread over devices, keys and values on all of them: dk and dv sum over the devices."""
    (q, k, v), _ = call

    def local(q, k, v):
        return jax.lax.psum(jnp.sum(jax_fa4.attention(q, k, v, backend="xla") ** 2), "x")

    want = jax.grad(lambda *a: jnp.sum(jax_fa4.attention(*a, backend="xla") ** 2), (0, 1, 2))(q, k, v)
    with jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))):
        mapped = jax.shard_map(local, in_specs=(P(None, "x"), P(), P()), out_specs=P(), check_vma=True)
        compare(jax.jit(jax.grad(mapped, (0, 1, 2)))(q, k, v), want)


@pytest.mark.skipif(jax.device_count() < 4, reason="needs 4 devices (tests/conftest.py gives 8 on the CPU)")
def test_shard_map_over_some_explicit_axes(call):
    """The axes that are left stay Explicit inside."""
    args, want = call
    with jax.set_mesh(jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)):
        placed = [jax.device_put(x, P("x", None, "y")) for x in args]

        def total(q, k, v, lengths):
            return jax.shard_map(lambda *a: jax.lax.psum(loss(*a), "x"), in_specs=P("x"), out_specs=P(),
                                 axis_names={"x"})(q, k, v, lengths)

        compare(jax.jit(jax.value_and_grad(total, (0, 1, 2)))(*placed, jax.device_put(LENGTHS, P("x"))), want)
