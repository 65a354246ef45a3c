"""Remove each synchronisation instruction of our Blackwell backward kernel in turn: does the software GPU notice?

    PYTHONPATH=.:tests:tests/kernels python tests/kernels/sm100_bwd_mutate.py [--head-dim 128] [--seeds 20]

Causal, deterministic (so that results do not depend on the order of execution), two query heads for a KV head, and
several tiles of keys for one pair of CTAs. Runs are strict. See `sm100_mutate`.
"""

import argparse

import jax.numpy as jnp
import numpy as np
import sm100_mutate

from jax_fa4 import compile, emulator, masks, plan
from jax_fa4.kernels.common.abi import Dims
from jax_fa4.peers import compiled
from jax_fa4.runtime import Arguments
from jax_fa4.spec import AttentionSpec

DIMS = Dims(B=1, S=300, T=600, H=2, K=1, sm_count=2)


class Subject:
    """The kernel and its problem."""

    def __init__(self, head_dim: int):
        spec = AttentionSpec(
            "bfloat16", head_dim, head_dim, group=DIMS.H // DIMS.K, scale=head_dim**-0.5, mask=masks.Causal(),
            deterministic=True,
        )  # fmt: skip
        self.artifact = compile.artifact(spec, sm100_mutate.ARCH, plan.SizeClass.MANY_TILES, "backward")
        rng = np.random.default_rng(0)
        self.inputs, self.others = {}, {}
        for buffer in self.artifact.buffers:
            shape, dtype = buffer.dims(DIMS), jnp.dtype(buffer.dtype)
            if buffer.kind == "in":
                draw = rng.standard_normal(shape)
                draw = 6 + 0.1 * draw if buffer.name == "lse" else draw
                self.inputs[buffer.name] = compiled.aligned(shape, dtype, draw)
            else:
                self.others[buffer.name] = (shape, dtype)

    def run(self, ptx: str, seed: int):
        """(result bytes, complaints, executed lines)."""
        module = emulator.load(self.artifact.object, ptx, self.artifact.symbol)
        arrays = self.inputs | {name: compiled.aligned(*what) for name, what in self.others.items()}
        arguments = Arguments(self.artifact, {name: array.ctypes.data for name, array in arrays.items()}, DIMS)
        settings = emulator.Settings(seed=seed, threads=1, sm_count=DIMS.sm_count, strict=True)
        report = module.run_vector(arguments.vector, list(arrays.values()), settings)
        lines = {line for kernel in report.kernels for line, count in kernel["lines"] if count}
        return b"".join(arrays[name].tobytes() for name in ("dq", "dk", "dv")), report.complaints, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    sm100_mutate.survey(Subject(options.head_dim), options.seeds)


if __name__ == "__main__":
    main()
