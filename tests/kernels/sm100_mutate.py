"""Remove each synchronisation instruction of our Blackwell forward kernel, one at a time: does the software GPU notice?

    PYTHONPATH=.:tests python tests/kernels/sm100_mutate.py [--head-dim 128] [--full] [--segments] [--seeds 20]

Several works for one CTA (or pair of CTAs), so that they follow each other. Runs are strict. See `emu.mutate`.
"""

import argparse
import collections
import re

import jax.numpy as jnp
import numpy as np
from emu import mutate

from jax_fa4 import compile, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.peers import compiled
from jax_fa4.runtime import Arguments
from jax_fa4.spec import AttentionSpec

ARCH = "sm_100a"


class Subject:
    """The kernel and its problems: works of many key blocks, and of one, whose epilogues come soon after another."""

    def __init__(self, head_dim: int, mask: masks.Mask):
        spec = AttentionSpec("bfloat16", head_dim, head_dim, scale=head_dim**-0.5, mask=mask)
        size = plan.SizeClass.MANY_TILES
        self.artifact = compile.artifact(spec, ARCH, size, "forward")
        chosen = plan.choose_plan(spec, ARCH, size, "forward")
        self.sm_count = chosen.cta_group
        rows = chosen.q_tiles * chosen.q_rows
        rng = np.random.default_rng(0)
        self.problems = []
        for lengths in ((2 * rows, 2 * rows), (6 * rows, 128)):
            arrays = [rng.standard_normal((1, lengths[i > 0], 1, head_dim)) for i in range(3)]
            problem = {n: compiled.aligned(x.shape, jnp.bfloat16, x) for n, x in zip("qkv", arrays, strict=True)}
            if chosen.key_blocks == "ids":
                for name, length in zip(("q", "kv"), lengths, strict=True):
                    documents = np.array([[4, 0, 3, 0, 1]]).repeat(-(-length // 5), 1)[:, :length].astype(np.int32)
                    problem[f"{name}_segment_ids"] = compiled.aligned(documents.shape, np.int32, documents)
            self.problems.append(problem)

    def run(self, ptx: str, seed: int):
        """(result bytes, complaints, executed lines) of all problems."""
        module = emulator.load(self.artifact.object, ptx, self.artifact.symbol)
        settings = emulator.Settings(seed=seed, threads=1, sm_count=self.sm_count, strict=True)
        results, complaints, lines = b"", [], set()
        for problem in self.problems:
            q, rows, columns = problem["q"], problem["q"].shape[1], problem["k"].shape[1]
            o, lse = compiled.aligned(q.shape, q.dtype), compiled.aligned((1, 1, rows), np.float32)
            dims = Dims(1, rows, columns, 1, 1, self.sm_count)
            scratch = [buffer for buffer in self.artifact.buffers if buffer.kind == "scratch"]
            arrays = problem | {"o": o, "lse": lse}
            arrays |= {b.name: compiled.aligned(b.dims(dims), np.dtype(b.dtype)) for b in scratch}
            places = {name: array.ctypes.data for name, array in arrays.items()}
            arguments = Arguments(self.artifact, places, dims)
            report = module.run_vector(arguments.vector, list(arrays.values()), settings)
            results += o.tobytes() + lse.tobytes()
            complaints += report.complaints
            lines |= {line for kernel in report.kernels for line, count in kernel["lines"] if count}
        return results, complaints, lines


def caught(subject: Subject, ptx: str, baseline: bytes, seeds: int) -> str:
    for seed in range(seeds):
        try:
            results, complaints, _ = subject.run(ptx, seed)
        except emulator.EmulationError as error:
            return "deadlock" if re.search("deadlock|hang", str(error)) else "judge"
        if results != baseline:
            return "value"
        if complaints:
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
    parser.add_argument("--full", action="store_true", help="instead of causal")
    parser.add_argument("--segments", action="store_true", help="with segment ids")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    mask = masks.Full() if options.full else masks.Causal()
    mask &= masks.Segments() if options.segments else masks.Full()
    survey(Subject(options.head_dim, mask), options.seeds)


def survey(subject, seeds: int) -> None:
    """Prints how each mutant of the subject's kernel is noticed, and the lines of those that are not."""
    ptx = subject.artifact.ptx
    baseline, _, executed = subject.run(ptx, 0)
    assert caught(subject, ptx, baseline, seeds) == "not caught", "the unchanged kernel depends on the seed"
    table, kept = collections.defaultdict(collections.Counter), []
    for line, kind, text in mutate.mutants(ptx):
        how = "not executed" if line not in executed else caught(subject, text, baseline, seeds)
        if how == "not caught" and kind == "mbarrier wait" and never_waits(subject, ptx, line, seeds):
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
