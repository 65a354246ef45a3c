"""Remove each synchronisation instruction of a known-right kernel, one at a time: does the software GPU notice?

    python tests/emu/mutate.py sm_100a d128_causal [--seeds 20] [--lengths 512 1024] [--json FILE]

(PYTHONPATH: the repository and its tests folder.) A mutant is caught by a value (some result differs), by the judge
(an error that names the fault), by a deadlock or hang, or by a strict run (as far as the unchanged kernel passes one).
A longer problem is tried where a shorter one does not catch it. What no seed catches is listed with its PTX line, and
with the reason where survivors.json has one.
"""

import argparse
import collections
import json
import pathlib
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


WAYS = ("value", "judge", "deadlock", "strict", "unused", "not executed", "never waits", "not caught")
SURVIVORS = pathlib.Path(__file__).with_name("survivors.json")


class Subject:
    """A kernel with a problem of some length, and how a run's results are told right from wrong."""

    def __init__(self, arch: str, case: str, length: int):
        head_dim, causal, kv_heads, self.is_backward, _ = flash_attn_4.CASES[case]
        heads = 4 if kv_heads == 1 else 2
        self.arch, self.case, self.length = arch, case, length
        self.problem = known_right.Problem(length, heads, 1 if kv_heads == 1 else heads, head_dim, causal)
        self.where = known_right.find(arch, case, ("Backward" if self.is_backward else "Forward")
                                      + arch[:-1].replace("sm_", "Sm"))
        self.ptx = (self.where / "kernel.ptx").read_text()
        if self.is_backward:
            self.exact = self.problem.gradients(self.problem.o.astype(known_right.BF16))

    def prepare(self, seeds: int) -> None:
        """The unchanged kernel's results, the kinds of strictness that it mostly passes, and where it does not."""
        right = known_right.Kernel(self.where)
        self.baseline = self.run(right, 0)
        for seed in range(seeds):
            assert not self.wrong(self.run(right, seed)), f"the unchanged kernel is wrong with seed {seed}"
        self.executed = self.lines(right)
        self.strict, self.complaints = emulator.Strict(0), set()
        for kind in emulator.Strict.LOADS | emulator.Strict.END | emulator.Strict.FENCES | emulator.Strict.OVERWRITES:
            drawn = []
            for seed in range(seeds):
                try:
                    self.run(right, seed, strict=kind)
                except emulator.EmulationError as error:
                    drawn.append(complaint(str(error)))
            if len(drawn) < seeds / 2:
                self.strict |= kind
                self.complaints |= set(drawn)

    def run(self, kernel: known_right.Kernel, seed: int, **settings) -> tuple[np.ndarray, ...]:
        call, count = (known_right.backward, 3) if self.is_backward else (known_right.forward, 2)
        return call(self.arch, self.case, self.problem, kernel, seed=seed, **settings)[:count]

    def lines(self, kernel: known_right.Kernel) -> set[int]:
        """PTX lines that a run executes."""
        call = known_right.backward if self.is_backward else known_right.forward
        report = call(self.arch, self.case, self.problem, kernel, seed=0)[-1]
        report = report[1] if self.is_backward else report
        return {line for line, count in report.kernels[0]["lines"] if count}

    def wrong(self, results) -> bool:
        """dQ is summed in an order that the seed picks: it is compared to rounding, the rest bit by bit."""
        if not self.is_backward:
            return any(got.tobytes() != want.tobytes() for got, want in zip(results, self.baseline, strict=True))
        return any(not known_right.relative(got, want) < 4e-3 for got, want in zip(results, self.exact, strict=True))


def complaint(message: str) -> str:
    """What a message complains about, and whether in a warp or an operation in flight: without its numbers."""
    return re.sub(r"\b(0x[0-9a-f]+|\d+)\b", "", message.split("\n")[0])


def judge(subject: Subject, text: str, seeds: int, strict: bool = False) -> tuple[str, int, str]:
    """(how it was caught, number of the seed, message). Strict: what the unchanged kernel draws too does not count."""
    try:
        kernel = known_right.Kernel(subject.where, text)
    except emulator.EmulationError as error:
        return "judge", 0, str(error)
    for seed in range(seeds):
        try:
            results = subject.run(kernel, seed, strict=subject.strict if strict else False)
        except emulator.EmulationError as error:
            message = str(error)
            if strict and complaint(message) in subject.complaints:
                continue
            return ("deadlock" if re.search("deadlock|hang", message) else "judge"), seed, message.split("\n")[0][:200]
        if subject.wrong(results):
            return "value", seed, ""
    return "not caught", seeds, ""


def never_waits(subject: Subject, line: int, seeds: int) -> bool:
    """Whether a wait finds its phase complete whenever it is reached: then its removal changes nothing. The wait
    becomes a test, and a failed test an access out of bounds."""
    lines = subject.ptx.split("\n")
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


def examine(subjects: list[Subject], line: int, kind: str, text: str, seeds: int) -> dict:
    """What became of one mutant: how it was caught, on which length, with which seed and message."""
    row = dict(line=line, kind=kind, text=subjects[0].ptx.split("\n")[line - 1].strip()[:120])
    longest = subjects[-1]
    if line not in longest.executed:
        return row | dict(caught="not executed")
    for subject in subjects:
        how, seed, message = judge(subject, text, seeds)
        if how != "not caught":
            return row | dict(caught=how, length=subject.length, seed=seed, message=message)
    if kind == "mbarrier init":  # whoever used it would have been told that it was not initialised
        return row | dict(caught="unused")
    if longest.strict:
        how, seed, message = judge(longest, text, seeds, strict=True)
        if how != "not caught":
            return row | dict(caught="strict", length=longest.length, seed=seed, message=message)
    never = kind == "mbarrier wait" and never_waits(longest, line, seeds)
    return row | dict(caught="never waits" if never else "not caught")


def print_table(rows: list[dict], reasons: dict[str, str]) -> None:
    table = collections.defaultdict(collections.Counter)
    for row in rows:
        table[row["kind"]][row["caught"]] += 1
    print(f"{'removed':24s}" + "".join(f"{way:>14s}" for way in WAYS))
    for kind, counts in [*table.items(), ("all", collections.Counter(r["caught"] for r in rows))]:
        print(f"{kind:24s}" + "".join(f"{counts[way]:14d}" for way in WAYS))
    for row in rows:
        if row["caught"] == "not caught":
            print(f"  line {row['line']}: {row['text']}\n    {reasons.get(str(row['line']), 'no reason known')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arch")
    parser.add_argument("case")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--lines", type=int, nargs="+", help="only the mutants of these PTX lines")
    parser.add_argument("--json")
    options = parser.parse_args()
    subjects = [Subject(options.arch, options.case, length) for length in options.lengths]
    for subject in subjects:
        subject.prepare(options.seeds)
    kept, start = pathlib.Path(options.json or "/dev/null"), time.time()
    rows = json.loads(kept.read_text()) if kept.is_file() else []  # goes on where it was interrupted
    done = {row["line"] for row in rows}
    for line, kind, text in mutants(subjects[0].ptx):
        if line not in done and (not options.lines or line in options.lines):
            rows.append(examine(subjects, line, kind, text, options.seeds))
            kept.write_text(json.dumps(rows, indent=1))
    print(f"{options.arch} {options.case}: {len(rows)} mutants, {options.seeds} seeds, {time.time() - start:.0f} s, "
          f"strict about {subjects[-1].strict!r}")
    reasons = json.loads(SURVIVORS.read_text()) if SURVIVORS.exists() else {}
    print_table(rows, reasons.get(f"{options.arch} {options.case}", {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
