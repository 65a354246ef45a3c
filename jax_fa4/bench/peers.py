"""Implementations of attention to compare with: each is one entry of ``PEERS``, used where it is installed.

A peer prepares a workload into ``Runnable`` pieces ("forward" and "backward"); backward is timed apart from forward,
on residuals made beforehand.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax

from jax_fa4.bench.timing import Runnable
from jax_fa4.bench.workload import Workload


@dataclass(frozen=True)
class Peer:
    """One implementation.

    Attributes:
      name: as printed.
      module: what must be importable.
      platforms: JAX platforms it runs on.
      prepare: makes the pieces to time; raises where the peer cannot do the workload.
    """

    name: str
    module: str
    platforms: tuple[str, ...]
    prepare: Callable[[Workload], Mapping[str, Runnable]]

    def absence(self) -> str | None:
        """Why it cannot run here, or None."""
        if jax.default_backend() not in self.platforms:
            return f"runs on {' or '.join(self.platforms)}, and JAX's default backend is {jax.default_backend()}"
        if importlib.util.find_spec(self.module.split(".")[0]) is None:
            return f"module {self.module} is not installed"
        return None


def jax_runnables(attend: Callable[..., jax.Array], workload: Workload) -> dict[str, Runnable]:
    """Forward and backward of ``attend(q, k, v)`` under jit, compiled before they are returned."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (
        jax.random.normal(key, shape, workload.dtype) for key, shape in zip(keys, workload.shapes(), strict=True)
    )
    forward = jax.jit(attend).lower(q, k, v).compile()
    _, pullback = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
    backward = jax.jit(lambda pullback, do: pullback(do)).lower(pullback, do).compile()
    jax.block_until_ready((forward(q, k, v), backward(pullback, do)))  # out of memory shows here, not while timing
    return {
        "forward": Runnable(lambda: forward(q, k, v), jax.block_until_ready),
        "backward": Runnable(lambda: backward(pullback, do), jax.block_until_ready),
    }


def own_peer(backend: str) -> Peer:
    """jax_fa4 itself on one of its backends."""

    def prepare(workload: Workload) -> Mapping[str, Runnable]:
        from jax_fa4 import attention

        window = None if workload.window is None else (workload.window, None)
        return jax_runnables(partial(attention, causal=workload.causal, window=window, backend=backend), workload)

    name = "jax_fa4" if backend == "auto" else f"jax_fa4:{backend}"
    return Peer(name, "jax_fa4", ("cpu", "gpu", "tpu"), prepare)


def _jax_nn(implementation: str) -> Callable[[Workload], Mapping[str, Runnable]]:
    def prepare(workload: Workload) -> Mapping[str, Runnable]:
        window = None if workload.window is None else (workload.window, 0)
        attend = partial(
            jax.nn.dot_product_attention, is_causal=workload.causal, local_window_size=window,
            implementation=implementation,
        )
        return jax_runnables(attend, workload)

    return prepare


def _fa3(workload: Workload) -> Mapping[str, Runnable]:
    from dew_flash_attn import flash_mha

    window = (-1, -1) if workload.window is None else (workload.window, 0)
    return jax_runnables(partial(flash_mha, is_causal=workload.causal, window_size=window), workload)


def _tokamax(workload: Workload) -> Mapping[str, Runnable]:
    import tokamax

    window = None if workload.window is None else (workload.window, 0)
    attend = partial(
        tokamax.dot_product_attention, is_causal=workload.causal, local_window_size=window, implementation="mosaic"
    )
    return jax_runnables(attend, workload)


def _fa4_torch(workload: Workload) -> Mapping[str, Runnable]:
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    dtype = getattr(torch, workload.dtype)
    q, k, v, do = (torch.randn(shape, device="cuda", dtype=dtype) for shape in workload.shapes())
    mask = {"causal": workload.causal, "window_size_left": workload.window}
    o, lse = _flash_attn_fwd(q, k, v, return_lse=True, **mask)[:2]

    def wait(_: object) -> None:
        torch.cuda.synchronize()

    return {
        "forward": Runnable(lambda: _flash_attn_fwd(q, k, v, return_lse=True, **mask), wait),
        "backward": Runnable(lambda: _flash_attn_bwd(q, k, v, o, do, lse, **mask), wait),
    }


PEERS = (
    Peer("jax.nn:xla", "jax", ("cpu",), _jax_nn("xla")),
    Peer("jax.nn:cudnn", "jax", ("gpu",), _jax_nn("cudnn")),
    Peer("fa3", "dew_flash_attn", ("gpu",), _fa3),
    Peer("tokamax", "tokamax", ("gpu",), _tokamax),
    Peer("fa4:torch", "flash_attn.cute", ("gpu",), _fa4_torch),
)
