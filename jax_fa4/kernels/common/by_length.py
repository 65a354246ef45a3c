"""A kernel with another form for short sequences: one artifact holds both, and its host function picks."""

import copy
from typing import Any

import cutlass
import cutlass.cute as cute


@cute.jit
def launch_by_length(kernel: cutlass.Constexpr, g, dims, stream):
    """Launches `kernel.short` for up to `kernel.plan.short_rows` query rows, `kernel` for more."""
    if dims.S <= kernel.plan.short_rows:
        launch(kernel.short, g, dims, stream)
    else:
        launch(kernel, g, dims, stream)


def launch(kernel: Any, g: Any, dims: Any, stream: Any) -> None:
    """Launches one form."""
    # A launch rebinds the members of the namespace that it is given to the kernel's own arguments: hence copies.
    kernel.launch(copy.copy(g), dims, stream)
