"""The Blackwell forward kernel under segment ids: results, and that nothing is loaded or computed without need."""

import dataclasses
import functools
import operator

import numpy as np
import pytest
from emu import emulated
from kernels.sm100_cases import ARCH, assert_same_bits, launch

from jax_fa4 import accuracy, compile, masks, plan
from jax_fa4.cases import Case, Shape
from jax_fa4.spec import Arguments, make_spec

BLOCK = 128
MANY, FEW = plan.SizeClass.MANY_TILES, plan.SizeClass.FEW_TILES


@dataclasses.dataclass(frozen=True)
class Packed:
    """Sequences of `documents`, each with an id of its own, in any order; of some, only queries or keys have the id."""

    name: str
    variants: tuple[str, ...]
    shape: Shape
    size: plan.SizeClass = MANY
    documents: int = 9
    fast: bool = False

    def arguments(self, draw: int) -> dict:
        arguments, random = Case(self.name, self.variants, self.shape).make(draw), np.random.default_rng(draw)
        for name, length in (("q", self.shape.S), ("kv", self.shape.T)):
            ids = np.empty((self.shape.B, length), np.int32)
            for row in ids:
                cuts = np.sort(random.integers(0, length, self.documents - 1))
                row[:] = np.random.default_rng(draw).permutation(self.documents)[np.searchsorted(cuts, range(length))]
            ids[random.random(ids.shape) < 2 / length] = -3 if name == "q" else 31 - 32 * 50
            arguments[f"{name}_segment_ids"] = ids
        return arguments


# More than 32 key blocks for each tile (one group), or than 64 (the queue's); several works for a CTA, pairs of CTAs,
# split-KV with packed heads, one query tile, ranges that end on both sides, and a predicate, under which no block goes
# without mask.
FORMS = (
    Packed("two-groups", ("causal",), Shape(B=1, S=256, T=4500, H=2, K=1), documents=20, fast=True),
    Packed("many-groups", (), Shape(B=1, S=300, T=17000, H=1, K=1)),
    Packed("alone", (), Shape(B=2, S=600, T=700, H=2, K=1, D=128, E=128)),
    Packed("window", ("window",), Shape(B=1, S=900, T=900, H=2, K=2, D=128, E=128)),
    Packed("pairs-one-tile", ("causal",), Shape(B=1, S=900, T=1000, H=2, K=1, D=256, E=256)),
    Packed("pairs-two-tiles", ("window",), Shape(B=1, S=1100, T=1000, H=2, K=2, D=192, E=128)),
    Packed("split", ("causal",), Shape(B=1, S=50, T=2000, H=4, K=1, D=128, E=128), FEW),
    Packed("split-one-tile", ("window", "sinks"), Shape(B=2, S=200, T=1500, H=2, K=2, D=256, E=256), FEW),
    Packed("predicate", ("mask_function",), Shape(B=1, S=500, T=600, H=2, K=1, D=128, E=128)),
    Packed("lengths", ("q_lengths", "kv_lengths", "causal"), Shape(B=3, S=500, T=600, H=2, K=1)),
)  # fmt: skip


def artifact_of(form: Packed, draw: int):
    spec, _ = make_spec(Arguments(**form.arguments(draw)))
    return spec, compile.artifact(spec, ARCH, form.size, "forward")


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=f.name, marks=() if f.fast else pytest.mark.slow) for f in FORMS]
)
def test_only_blocks_with_an_id_of_the_tile_are_loaded_and_computed(form):
    emulated.require_library()
    for draw in range(1 if form.fast else 4):
        arguments = form.arguments(draw)
        spec, artifact = artifact_of(form, draw)
        assert artifact.spilled == ()
        results, spec, operands, report = launch(arguments, form.shape, draw, artifact, strict=True)
        assert report.complaints == []
        judged = accuracy.judge(results, spec, operands)
        assert all(row.ok for row in judged), "\n".join(map(str, judged))
        if form.size is MANY:
            rows, loaded, queries = visited(form, arguments, spec)
            main = max(report.kernels, key=lambda kernel: kernel["tensor_flops"])
            columns = spec.head_dim + spec.value_head_dim
            assert main["tensor_flops"] == 2 * rows * BLOCK * columns
            assert main["bytes"]["bulk_read"] == 2 * (loaded * BLOCK * columns + queries * spec.head_dim)


def visited(form: Packed, arguments: dict, spec) -> tuple[int, int, int]:
    """Of all heads: rows of each visit by a tile, key blocks that are loaded, and rows of Q that are.

    A tile visits the blocks that other masks leave and that have an id in common with it; the ids are few.
    """
    chosen, s = plan.choose_plan(spec, ARCH, form.size, "forward"), form.shape
    mask = functools.reduce(operator.and_, (x for x in spec.mask.parts if x != masks.Segments()), masks.Full())
    visits = loaded = works = 0
    for b in range(s.B):
        q_ids, kv_ids = (arguments[f"{name}_segment_ids"][b] for name in ("q", "kv"))
        lengths = [arguments.get(f"{name}_lengths", [size] * s.B)[b] for name, size in (("q", s.S), ("kv", s.T))]
        geometry = masks.Geometry.bottom_right(*map(int, lengths))
        for first in range(0, -(-s.S // chosen.q_rows), chosen.q_tiles):
            sets = [meeting(mask, first + i, chosen.q_rows, geometry, (q_ids, kv_ids)) for i in range(chosen.q_tiles)]
            visits += sum(max(len(blocks), 1) for blocks in sets) * chosen.q_rows
            loaded += max(len(set().union(*sets)), 1)
            works += 1
    return visits * s.H, loaded * s.H, works * s.H * chosen.q_tiles * chosen.q_rows


def meeting(mask: masks.Mask, tile: int, rows: int, geometry: masks.Geometry, ids: tuple) -> set[int]:
    start, _, _, end = masks.block_range(mask, tile, rows, BLOCK, geometry)
    own = ids[0][tile * rows : (tile + 1) * rows]
    blocks = {block: ids[1][block * BLOCK : (block + 1) * BLOCK] for block in range(start, end)}
    return {block for block, others in blocks.items() if np.intersect1d(own, others).size}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_every_interleaving_gives_the_same_bits(form):
    emulated.require_library()
    _, artifact = artifact_of(form, 0)
    first, *_ = launch(form.arguments(0), form.shape, 0, artifact)
    for seed in range(1, 20):
        again, _, _, report = launch(form.arguments(0), form.shape, seed, artifact)
        assert report.complaints == []
        assert_same_bits(again, first, f"under seed {seed}")
