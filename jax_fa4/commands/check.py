"""``python -m jax_fa4 check``: outputs and gradients of the case list against the float64 oracle, on this machine."""

import argparse
import sys
import time

from jax_fa4.bench.report import environment, table

QUICK = ("full", "causal", "cross-causal", "window-left", "sinks", "segments", "lengths-causal", "kitchen-sink")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="auto, xla, cuda or emulate:<arch> (default: auto)")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--cases", metavar="TEXT", help="only cases whose name contains one of these, by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--verbose", action="store_true", help="every result of every case, not just its worst")


def main(arguments: argparse.Namespace) -> int:
    from jax_fa4.accuracy import Row, check
    from jax_fa4.cases import CASES
    from jax_fa4.errors import Unsupported

    wanted = arguments.cases.split(",") if arguments.cases else [""]
    cases = [
        case
        for case in CASES
        if any(text in case.name for text in wanted) and (not arguments.quick or case.name in QUICK)
    ]
    if not cases:
        sys.exit(f"--cases {arguments.cases}: no case has such a name; there are {', '.join(c.name for c in CASES)}")
    for key, value in environment().items():
        print(f"{key}: {value}")
    print(f"{len(cases)} cases on backend {arguments.backend!r}, seed {arguments.seed}; bound: twice the error of the")
    print("same-precision reference, plus 1e-5, in relative norm and in the largest difference\n", flush=True)

    def share(row: Row) -> float:
        """How much of its bound a result uses."""
        return max(row.relative / row.allowed_relative, row.largest / row.allowed_largest)

    lines = [["case", "result", "relative", "allowed", "largest", "allowed", "", "seconds"]]
    failed, unsupported = [], []
    for number, case in enumerate(cases, 1):
        print(f"\r\x1b[K{number}/{len(cases)} {case.name}", end="", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            rows = check(case.make(arguments.seed), arguments.backend, arguments.seed)
        except Unsupported as error:
            unsupported.append(case.name)
            lines.append([case.name, "-", "-", "-", "-", "-", "unsupported", "-"])
            if arguments.verbose:
                print(f"\r\x1b[K{case.name}: {error}")
            continue
        seconds = time.perf_counter() - began
        if not all(row.ok for row in rows):
            failed.append(case.name)
        for row in rows if arguments.verbose else [max(rows, key=share)]:
            errors = [f"{x:.1e}" for x in (row.relative, row.allowed_relative, row.largest, row.allowed_largest)]
            lines.append([case.name, row.name, *errors, "ok" if row.ok else "TOO LARGE", f"{seconds:.1f}"])
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    print(table(lines))
    passed = len(cases) - len(failed) - len(unsupported)
    print(f"\n{passed} passed, {len(failed)} failed, {len(unsupported)} unsupported by the backend")
    if failed:
        print("failed: " + ", ".join(failed))
    return 1 if failed or not passed else 0
