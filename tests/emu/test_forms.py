"""What our kernels ask of the software GPU was asked of it before, by a kernel known to be right or a small test."""

import jax
import jax.numpy as jnp
import pytest
from emu import emulated, forms, ptx_cases

import jax_fa4
from jax_fa4 import emulator


@pytest.fixture(scope="module", autouse=True)
def _library():
    emulated.require_library()


def tested_by_hand() -> set[str]:
    with forms.collected() as reports:
        for case in ptx_cases.cases():
            case.check(emulated.run(case))
    return forms.of_reports(reports)


def test_known_forms_are_recorded():
    known = forms.known()
    assert {"ex2.approx.ftz.f32", "setmaxnreg.inc.sync.aligned.u32"} <= known
    assert any(form.startswith("tcgen05.mma instruction") for form in known)
    assert any(form.startswith("wgmma shape") for form in known)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("causal", [False, True])
def test_our_kernels_use_known_forms(arch, causal):
    shape = (1, 300, 2, 128)
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 3))
    emulator.take_reports()
    with emulator.emulate():
        out = jax_fa4.attention(q, k, v, causal=causal, backend=f"emulate:{arch}")
        jax.block_until_ready(out)
    executed = forms.of_reports(emulator.take_reports())
    unknown = executed - forms.known() - tested_by_hand()
    print(f"{len(executed)} forms, {len(unknown)} of them new:", *sorted(unknown), sep="\n  ")
    assert not unknown
