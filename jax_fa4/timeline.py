"""What each warp role and each asynchronous unit of a kernel did when: from a traced run of the software GPU.

    timeline = record("sm_100a", (1, 512, 1, 128), causal=True)
    timeline.save("forward.json")     # for https://ui.perfetto.dev or chrome://tracing
    timeline.save("forward.png")      # or .svg, .pdf; in a notebook the value shows itself

Times are cycles of the software GPU's model of the clock, which is an estimate (see `jax_fa4.estimate`), or, with
``cycles=False``, the order of one interleaving.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_fa4 import counting, emulator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OFFSET = 0xFFFFFF  # of an address in shared memory, below the CTA's rank
UNITS = {"tensor core": ("mma",), "TMA loads": ("load",), "TMA stores": ("store", "reduce"),
         "tensor memory": ("tensor_load", "tensor_store", "tensor_copy")}
"""The asynchronous units, and the kinds of events (`emulator.Event`) that each works on."""
_REPORTERS = {"load": "TMA", "commit": "tensor core", "other": "cluster launch control"}
"""What reports to a barrier when an operation of that kind is complete."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something that took from `begin` to `end` on a track. `kind` as in `emulator.Event`."""

    kind: str
    name: str
    begin: int
    end: int
    details: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Track:
    """What one warp, or one unit, did; slices do not overlap. `role` is the warp's role, or the unit."""

    name: str
    role: str
    cluster: int
    cta: int
    slices: tuple[Slice, ...]

    def busy(self) -> int:
        """Time in which it did not wait."""
        return sum(s.end - s.begin for s in self.slices if s.kind != "wait")


