"""The custom call on an NVIDIA GPU: results, threads, CUDA graphs, typed errors, and what a launch costs.

    python -m pytest -m gpu -s tests/test_cuda_call.py
"""

import ctypes
import statistics
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_fa4
from jax_fa4 import launch, registry, targets
from jax_fa4.spec import Arguments, make_spec

pytestmark = pytest.mark.gpu


def arrays(batch, rows, heads, kv_heads, dim=64):
    generator = np.random.default_rng()
    shapes = ((batch, rows, heads, dim), *[(batch, rows, kv_heads, dim)] * 2)
    return tuple(jnp.asarray(generator.standard_normal(shape), jnp.bfloat16) for shape in shapes)


def attend(backend="cuda"):
    return lambda q, k, v: jax_fa4.attention(q, k, v, causal=True, backend=backend)


def gradients(function):
    weights = jnp.cos(jnp.arange(64.0))
    return jax.jit(jax.grad(lambda *x: (function(*x).astype(jnp.float32) * weights).sum(), (0, 1, 2)))


def assert_close(got, wanted, tolerance=4e-3):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def wide(values):
    return [x.astype(jnp.float32) for x in values]


def test_forward_and_backward_are_right_and_auto_takes_them():
    values = arrays(2, 300, 8, 2)
    assert_close(jax.jit(attend())(*values), attend("xla")(*wide(values)))
    assert_close(gradients(attend())(*values), gradients(attend("xla"))(*wide(values)))
    compiled = jax.jit(attend("auto")).lower(*values).compile()
    assert 'custom_call_target="jax_fa4"' in compiled.as_text()
    np.testing.assert_array_equal(np.asarray(compiled(*values)), np.asarray(attend()(*values)))


def test_vmap_and_remat():
    values = arrays(2, 130, 4, 4)
    stacked = [jnp.stack([x, 0.5 * x]) for x in values]
    assert_close(jax.vmap(attend())(*stacked), jax.vmap(attend("xla"))(*wide(stacked)))
    policy = jax.checkpoint_policies.save_only_these_names(*jax_fa4.CHECKPOINT_NAMES)
    compiled = gradients(jax.checkpoint(attend(), policy=policy)).lower(*values).compile()
    assert compiled.as_text().count('custom_call_target="jax_fa4"') == 2
    assert_close(compiled(*values), gradients(attend("xla"))(*wide(values)))


