"""What the judge says of fences and waits that barriers do not replace: right kernels draw no complaint, and each fence
or wait left out is named. Kernels of ptx_cases.py, and some written here, with one thing spoiled."""

import numpy as np
import pytest
from emu import emulated, ptx_cases
from emu.ptx_case import Case

from jax_fa4 import emulator

CASES = {case.name: case for case in ptx_cases.cases()}
TCGEN05 = "tcgen05_m128_n64_group1_128B_KK_tensor_memory"
PAIR = next(name for name in CASES if name.startswith("tcgen05") and "group2" in name)
WGMMA, WGMMA_REGISTERS = "wgmma_n64_f16_f32_64B_KK_k16", "wgmma_n192_bf16_f32_128B_KMN_k16_registers"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync"
STORE_BEFORE = "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\n"
WAIT_WGMMA = "wgmma.wait_group.sync.aligned 0;\n"


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def spoiled(case: Case, old: str, new: str = "") -> str:
    assert case.text.count(old) == 1, f"{old!r} is {case.text.count(old)} times in {case.name}"
    return case.text.replace(old, new)


def run_seeds(case: Case, text: str, **settings) -> None:
    for seed in range(8):
        case.check(emulated.run(case, seed, text, **settings))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if name.startswith("tcgen05")])
def test_right_kernels_pass_strict_runs(name):
    run_seeds(CASES[name], CASES[name].text, strict=True)


TENSOR_FENCES = [  # case, text to leave out, its replacement, what is missing
    (TCGEN05, STORE_BEFORE, "tcgen05.wait::st.sync.aligned;\n", BEFORE),
    (TCGEN05, AFTER + ";\nsetp.eq.s32 p, rank, 0;", "setp.eq.s32 p, rank, 0;", AFTER),
    *[(name, "@!ready bra again;\n" + AFTER + ";\n", "@!ready bra again;\n", AFTER) for name in (TCGEN05, PAIR)],
]


@pytest.mark.parametrize(("name", "old", "new", "missing"), TENSOR_FENCES)
def test_missing_tensor_fence_is_named_in_strict_runs_alone(name, old, new, missing):
    text = spoiled(CASES[name], old, new)
    run_seeds(CASES[name], text)
    run_seeds(CASES[name], text, strict=emulator.Strict.LOADS | emulator.Strict.END)
    for strict in (True, emulator.Strict.FENCES):
        with pytest.raises(emulator.EmulationError, match=f"strict: tensor memory lane .* missing {missing}"):
            run_seeds(CASES[name], text, strict=strict)


WGMMA_RULES = [
    (WGMMA, "wgmma.fence.sync.aligned;\n", "", "missing wgmma.fence: an accumulator"),
    (WGMMA, WAIT_WGMMA, "", "missing wgmma.wait_group: a register is read"),
    (WGMMA, "wgmma.commit_group.sync.aligned;\n", "", "missing wgmma.wait_group: a register is read"),
    (WGMMA, WAIT_WGMMA, "wgmma.wait_group.sync.aligned 1;\n", "missing wgmma.wait_group: a register is read"),
    (WGMMA, WAIT_WGMMA, "add.f32 r3, r200, r200;\n" + WAIT_WGMMA, "missing wgmma.wait_group: a register is written"),
    (WGMMA, WAIT_WGMMA, "mov.b32 r100, r3;\nst.global.b32 [out], r100;\n" + WAIT_WGMMA, "a register is read"),
    (WGMMA_REGISTERS, WAIT_WGMMA, "xor.b32 r201, r201, r202;\n" + WAIT_WGMMA, "missing wgmma.wait_group"),
    (WGMMA_REGISTERS, "wgmma.fence.sync.aligned;\n", "wgmma.fence.sync.aligned;\nxor.b32 r201, r201, 0;\n",
     "missing wgmma.fence: a register of A"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), WGMMA_RULES)
def test_wgmma_register_rules(name, old, new, message):
    with pytest.raises(emulator.EmulationError, match=message):
        run_seeds(CASES[name], spoiled(CASES[name], old, new))


def test_accumulators_may_be_moved_in_flight():
    """As published kernels do: the assembler gives both ends of the move one register."""
    moved = "mov.b32 r100, r3;\n" + WAIT_WGMMA + "mov.b32 r3, r100;\n"
    run_seeds(CASES[WGMMA], spoiled(CASES[WGMMA], WAIT_WGMMA, moved))


@pytest.mark.parametrize("name", ["bulk", "cluster", TCGEN05])
def test_missing_fence_after_mbarrier_init(name):
    lines = CASES[name].text.split("\n")
    fence = next(i for i, line in enumerate(lines) if "fence.mbarrier_init" in line)
    text = "\n".join(lines[:fence] + lines[fence + 1 :])
    if name == TCGEN05:  # a proxy fence after it would do as well
        assert text.index("fence.proxy.async") < text.index("mbarrier.init")
    with pytest.raises(emulator.EmulationError, match="missing fence.mbarrier_init"):
        run_seeds(CASES[name], text)


EMPTY = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry main(.param .u64 results) {
.reg .b32 tid, v; .reg .b64 out, at;
ld.param.u64 out, [results]; mov.u32 tid, %tid.x; mul.wide.u32 at, tid, 4; add.s64 out, out, at;
wgmma.fence.sync.aligned; wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
st.global.b32 [out], tid; exit; }
"""


def test_waits_without_any_product():
    case = Case("empty", EMPTY, {"results": np.zeros(128, np.uint32)}, ("results",),
                {"results": np.arange(128, dtype=np.uint32)}, block=128)
    run_seeds(case, EMPTY)
