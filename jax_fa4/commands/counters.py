"""``python -m jax_fa4 counters``: what the kernels of a call execute, counted on the software GPU."""

import argparse
import sys

from jax_fa4.commands.options import count, shape

DEFAULT_SHAPE = (1, 1024, 1, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arch", default="sm_100a", choices=("sm_90a", "sm_100a"))
    parser.add_argument("--shape", type=shape, default=DEFAULT_SHAPE, metavar="B,S,H,D", help="default: 1,1024,1,128")
    parser.add_argument("--keys", type=count, help="length of keys and values (default: S)")
    parser.add_argument("--kv-heads", type=count, help="default: H")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--backward", action="store_true", help="count the gradient's kernels too")
    parser.add_argument("--seed", type=int, default=0, help="of the interleaving")
    parser.add_argument("--strict", action="store_true", help="report what hardware forgives")
    parser.add_argument(
        "--cycles", action="store_true", help="follow a model of the clock, and estimate times and waits"
    )
    parser.add_argument(
        "--machine-code", action="store_true", help="count the assembler's instructions too, by role (needs nvdisasm)"
    )
    parser.add_argument(
        "--peer",
        choices=("flash-attn-4",),
        help="a table, in Markdown, of our sm_100a forward kernel beside its published one, both run now on the same "
        "inputs: D 64 and 128, full and causal, S 1k and 4k; with --shape 1,S,1,D (and --causal) that case alone",
    )


def main(arguments: argparse.Namespace) -> int:
    if arguments.peer:
        return _beside_peer(arguments)
    import jax
    import jax.numpy as jnp

    import jax_fa4
    from jax_fa4 import counting, emulator, estimate, plan, sass
    from jax_fa4.spec import Arguments, make_spec

    batch, rows, heads, width = arguments.shape
    keys, kv_heads = arguments.keys or rows, arguments.kv_heads or heads
    shapes = [(batch, rows, heads, width)] + [(batch, keys, kv_heads, width)] * 2
    q, k, v = (
        jax.random.normal(key, shape, jnp.dtype(arguments.dtype))
        for key, shape in zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    )

    def attend(q, k, v):
        return jax_fa4.attention(q, k, v, causal=arguments.causal, backend=f"emulate:{arguments.arch}")

    emulated = emulator.emulate(arguments.seed, strict=arguments.strict, timing=arguments.cycles)
    with jax.default_device(jax.devices("cpu")[0]), emulated:
        if arguments.backward:
            jax.block_until_ready(jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v))
        else:
            jax.block_until_ready(attend(q, k, v))
    spec, _ = make_spec(Arguments(q, k, v, causal=arguments.causal))
    size = plan.size_class(batch, rows, keys, heads)
    for pass_, report in zip(plan.PASSES, emulator.take_reports(), strict=False):
        print(counting.table(counting.summarize([report])))
        main_kernel = max(report.kernels, key=lambda kernel: kernel["tensor_flops"])
        print(counting.role_table(main_kernel, plan.choose_plan(spec, arguments.arch, size, pass_).roles))
        if arguments.cycles:
            for kernel in report.kernels:
                print(estimate.estimate(kernel, report.architecture, report.sm_count))
        if arguments.machine_code:
            print(*sass.of_run(report, spec, arguments.arch, size, pass_), sep="\n")
    return 0


def _beside_peer(arguments: argparse.Namespace) -> int:
    from jax_fa4.peers import counters
    from jax_fa4.peers.compiled import MissingPeer

    cases = counters.CASES
    if arguments.shape != DEFAULT_SHAPE:
        batch, length, heads, head_dim = arguments.shape
        if (batch, heads) != (1, 1) or head_dim not in (64, 128):
            sys.exit(f"--shape {arguments.shape}: beside a peer one head of D 64 or 128 is counted; give 1,S,1,D")
        cases = (counters.Case(head_dim, arguments.causal, length),)
    try:
        print(counters.table({case: counters.count(case, seed=arguments.seed) for case in cases}))
    except MissingPeer as error:
        sys.exit(f"--peer {error}")
    return 0
