"""Pictures of masks: which scores survive, and which blocks a kernel visits with and without an element mask."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jax_fa4 import masks
from jax_fa4.operands import Operands, geometry
from jax_fa4.spec import Arguments, AttentionSpec, make_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIPPED, PARTIAL, FULL = 0, 1, 2
_COLOURS = {SKIPPED: "#eceff1", PARTIAL: "#ffb74d", FULL: "#4f8fd0"}
_NAMES = {SKIPPED: "skipped", PARTIAL: "partial (element mask)", FULL: "full (no mask)"}
_CHARACTERS = {SKIPPED: "·", PARTIAL: "▒", FULL: "█"}


@dataclass(frozen=True, eq=False, repr=False)
class MaskPicture:
    """One example's and head's mask, by score and by block.

    Attributes:
      survives: bool [S, T], which scores survive.
      states: int [query blocks, key blocks] of SKIPPED, PARTIAL, FULL: what a kernel does with each block.
      block: (query rows, keys) of a block.
      title: what the mask is.
    """

    survives: np.ndarray
    states: np.ndarray
    block: tuple[int, int]
    title: str

    def summary(self) -> str:
        """How many blocks are visited, and how full they are."""
        counts = {state: int((self.states == state).sum()) for state in _NAMES}
        visited = counts[PARTIAL] + counts[FULL]
        computed = visited * math.prod(self.block)
        use = self.survives.sum() / computed if computed else 0.0
        return (
            f"{visited} of {self.states.size} blocks visited ({counts[FULL]} full, {counts[PARTIAL]} partial); "
            f"{self.survives.mean() if self.survives.size else 0.0:.1%} of the scores survive, "
            f"{use:.1%} of those computed"
        )

    def __str__(self) -> str:
        rows = ["".join(_CHARACTERS[state] * 2 for state in row) for row in self.states.tolist()]
        return "\n".join([self.title, *rows, self.summary()])

    __repr__ = __str__

    def figure(self) -> "Figure":
        """The picture as a matplotlib figure: scores on the left, blocks on the right."""
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        figure = Figure(figsize=(9.5, 4.8), layout="constrained")
        scores, blocks = figure.subplots(1, 2)
        rows, columns = self.survives.shape
        extent = (0.0, float(columns), float(rows), 0.0)
        scores.imshow(self.survives, cmap=ListedColormap([_COLOURS[SKIPPED], "#263238"]), vmin=0, vmax=1,
                      extent=extent, interpolation="nearest", aspect="equal")
        scores.set(title="scores that survive", xlabel="key", ylabel="query")
        block_rows, block_columns = self.block
        size = (0.0, float(self.states.shape[1] * block_columns), float(self.states.shape[0] * block_rows), 0.0)
        blocks.imshow(self.states, cmap=ListedColormap([_COLOURS[state] for state in sorted(_COLOURS)]), vmin=0,
                      vmax=2, extent=size, interpolation="nearest", aspect="equal")
        blocks.set(title=f"blocks of {block_rows} x {block_columns}", xlabel="key", ylabel="query")
        blocks.set_xticks(np.arange(0, size[1] + 1, block_columns), minor=True)
        blocks.set_yticks(np.arange(0, size[2] + 1, block_rows), minor=True)
        blocks.grid(which="minor", color="white", lw=0.6)
        blocks.tick_params(which="minor", length=0)
        legend = [Patch(color=_COLOURS[state], label=_NAMES[state]) for state in (FULL, PARTIAL, SKIPPED)]
        figure.legend(handles=legend, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
        figure.suptitle(f"{self.title}\n{self.summary()}", fontsize=9)
        return figure

    def _repr_png_(self) -> bytes:
        """Shows itself in a notebook."""
        import io

        buffer = io.BytesIO()
        self.figure().savefig(buffer, dpi=100, format="png")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Writes the figure to ``path``; the ending picks the format."""
        self.figure().savefig(path, dpi=120)


def picture(
    spec: AttentionSpec, operands: Operands, block: tuple[int, int] = (128, 128), example: int = 0, head: int = 0
) -> MaskPicture:
    """The mask of one example and head of a call, with what a kernel of that block shape does with each block.

    Args:
      spec: the call's spec.
      operands: its arrays; only their shapes matter, and those that the mask reads.
      block: (query rows, keys) of a block.
      example: index into the batch.
      head: query head.
    """
    survives = np.asarray(masks.dense(spec.mask, operands))[example, head]
    here = _of_example(geometry(operands), example)
    rows, columns = survives.shape
    block_rows, block_columns = block
    states = np.full((-(-rows // block_rows), -(-columns // block_columns)), SKIPPED)
    for i in range(states.shape[0]):
        start, full_start, full_end, end = masks.block_range(spec.mask, i, block_rows, block_columns, here)
        states[i, start:end] = PARTIAL
        states[i, full_start:full_end] = FULL
    return MaskPicture(survives, states, block, f"{spec.mask!r}, {rows} queries, {columns} keys")


def mask_picture(rows: int, columns: int, block: tuple[int, int] = (128, 128), **arguments: Any) -> MaskPicture:
    """The picture of a mask given by keyword arguments of :func:`jax_fa4.attention` (``causal``, ``window``, ``mask``,
    ``q_segment_ids``, ``kv_lengths``, ...) for ``rows`` queries and ``columns`` keys of one example and head."""
    q, k = jnp.zeros((1, rows, 1, 1)), jnp.zeros((1, columns, 1, 1))
    return picture(*make_spec(Arguments(q, k, k, **arguments)), block=block)


def _of_example(here: masks.Geometry, example: int) -> masks.Geometry:
    """The geometry of one example in Python integers."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(here):
        value = getattr(here, field.name)
        if field.name != "numbers" and value is not None:
            flat = np.asarray(value).reshape(-1)
            values[field.name] = int(flat[example if flat.size > 1 else 0])
    return dataclasses.replace(here, **values, numbers=masks.PYTHON)
