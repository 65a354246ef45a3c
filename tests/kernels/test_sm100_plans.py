"""Plans of the Blackwell forward kernel, and which key blocks its tiles visit."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_fa4 import masks
from jax_fa4.kernels.sm100 import plans, visits
from jax_fa4.plan import SizeClass
from jax_fa4.spec import AttentionSpec


def spec(head_dim=128, value_head_dim=None, **rest):
    return AttentionSpec("bfloat16", head_dim, value_head_dim or head_dim, scale=0.1, **rest)


def plan(size=SizeClass.MANY_TILES, **rest):
    return plans.forward_plan(spec(**rest), "sm_100a", size)


@pytest.mark.parametrize(
    "head_dim, value_head_dim", [*((d, d) for d in range(8, 257, 8)), (192, 128), (128, 192), (64, 256)]
)
@pytest.mark.parametrize("float32_out", [False, True])
@pytest.mark.parametrize("size", list(SizeClass))
def test_every_head_dim_has_a_plan_within_the_budgets(head_dim, value_head_dim, float32_out, size):
    chosen = plan(size, head_dim=head_dim, value_head_dim=value_head_dim, float32_out=float32_out)
    assert chosen.head_dim >= head_dim and chosen.value_head_dim >= value_head_dim
    assert chosen.smem_bytes <= plans.SMEM_BYTES
    assert chosen.tmem_columns <= plans.TMEM_COLUMNS
    assert chosen.q_tiles == (2 if value_head_dim <= 128 else 1)
    assert 2 <= chosen.kv_stages <= plans.MAX_STAGES
    one_more = dataclasses.replace(chosen, kv_stages=2).smem_bytes + (chosen.kv_stages - 1) * chosen.kv_stage_bytes
    assert chosen.kv_stages == plans.MAX_STAGES or one_more > plans.SMEM_BYTES, "shared memory for a stage is left"


def test_a_plan_that_does_not_fit_says_both_numbers():
    with pytest.raises(ValueError, match=r"tensor memory columns: the plan needs 768, an SM has 512"):
        plans.ForwardPlan("sm_100a", 128, 256)
    with pytest.raises(ValueError, match=rf"shared memory bytes: the plan needs \d+, an SM has {plans.SMEM_BYTES}"):
        plans.ForwardPlan("sm_100a", 128, 128, kv_stages=4)
    with pytest.raises(ValueError, match=r"registers: .* take 528 of 512"):
        plans.Registers(softmax=200)


def test_strategies_follow_from_the_spec():
    full, causal = plan(), plan(mask=masks.Causal())
    assert (full.longest_first, causal.longest_first) == (False, True)
    assert sum(full.exp2_on_fma) == sum(causal.exp2_on_fma) == 15 and sum(plan(head_dim=64).exp2_on_fma) == 16
    assert plan(head_dim=256).exp2_on_fma == (0, 0, 0, 0)
    assert plans.forward_plan(spec(), "sm_103a", SizeClass.MANY_TILES).exp2_on_fma == (0, 0, 0, 0)
    assert (full.scheduler, causal.scheduler) == ("static", "clc"), "tiles of equal length need no balancing"
    assert plan(SizeClass.FEW_TILES, mask=masks.Causal()).scheduler == "static", "one work for each CTA"
    few = plan(SizeClass.FEW_TILES, group=4)
    assert few.split_kv and few.float32_out and few.packed_heads == 4
    assert plan(SizeClass.FEW_TILES, group=3).packed_heads == 1, "128 rows hold no whole number of groups of 3"


def test_pairs_share_products_where_stages_are_short_or_no_block_is_wasted():
    assert plan().cta_group == 2 and plan(mask=masks.Causal()).cta_group == 1 and plan(head_dim=64).cta_group == 1
    for head_dim, value_head_dim in ((256, 256), (192, 128)):
        paired = plan(head_dim=head_dim, value_head_dim=value_head_dim, mask=masks.Causal())
        assert (paired.cta_group, paired.kv_chunks, paired.kv_stages) == (2, 1, 5)
        alone = plan(SizeClass.FEW_TILES, head_dim=head_dim, value_head_dim=value_head_dim)
        assert (alone.cta_group, alone.kv_chunks) == (1, 2) and alone.kv_stages >= 4
    with pytest.raises(ValueError, match="cta_group: 2 does not go with split_kv"):
        dataclasses.replace(plan(), split_kv=True)


@st.composite
def block_ranges(draw):
    """The (start, full_start, full_end, end) of two query tiles under some mask, from the masks' own formula."""
    length = st.integers(1, 2000)
    bound = st.one_of(st.none(), st.integers(0, 700))
    mask = draw(st.sampled_from([masks.Full(), masks.Causal()])) & masks.Window(draw(bound), draw(bound))
    geometry = masks.Geometry.bottom_right(draw(length), draw(length))
    blocks = -(-geometry.q_length // 128)
    first = 2 * draw(st.integers(0, (blocks - 1) // 2))
    return [masks.block_range(mask, first + i, 128, 128, geometry) for i in range(2)]


@given(block_ranges())
def test_tiles_visit_their_blocks_and_the_union_holds_them(ranges):
    blocks, start, end = visits.at_least_one(ranges, max(r[3] for r in ranges), masks.PYTHON)
    for tile, (first, full_start, full_end, last) in zip(blocks, ranges, strict=True):
        if first < last:
            assert (tile.start, tile.full_start, tile.full_end, tile.end) == (first, full_start, full_end, last)
        else:
            assert tile.count == 1 and tile.full_start == tile.full_end, "one block, masked"
        assert start <= tile.start < tile.end <= end
    assert start == min(tile.start for tile in blocks) and end == max(tile.end for tile in blocks)


@given(block_ranges(), st.integers(1, 9))
def test_splits_share_out_every_block_once(ranges, splits):
    parts = [visits.part(ranges, split, splits, masks.PYTHON) for split in range(splits)]
    for i, (start, full_start, full_end, end) in enumerate(ranges):
        visited = [b for part in parts for b in range(part[i][0], part[i][3])]
        assert visited == list(range(start, end))
        unmasked = [b for part in parts for b in range(part[i][1], part[i][2])]
        assert unmasked == list(range(full_start, full_end))


@given(block_ranges(), st.integers(1, 9))
def test_a_split_without_keys_visits_a_block_that_no_row_of_the_tile_sees(ranges, splits):
    for split in range(splits):
        part = visits.part(ranges, split, splits, masks.PYTHON)
        blocks, _, _ = visits.at_least_one(part, max(r[3] for r in ranges), masks.PYTHON)
        for tile, mine, whole in zip(blocks, part, ranges, strict=True):
            if mine[0] >= mine[3]:
                assert not whole[0] <= tile.start < whole[3]
