"""Faults that the judge names: each is a right kernel of ptx_cases.py with one thing spoiled."""

import dataclasses

import numpy as np
import pytest
from emu import emulated, ptx_case, ptx_cases

from jax_fa4 import emulator

CASES = {case.name: case for case in ptx_cases.cases()}
TILE, WGMMA = "tma_main_f16_2d_128B_0_8", "wgmma_n64_f16_f32_64B_KK_k16"
TCGEN05 = "tcgen05_m128_n64_group1_128B_KK_tensor_memory"

FAULTS = [  # case, text to replace, by what, message
    (WGMMA, "fence.proxy.async.shared::cta;", "", "missing fence.proxy.async: a tensor core"),
    (TCGEN05, "fence.proxy.async.shared::cta;", "", "missing fence.proxy.async: a tensor core"),
    (WGMMA, "st.shared.v4.b32 [at], {r0, r1, r2, r3};", "", "nothing was ever written at"),
    ("memory", "st.shared.v4.b32 [index], {a, b, c, d};", "", "nothing was ever written at"),
    ("matrix", "st.shared.v4.b32 [at], {a, b, c, d};", "", "nothing was ever written at"),
    (TCGEN05, "tcgen05.st.sync.aligned.32x32b.x32.b32 [at+256]", "tcgen05.st.sync.aligned.32x32b.x32.b32 [at+224]",
     "A is read from tensor memory lane"),
    (TCGEN05, "@p tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 512;", "", "512"),
    (TCGEN05, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 512;",
     "tcgen05.dealloc.cta_group::1.sync.aligned.b32 taddr, 256;", "were not allocated"),
    (TCGEN05, "mov.b32 v, 0;\nsetp.ne.s32 accumulate, v, 0;", "mov.b32 v, 1;\nsetp.ne.s32 accumulate, v, 0;",
     "accumulates onto lane"),
    (TILE, "mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], n;",
     "add.s32 v, n, 16;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], v;", "deadlock"),
    ("bulk", "expect_tx.shared::cta.b64 state, [bar], 1024;", "expect_tx.shared::cta.b64 state, [bar], 512;",
     "nothing was ever written at|bytes more were copied than"),
    ("mbarrier", "@!p mbarrier.arrive.shared::cta.b64 _, [emptyat];", "", "deadlock"),
    ("barrier", "bar.arrive 3, 128;", "", "deadlock"),
    ("bulk", "add.s32 to, at, 512;\ncp.async.bulk.shared", "add.s32 to, at, 520;\ncp.async.bulk.shared",
     "aligned to 16"),
    ("memory", "st.global.v2.b64 [out+512]", "st.global.v2.b64 [out+516]", "not aligned to 16"),
    ("memory", "st.global.v2.b64 [out+512]", "st.global.v2.b64 [out+524288]", "global memory"),
]


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


@pytest.mark.parametrize(("name", "old", "new", "message"), FAULTS)
def test_fault_is_named(name, old, new, message):
    text = CASES[name].text
    assert old in text
    with pytest.raises(emulator.EmulationError, match=message):
        for seed in range(8):
            emulated.run(CASES[name], seed, text.replace(old, new))


def test_too_few_bytes_expected_is_found_with_every_seed():
    text = CASES["bulk"].text.replace("state, [bar], 1024;", "state, [bar], 512;")
    for seed in range(12):
        with pytest.raises(emulator.EmulationError, match="nothing was ever written at|512 bytes more were copied"):
            emulated.run(CASES["bulk"], seed, text)


@pytest.mark.parametrize(("coordinates", "message"), [
    ((0, -1), "may not begin before 0"), ((-8, 0), "may not begin before 0"), ((4, 0), "multiple of 16 bytes")])
def test_store_coordinates_that_fault_on_hardware(coordinates, message):
    case = CASES[TILE]
    at = np.array([*coordinates, 0, 0, 0], np.int32).view(np.uint8)
    spoiled = dataclasses.replace(case, parameters=(*case.parameters[:-1],
                                                    np.concatenate([case.parameters[-1][:20], at])))
    with pytest.raises(emulator.EmulationError, match=message):
        emulated.run(spoiled)


def test_damaged_tensor_map():
    case = CASES[TILE]
    maps = [dataclasses.replace(p, extra_bits=1 << 11) if isinstance(p, ptx_case.Map) else p for p in case.parameters]
    with pytest.raises(emulator.EmulationError, match="interleaved"):
        emulated.run(dataclasses.replace(case, parameters=tuple(maps)))