@dataclasses.dataclass(frozen=True, repr=False)
class Timeline:
    """Tracks of the traced CTAs of one kernel, warps first, in the order of `plan.roles`.

    Attributes:
      title: kernel and architecture.
      unit: what times are: "cycles" or "instructions of the cluster".
      end: when the last event ended.
    """

    title: str
    unit: str
    tracks: tuple[Track, ...]

    @classmethod
    def of(cls, report: emulator.Report, plan: Any = None, kernel: str | None = None) -> Timeline:
        """From the report of a traced run.

        Args:
          report: of a run with ``Settings(trace=n)``.
          plan: the plan of the kernel that ran: its `roles` name the warps, its `accumulators` the products.
          kernel: part of the name of the kernel to show; by default the one with most tensor-core work.

        Raises:
          ValueError: no such kernel, or the run was not traced.
        """
        names = [counting.short_name(k["kernel"]) for k in report.kernels]
        candidates = [k for k in report.kernels if kernel is None or kernel in k["kernel"]]
        if not candidates:
            raise ValueError(f"kernel: no kernel is called {kernel!r}; the run had {', '.join(names) or 'none'}")
        chosen = max(candidates, key=lambda k: k["tensor_flops"])
        if "trace" not in chosen:
            raise ValueError("report: no events; run with emulator.Settings(trace=1) or jax_fa4.emulate(trace=1)")
        roles = getattr(plan, "roles", {}) if chosen["tensor_flops"] or kernel is None else {}
        events = _Events(chosen["trace"], roles, getattr(plan, "accumulators", {}))
        title = f"{counting.short_name(chosen['kernel'])}, sm_{report.architecture}a"
        return cls(title, "cycles" if "timing" in chosen else "instructions of the cluster", tuple(events.tracks()))

    @property
    def end(self) -> int:
        return max((s.end for track in self.tracks for s in track.slices), default=0)

    def between(self, first: int, last: int) -> Timeline:
        """The part from time `first` to time `last`; slices that reach beyond are cut."""
        cut = []
        for track in self.tracks:
            inside = [s for s in track.slices if s.end > first and s.begin < last]
            clipped = [dataclasses.replace(s, begin=max(s.begin, first), end=min(s.end, last)) for s in inside]
            cut.append(dataclasses.replace(track, slices=tuple(clipped)))
        return dataclasses.replace(self, tracks=tuple(cut))

    def __str__(self) -> str:
        """A table: of each role, how long it worked, and what it waited for longest."""
        lines = [f"{self.title}: {self.end:,} {self.unit}"]
        groups: dict[tuple[int, int, str], list[Track]] = collections.defaultdict(list)
        for track in self.tracks:
            groups[track.cluster, track.cta, track.role].append(track)
        several = len({(cluster, cta) for cluster, cta, _ in groups}) > 1
        for (cluster, cta, role), tracks in groups.items():
            waits: collections.Counter[str] = collections.Counter()
            for s in (s for track in tracks for s in track.slices if s.kind == "wait"):
                waits[s.name] += s.end - s.begin
            span = max(1, self.end) * len(tracks)
            most = ", ".join(f"{name} {100 * time / span:.0f} %" for name, time in waits.most_common(3) if time)
            place = f"cluster {cluster} CTA {cta} " if several else ""
            busy = 100 * sum(track.busy() for track in tracks) / span
            lines.append(f"  {place}{role:14} busy {busy:3.0f} %" + (f"   waits for {most}" if most else ""))
        return "\n".join(lines)

    __repr__ = __str__  # of all slices is too long to read, and notebooks keep it

    def chrome_trace(self) -> dict[str, Any]:
        """As a dict in the trace event format of Perfetto and chrome://tracing; 1 us stands for 1 unit of time."""
        out: list[dict[str, Any]] = []
        places = {place: i for i, place in enumerate(dict.fromkeys((t.cluster, t.cta) for t in self.tracks))}
        for (cluster, cta), pid in places.items():
            name = f"cluster {cluster}, CTA {cta} (1 us is 1 of {self.unit})"
            out.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, track in enumerate(self.tracks):
            where = {"pid": places[track.cluster, track.cta], "tid": tid}
            out.append({"ph": "M", "name": "thread_name", **where, "args": {"name": track.name}})
            out.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": tid}})
            for s in track.slices:
                out.append({"ph": "X", "name": s.name, "cat": s.kind, **where, "ts": s.begin, "dur": s.end - s.begin,
                            "args": dict(s.details)})
        return {"traceEvents": out, "otherData": {"title": self.title, "unit": self.unit}}

    def figure(self) -> Figure:
        """As a matplotlib figure: a row for each role and unit, of the first CTA."""
        from jax_fa4 import timeline_figure

        return timeline_figure.draw(self)

    def _repr_png_(self) -> bytes:
        """Shows itself in a notebook."""
        import io

        buffer = io.BytesIO()
        self.figure().savefig(buffer, dpi=100, format="png")
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Writes the events (.json) or a picture (.png, .svg, .pdf): the ending of `path` says which."""
        path = Path(path)
        if path.suffix == ".json":
            path.write_text(json.dumps(self.chrome_trace()))
        elif path.suffix in (".png", ".svg", ".pdf"):
            self.figure().savefig(path, dpi=120)
        else:
            raise ValueError(f"path: {str(path)!r} ends in {path.suffix!r}; allowed are .json, .png, .svg and .pdf")


class _Events:
    """Events of a kernel, with what is needed to name them."""

    def __init__(self, events: Sequence[emulator.Event], roles: Mapping[str, range], accumulators: Mapping[int, str]):
        self.events, self.accumulators = events, accumulators
        self.roles = roles
        self.role_of = {warp: role for role, warps in roles.items() for warp in warps}
        # Who reports to a barrier: ("mbarrier", offset in shared memory) or ("named barrier", number) -> roles, units.
        self.reporters: dict[tuple[str, int], set[str]] = collections.defaultdict(set)
        for e in events:
            if e.kind == "arrive":
                self.reporters[e.what, e.address & _OFFSET].add(self.role(e))
            elif e.kind in _REPORTERS and e.address:
                self.reporters["mbarrier", e.address & _OFFSET].add(_REPORTERS[e.kind])

    def role(self, event: emulator.Event) -> str:
        return self.role_of.get(event.warp, f"warp {event.warp}")

    def tracks(self) -> list[Track]:
        order = {role: i for i, role in enumerate(self.roles)}
        warps: dict[tuple, list[Slice]] = collections.defaultdict(list)
        for e in self.events:
            if e.kind in ("run", "wait"):
                key = (e.cluster, e.cta, order.get(self.role(e), len(order)), e.warp, self.role(e))
                warps[key].append(self.slice(e))
        result = [
            Track(role if role.startswith("warp ") else f"{role} (warp {warp})", role, cluster, cta, tuple(slices))
            for (cluster, cta, _, warp, role), slices in sorted(warps.items())
        ]
        for cluster, cta in dict.fromkeys((e.cluster, e.cta) for e in self.events):
            here = [e for e in self.events if (e.cluster, e.cta) == (cluster, cta)]
            for unit, kinds in UNITS.items():
                work = sorted((e for e in here if e.kind in kinds), key=lambda e: (e.started, e.end))
                if unit == "tensor core":
                    lanes = [self.products(work)] if work else []
                elif unit == "tensor memory":  # a path for each quarter of the multiprocessor
                    quarters = ([self.slice(e) for e in work if e.warp % 4 == q] for q in range(4))
                    lanes = [_one_after_the_other(slices) for slices in quarters if slices]
                else:
                    lanes = _lanes(self.slice(e) for e in work)
                for i, lane in enumerate(lanes):
                    name = unit if len(lanes) == 1 else f"{unit} {i}"
                    result.append(Track(name, unit, cluster, cta, tuple(lane)))
        return sorted(result, key=lambda track: (track.cluster, track.cta))

    def products(self, work: Sequence[emulator.Event]) -> list[Slice]:
        """Slices of the tensor core, which makes one product after the other: steps of K that follow each other in the
        same accumulator are one slice."""
        slices: list[Slice] = []
        for e in work:
            last = slices[-1] if slices else None
            name = self.accumulators.get(e.address & 0xFFFF) or f"{self.role(e)}: {e.what}"
            same = last is not None and last.name == name and last.details["shape"] == e.what
            if last is not None and same and e.started - last.end <= _JOIN:
                more = {"steps": last.details["steps"] + 1, "FLOP": last.details["FLOP"] + e.amount}
                slices[-1] = dataclasses.replace(last, end=e.end, details={**last.details, **more})
                continue
            details = {"shape": e.what, "steps": 1, "FLOP": e.amount, "D": e.address, "PTX line": e.line,
                       "issued by": self.role(e), "issued": e.begin}
            slices.append(Slice("mma", name, e.started, e.end, details))
        return _one_after_the_other(slices)

    def slice(self, e: emulator.Event) -> Slice:
        if e.kind == "run":
            return Slice("run", self.role(e), e.begin, e.end, {"PTX line": e.line, "instructions": e.amount})
        if e.kind == "wait":
            what, details = e.what.split(",")[0], {"what": e.what, "PTX line": e.line}
            if what in ("mbarrier", "named barrier"):
                others = sorted(self.reporters.get((what, e.address & _OFFSET), set()))
                if units := [name for name in others if name in _REPORTERS.values()]:
                    others = units  # the warp that issued the operation tells the barrier to expect it
                others = [name for name in others if name != self.role(e)] or others
                details |= {"barrier": f"{what} {e.address:#x}", "phase": e.amount}
                what = "all roles" if len(others) > 4 else " and ".join(others) or what
            return Slice("wait", what, e.begin, e.end, details)
        details = {"PTX line": e.line, "issued by": self.role(e), "issued": e.begin, "bytes": e.amount}
        if e.kind == "load" and e.address:
            details["mbarrier"] = hex(e.address)
        return Slice(e.kind, e.kind.replace("_", " "), e.started, e.end, details)


_JOIN = 64  # cycles between two products of one accumulator that are still drawn as one


def _one_after_the_other(slices: Sequence[Slice]) -> list[Slice]:
    """Slices of a unit that takes up the next work before the results of the last have come out: each ends where the
    next begins."""
    ends = [following.begin for following in slices[1:]] + [slices[-1].end]
    return [dataclasses.replace(s, end=min(s.end, end)) for s, end in zip(slices, ends, strict=True)]


def _lanes(slices: Iterable[Slice]) -> list[list[Slice]]:
    """Slices, in order of their begin, laid so that none overlaps another of its lane."""
    lanes: list[list[Slice]] = []
    for s in slices:
        free = next((lane for lane in lanes if lane[-1].end <= s.begin), None)
        if free is None:
            lanes.append([s])
        else:
            free.append(s)
    return lanes


def record(
    arch: str, shape: tuple[int, int, int, int] = (1, 512, 1, 128), *, kv_shape: tuple[int, int] | None = None,
    dtype: str = "bfloat16", backward: bool = False, cycles: bool = True, seed: int = 0, sm_count: int = 1,
    kernel: str | None = None, **options: Any,
) -> Timeline:
    """Runs attention on random inputs on the software GPU, and gives the first CTA's (or cluster's) timeline.

    Args:
      arch: "sm_90a", "sm_100a" or "sm_103a".
      shape: [B, S, H, D] of the queries.
      kv_shape: (T, K), length and heads of keys and values; by default those of the queries.
      dtype: "bfloat16" or "float16".
      backward: show the backward pass's kernel instead of the forward's.
      cycles: follow the model of the clock; else the interleaving of `seed`.
      sm_count: multiprocessors; with one, the first CTA does all of the work.
      kernel: part of the name of the kernel to show, where a pass has several.
      options: keyword arguments of `jax_fa4.attention`: causal, window, softcap, ...

    Raises:
      Unsupported: no kernel of that architecture does it.
    """
    import jax
    import jax.numpy as jnp

    from jax_fa4 import api, plan
    from jax_fa4.spec import Arguments, make_spec

    batch, rows, heads, width = shape
    keys, kv_heads = kv_shape or (rows, heads)
    shapes = [shape] + [(batch, keys, kv_heads, width)] * 2
    drawn = zip(jax.random.split(jax.random.key(0), 3), shapes, strict=True)
    q, k, v = (jax.random.normal(key, s, jnp.dtype(dtype)) for key, s in drawn)
    spec, _ = make_spec(Arguments(q, k, v, **options))
    size = plan.size_class(batch, rows, keys, heads)
    chosen = plan.choose_plan(spec, arch, size, "backward" if backward else "forward")

    def attend(*arrays: jax.Array) -> jax.Array:
        return api.attention(*arrays, backend=f"emulate:{arch}", **options)

    emulator.take_reports()
    emulated = emulator.emulate(seed, timing=cycles, sm_count=sm_count, trace=1)
    with jax.default_device(jax.devices("cpu")[0]), emulated:
        if backward:
            jax.block_until_ready(jax.grad(lambda *a: attend(*a).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v))
        else:
            jax.block_until_ready(attend(q, k, v))
    *_, report = emulator.take_reports()
    timeline = Timeline.of(report, chosen, kernel)
    direction = "backward" if backward else "forward"
    what = f"{direction} on {arch}: S {rows}, T {keys}, D {width}, {spec.mask!r}"
    return dataclasses.replace(timeline, title=what)
