"""``python -m jax_fa4 check``: outputs and gradients of the case list against the float64 oracle, on this machine.

Kernels that are in no cache yet are compiled first, a process per processor; then the cases run, several at a time,
because most of a case's time is XLA's compilation of its references.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from jax_fa4.bench.report import environment, table
from jax_fa4.cases import CASES, Case
from jax_fa4.commands.options import count

QUICK = ("full", "causal", "cross-causal", "window-left", "sinks", "segments", "lengths-causal", "kitchen-sink")
AT_A_TIME = 8  # cases; each keeps its references, a few MB, until it is judged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="auto, xla, cuda or emulate:<arch> (default: auto)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--cases", metavar="TEXT", help="only cases whose name contains one of these, by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1,
                        help="processes that compile kernels, and cases at a time up to 8; default: one a processor")
    parser.add_argument("--verbose", action="store_true", help="every result of every case, not just its worst")


@dataclass
class Outcome:
    """What one case came to: rows of `accuracy.Row`, or the reason why the backend does not do it."""

    case: Case
    rows: list = field(default_factory=list)
    refused: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)


def selected(arguments: argparse.Namespace) -> list[Case]:
    """The cases asked for; ends the program if there is none."""
    wanted = arguments.cases.split(",") if arguments.cases else [""]
    cases = [
        case
        for case in CASES
        if any(text in case.name for text in wanted) and (not arguments.quick or case.name in QUICK)
    ]
    if not cases:
        sys.exit(f"--cases {arguments.cases}: no case has such a name; there are {', '.join(c.name for c in CASES)}")
    return cases


def kernel_architectures(backend: str) -> tuple[str, ...]:
    """For which the backend needs kernels on this machine."""
    from jax_fa4 import targets

    if backend.startswith("emulate:"):
        return (backend.removeprefix("emulate:"),)
    return targets.architectures() if backend == "cuda" or (backend == "auto" and targets.has_gpu()) else ()


def compile_case(name: str, seed: int, arch: str) -> int:
    """Brings a case's kernels into the disk cache; how many had to be compiled."""
    from jax_fa4 import compile as compiler
    from jax_fa4 import plan
    from jax_fa4.cache import DiskCache
    from jax_fa4.errors import Unsupported
    from jax_fa4.spec import Arguments, make_spec

    (case,) = (case for case in CASES if case.name == name)
    spec, _ = make_spec(Arguments(**case.make(seed)))
    size = plan.size_class(case.shape.B, case.shape.S, case.shape.T, case.shape.H)
    compiled = 0
    for pass_ in plan.PASSES:
        try:
            missing = not DiskCache().contains(compiler.artifact_key(spec, arch, size, pass_))
            compiler.artifact(spec, arch, size, pass_)
            compiled += missing
        except (Unsupported, ModuleNotFoundError):
            return compiled  # the check itself says so
    return compiled


def compile_missing(cases: list[Case], arguments: argparse.Namespace) -> None:
    """Compiles the kernels of all cases, and says how long that took."""
    jobs = [(case.name, arguments.seed, arch) for arch in kernel_architectures(arguments.backend) for case in cases]
    if not jobs:
        return
    began = time.perf_counter()
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"  # of the processes that compile: they leave the GPU alone
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(arguments.jobs, len(jobs)), mp_context=context) as pool:
            waiting = [pool.submit(compile_case, *job) for job in jobs]
            compiled = 0
            for number, done in enumerate(concurrent.futures.as_completed(waiting), 1):
                compiled += done.result()
                _progress(f"kernels of {number}/{len(jobs)} cases")
    finally:
        os.environ.pop("JAX_PLATFORMS")
        if before is not None:
            os.environ["JAX_PLATFORMS"] = before
    _progress("")
    print(f"kernels: {compiled} compiled, the others from the cache, {time.perf_counter() - began:.1f} s\n", flush=True)


def run_case(case: Case, backend: str, seed: int) -> Outcome:
    """One case, judged."""
    from jax_fa4 import accuracy
    from jax_fa4.errors import Unsupported

    began = time.perf_counter()
    try:
        outcome = Outcome(case, rows=accuracy.check(case.make(seed), backend, seed))
    except Unsupported as error:
        return Outcome(case, refused=str(error))
    outcome.seconds = time.perf_counter() - began
    return outcome


def outcomes(cases: list[Case], arguments: argparse.Namespace) -> Iterator[Outcome]:
    """All cases in their order, several at a time."""
    with concurrent.futures.ThreadPoolExecutor(min(arguments.jobs, AT_A_TIME)) as pool:
        waiting = [pool.submit(run_case, case, arguments.backend, arguments.seed) for case in cases]
        for number, done in enumerate(waiting, 1):
            _progress(f"{number}/{len(cases)} {cases[number - 1].name}")
            yield done.result()
    _progress("")


def lines_of(outcome: Outcome, verbose: bool) -> list[list[str]]:
    """A case's lines of the table: its worst result, or all of them."""
    if outcome.refused:
        return [[outcome.case.name, "-", "-", "-", "-", "-", "unsupported", "-"]]
    rows = outcome.rows if verbose else [max(outcome.rows, key=_share)]
    return [
        [outcome.case.name, row.name,
         *(f"{x:.1e}" for x in (row.relative, row.allowed_relative, row.largest, row.allowed_largest)),
         "ok" if row.ok else "TOO LARGE", f"{outcome.seconds:.1f}"]
        for row in rows
    ]


def _share(row) -> float:
    """How much of its bound a result uses."""
    return max(row.relative / row.allowed_relative, row.largest / row.allowed_largest)


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def main(arguments: argparse.Namespace) -> int:
    cases = selected(arguments)
    for key, value in environment().items():
        print(f"{key}: {value}")
    print(f"{len(cases)} cases on backend {arguments.backend!r}, seed {arguments.seed}; bound: twice the error of the")
    print("same-precision reference, plus 1e-5, in relative norm and in the largest difference", flush=True)
    compile_missing(cases, arguments)
    began = time.perf_counter()
    lines = [["case", "result", "relative", "allowed", "largest", "allowed", "", "seconds"]]
    failed, refused = [], []
    for outcome in outcomes(cases, arguments):
        lines += lines_of(outcome, arguments.verbose)
        if outcome.refused:
            refused.append(f"{outcome.case.name}: {outcome.refused}")
        elif not outcome.ok:
            failed.append(outcome.case.name)
    print(table(lines))
    if arguments.verbose and refused:
        print("\n" + "\n".join(refused))
    passed = len(cases) - len(failed) - len(refused)
    print(f"\n{passed} passed, {len(failed)} failed, {len(refused)} unsupported by the backend, "
          f"{time.perf_counter() - began:.1f} s")
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed or not passed else 0
