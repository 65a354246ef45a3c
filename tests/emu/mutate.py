"""Remove each synchronisation instruction of a known-right kernel, one at a time: does the software GPU notice?

    python tests/emu/mutate.py sm_100a d128_causal [--seeds 20] [--length 512] [--json FILE]

(PYTHONPATH: the repository and its tests folder.) A mutant is caught by a value (some result differs), by the judge
(an error that names the fault) or by a deadlock or hang. What no seed catches is listed with its PTX line.
"""

import argparse
import collections
import json
import re
import sys
import time

import numpy as np
from emu import known_right

from jax_fa4 import emulator
from jax_fa4.peers import flash_attn_4

# What is removed, by kind. A wait's predicate becomes true at once.
KINDS = {
    "mbarrier wait": r"mbarrier\.(try|test)_wait", "mbarrier arrive": r"mbarrier\.arrive(?!\.expect)",
    "expect_tx": r"mbarrier\.(arrive\.)?expect_tx", "mbarrier init": r"mbarrier\.init",
    "named barrier": r"(bar|barrier)\.(cta\.)?(sync|arrive)", "warp barrier": r"bar\.warp\.sync",
    "cluster barrier": r"barrier\.cluster\.(arrive|wait)", "proxy fence": r"fence\.proxy",
    "init fence": r"fence\.mbarrier_init", "fence": r"fence\.(acq_rel|sc)", "tcgen05 commit": r"tcgen05\.commit",
    "tcgen05 wait": r"tcgen05\.wait", "tcgen05 fence": r"tcgen05\.fence", "wgmma fence": r"wgmma\.fence",
    "wgmma commit": r"wgmma\.commit_group", "wgmma wait": r"wgmma\.wait_group",
    "bulk commit": r"cp\.async\.bulk\.commit_group", "bulk wait": r"cp\.async\.bulk\.wait_group",
    "grid dependency": r"griddepcontrol", "tensor memory dealloc": r"tcgen05\.(dealloc|relinquish)",
}
STATEMENT = re.compile(r"^(\s*(?:\{\s*)?)((?:@!?[%\w$]+\s+)?)(" + "|".join(KINDS.values()) + r")([^;]*);")


def mutants(ptx: str) -> list[tuple[int, str, str]]:
    """(PTX line, kind, mutated module) for each synchronisation instruction."""
    lines = ptx.split("\n")
    out = []
    for number, line in enumerate(lines):
        match = STATEMENT.match(line)
        if not match:
            continue
        opcode = line[match.end(1) + len(match.group(2)):]
        kind = next(k for k, pattern in KINDS.items() if re.match(pattern, opcode))
        replacement = ""
        if kind == "mbarrier wait":
            predicate = re.search(r"_wait\S*\s+([%\w$]+)\s*,", line).group(1)
            replacement = f"setp.eq.b32 {predicate}, %r1, %r1;"
        changed = [*lines]
        changed[number] = match.group(1) + replacement + line[match.end():]
        out.append((number + 1, kind, "\n".join(changed)))
    return out


class Subject:
    """A kernel, its problem, and how a run's results are had as bytes."""

    def __init__(self, arch: str, case: str, length: int):
        head_dim, causal, kv_heads, self.is_backward, _ = flash_attn_4.CASES[case]
        heads = 4 if kv_heads == 1 else 2
        self.arch, self.case = arch, case
        self.problem = known_right.Problem(length, heads, 1 if kv_heads == 1 else heads, head_dim, causal)
        self.where = known_right.find(arch, case, ("Backward" if self.is_backward else "Forward")
                                      + arch[:-1].replace("sm_", "Sm"))
        if self.is_backward:
            self.exact = self.problem.gradients(self.problem.o.astype(known_right.BF16))

    def run(self, kernel: known_right.Kernel, seed: int) -> tuple[np.ndarray, ...]:
        if self.is_backward:
            return known_right.backward(self.arch, self.case, self.problem, kernel, seed=seed)[:3]
        return known_right.forward(self.arch, self.case, self.problem, kernel, seed=seed)[:2]

    def executed(self, kernel: known_right.Kernel) -> set[int]:
        """PTX lines that a run executes."""
        call = known_right.backward if self.is_backward else known_right.forward
        report = call(self.arch, self.case, self.problem, kernel, seed=0)[-1]
        report = report[1] if self.is_backward else report
        return {line for line, count in report.kernels[0]["lines"] if count}

    def wrong(self, results, baseline) -> bool:
        """dQ is summed in an order that the seed picks: it is compared to rounding, the rest bit by bit."""
        if not self.is_backward:
            return any(got.tobytes() != want.tobytes() for got, want in zip(results, baseline, strict=True))
        return any(not known_right.relative(got, want) < 4e-3 for got, want in zip(results, self.exact, strict=True))


