"""XLA's GPU schedule of the ring, compiled without a GPU: each transfer runs beside an attention call.

Needs jax's CUDA plug-in (its compiler, not its libraries) and the compiler of the kernels.
"""

import functools
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4 import registry
from jax_fa4.ring import ring_attention
from jax_fa4.targets import target

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax-cuda13-plugin, XLA's compiler for GPUs")
pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl, the kernels' compiler")

PACKED_ROWS = 1 << 14
"""So many that XLA does not combine what travels in a step."""

DEVICE = (Path(__file__).parent / "h100.txtpb").read_text()


@functools.cache
def topology(devices):
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # the compiler alone needs no cuDNN
    return topologies.get_topology_desc("", "cuda", target_config=DEVICE, topology=f"1x1x{devices}")


def schedule(devices, backward, rows=4096, **options):
    """The order of transfers and attention calls by computation: strings of s(tart), d(one) and a(ttention)."""
    registry.register()
    mesh = Mesh(np.array(topology(devices).devices), ("sp",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "sp"))
    q, k = (jax.ShapeDtypeStruct((1, rows * devices, heads, 128), jnp.bfloat16, sharding=sharding) for heads in (16, 4))

    def ring(q, k, v):
        return ring_attention(q, k, v, axis="sp", mesh=mesh, backend="cuda", **options)

    function = ring
    if backward:
        function = jax.grad(lambda q, k, v: ring(q, k, v).astype(jnp.float32).sum(), (0, 1, 2))
    with target("sm_90a"):
        lowered = jax.jit(function).trace(q, k, k).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    marks = {"collective-permute-start(": "s", "collective-permute-done(": "d", f'"{registry.TARGET}"': "a"}
    computations = [""]
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%\S+ \(", line):
            computations.append("")
        if " fusion(" not in line:
            computations[-1] += "".join(mark for needle, mark in marks.items() if needle in line)
    return [found for found in computations if found]


@pytest.mark.parametrize("devices, options", [
    (3, {"causal": True, "layout": "zigzag", "rows": PACKED_ROWS}),
    (8, {"causal": True, "layout": "zigzag"}),
    pytest.param(8, {"causal": True, "layout": "striped"}, marks=pytest.mark.slow),
    pytest.param(8, {}, marks=pytest.mark.slow),
    pytest.param(4, {"causal": True}, marks=pytest.mark.slow),
    pytest.param(8, {"causal": True, "window": (2048, None)}, marks=pytest.mark.slow),
])
def test_forward_hides_every_transfer(devices, options):
    computations = schedule(devices, backward=False, **options)
    assert any("s" in found for found in computations)
    for found in computations:
        assert re.fullmatch(r"a*(sa+d)*a*", found), computations


@pytest.mark.parametrize("devices, options", [
    (8, {"causal": True, "layout": "zigzag"}),
    pytest.param(8, {"causal": True, "layout": "zigzag", "rows": PACKED_ROWS}, marks=pytest.mark.slow),
    pytest.param(3, {"causal": True, "layout": "zigzag"}, marks=pytest.mark.slow),
    pytest.param(8, {"causal": True, "layout": "striped"}, marks=pytest.mark.slow),
    pytest.param(8, {}, marks=pytest.mark.slow),
])
def test_backward_hides_every_transfer(devices, options):
    """dK and dV of the last step come home beside half of the heads of the device's own block."""
    computations = schedule(devices, backward=True, **options)
    entry = max(computations, key=len)
    assert re.fullmatch(r"a*(sa+d)*a*(sa+d)*sad", entry), computations
    for found in computations:
        assert found is entry or re.fullmatch(r"a*(sa+d)*a*", found), computations


@pytest.mark.slow
def test_rows_that_a_window_reaches_come_home_by_themselves():
    """They are few, and no work is kept for that."""
    entry = max(schedule(8, backward=True, causal=True, window=(2048, None)), key=len)
    assert re.fullmatch(r"a*(sa+d)*a*(sa+d)*sd", entry), entry
