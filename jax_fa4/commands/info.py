"""``python -m jax_fa4 info``: this machine, the versions, and which backend a call would take."""

import argparse
import importlib.metadata
import platform
import sys

import jax
import jax.numpy as jnp

from jax_fa4 import plan, registry, targets
from jax_fa4.commands.options import bounds, count, positive, shape
from jax_fa4.spec import DTYPES

OLDEST_JAX = (0, 10)
OLDEST_PYTHON = (3, 11)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--q", type=shape, default=(2, 1024, 8, 128), metavar="B,S,H,D", help="default: 2,1024,8,128")
    parser.add_argument("--kv", type=shape, metavar="B,T,K,D", help="default: as --q")
    parser.add_argument("--value-head-dim", type=count, metavar="E", help="default: D")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="default: bfloat16")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--window", type=bounds, metavar="LEFT,RIGHT", help="bounds, or none")
    parser.add_argument("--softcap", type=positive)
    parser.add_argument("--sinks", action="store_true", help="with attention sinks")
    parser.add_argument("--bias", action="store_true", help="with an additive bias")
    parser.add_argument("--segments", action="store_true", help="with segment ids")
    parser.add_argument("--deterministic", action="store_true")


def kernels_for(device: jax.Device) -> str:
    """Which kernels a device runs, in words."""
    if device.platform != "gpu":
        return "no GPU kernels, except on the software GPU"
    arch = targets.architecture(device)
    return f"kernels for {arch}" if arch in plan.ARCHITECTURES else f"no kernels for {arch}, the XLA path serves it"


def version_lines() -> list[str]:
    """Versions of what matters, each with what to install where it is missing or too old."""
    lines = [f"Python {platform.python_version()}{_too_old(sys.version_info[:2], OLDEST_PYTHON, 'Python')}"]
    for package, wanted_for in (
        ("jax", "everything: pip install 'jax>=0.10'"),
        ("jaxlib", "everything: pip install 'jax>=0.10'"),
        ("nvidia-cutlass-dsl", "compiling kernels: pip install 'jax-fa4[cuda13]'"),
        ("flax", "the Flax drop-ins: pip install 'jax-fa4[flax]'"),
    ):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: not installed, needed for {wanted_for}")
            continue
        numbers = tuple(int(part) for part in version.split(".")[:2])
        oldest = OLDEST_JAX if package in ("jax", "jaxlib") else (0, 0)
        lines.append(f"{package} {version}{_too_old(numbers, oldest, package)}")
    try:
        built = str(registry.library_path())
    except FileNotFoundError:
        built = "not built: pip install ."
    return [*lines, f"C++ library: {built}"]


def _too_old(version: tuple[int, ...], oldest: tuple[int, ...], name: str) -> str:
    if version >= oldest:
        return ""
    wanted = ".".join(map(str, oldest))
    return f" is not supported: install {name} {wanted} or newer"


def main(arguments: argparse.Namespace) -> int:
    from jax_fa4.explanation import explain

    print("devices")
    for device in jax.devices():
        print(f"  {device}: {device.device_kind}, {kernels_for(device)}")
    print("versions")
    for line in version_lines():
        print(f"  {line}")

    def array(sizes: tuple[int, ...], dtype: str = arguments.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))

    q, kv = arguments.q, arguments.kv or arguments.q
    options: dict = {name: getattr(arguments, name) for name in ("causal", "window", "softcap", "deterministic")}
    if arguments.sinks:
        options["sinks"] = array((q[2],), "float32")
    if arguments.bias:
        options["bias"] = array((1, q[2], q[1], kv[1]), "float32")
    if arguments.segments:
        options |= {"q_segment_ids": array(q[:2], "int32"), "kv_segment_ids": array(kv[:2], "int32")}
    value = (*kv[:3], arguments.value_head_dim or kv[3])
    print(f"a call with q {list(q)}, k {list(kv)}, v {list(value)}")
    for line in str(explain(array(q), array(kv), array(value), **options)).splitlines():
        print(f"  {line}")
    return 0
