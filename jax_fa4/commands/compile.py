"""``python -m jax_fa4 compile``: fills a cache of compiled kernels on any machine, without a GPU.

Without a spec's options it compiles the default set: bfloat16, head dims 64 and 128, 1, 4 and 8 query heads per KV
head, full and causal, forward and backward. The cache (`JAX_FA4_CACHE_DIR`, or ``--cache``) can be copied to another
machine.
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from jax_fa4 import compile as compiler
from jax_fa4 import masks, plan
from jax_fa4.cache import DiskCache
from jax_fa4.commands.options import bounds, count, positive
from jax_fa4.errors import Unsupported
from jax_fa4.spec import AttentionSpec

Job = tuple[AttentionSpec, str, plan.SizeClass, plan.Pass]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", action="append", choices=plan.ARCHITECTURES,
                        help=f"may be given several times; default: {' and '.join(plan.DEFAULT_TARGETS)}")
    parser.add_argument("--cache", metavar="DIR", help="where to; default: JAX_FA4_CACHE_DIR or ~/.cache/jax_fa4")
    parser.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes; default: one a processor")
    parser.add_argument("--forward-only", action="store_true", help="leave out backward kernels")
    spec = parser.add_argument_group("a spec; with none of these options, the default set")
    spec.add_argument("--dtype", choices=("bfloat16", "float16"), help="default: bfloat16")
    spec.add_argument("--head-dim", type=count, metavar="D")
    spec.add_argument("--value-head-dim", type=count, metavar="E", help="default: D")
    spec.add_argument("--group", type=count, help="query heads per KV head; default: 1")
    spec.add_argument("--scale", type=positive, help="default: D ** -0.5")
    spec.add_argument("--causal", action="store_true")
    spec.add_argument("--window", type=bounds, metavar="LEFT,RIGHT", help="bounds, or none")
    spec.add_argument("--softcap", type=positive)
    spec.add_argument("--sinks", action="store_true")
    spec.add_argument("--segments", action="store_true")
    spec.add_argument("--lengths", action="store_true", help="query and key lengths")
    spec.add_argument("--deterministic", action="store_true")


def default_specs() -> Iterator[AttentionSpec]:
    """The documented default set."""
    for dim in (64, 128):
        for group in (1, 4, 8):
            for mask in (masks.Full(), masks.Causal()):
                yield AttentionSpec("bfloat16", dim, dim, group=group, scale=dim**-0.5, mask=mask)


def chosen_specs(arguments: argparse.Namespace) -> list[AttentionSpec]:
    """The spec that the options describe, or the default set."""
    a = arguments
    values = (a.dtype, a.head_dim, a.value_head_dim, a.group, a.scale, a.window, a.softcap)
    flags = (a.causal, a.sinks, a.segments, a.lengths, a.deterministic)
    if not any(flags) and all(value is None for value in values):
        return list(default_specs())
    from jax_fa4.scores import SoftCap

    mask: masks.Mask = masks.Causal() if a.causal else masks.Full()
    mask &= masks.Window(*a.window) if a.window else masks.Full()
    mask &= masks.Lengths(a.lengths, a.lengths)
    mask &= masks.Segments() if a.segments else masks.Full()
    dim = a.head_dim or a.value_head_dim or 128
    return [
        AttentionSpec(
            a.dtype or "bfloat16", dim, a.value_head_dim or dim, group=a.group or 1, scale=a.scale or dim**-0.5,
            mask=masks.canonical(mask), score_mods=(SoftCap(a.softcap),) if a.softcap else (), sink=a.sinks,
            deterministic=a.deterministic,
        )
    ]


def jobs(arguments: argparse.Namespace) -> tuple[list[Job], list[str]]:
    """What to compile (each plan once, for all size classes), and what no kernel does, with the reason."""
    passes: tuple[plan.Pass, ...] = ("forward",) if arguments.forward_only else plan.PASSES
    found: dict[tuple, Job] = {}
    refused: list[str] = []
    for spec in chosen_specs(arguments):
        for arch in arguments.arch or plan.DEFAULT_TARGETS:
            for pass_ in passes:
                try:
                    for size in plan.SizeClass:
                        chosen = plan.choose_plan(spec, arch, size, pass_)
                        found.setdefault((spec, arch, pass_, chosen), (spec, arch, size, pass_))
                except Unsupported as error:
                    refused.append(f"{arch} {pass_}: {error.reason}  {spec}")
    return list(found.values()), refused


def compile_one(job: Job) -> str:
    """Compiles one job, or finds it in the cache, and describes it in a line."""
    spec, arch, _, pass_ = job
    start = time.perf_counter()
    made = compiler.artifact(*job)
    registers = "/".join(str(kernel.registers) for kernel in made.kernels)
    spills = "".join(f"  {kernel.stack_bytes} bytes of stack in {kernel.name[:40]}" for kernel in made.spilled)
    return (f"{arch} {pass_:8} {time.perf_counter() - start:6.2f} s  registers {registers:12} "
            f"{len(made.object):7} bytes{spills}  {spec}")


def main(arguments: argparse.Namespace) -> int:
    if arguments.cache:
        os.environ["JAX_FA4_CACHE_DIR"] = arguments.cache
    todo, refused = jobs(arguments)
    start = time.perf_counter()
    if min(arguments.jobs, len(todo)) > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(min(arguments.jobs, len(todo)), mp_context=context) as pool:
            for line in pool.map(compile_one, todo):
                print(line, flush=True)
    else:
        for job in todo:
            print(compile_one(job), flush=True)
    for line in refused:
        print(f"left out: {line}", file=sys.stderr)
    print(f"{len(todo)} kernels in {DiskCache().folder}, {time.perf_counter() - start:.1f} s")
    return 0 if todo else 1