def test_two_threads():
    values, function, wrong = arrays(2, 300, 8, 2), jax.jit(attend()), []
    wanted = np.asarray(function(*values))

    def work():
        wrong.extend(1 for _ in range(200) if not np.array_equal(np.asarray(function(*values)), wanted))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_four_million_keys():
    """Offsets beyond 2^31 elements: a key array of 2^32, and gradients as large, against chunks in float32."""
    rows, keys, heads, dim, chunk = 64, 1 << 22, 8, 128, 1 << 16

    @jax.jit
    def draw(key):
        parts = jax.lax.map(lambda k: jax.random.normal(k, (chunk, heads, dim), jnp.bfloat16),
                            jax.random.split(key, keys // chunk))
        return parts.reshape(1, keys, heads, dim)

    k, v = (draw(jax.random.key(i)) for i in (1, 2))
    q, do = (jax.random.normal(jax.random.key(i), (1, rows, heads, dim), jnp.bfloat16) for i in (3, 4))
    q = 4 * q  # else every row is the mean of all values
    scale = dim**-0.5

    @jax.jit
    def run(q, k, v, do):
        (o, lse), pull = jax.vjp(lambda *x: jax_fa4.attention(*x, return_lse=True, backend="cuda"), q, k, v)
        return o, lse, pull((do, jnp.zeros_like(lse)))

    o, lse, (dq, dk, dv) = run(q, k, v, do)

    def chunks(x):
        return x[0].reshape(keys // chunk, chunk, heads, dim)

    @jax.jit
    def exact(q, k, v, do, o):
        q, do, o = (x[0].astype(jnp.float32) for x in (q, do, o))

        def scores(part):
            return jnp.einsum("qhd,khd->hqk", q, part.astype(jnp.float32), precision="highest") * scale

        tops = jax.lax.map(lambda part: jax.nn.logsumexp(scores(part), axis=-1), chunks(k))
        lse = jax.nn.logsumexp(tops, axis=0)
        delta = (o * do).sum(-1).T

        def gradients(sums, parts):
            k, v = parts
            p = jnp.exp(scores(k) - lse[..., None])
            dp = jnp.einsum("qhd,khd->hqk", do, v.astype(jnp.float32), precision="highest")
            ds = p * (dp - delta[..., None]) * scale
            new = (jnp.einsum("hqk,khd->qhd", p, v.astype(jnp.float32), precision="highest"),
                   jnp.einsum("hqk,khd->qhd", ds, k.astype(jnp.float32), precision="highest"))
            last = (jnp.einsum("hqk,qhd->khd", ds, q, precision="highest"),
                    jnp.einsum("hqk,qhd->khd", p, do, precision="highest"))
            return jax.tree.map(jnp.add, sums, new), jax.tree.map(lambda x: x[-16:], last)

        zero = (jnp.zeros((rows, heads, dim)),) * 2
        (o, dq), (dk, dv) = jax.lax.scan(gradients, zero, (chunks(k), chunks(v)))
        return o, lse, dq, dk, dv

    want = exact(q, k, v, do, o)
    ends = [chunks(x)[:, -16:] for x in (dk, dv)]  # the last keys of each chunk, the last of all among them
    assert_close((o[0], lse[0], dq[0], *ends), want, tolerance=6e-3)


def launch_count() -> int:
    count = registry.library().jax_fa4_launch_count
    count.restype = ctypes.c_uint64
    return count()


def test_calls_are_captured_into_cuda_graphs():
    values = arrays(1, 128, 8, 8)

    def layers(attention):
        def function(q, k, v):
            for _ in range(6):
                q = attention(q * 1.01, k, v)
            return q

        return function

    compiled = jax.jit(layers(attend())).lower(*values).compile()
    before = launch_count()
    for _ in range(50):
        out = compiled(*values)
    out.block_until_ready()
    assert 6 <= launch_count() - before < 50 * 6 / 2, "replayed graphs do not launch through the handler"
    for _ in range(3):
        fresh = arrays(1, 128, 8, 8)
        assert_close(compiled(*fresh), layers(attend("xla"))(*wide(fresh)))


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda a: {"archs": "sm_100a", "sm_100a": a["sm_90a"]}, "holds modules for sm_100a, and the device is NVIDIA"),
        (lambda a: {"shared_bytes": a["shared_bytes"] * 0 + 300000}, "needs 300000 bytes of shared memory"),
    ],
)
def test_errors_name_both_sides(change, words):
    values = arrays(1, 128, 1, 1)
    spec, _ = make_spec(Arguments(*values, causal=True))
    kernel = launch.KernelCall(spec, "forward", targets.architectures())
    if kernel.archs != ("sm_90a",):
        pytest.skip("written for one Hopper GPU")
    artifact = launch.compiler.artifact(spec, "sm_90a", launch.size_class(1, 128, 128, 1), "forward")
    good = launch._attributes(kernel, (artifact,), (0,))
    broken = good | change(good) | {"key": words}
    dims = launch.abi.Dims(1, 128, 128, 1, 1, 0)
    results = [jax.ShapeDtypeStruct(b.dims(dims), b.dtype) for b in kernel.outputs] + launch._scratch([artifact], dims)
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(jax.jit(lambda *x: jax.ffi.ffi_call(registry.TARGET, results)(*x, **broken))(*values))


def microseconds(function, values, calls=1000):
    jax.block_until_ready(function(*values))
    start = time.perf_counter()
    for _ in range(calls):
        out = function(*values)
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / calls * 1e6


def test_a_tiny_call_costs_at_most_ten_microseconds_more_than_a_product():
    values = arrays(1, 128, 8, 8)
    double, attention = jax.jit(lambda q: q * 2), jax.jit(attend("auto"))
    pairs = [(microseconds(double, values[:1]), microseconds(attention, values)) for _ in range(9)]
    extra = statistics.median(b - a for a, b in pairs)
    print(f"q * 2: {min(a for a, _ in pairs):.1f} us, attention: {min(b for _, b in pairs):.1f} us, "
          f"median difference {extra:.1f} us")
    assert extra <= 10
