"""The Blackwell forward kernel is no more expensive, in the unit that bounds it, than flash-attn-4's published one."""

import pytest
from emu import emulated
from kernels import sm100_peer


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_largest_unit_bound_is_at_most_the_published_kernels(head_dim, causal):
    emulated.require_library()
    kernels = sm100_peer.count(head_dim, causal, 1024)
    assert max(kernels["ours"]["bound_cycles"].values()) <= max(kernels["theirs"]["bound_cycles"].values())
