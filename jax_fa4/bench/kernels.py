"""What the compiler made of the kernels that a benchmark times: registers, spills, shared memory, compile time."""

from collections.abc import Iterable

from jax_fa4 import compile as compiler
from jax_fa4 import plan
from jax_fa4.bench.report import table
from jax_fa4.bench.workload import Workload
from jax_fa4.errors import Unsupported


def kernel_rows(workloads: Iterable[Workload], arch: str) -> list[dict]:
    """One row per kernel, each artifact once; kernels that no plan covers are left out.

    Args:
      workloads: what is timed.
      arch: "sm_90a" or another of `plan.ARCHITECTURES`.

    Returns:
      Rows with keys ``workload`` (the first that uses it), ``pass``, ``kernel``, ``registers``, ``stack_bytes`` (local
      memory, that is spills), ``shared_bytes`` (static), ``code_bytes``, and ``compile_seconds`` of the whole artifact.
    """
    rows: list[dict] = []
    seen = set()
    for workload in workloads:
        size = plan.size_class(workload.batch, workload.length, workload.length, workload.heads)
        for pass_ in plan.PASSES:
            try:
                artifact = compiler.artifact(workload.spec(), arch, size, pass_)
            except Unsupported:
                continue
            if artifact.object in seen:
                continue
            seen.add(artifact.object)
            rows += [
                {
                    "workload": str(workload), "pass": pass_, "kernel": _short(kernel.name),
                    "registers": kernel.registers, "stack_bytes": kernel.stack_bytes,
                    "shared_bytes": kernel.shared_bytes, "code_bytes": kernel.code_bytes,
                    "compile_seconds": artifact.compile_seconds,
                }
                for kernel in artifact.kernels
            ]
    return rows


def kernel_table(rows: list[dict]) -> str:
    """The rows as text."""
    keys = ("workload", "pass", "kernel", "registers", "stack_bytes", "code_bytes", "compile_seconds")
    return table([list(keys), *([str(row[key]) for key in keys] for row in rows)])


def _short(name: str) -> str:
    """The function's name, without the types of its arguments that the compiler appends."""
    return name.removeprefix("kernel_cutlass_").split("_")[0]
