"""Layouts: which rows a device holds, and the way there and back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_fa4.errors import InvalidArgument
from jax_fa4.layout import LAYOUTS, from_layout, layout_positions, to_layout


def test_positions_by_hand():
    assert layout_positions(8, "contiguous", 2).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert layout_positions(8, "zigzag", 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert layout_positions(8, "striped", 2).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_no_devices():
    for devices in (0, -2):
        with pytest.raises(InvalidArgument, match=f"devices: received {devices}; allowed: at least 1"):
            layout_positions(8, "zigzag", devices)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("devices", [1, 2, 3, 8])
def test_there_and_back(layout, devices):
    length = 48 * devices
    x = jnp.asarray(np.random.default_rng(devices).standard_normal((2, length, 3)))
    laid = to_layout(x, layout, devices)
    np.testing.assert_array_equal(laid, x[:, layout_positions(length, layout, devices)])
    np.testing.assert_array_equal(from_layout(laid, layout, devices), x)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keeps_sharding(layout, kind):
    mesh = jax.make_mesh((4,), ("sp",), axis_types=(kind,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, P(None, "sp"))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.arange(64.0).reshape(2, 32), sharding)
        laid = jax.jit(lambda x: to_layout(x, layout, 4))(x)
        back = jax.jit(lambda x: from_layout(x, layout, 4))(laid)
    np.testing.assert_array_equal(laid, np.asarray(x)[:, layout_positions(32, layout, 4)])
    np.testing.assert_array_equal(back, x)
    if kind == AxisType.Explicit:
        assert jax.typeof(laid).sharding.spec == sharding.spec


def test_work_is_balanced_as_said():
    from jax_fa4.ring.scaling import work_share

    def critical_path(layout):
        share = np.array(work_share(layout, 8, 512, causal=True))
        assert abs(share.sum() - (8 * 8 / 2 + 8 / (2 * 512))) < 1e-9  # the causal half, and half the diagonal
        return share.max(axis=0).sum()

    assert critical_path("contiguous") == pytest.approx(7.5, abs=0.01)
    assert critical_path("zigzag") == pytest.approx(4.0, abs=0.01)
    assert critical_path("striped") == pytest.approx(4.0, abs=0.01)


@pytest.mark.parametrize(
    "layout, length, message",
    [
        ("zigzag", 12, r"multiples of 8 \(zigzag layout over 4 devices\)"),
        ("striped", 10, "multiples of 4"),
        ("spiral", 16, "contiguous, zigzag, striped"),
        (None, 16, "contiguous, zigzag, striped"),
    ],
)
def test_bad_input(layout, length, message):
    with pytest.raises(InvalidArgument, match=message):
        layout_positions(length, layout, 4)


@pytest.mark.parametrize("devices", [2, 5])
def test_one_mask_for_both_chunks_of_a_zigzag_block(devices):
    rows = 6
    position = layout_positions(rows * devices, "zigzag", devices).reshape(devices, rows)
    for device, owner in itertools.permutations(range(devices), 2):
        (q, q_stride), (k, k_stride) = LAYOUTS["zigzag"].across(owner < device, rows)
        index = np.arange(rows)
        got = k + k_stride * index <= (q + q_stride * index)[:, None]
        np.testing.assert_array_equal(got, position[owner] <= position[device][:, None])


def test_scaling_model_by_hand():
    from jax_fa4.ring.scaling import Machine, Workload, predict

    work = Workload(tokens=8192, heads=1, kv_heads=1, head_dim=128, causal=False, layout="contiguous")
    machine = Machine(forward_tflops=1.0, backward_tflops=2.5, link_gb_per_s=1.0, latency_us=0.0, step_us=0.0)
    # A block: 4 * 4096^2 * 128 flop at 1 TFLOP/s is 8.59 ms each way; K and V are 2.10 MB, with dK and dV 6.29 MB.
    row = predict(machine, work, 2)
    assert row.forward_ms == pytest.approx(2 * 8.589934592)
    assert row.backward_ms == pytest.approx(2 * 8.589934592)
    assert row.transfer_per_step_ms == pytest.approx((2.097152 + 6.291456) / 2)
    assert row.hidden == 1.0 and row.efficiency == pytest.approx(1.0)
    # A link ten times slower: 20.97 ms and 62.9 ms to send, beside 8.59 ms of attention.
    slow = predict(Machine(1.0, 2.5, 0.1, 0.0, 0.0), work, 2)
    assert slow.forward_ms == pytest.approx(20.97152 + 8.589934592)
    assert slow.hidden == pytest.approx(2 * 8.589934592 / (20.97152 + 62.91456))
