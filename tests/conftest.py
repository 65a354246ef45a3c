"""Shared by all tests: flags for XLA, and the skip of GPU tests where there is no GPU."""

import os

# Before jax is imported. Tests of sharding and of the ring want several devices on one host. Shapes in tests are small:
# compiling takes most of the time, of which the first flag saves half, and the next two half of the rest.
for flag, value in (
    ("xla_backend_optimization_level", 0),
    ("xla_backend_extra_options", "xla_cpu_disable_new_fusion_emitters"),
    ("xla_cpu_parallel_codegen_split_count", 1),
    ("xla_force_host_platform_device_count", 8),
):
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{flag}={value}"

# The CUDA plug-in is installed for a test that compiles for GPUs; without a GPU it must not try to start one.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
if not os.path.exists("/dev/nvidia0"):
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

from jax_fa4 import registry

# Processes that tests start in the clone find its Python sources, and the library where it is installed.
try:
    os.environ["JAX_FA4_LIBRARY"] = str(registry.library_path())
except FileNotFoundError:
    pass  # not built: what needs it says so


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu``, with a reason, unless JAX sees an NVIDIA GPU."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason=f"needs an NVIDIA GPU; JAX's default backend here is {jax.default_backend()!r}")
    for item in gpu_items:
        item.add_marker(skip)
