"""Every fence between the proxies in our Blackwell kernels is needed: the judge reports the kernel without it."""

import pytest
from emu import emulated, mutate
from kernels import sm100_bwd_mutate, sm100_mutate

from jax_fa4 import masks

KERNELS = {  # name: (its subject, fences that others make unnecessary)
    "forward, launch control": (lambda: sm100_mutate.Subject(128, masks.Causal()), 0),
    "forward, pairs": (lambda: sm100_mutate.Subject(128, masks.Full()), 0),
    "backward": (lambda: sm100_bwd_mutate.Subject(64, True, False), 0),
    # One: behind a tile number, in the compute role, where every step has another.
    "backward, pairs": (lambda: sm100_bwd_mutate.Subject(128, True, False), 1),
    "backward, narrow pairs": (lambda: sm100_bwd_mutate.Subject(256, False, False), 1),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("forward, launch control", "backward, pairs") else pytest.mark.slow)
        for name in KERNELS
    ],
)
def test_every_proxy_fence_is_missed(name):
    emulated.require_library()
    make, unnecessary = KERNELS[name]
    subject = make()
    ptx = subject.artifact.ptx
    baseline = subject.run(ptx, 0)[0]
    assert sm100_mutate.caught(subject, ptx, baseline, 3) == "not caught"
    mutants = [(line, text) for line, kind, text in mutate.mutants(ptx) if kind == "proxy fence"]
    verdicts = {line: sm100_mutate.caught(subject, text, baseline, 1) for line, text in mutants}
    missed = [verdict for verdict in verdicts.values() if verdict == "judge"]
    assert mutants and len(missed) == len(mutants) - unnecessary, verdicts
