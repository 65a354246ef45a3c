"""Which backend a call would take, and why each other one would not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jax_fa4 import backends, plan
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

_STATIC = {"causal", "deterministic", "scale", "softcap"}
"""Arguments that are part of the program, even as scalars of NumPy."""


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found; ``str()`` of it is the report.

    Attributes:
      spec: what the call asks for.
      chosen: the backend that ``backend="auto"`` takes.
      refusals: for each backend in the order in which ``auto`` tries them, why it would not run the call, or None.
      on_gpus: for each architecture that there are kernels for, why ``auto`` would not take its kernel on such a GPU,
        or None; whether or not there is one here.
    """

    spec: AttentionSpec
    chosen: str
    refusals: Mapping[str, str | None]
    on_gpus: Mapping[str, str | None]

    def __str__(self) -> str:
        width = max(map(len, self.refusals))
        lines = [repr(self.spec), f"auto takes: {self.chosen}"]
        for name, refusal in self.refusals.items():
            lines.append(f"  {name.ljust(width)}  {'runs' if refusal is None else 'does not run: ' + refusal}")
        for arch, refusal in self.on_gpus.items():
            lines.append(f"on a GPU of {arch} auto takes: {'cuda' if refusal is None else 'xla (' + refusal + ')'}")
        return "\n".join(lines)


def explain(q: Any, k: Any, v: Any, **arguments: Any) -> Explanation:
    """Which backend :func:`jax_fa4.attention` would take for this call, and why each other one would not.

    Nothing is computed: arrays may be ``jax.ShapeDtypeStruct``.

    Args:
      q: [B, S, H, D].
      k: [B, T, K, D].
      v: [B, T, K, E].
      **arguments: as for :func:`jax_fa4.attention`; ``backend`` and ``return_lse`` make no difference.

    Raises:
      InvalidArgument: where the call itself would.
    """
    for ignored in ("backend", "return_lse"):
        arguments.pop(ignored, None)
    arguments |= {"q": q, "k": k, "v": v}
    arrays = {name: x for name, x in arguments.items() if hasattr(x, "shape") and name not in _STATIC}
    static = {name: x for name, x in arguments.items() if name not in arrays}
    found: list[Explanation] = []

    def inspect(arrays: dict[str, Any]) -> None:
        spec, operands = make_spec(Arguments(**arrays, **static))
        refusals = {name: backends.why_not(name, spec, operands) for name in backends.BACKENDS}
        chosen = next(name for name, refusal in refusals.items() if refusal is None)
        on_gpus = {arch: plan.refusal(spec, arch, ("forward",)) for arch in plan.ARCHITECTURES}
        found.append(Explanation(spec, chosen, refusals, on_gpus))

    jax.eval_shape(inspect, arrays)
    return found[0]
