"""What travels in a ring: every needed block arrives, nothing else is sent, and every gradient comes home."""

import numpy as np
import pytest

from jax_fa4.layout import LAYOUTS
from jax_fa4.masks import Causal, Full, Window, canonical
from jax_fa4.ring.schedule import make_levels, needed_blocks
from jax_fa4.spec import AttentionSpec

MASKS = {
    "full": Full(),
    "causal": Causal(),
    "left window": Causal() & Window(20, None),
    "two-sided window": Window(20, 3),
    "ahead": Window(0, 30),
}


def needed_by_hand(mask, layout, devices, q_rows, kv_rows):
    """From every single pair of positions."""

    def positions(device, rows):
        run = rows // layout.chunks
        spans = (layout.affine(device, chunk, devices, rows) for chunk in range(layout.chunks))
        return np.concatenate([offset + stride * np.arange(run) for offset, stride in spans])

    needed = np.zeros((devices, devices), bool)
    for i in range(devices):
        q = positions(i, q_rows) + devices * (kv_rows - q_rows)
        for j in range(devices):
            distance = positions(j, kv_rows)[None, :] - q[:, None]
            keep = np.ones_like(distance, bool)
            for part in mask.parts:
                if isinstance(part, Causal):
                    keep &= distance <= 0
                else:
                    keep &= (distance >= -part.left) if part.left is not None else True
                    keep &= (distance <= part.right) if part.right is not None else True
            needed[i, j] = keep.any()
    return needed


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("devices, q_rows, kv_rows", [(1, 8, 8), (2, 8, 8), (5, 8, 8), (8, 16, 16), (4, 8, 24)])
def test_transfers(mask, layout, devices, q_rows, kv_rows):
    spec = AttentionSpec("float32", 8, 8, mask=canonical(MASKS[mask]))
    needed = needed_blocks(spec, LAYOUTS[layout], devices, q_rows, kv_rows)
    exact = needed_by_hand(spec.mask, LAYOUTS[layout], devices, q_rows, kv_rows)
    assert not (exact & ~needed).any()
    if layout != "striped" or mask == "full":  # a stripe's span says less than its rows
        np.testing.assert_array_equal(needed, exact)

    (level,) = make_levels({"sp": devices}, needed)
    seen = {(i, i) for i in range(devices)}
    for chain in level.chains:
        held = {i: i for i in range(devices)}  # device -> owner of the block it holds
        home = set()
        for hop in chain.hops:
            home |= {(held[holder], owner) for holder, owner in hop.home}
            assert all(source in held for source, _ in hop.pairs)
            held = {destination: held[source] for source, destination in hop.pairs}
            assert all(owner == (i - hop.shift) % devices for i, owner in held.items())
            seen |= set(held.items())
            # A block travels on only while it is still needed somewhere.
            later = [h for h in chain.hops if chain.hops.index(h) >= chain.hops.index(hop)]
            assert all(any(needed[(o + h.shift) % devices, o] for h in later) for o in held.values())
        home |= {(held[holder], owner) for holder, owner in chain.final}
        assert all(carried == owner for carried, owner in home)
        assert len(home) == len(chain.hops[0].pairs)
    assert all((i, j) in seen for i in range(devices) for j in range(devices) if needed[i, j])


def test_window_sends_to_neighbours_only():
    spec = AttentionSpec("float32", 8, 8, mask=canonical(Causal() & Window(16, None)))
    (level,) = make_levels({"sp": 8}, needed_blocks(spec, LAYOUTS["contiguous"], 8, 16, 16))
    (chain,) = level.chains
    assert [hop.pairs for hop in chain.hops] == [tuple((i, i + 1) for i in range(7))]


def test_causal_contiguous_never_wraps():
    spec = AttentionSpec("float32", 8, 8, mask=Causal())
    (level,) = make_levels({"sp": 4}, needed_blocks(spec, LAYOUTS["contiguous"], 4, 16, 16))
    (chain,) = level.chains
    assert [len(hop.pairs) for hop in chain.hops] == [3, 2, 1]
    assert [hop.home for hop in chain.hops] == [(), ((3, 2),), ((3, 1),)]


def test_full_rings_are_one_loop():
    spec = AttentionSpec("float32", 8, 8, mask=Causal())
    (level,) = make_levels({"sp": 8}, needed_blocks(spec, LAYOUTS["zigzag"], 8, 16, 16))
    assert level.chains[0].uniform
    two = make_levels({"host": 2, "device": 4}, np.ones((8, 8), bool))
    assert [(level.axis, level.size, len(level.chains[0].hops)) for level in two] == [("host", 2, 1), ("device", 4, 3)]
