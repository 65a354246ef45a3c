"""``python -m jax_fa4 bench``: speed beside the peers that are installed; memory and compile time of the XLA path."""

import argparse
import json
import sys
from pathlib import Path

import jax

from jax_fa4 import targets
from jax_fa4.backends import check_name
from jax_fa4.bench import report
from jax_fa4.bench.peers import PEERS, Peer, own_peer
from jax_fa4.bench.timing import time_interleaved
from jax_fa4.bench.workload import Workload, constant_tokens, further
from jax_fa4.commands.options import count, sizes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", help="backend of jax_fa4: auto, xla, cuda (default: auto)")
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        default="all",
        help="which peers to compare with: all, none, or names separated by commas: "
        + ", ".join(peer.name for peer in PEERS),
    )
    parser.add_argument(
        "--measure",
        help="what to measure, separated by commas: speed, kernels (registers, spills, compile time), memory, compile "
        "(default: speed, and kernels on a GPU; speed, memory, compile with --backend xla)",
    )
    parser.add_argument("--head-dims", type=sizes("N,N,..."), help="default: 64,128,256 on a GPU, 64 on a CPU")
    parser.add_argument("--further", action="store_true", help="add rows with grouped heads, a window, and D != E")
    parser.add_argument("--lengths", type=sizes("N,N,..."), help="default: 1024,4096,16384 on a GPU, 2048 on a CPU")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--rounds", type=count, default=5, help="timed rounds, interleaved over the peers (default: 5)")
    parser.add_argument("--json", type=Path, help="write header and rows to this file")
    parser.add_argument("--plot", type=Path, help="draw the speed table to this PNG")


def workloads(arguments: argparse.Namespace) -> list[Workload]:
    """The shapes to time: 32k tokens on a GPU, one small batch on a CPU."""
    on_gpu = jax.default_backend() == "gpu"
    dtype = arguments.dtype or ("bfloat16" if on_gpu else "float32")
    dims = arguments.head_dims or ([64, 128, 256] if on_gpu else [64])
    lengths = arguments.lengths or ([1024, 4096, 16384] if on_gpu else [2048])
    rows = [
        constant_tokens(length, dim, causal, dtype) if on_gpu else Workload(1, length, 4, dim, causal, dtype)
        for dim in dims
        for length in lengths
        for causal in (False, True)
    ]
    return rows + (further(dtype) if arguments.further else [])


def select_peers(arguments: argparse.Namespace) -> list[Peer]:
    """jax_fa4 first, then the peers asked for that are here; says which are not."""
    names = [peer.name for peer in PEERS]
    wanted = names if arguments.peers == "all" else [] if arguments.peers == "none" else arguments.peers.split(",")
    unknown = set(wanted) - set(names)
    if unknown:
        sys.exit(f"--peers: unknown {', '.join(sorted(unknown))}; known: {', '.join(names)}")
    selected = [own_peer(arguments.backend)]
    for peer in PEERS:
        if peer.name in wanted:
            absence = peer.absence()
            if absence is None:
                selected.append(peer)
            else:
                print(f"skipping {peer.name}: {absence}")
    return selected


def measure_speed(arguments: argparse.Namespace) -> list[dict]:
    """Times every workload on every peer; a peer that cannot do one gets an empty rate and its reason."""
    from tqdm import tqdm

    peers, shapes = select_peers(arguments), workloads(arguments)
    rows: list[dict] = []
    with tqdm(total=len(shapes) * len(peers) * 2 * arguments.rounds, unit="round", dynamic_ncols=True) as progress:
        for workload in shapes:
            progress.set_description(str(workload))
            prepared = {}
            for peer in peers:
                try:
                    prepared[peer.name] = peer.prepare(workload)
                except Exception as error:  # whatever a peer raises, the others are still to be timed
                    reason = (str(error).strip().splitlines() or [""])[0][:160]
                    tqdm.write(f"{peer.name} cannot do {workload}: {type(error).__name__}: {reason}")
                    progress.update(2 * arguments.rounds)
            for direction in ("forward", "backward"):
                works = {name: pieces[direction] for name, pieces in prepared.items()}
                for name, timing in time_interleaved(works, arguments.rounds):
                    if timing is None:
                        progress.update()
                        continue
                    rows.append(
                        {
                            "workload": str(workload),
                            "direction": direction,
                            "peer": name,
                            "seconds": timing.median_s,
                            "spread_s": timing.spread_s,
                            "flops_per_s": workload.flops(direction) / timing.median_s,
                        }
                    )
            rows += _both_directions(rows, workload)
            if arguments.json:  # row by row, so that an interrupted run leaves what it measured
                arguments.json.write_text(json.dumps({"environment": report.environment(), "speed": rows}, indent=1))
    return rows


