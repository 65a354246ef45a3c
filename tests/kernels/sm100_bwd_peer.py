"""Our Blackwell backward kernel beside flash-attn-4's published one, unit by unit, on the software GPU, as Markdown.

    PYTHONPATH=.:tests python tests/kernels/sm100_bwd_peer.py [--length 2048]

The main kernels alone, in bfloat16, one head, S = T. Both run on the same inputs, once under a seed, where they are
compared with the float64 oracle and counted, and once after the model of the clock.
"""

import argparse

import jax.numpy as jnp
import numpy as np
from emu import known_right

from jax_fa4 import compile, counting, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.peers import compiled, counters
from jax_fa4.spec import AttentionSpec

ARCH, SM_COUNT = counters.ARCH, counters.SM_COUNT
TOLERANCE = 6e-3
"""Of each gradient, in relative norm."""


def ours(case: counters.Case, problem: known_right.Problem, **settings):
    """(gradients, report of the main kernel alone)."""
    mask = masks.Causal() if case.causal else masks.Full()
    spec = AttentionSpec("bfloat16", case.head_dim, case.head_dim, scale=problem.scale, mask=mask)
    artifact = compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "backward")
    delta = (problem.o.astype(known_right.BF16).astype(np.float64) * problem.do.astype(np.float64)).sum(-1)
    arrays = {
        "q": problem.q, "k": problem.k, "v": problem.v, "do": problem.do,
        "lse": problem.lse.astype(np.float32), "delta": delta.transpose(0, 2, 1).astype(np.float32).copy(),
    }  # fmt: skip
    arrays |= {name: compiled.aligned(problem.q.shape, jnp.bfloat16) for name in ("dq", "dk", "dv")}
    report = emulator.launch(artifact, arrays, Dims(1, case.length, case.length, 1, 1, SM_COUNT), **settings)
    return [arrays[name] for name in ("dq", "dk", "dv")], report


def theirs(case: counters.Case, problem: known_right.Problem, **settings):
    name = f"d{case.head_dim}_{'causal' if case.causal else 'full'}_bwd"
    *gradients, reports = known_right.backward(ARCH, name, problem, **settings)
    return gradients, reports[1]


CYCLES = ("slowest cluster", "all multiprocessors, thousands")
"""What of the clock model's cycles is reported: a tile's, and what all tiles of the problem cost."""


def measure(case: counters.Case) -> tuple[dict, dict[str, tuple]]:
    """({"ours", "theirs"}: counters with bound cycles, the same: `CYCLES`)."""
    problem = known_right.Problem(case.length, 1, 1, case.head_dim, case.causal)
    exact = problem.gradients(problem.o.astype(known_right.BF16))
    counted, cycles = {}, {}
    for who, run in (("ours", ours), ("theirs", theirs)):
        gradients, report = run(case, problem, threads=1, sm_count=SM_COUNT)
        for name, got, want in zip(("dq", "dk", "dv"), gradients, exact, strict=True):
            error = np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want)
            assert error < TOLERANCE, f"{case}: {who} differs from the oracle: {name} by {error:.1e} in relative norm"
        kernels = counting.summarize([report])["kernels"].values()
        counted[who] = max(kernels, key=lambda kernel: kernel["tensor_flops"])
        timed = run(case, problem, threads=1, sm_count=SM_COUNT, timing=True)[1]
        main = max(timed.kernels, key=lambda kernel: kernel["tensor_flops"])
        clusters = main["cluster_cycles"]
        cycles[who] = max(clusters), sum(clusters) * main["timing"]["multiprocessors"] / 1000
    return counted, cycles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    length = parser.parse_args().length
    cases = [counters.Case(head_dim, causal, length) for head_dim in (64, 128) for causal in (False, True)]
    results = {case: measure(case) for case in cases}
    print(counters.table({case: counted for case, (counted, _) in results.items()}))
    for i, name in enumerate(CYCLES):
        pairs = [(cycles["ours"][i], cycles["theirs"][i]) for _, cycles in results.values()]
        cells = [f"{ours:,.0f} / {theirs:,.0f} = {ours / theirs:.2f}" for ours, theirs in pairs]
        print(f"| cycles by the clock model: {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
