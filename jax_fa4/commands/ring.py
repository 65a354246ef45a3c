"""``python -m jax_fa4 ring``: Ring Attention on all GPUs of this machine against each of them alone."""

import argparse
import json
import sys
from pathlib import Path

import jax

from jax_fa4.bench import report, ring

KINDS = ("full", "causal", "window")
HEADS = ((16, 16, KINDS), (32, 4, ("causal",)))
DIRECTIONS = ("forward", "both")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, nargs="+", default=[65_536, 262_144])
    parser.add_argument("--compare", type=int, default=8192, metavar="TOKENS", help="of the comparison of results")
    parser.add_argument("--inner", type=int, default=16_384, metavar="TOKENS", help="of the ring step on one device")
    parser.add_argument("--repeats", type=int, default=20, help="of the comparison; deterministic, bitwise")
    parser.add_argument("--rounds", type=int, default=7, help="timings of each row, 0.15 s each or one call")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path, help="write header and rows here, row by row")
    parser.add_argument("--lower-only", type=int, metavar="DEVICES",
                        help="fill the kernel cache for a run on so many GPUs; needs none (XLA_FLAGS may have to ask "
                             "for virtual CPU devices)")


def workloads(tokens: list[int]) -> list[ring.RingWorkload]:
    """All rows of the table."""
    return [ring.RingWorkload(length, heads, kv_heads, kind, direction)
            for length in tokens for heads, kv_heads, kinds in HEADS for kind in kinds for direction in DIRECTIONS]


def lower_all(arguments: argparse.Namespace) -> None:
    """Traces every program of the run for CUDA, which compiles its kernels into the cache."""
    from jax_fa4.targets import target

    mesh = jax.make_mesh((arguments.lower_only,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,),
                         devices=jax.devices()[: arguments.lower_only])
    programs = [(work, True) for work in ring.compared(arguments.compare)]
    programs += [(work, False) for work in workloads(arguments.tokens)]
    for work, deterministic in programs:
        shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in work.shapes()]
        for call in (ring.over(mesh, work, "cuda", deterministic=deterministic),
                     ring.alone(work, "cuda", deterministic=deterministic)):
            with target("sm_90a"):
                jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))
        print(f"lowered {work}", flush=True)


def main(arguments: argparse.Namespace) -> int:
    """Prints results as they come; 1 if a comparison fails."""
    if arguments.lower_only:
        lower_all(arguments)
        return 0
    if jax.device_count() < 2:
        sys.exit(f"a ring needs at least two devices; JAX sees {jax.device_count()} ({jax.default_backend()})")
    header = report.environment()
    mesh = ring.mesh_of_all()
    megabytes = 256 if jax.default_backend() == "gpu" else 1
    header["link GB/s, one way"] = f"{ring.link_bytes_per_s(mesh, megabytes) / 1e9:.1f}"
    for name, value in header.items():
        print(f"{name}: {value}")
    rows: list[dict] = []
    failed = False
    for row in ring.compare(arguments.compare, arguments.backend, arguments.repeats):
        failed |= max(row["relative_errors"]) > 5e-3 or not row["bitwise_equal"].startswith(f"{arguments.repeats} of")
        _emit(rows, row, header, arguments.json)
    _emit(rows, ring.inner_step(arguments.inner, arguments.backend, 2 * arguments.rounds), header, arguments.json)
    for work in workloads(arguments.tokens):
        _emit(rows, ring.measure(work, arguments.backend, arguments.rounds), header, arguments.json)
    return int(failed)


def _emit(rows: list[dict], row: dict, header: dict, path: Path | None) -> None:
    rows.append(row)
    print(json.dumps(row), flush=True)
    if path:
        path.write_text(json.dumps({"header": header, "rows": rows}, indent=1))
