"""Remove each synchronisation instruction of our Blackwell backward kernel in turn: does the software GPU notice?

    PYTHONPATH=.:tests python tests/kernels/sm100_bwd_mutate.py [--head-dim 128] [--full] [--ordered]

Runs are strict, and their results do not depend on the order of execution: either a block of queries meets one tile of
keys, or (`--ordered`) the kernel is the deterministic one. Head dim 64 takes CTAs of their own (with `--full` pairs),
128 pairs, 256 narrow pairs. See `sm100_mutate`.
"""

import argparse

import jax.numpy as jnp
import numpy as np
from kernels import sm100_mutate

from jax_fa4 import compile, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.kernels.sm100.bwd.plan import backward_plan
from jax_fa4.peers import compiled
from jax_fa4.runtime import Arguments
from jax_fa4.spec import AttentionSpec


def free(keys: int) -> tuple[Dims, ...]:
    """One tile of so many keys a head: with several steps, and with one; several heads in turn for each CTA or pair."""
    return Dims(1, 600, keys - 6, 4, 4, sm_count=2), Dims(1, 100, 100, 24, 24, sm_count=2)


ORDERED = (Dims(1, 300, 600, 2, 2, sm_count=2), Dims(1, 250, 1500, 1, 1, sm_count=12))
"""Several tiles that add to the same dQ, in turn and at a time."""


class Subject:
    """The kernel and its problems."""

    def __init__(self, head_dim: int, causal: bool, ordered: bool):
        mask = masks.Causal() if causal else masks.Full()
        spec = AttentionSpec(
            "bfloat16", head_dim, head_dim, scale=head_dim**-0.5, mask=mask, deterministic=ordered
        )
        self.artifact = compile.artifact(spec, sm100_mutate.ARCH, plan.SizeClass.MANY_TILES, "backward")
        rng = np.random.default_rng(0)
        self.problems = []
        for dims in ORDERED if ordered else free(backward_plan(spec).block_k):
            inputs, others = {}, {}
            for buffer in self.artifact.buffers:
                shape, dtype = buffer.dims(dims), jnp.dtype(buffer.dtype)
                if buffer.kind == "in":
                    draw = rng.standard_normal(shape)
                    draw = 6 + 0.1 * draw if buffer.name == "lse" else draw
                    inputs[buffer.name] = compiled.aligned(shape, dtype, draw)
                else:
                    others[buffer.name] = (shape, dtype)
            self.problems.append((dims, inputs, others))

    def run(self, ptx: str, seed: int):
        """(result bytes, complaints, executed lines) of all problems."""
        module = emulator.load(self.artifact.object, ptx, self.artifact.symbol)
        results, complaints, lines = b"", [], set()
        for dims, inputs, others in self.problems:
            arrays = inputs | {name: compiled.aligned(*what) for name, what in others.items()}
            arguments = Arguments(self.artifact, {name: array.ctypes.data for name, array in arrays.items()}, dims)
            settings = emulator.Settings(seed=seed, threads=1, sm_count=dims.sm_count, strict=True)
            report = module.run_vector(arguments.vector, list(arrays.values()), settings)
            results += b"".join(arrays[name].tobytes() for name in ("dq", "dk", "dv"))
            complaints += report.complaints
            lines |= {line for kernel in report.kernels for line, count in kernel["lines"] if count}
        return results, complaints, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="instead of causal")
    parser.add_argument("--ordered", action="store_true", help="the deterministic kernel")
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    sm100_mutate.survey(Subject(options.head_dim, not options.full, options.ordered), options.seeds)


if __name__ == "__main__":
    main()
