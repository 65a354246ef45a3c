"""What travels in a ring: every needed block arrives, nothing else is sent, and every gradient comes home."""

import numpy as np
import pytest

from jax_fa4.layout import LAYOUTS
from jax_fa4.masks import Causal, Full, Window, canonical
from jax_fa4.ring.schedule import cut_blocks, make_levels, needed_blocks
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


@pytest.mark.parametrize(
    "mask, keys, rows",
    [
        (Causal() & Window(5, None), [range(11, 16)], [range(5)]),
        (Window(5, 3), [range(11, 16), range(3)], [range(5), range(13, 16)]),
        (Causal() & Window(40, None), [None], [None]),  # blocks travel on: the next device needs more of them
        (Causal() & Window(16, None), [None], [None]),  # one hop, and all of the block is needed
    ],
)
def test_a_block_is_cut_down_to_what_a_window_reaches(mask, keys, rows):
    spec = AttentionSpec("float32", 8, 8, mask=canonical(mask))
    levels = make_levels({"sp": 8}, needed_blocks(spec, LAYOUTS["contiguous"], 8, 16, 16))
    (level,) = cut_blocks(levels, spec, LAYOUTS["contiguous"], 16, 16)
    cuts = [chain.cut for chain in level.chains]
    assert [cut and cut.keys for cut in cuts] == keys
    assert [cut and cut.rows for cut in cuts] == rows


def test_a_cut_keeps_every_pair_that_the_mask_allows():
    """By enumeration, with more keys than queries."""
    devices, q_rows, kv_rows, left, right = 4, 9, 10, 3, 2
    spec = AttentionSpec("float32", 8, 8, mask=canonical(Window(left, right)))
    needed = needed_blocks(spec, LAYOUTS["contiguous"], devices, q_rows, kv_rows)
    (level,) = cut_blocks(make_levels({"sp": devices}, needed), spec, LAYOUTS["contiguous"], q_rows, kv_rows)
    cuts = {chain.hops[0].shift: chain.cut for chain in level.chains if len(chain.hops) == 1}
    assert any(cuts.values())
    for row in range(devices * q_rows):
        position = row + devices * (kv_rows - q_rows)
        for key in range(max(position - left, 0), min(position + right + 1, devices * kv_rows)):
            cut = cuts.get((row // q_rows - key // kv_rows) % devices)
            assert cut is None or (row % q_rows in cut.rows and key % kv_rows in cut.keys)


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
