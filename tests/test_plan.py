"""plan.py: size classes, and which specs kernels take."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from jax_fa4 import masks, plan
from jax_fa4.errors import Unsupported
from jax_fa4.plan import SizeClass, choose_plan, refusal, size_class
from jax_fa4.scalar import trace
from jax_fa4.scores import Bias, ScoreMap, SoftCap
from jax_fa4.spec import AttentionSpec

SPEC = AttentionSpec("bfloat16", 128, 128, group=4, scale=0.1, mask=masks.Causal())
EVERY = [(arch, pass_) for arch, passes in plan.KERNELS.items() for pass_ in passes]


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((1, 1, 8192, 8), SizeClass.FEW_TILES),  # decoding: 8 tiles, many keys
        ((1, 1, 512, 8), SizeClass.MANY_TILES),  # too few keys to split
        ((8, 256, 8192, 8), SizeClass.FEW_TILES),  # 64 tiles
        ((8, 257, 8192, 8), SizeClass.MANY_TILES),  # 128 tiles
        ((4, 4096, 4096, 16), SizeClass.MANY_TILES),
    ],
)
def test_size_class(sizes, expected):
    assert size_class(*sizes) is expected


def test_symbolic_sizes_count_as_many_tiles():
    batch, rows = jax.export.symbolic_shape("b, s")
    assert size_class(batch, rows, rows, 8) is SizeClass.MANY_TILES


@pytest.mark.parametrize("arch, pass_", EVERY)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (72, 40)])
def test_every_head_dim_has_a_plan(arch, pass_, dims):
    spec = dataclasses.replace(SPEC, head_dim=dims[0], value_head_dim=dims[1])
    reason = refusal(spec, arch, (pass_,))
    if reason is not None:  # said in words that name the limit
        assert any(char.isdigit() for char in reason), reason
        pytest.skip(reason)
    chosen = choose_plan(spec, arch, SizeClass.MANY_TILES, pass_)
    assert dataclasses.is_dataclass(chosen)
    assert hash(chosen) == hash(choose_plan(spec, arch, SizeClass.MANY_TILES, pass_))


@pytest.mark.parametrize("arch, pass_", EVERY)
@pytest.mark.parametrize(
    "change, words",
    [
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "float64"}, "float64"),
        ({"score_mods": (Bias(),)}, "bias"),
        ({"mask": masks.MaskArray()}, "mask array"),
        ({"score_mods": (SoftCap(1.5e4),)}, "15000"),
        ({"head_dim": 260}, "260"),
        ({"head_dim": 68}, "68"),
    ],
)
def test_refusals_name_what_stands_in_the_way(arch, pass_, change, words):
    with pytest.raises(Unsupported) as error:
        choose_plan(dataclasses.replace(SPEC, **change), arch, SizeClass.MANY_TILES, pass_)
    assert words in error.value.reason
    assert refusal(dataclasses.replace(SPEC, **change), arch, (pass_,)) == error.value.reason


def test_backward_refuses_floating_operands_of_score_functions():
    function, _ = trace("score_mods", lambda s, b, h, q, k, slopes: s + slopes[h], (jnp.ones(8),), jnp.float32)
    spec = dataclasses.replace(SPEC, score_mods=(ScoreMap(function),))
    assert refusal(spec, "sm_90a", ("forward",)) is None
    assert "gradients" in refusal(spec, "sm_90a", ("backward",))


@pytest.mark.parametrize("dtype, refused", [("int8", False), ("uint16", False), ("float8_e4m3fn", True)])
def test_dtypes_of_arrays_that_functions_read(dtype, refused):
    function, _ = trace("mask", lambda b, h, q, k, x: x[h].astype(float) > 0, (jnp.ones(8, dtype),), None)
    spec = dataclasses.replace(SPEC, mask=masks.Predicate(function))
    reason = refusal(spec, "sm_90a")
    assert f"{dtype!r} has no place in a kernel's buffers" in reason if refused else reason is None


def test_unknown_architecture():
    with pytest.raises(Unsupported, match=r"sm_80.*sm_90a"):
        choose_plan(SPEC, "sm_80", SizeClass.MANY_TILES, "forward")


@pytest.mark.parametrize("kind, factor", [(AxisType.Auto, 1.25), (AxisType.Explicit, 0.75)])
def test_score_functions_have_slopes_under_any_mesh(kind, factor):
    """A slope is a program of scalars: nothing in it may belong to the caller's mesh."""
    with jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(kind,))):
        function, _ = trace("score_mods", lambda s, b, h, q, k: s + factor * h, (), jnp.float32)  # not traced before
        spec = dataclasses.replace(SPEC, score_mods=(ScoreMap(function),))
        assert refusal(spec, "sm_90a") is None and refusal(spec, "sm_100a") is None
