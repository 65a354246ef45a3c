"""What the Hopper kernels keep in local memory: nothing in their loops, but where it is said here."""

import dataclasses

import pytest
from kernels import machine_code
from kernels.sm90_cases import ARCH, CASES, kernel_of, slow_unless

from jax_fa4 import compile, masks, plan
from jax_fa4.kernels.sm90.bwd.plan import backward_plan
from jax_fa4.spec import AttentionSpec

HEAD_DIMS = pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
VARIANTS = ("segments", "softcap", "score-function", "mask-function", "kitchen-sink", "positions-window", "mqa")


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes of a thread, and instructions in steps, and in other loops within a loop (see `machine_code`)."""

    stack_bytes: int
    step: int = 0
    loop: int = 0


def limits(spec: AttentionSpec) -> Limits:
    """Of a backward kernel. Where steps have none, up to 40 bytes are for what is needed once a tile."""
    chosen = backward_plan(spec)
    if chosen.wide:
        return Limits(0)
    if chosen.spares_registers:  # mask functions that read arrays, and many variants at once
        return Limits(40, step=13)
    return Limits(40)


def check_backward(artifact, spec) -> None:
    used, allowed = machine_code.local_memory(artifact), limits(spec)
    stack = max(kernel.stack_bytes for kernel in artifact.kernels)
    found = Limits(stack, used.get("step", 0), used.get("loop", 0))
    assert found.stack_bytes <= allowed.stack_bytes and found.step <= allowed.step and found.loop <= allowed.loop, found


@HEAD_DIMS
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mask, group",
    [
        (masks.Full(), 1), (masks.Causal(), 1), pytest.param(masks.Causal(), 8, marks=pytest.mark.slow),
        pytest.param(masks.Causal() & masks.Window(1023, None), 1, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_plain_backward_kernels(head_dims, mask, group, deterministic):
    spec = AttentionSpec(
        "bfloat16", *head_dims, group, head_dims[0] ** -0.5, masks.canonical(mask), deterministic=deterministic
    )
    check_backward(compile.artifact(spec, ARCH, plan.SizeClass.MANY_TILES, "backward"), spec)


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_unless(("segments", "score-function")))
def test_backward_kernels_of_cases(name, deterministic):
    spec, _, artifact = kernel_of(CASES[name], "backward", deterministic=deterministic)
    check_backward(artifact, spec)


@pytest.mark.parametrize(
    "name, head_dims, deterministic",
    [("softcap", (128, 128), False), ("d192-e128", (192, 128), True)]
    + [
        pytest.param(name, head_dims, deterministic, marks=pytest.mark.slow)
        for name in VARIANTS
        for head_dims in ((96, 96), (128, 128), (192, 128), (256, 256))
        for deterministic in (False, True)
    ],
)
def test_backward_kernels_of_other_head_dims(name, head_dims, deterministic):
    D, E = head_dims
    spec, _, artifact = kernel_of(CASES[name].resized(D=D, E=E), "backward", deterministic=deterministic)
    check_backward(artifact, spec)


@pytest.mark.parametrize("name", slow_unless(("causal",)))
def test_forward_kernels_of_cases(name):
    """A few words once a tile, as where three warpgroups share the registers (D = 64)."""
    _, _, artifact = kernel_of(CASES[name], "forward")
    check_forward(artifact)


@pytest.mark.slow
@pytest.mark.parametrize("size", list(plan.SizeClass))
@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal()], ids=["full", "causal"])
@HEAD_DIMS
def test_plain_forward_kernels(head_dims, mask, size):
    spec = AttentionSpec("bfloat16", *head_dims, scale=head_dims[0] ** -0.5, mask=mask)
    check_forward(compile.artifact(spec, ARCH, size, "forward"))


def check_forward(artifact) -> None:
    assert all(kernel.stack_bytes <= 16 for kernel in artifact.kernels)
    used = machine_code.local_memory(artifact)
    assert set(used) <= {"tile"}, used


def test_a_word_is_found_in_the_loop_where_it_is():
    """A kernel that loops over tiles, within that over blocks, and beside over something else."""
    lines = [
        "        /*0000*/                   STL [R1], R2 ;", ".L_tile:",
        "        /*0010*/                   LDL R2, [R1] ;", ".L_block:",
        "        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;",
        "        /*0030*/                   LDL R3, [R1+0x4] ;",
        "        /*0040*/              @!P0 BRA `(.L_block) ;", ".L_wait:",
        "        /*0050*/                   STL [R1+0x8], R3 ;",
        "        /*0060*/               @P1 BRA `(.L_wait) ;",
        "        /*0070*/                   BRA.U UP0, `(.L_tile) ;",
        "        /*0080*/                   LDL R2, [R1] ;",
        "        /*0090*/                   EXIT ;",
    ]  # fmt: skip
    used, finds_steps = machine_code.of_kernel(lines)
    assert used == {"tile": 1, "step": 1, "loop": 1} and finds_steps
    straight = [line for line in lines if "BRA" not in line]
    assert machine_code.of_kernel(straight) == ({}, False)
