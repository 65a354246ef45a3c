"""The picture of a `timeline.Timeline`."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jax_fa4.timeline import Slice, Timeline, Track

_PALETTE = ("#4f8fd0", "#f29e4c", "#5fb49c", "#c8553d", "#8e6bbf", "#c9a227", "#6c8ead", "#b56576")
_WAIT, _FAINT = "#e3e7ea", "#90a4ae"
_HEIGHT = 0.8  # of a row
_LABEL_SHARE = 0.007  # of the picture's width that a slice needs for each character of its label


def draw(timeline: Timeline) -> Figure:
    """A row for each role and unit of the first CTA. A warpgroup's warps are thin lines of one row; grey is waiting."""
    first = next(((t.cluster, t.cta) for t in timeline.tracks), None)
    rows: dict[str, list[Track]] = collections.defaultdict(list)
    for track in timeline.tracks:
        if (track.cluster, track.cta) == first and not track.role.startswith("warp "):
            rows[track.role].append(track)
    if not rows:  # a kernel without roles
        rows = {track.name: [track] for track in timeline.tracks if (track.cluster, track.cta) == first}
    begin = min((s.begin for tracks in rows.values() for t in tracks for s in t.slices), default=0)
    end = max((s.end for tracks in rows.values() for t in tracks for s in t.slices), default=1)
    figure = Figure(figsize=(13, 0.62 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for row, tracks in enumerate(rows.values()):
        for i, track in enumerate(tracks):
            height = _HEIGHT / len(tracks)
            _draw_track(axes, track, row - _HEIGHT / 2 + i * height, height, colours)
        if tracks[0].role == "tensor core":
            _label(axes, tracks[0].slices, row, end - begin)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel=timeline.unit, xlim=(begin, end), ylim=(len(rows) - 0.5, -0.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    products = [Patch(color=colour, label=name) for name, colour in colours.items()]
    legend = [*products, Patch(color=_WAIT, label="waiting")]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8, frameon=False)
    several = len({(t.cluster, t.cta) for t in timeline.tracks}) > 1
    axes.set_title(timeline.title + (", first CTA of its cluster" if several else ""), fontsize=10, loc="left")
    return figure


def _draw_track(axes: Axes, track: Track, bottom: float, height: float, colours: dict[str, str]) -> None:
    """Bars of one track; what a product's accumulator is called picks its colour, a warp has its role's."""
    bars: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for s in track.slices:
        if s.kind == "mma":
            colour = colours.setdefault(s.name, _PALETTE[len(colours) % len(_PALETTE)])
        else:
            colour = {"wait": _WAIT, "run": "#455a64"}.get(s.kind, _FAINT)
        bars[colour].append((s.begin, s.end - s.begin))
    for colour, spans in bars.items():
        edge = "white" if track.role == "tensor core" else "none"
        axes.broken_barh(spans, (bottom, height), facecolors=colour, edgecolor=edge, linewidth=0.4)


def _label(axes: Axes, slices: tuple[Slice, ...], row: int, span: int) -> None:
    for s in slices:
        if s.end - s.begin > _LABEL_SHARE * len(s.name) * span:
            axes.text((s.begin + s.end) / 2, row, s.name, ha="center", va="center", fontsize=7, color="white")
