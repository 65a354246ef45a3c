"""Small calls of every Hopper kernel, in a process of their own for compute-sanitizer (see `test_sm90_sanitizer`):

    compute-sanitizer --tool racecheck python tests/kernels/sanitized.py GROUP
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from jax_fa4 import cases, reference
from jax_fa4.spec import Arguments, make_spec


@dataclasses.dataclass(frozen=True)
class Call:
    """A call without a case: self-attention on Gaussians."""

    batch: int
    rows: int
    heads: int
    kv_heads: int
    dims: tuple[int, int]
    mask: tuple[tuple[str, object], ...] = ()

    def make(self, seed: int) -> dict:
        generator = np.random.default_rng(seed)

        def array(heads, dim):
            return generator.standard_normal((self.batch, self.rows, heads, dim), np.float32).astype(jnp.bfloat16)

        q, k, v = (array(*shape) for shape in zip((self.heads, self.kv_heads, self.kv_heads),
                                                  (self.dims[0], *self.dims), strict=True))  # fmt: skip
        return {"q": q, "k": k, "v": v, **dict(self.mask)}


CAUSAL, WINDOW = (("causal", True),), (("causal", True), ("window", (128, 0)))
GROUPS: dict[str, list] = {
    # Few tiles, so that most are cut.
    "cases": [case for case in cases.CASES if case.name in (
        "causal", "d128", "d256", "d192-e128", "segments", "window", "kv-lengths", "kitchen-sink", "mqa")],
    # More tiles than multiprocessors: what a block carries from one to the next.
    "tiles": [
        *(Call(4, 300, 16, 16, dims, mask) for dims in ((64, 64), (128, 128), (256, 256), (192, 128))
          for mask in ((), CAUSAL)),
        Call(4, 300, 16, 2, (128, 128), CAUSAL), Call(4, 300, 16, 16, (128, 128), WINDOW),
    ],
    # The forms for many rows, and for few tiles of many keys.
    "long": [
        *(Call(2, 2200, 5, 5, (dim, dim), mask) for dim in (64, 128) for mask in ((), CAUSAL)),
        Call(1, 2200, 2, 2, (128, 128), CAUSAL),
    ],
}  # fmt: skip


def run(call, deterministic: bool) -> bool:
    """Forward and backward; whether all results are finite."""
    arguments = call.make(0)
    spec, operands = make_spec(Arguments(**arguments))

    def attend(q, k, v):
        changed = {"q": q, "k": k, "v": v, "deterministic": deterministic, "return_lse": True, "backend": "cuda"}
        return jax_fa4.attention(**arguments | changed)

    def gradients(q, k, v, *cotangents):
        return jax.vjp(attend, q, k, v)[1](cotangents)

    results = jax.jit(gradients)(operands.q, operands.k, operands.v, *reference.cotangents(operands, 0))
    return all(np.isfinite(np.asarray(x, np.float32)).all() for x in results)


def main(group: str) -> None:
    for call, deterministic in ((c, d) for c in GROUPS[group] for d in (False, True)):
        if deterministic and isinstance(call, Call):
            continue
        finite = run(call, deterministic)
        print(call, "deterministic" if deterministic else "", flush=True)
        assert finite, "results that are not finite"


if __name__ == "__main__":
    main(sys.argv[1])
