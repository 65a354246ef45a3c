"""Which architectures a program carries kernels for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from jax_fa4.errors import Unsupported, invalid
from jax_fa4.plan import ARCHITECTURES, DEFAULT_TARGETS

_chosen = jax.make_user_context(())


@contextlib.contextmanager
def target(*architectures: str) -> Iterator[None]:
    """Within it, programs are traced with kernels for these architectures ("sm_90a", "sm_100a", "sm_103a").

    Without it a program carries kernels for the GPUs of this process, and on a machine without one those for sm_90a
    and sm_100a. The program picks its kernel on the device that it runs on, so an exported one serves all of them::

        with jax_fa4.target("sm_90a", "sm_100a"):
            exported = jax.export.export(jax.jit(f), platforms=("cuda",), disabled_checks=jax_fa4.EXPORT_CHECKS)(x)

    Raises:
      InvalidArgument: an architecture that there are no kernels for.
    """
    if not architectures or any(arch not in ARCHITECTURES for arch in architectures):
        raise invalid("target", repr(architectures), ", ".join(ARCHITECTURES), "Name one or several of them")
    with _chosen(tuple(dict.fromkeys(architectures))):
        yield


def architectures() -> tuple[str, ...]:
    """What a program traced now is to carry.

    Raises:
      Unsupported: a GPU of this process has no kernels.
    """
    if _chosen.value:
        return _chosen.value
    local = tuple(dict.fromkeys(map(architecture, _gpus())))
    unknown = [arch for arch in local if arch not in ARCHITECTURES]
    if unknown:
        raise Unsupported(f"there are no kernels for {', '.join(unknown)}, a GPU of this process, only for "
                          f"{', '.join(ARCHITECTURES)}")
    return local or DEFAULT_TARGETS


def architecture(device: jax.Device) -> str:
    """"sm_90a" for a GPU of compute capability 9.0."""
    return f"sm_{device.compute_capability.replace('.', '')}a"


def has_gpu() -> bool:
    """Whether this process has an NVIDIA GPU."""
    return bool(_gpus())


def _gpus() -> list[jax.Device]:
    return [device for device in jax.local_devices() if device.platform in ("gpu", "cuda")]
