"""The Blackwell forward kernel is no more expensive, in the unit that bounds it, than flash-attn-4's published one."""

import pytest
from emu import emulated, known_right

from jax_fa4.__main__ import main
from jax_fa4.peers import compiled, counters


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in counters.CASES if case.length == 1024], ids=str)
def test_the_largest_unit_bound_is_at_most_the_published_kernels(case):
    emulated.require_library()
    known_right.folder(counters.ARCH, "d128_full")  # skips without flash-attn-4
    kernels = counters.count(case)
    assert max(kernels["ours"]["bound_cycles"].values()) <= max(kernels["theirs"]["bound_cycles"].values())
    table = counters.table({case: kernels})
    assert str(case) in table and "special functions" in table


def test_without_the_peer_the_command_says_what_to_install(tmp_path, monkeypatch):
    emulated.require_library()
    monkeypatch.setenv("JAX_FA4_KNOWN_RIGHT", str(tmp_path))
    monkeypatch.setenv("JAX_FA4_KNOWN_RIGHT_PYTHON", "false")
    compiled.folder.cache_clear()
    with pytest.raises(compiled.MissingPeer, match=r"pip install 'jax_fa4\[peers\]'"):
        compiled.folder("sm_100a", "d64_full")


def test_the_command_refuses_shapes_that_it_does_not_compare():
    with pytest.raises(SystemExit, match="one head of D 64 or 128"):
        main(["counters", "--peer", "flash-attn-4", "--shape", "2,128,1,64"])
