"""Remove each synchronisation instruction of our Blackwell forward kernel, one at a time: does the software GPU notice?

    PYTHONPATH=.:tests python tests/kernels/sm100_mutate.py [--head-dim 128] [--seeds 20]

Causal, two query blocks for one multiprocessor, so that tiles follow each other in a CTA. See `emu.mutate`.
"""

import argparse
import collections
import re

import numpy as np
from emu import known_right, mutate

from jax_fa4 import compile, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.runtime import Arguments
from jax_fa4.spec import AttentionSpec

ARCH, LENGTH = "sm_100a", 512


class Subject:
    """The kernel and its problem."""

    def __init__(self, head_dim: int):
        self.problem = known_right.Problem(LENGTH, 1, 1, head_dim, True)
        spec = AttentionSpec("bfloat16", head_dim, head_dim, scale=self.problem.scale, mask=masks.Causal())
        self.artifact = compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "forward")

    def run(self, ptx: str, seed: int):
        """(result bytes, report)."""
        p = self.problem
        o = known_right.aligned(p.q.shape, p.q.dtype)
        lse = known_right.aligned((1, 1, LENGTH), np.float32)
        arrays = {"q": p.q, "k": p.k, "v": p.v, "o": o, "lse": lse}
        places = {name: array.ctypes.data for name, array in arrays.items()}
        arguments = Arguments(self.artifact, places, Dims(1, LENGTH, LENGTH, 1, 1, 1))
        module = emulator.load(self.artifact.object, ptx, self.artifact.symbol)
        settings = emulator.Settings(seed=seed, threads=1, sm_count=1)
        report = module.run_vector(arguments.vector, list(arrays.values()), settings)
        return o.tobytes() + lse.tobytes(), report


def caught(subject: Subject, ptx: str, baseline: bytes, seeds: int) -> str:
    for seed in range(seeds):
        try:
            results, report = subject.run(ptx, seed)
        except emulator.EmulationError as error:
            return "deadlock" if re.search("deadlock|hang", str(error)) else "judge"
        if results != baseline:
            return "value"
        if report.complaints:
            return "judge"
    return "not caught"


def never_waits(subject: Subject, ptx: str, line: int, seeds: int) -> bool:
    """As `mutate.never_waits`: whether the wait finds its phase complete under every seed."""
    lines = ptx.split("\n")
    predicate = re.search(r"_wait\S*\s+([%\w$]+)\s*,", lines[line - 1]).group(1)
    tested = re.sub(r",\s*\d{4,}\s*;", ";", re.sub(r"try_wait", "test_wait", lines[line - 1], count=1))
    lines[line - 1] = tested + f" @!{predicate} st.shared.b32 [%r1+16000000], %r1;"
    return caught(subject, "\n".join(lines), subject.run(ptx, 0)[0], seeds) == "not caught"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    subject = Subject(options.head_dim)
    ptx = subject.artifact.ptx
    baseline, report = subject.run(ptx, 0)
    assert caught(subject, ptx, baseline, options.seeds) == "not caught", "the unchanged kernel depends on the seed"
    executed = {line for line, count in report.kernels[0]["lines"] if count}
    table, kept = collections.defaultdict(collections.Counter), []
    for line, kind, text in mutate.mutants(ptx):
        how = "not executed" if line not in executed else caught(subject, text, baseline, options.seeds)
        if how == "not caught" and kind == "mbarrier wait" and never_waits(subject, ptx, line, options.seeds):
            how = "never waits"
        table[kind][how] += 1
        if how == "not caught":
            kept.append((line, ptx.split("\n")[line - 1].strip()))
    ways = ("value", "judge", "deadlock", "not executed", "never waits", "not caught")
    print(f"{'removed':24s}" + "".join(f"{way:>14s}" for way in ways))
    for kind, counts in [*table.items(), ("all", sum(table.values(), collections.Counter()))]:
        print(f"{kind:24s}" + "".join(f"{counts[way]:14d}" for way in ways))
    for line, text in kept:
        print(f"  line {line}: {text}")


if __name__ == "__main__":
    main()
