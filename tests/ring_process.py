"""One of several processes of a ring: `python ring_process.py ADDRESS COUNT INDEX`. Prints the largest differences."""

import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_fa4
from jax_fa4.layout import layout_positions
from jax_fa4.ring import ring_attention

random = np.random.default_rng(0)
q, k, v, do = (random.standard_normal((1, 64, 2, 8)).astype(np.float32) for _ in range(4))
order = layout_positions(64, "zigzag", 8)
mesh = jax.make_mesh((8,), ("sp",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, P(None, "sp"))


def spread(x):
    laid = x[:, order]
    return jax.make_array_from_callback(laid.shape, sharding, lambda index: laid[index])


@jax.jit
def ring(q, k, v, do):
    def run(*x):
        return ring_attention(*x, axis="sp", mesh=mesh, layout="zigzag", causal=True, backend="xla")

    o, pull = jax.vjp(run, q, k, v)
    return o, *pull(do)


o, pull = jax.vjp(lambda *x: jax_fa4.attention(*x, causal=True, backend="xla"), *map(jnp.asarray, (q, k, v)))
want = [np.asarray(x)[:, order] for x in (o, *pull(jnp.asarray(do)))]
for got, exact in zip(ring(*map(spread, (q, k, v, do))), want, strict=True):
    errors = [np.abs(np.asarray(shard.data) - exact[shard.index]).max() for shard in got.addressable_shards]
    assert len(errors) == 4 and jax.device_count() == 8
    print(f"difference {max(errors):.3e}", flush=True)
