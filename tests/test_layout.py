"""Layouts: which rows a device holds, and the way there and back."""

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