def judge(subject: Subject, text: str, baseline, seeds: int) -> tuple[str, int, str]:
    """(how it was caught, number of the seed, message)."""
    try:
        kernel = known_right.Kernel(subject.where, text)
    except emulator.EmulationError as error:
        return "judge", 0, str(error)
    for seed in range(seeds):
        try:
            results = subject.run(kernel, seed)
        except emulator.EmulationError as error:
            message = str(error)
            return ("deadlock" if re.search("deadlock|hang", message) else "judge"), seed, message.split("\n")[0][:200]
        if subject.wrong(results, baseline):
            return "value", seed, ""
    return "not caught", seeds, ""


def never_waits(subject: Subject, ptx: str, line: int, seeds: int) -> bool:
    """Whether a wait finds its phase complete whenever it is reached: then its removal changes nothing. The wait
    becomes a test, and a failed test an access out of bounds."""
    lines = ptx.split("\n")
    text = lines[line - 1]
    predicate = re.search(r"_wait\S*\s+([%\w$]+)\s*,", text).group(1)
    tested = re.sub(r"try_wait|test_wait", "test_wait", text, count=1)
    tested = re.sub(r",\s*\d{4,}\s*;", ";", tested)  # the time limit
    lines[line - 1] = tested + f" @!{predicate} st.shared.b32 [%r1+16000000], %r1;"
    kernel = known_right.Kernel(subject.where, "\n".join(lines))
    for seed in range(seeds):
        try:
            subject.run(kernel, seed)
        except emulator.EmulationError:
            return False
    return True


def why_not(subject: Subject, ptx: str, row: dict, executed: set[int], seeds: int) -> str:
    """A reason why no seed can notice, or "not caught"."""
    if row["line"] not in executed:
        return "not executed"
    if row["kind"] == "mbarrier wait" and never_waits(subject, ptx, row["line"], seeds):
        return "never waits"
    return "not caught"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch")
    parser.add_argument("case")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--json")
    options = parser.parse_args()
    subject = Subject(options.arch, options.case, options.length)
    ptx = (subject.where / "kernel.ptx").read_text()
    right = known_right.Kernel(subject.where)
    baseline = subject.run(right, 0)
    for seed in range(options.seeds):
        assert not subject.wrong(subject.run(right, seed), baseline), f"the unchanged kernel is wrong with seed {seed}"
    executed = subject.executed(right)
    rows, start = [], time.time()
    for line, kind, text in mutants(ptx):
        how, seed, message = judge(subject, text, baseline, options.seeds)
        row = dict(line=line, kind=kind, caught=how, seed=seed, message=message,
                   text=ptx.split("\n")[line - 1].strip()[:120])
        if how == "not caught":
            row["caught"] = why_not(subject, ptx, row, executed, options.seeds)
        rows.append(row)
    table = collections.defaultdict(collections.Counter)
    for row in rows:
        table[row["kind"]][row["caught"]] += 1
    ways = ("value", "judge", "deadlock", "not executed", "never waits", "not caught")
    print(f"{options.arch} {options.case}: {len(rows)} mutants, {options.seeds} seeds, {time.time() - start:.0f} s")
    print(f"{'removed':24s}" + "".join(f"{way:>14s}" for way in ways))
    for kind, counts in [*table.items(), ("all", collections.Counter(r["caught"] for r in rows))]:
        print(f"{kind:24s}" + "".join(f"{counts[way]:14d}" for way in ways))
    for row in rows:
        if row["caught"] == "not caught":
            print(f"  line {row['line']}: {row['text']}")
    if options.json:
        with open(options.json, "w") as out:
            json.dump(rows, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
