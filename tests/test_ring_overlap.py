"""What a profile says about hidden transfers: the arithmetic of intervals."""

import pytest

from jax_fa4.bench.overlap import length, overlap, union


def test_union_joins_what_touches():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert length(union([(5, 6), (0, 2), (1, 3), (3, 4)])) == 5


def test_time_of_transfers_that_nothing_covers():
    ms = 1e6
    one = [("kernel", 0, 10 * ms), ("ncclDevKernel_SendRecv", 8 * ms, 14 * ms), ("fusion", 12 * ms, 13 * ms)]
    seen = overlap([one], calls=1)
    assert (seen.busy_ms, seen.transfer_ms, seen.exposed_ms) == (14, 6, 3)
    assert seen.hidden == 0.5
    both = overlap([one, [("kernel", 0, 14 * ms), ("ncclDevKernel_SendRecv", 2 * ms, 8 * ms)]], calls=2)
    assert (both.busy_ms, both.transfer_ms, both.exposed_ms) == (7, 3, 0.75)
    assert both.hidden == pytest.approx(0.75)


def test_a_profile_without_transfers_hides_all_of_them():
    assert overlap([[("kernel", 0, 1e6)]], calls=1).hidden == 1.0