def _both_directions(rows: list[dict], workload: Workload) -> list[dict]:
    """Forward plus backward as rows of their own."""
    mine = [row for row in rows if row["workload"] == str(workload)]
    sums = []
    for name in dict.fromkeys(row["peer"] for row in mine):
        seconds = sum(row["seconds"] for row in mine if row["peer"] == name)
        spread = tuple(sum(row["spread_s"][i] for row in mine if row["peer"] == name) for i in (0, 1))
        sums.append(
            {
                "workload": str(workload),
                "direction": "both",
                "peer": name,
                "seconds": seconds,
                "spread_s": spread,
                "flops_per_s": workload.flops("both") / seconds,
            }
        )
    return sums


def print_memory(rows: list[dict]) -> None:
    from jax_fa4.bench.goals import LONG, SHORT

    cells = [["forward + backward", f"S={SHORT}", f"S={LONG}", "growth", "of dense"]]
    for row in rows:
        sizes = [f"{row[key] / 2**20:.1f} MiB" for key in ("short_bytes", "long_bytes")]
        cells.append([row["mask"], *sizes, f"{row['growth']:.2f}x", f"{row['of_dense']:.3f}"])
    print("\nTemporary memory, B1 H4 D64 float32\n" + report.table(cells))


def print_compile(rows: list[dict]) -> None:
    from jax_fa4.bench.goals import LONGEST, SHORT

    cells = [["forward + backward", f"S={SHORT}", f"S={LONGEST}", "ratio"]]
    cells += [[row["mask"], f"{row['short_s']:.2f} s", f"{row['long_s']:.2f} s", f"{row['ratio']:.2f}"] for row in rows]
    print("\nTime to trace and compile, B1 H4 D64 float32\n" + report.table(cells))


MEASURES = ("speed", "kernels", "memory", "compile")


def default_measures(backend: str) -> list[str]:
    """What `--measure` is where it is not given."""
    if backend == "xla":
        return ["speed", "memory", "compile"]
    return ["speed", "kernels"] if jax.default_backend() == "gpu" else ["speed"]


def main(arguments: argparse.Namespace) -> int:
    measure = arguments.measure.split(",") if arguments.measure else default_measures(arguments.backend)
    unknown = set(measure) - set(MEASURES)
    if unknown:
        sys.exit(f"--measure: unknown {', '.join(sorted(unknown))}; known: {', '.join(MEASURES)}")
    check_name(arguments.backend)
    header = report.environment()
    for key, value in header.items():
        print(f"{key}: {value}")
    results: dict = {"environment": header}
    if "speed" in measure:
        results["speed"] = measure_speed(arguments)
        print("\nSpeed, medians; ratio: jax_fa4 over the best peer\n" + report.speed_table(results["speed"]))
    if "kernels" in measure:
        from jax_fa4.bench.kernels import kernel_rows, kernel_table

        arch = targets.architectures()[0]
        results["kernels"] = kernel_rows(workloads(arguments), arch)
        print(f"\nKernels for {arch}; stack_bytes are spilled registers\n" + kernel_table(results["kernels"]))
    if "memory" in measure:
        from jax_fa4.bench.goals import memory_rows

        results["memory"] = memory_rows(arguments.backend)
        print_memory(results["memory"])
    if "compile" in measure:
        from jax_fa4.bench.goals import compile_rows

        results["compile"] = compile_rows(arguments.backend)
        print_compile(results["compile"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
        print(f"wrote {arguments.json}")
    if arguments.plot and "speed" in results:
        report.speed_plot(results["speed"], arguments.plot)
        print(f"wrote {arguments.plot}")
    return 0
