"""A buffer of shared memory that a bulk copy fills, a warp reads, and another bulk copy fills again.

    compute-sanitizer --tool racecheck python tests/emu/rereading.py WAY [FORM ...]

runs kernels of it on a real Hopper GPU (see `hopper/record.py`).
"""

import dataclasses
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from emu.ptx_case import Case

FENCE = "fence.proxy.async.shared::cta;"


@dataclasses.dataclass(frozen=True)
class Form:
    """What stands between the first reading and the second copy: before and after the buffer is given back, and in the
    copying warp behind its wait. `use`: what the warp does with the buffer; `last` says it is given back once more."""

    before: str = ""
    after: str = ""
    copier: str = ""
    use: str = "ld.shared.b32 a, [mine];"
    last: bool = False


FORMS = {
    "fenced": Form(before=FENCE),
    "unfenced": Form(),
    "fenced late": Form(after=FENCE),
    "fenced before the last": Form(after=FENCE, last=True),
    "fenced by the copier": Form(copier=FENCE),
    "fenced by one lane": Form(before="@first " + FENCE),
    "overwritten": Form(use="mov.b32 a, 3; st.shared.b32 [mine], a;"),
}

# (given back by a warp, awaited by another), for mbarrier or named barrier `number` of two
WAYS = {
    "mbarrier": (
        "bar.warp.sync -1;\n@first mbarrier.arrive.shared::cta.b64 _, [bar+{offset}];",
        "L{number}: mbarrier.try_wait.parity.shared::cta.b64 ready, [bar+{offset}], 0;\n@!ready bra L{number};",
    ),
    "named barrier": ("barrier.cta.arrive {number}, 64;", "barrier.cta.sync {number}, 64;"),
}  # fmt: skip

TEXT = """
.version 8.6
.target sm_90a
.address_size 64
.shared .align 128 .b8 tile[128];
.shared .align 8 .b8 barriers[24];
.visible .entry NAME(.param .u64 results, .param .u64 values)
{
.reg .b32 tid, a, b, at, mine, bar; .reg .b64 out, in, state; .reg .pred first, copies, ready;
ld.param.u64 out, [results]; ld.param.u64 in, [values];
mov.u32 tid, %tid.x; mov.b32 at, tile; mov.b32 bar, barriers;
setp.eq.s32 first, tid, 0; setp.ge.s32 copies, tid, 32;
@first mbarrier.init.shared::cta.b64 [bar], 1;
@first mbarrier.init.shared::cta.b64 [bar+8], 1;
@first mbarrier.init.shared::cta.b64 [bar+16], 1;
@first fence.mbarrier_init.release.cluster;
bar.sync 0;
@copies bra COPIES;
shl.b32 mine, tid, 2; mul.wide.u32 state, tid, 4; add.s64 out, out, state; add.s32 mine, mine, at;
full0: mbarrier.try_wait.parity.shared::cta.b64 ready, [bar], 0;
@!ready bra full0;
USE
BEFORE
GIVE
AFTER
full1: mbarrier.try_wait.parity.shared::cta.b64 ready, [bar], 1;
@!ready bra full1;
ld.shared.b32 b, [mine];
add.s32 a, a, b;
st.global.b32 [out], a;
ret;
COPIES:
setp.eq.s32 first, tid, 32;
@first mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], 128;
@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [in], 128, [bar];
AWAIT
COPIER
@first mbarrier.arrive.expect_tx.shared::cta.b64 state, [bar], 128;
@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [at], [in], 128, [bar];
ret;
}
"""


def case(form: str, way: str) -> Case:
    """The kernel; right results in every order of execution."""
    f, (give, await_) = FORMS[form], WAYS[way]
    one, two = dict(number=1, offset=8), dict(number=2, offset=16)
    parts = dict(USE=f.use, BEFORE=f.before, GIVE=give.format(**one), COPIER=f.copier,
                 AFTER=f.after + (give.format(**two) if f.last else ""),
                 AWAIT=await_.format(**one) + ("\n" + await_.format(**two) if f.last else ""))  # fmt: skip
    kernel = form.replace(" ", "_")
    text = TEXT.replace("NAME", kernel)
    for name, part in parts.items():
        text = text.replace(f"\n{name}\n", f"\n{part}\n")
    values = np.arange(32, dtype=np.uint32) * 5 + 1
    expected = values + (3 if form == "overwritten" else values)
    return Case(f"{form}, {way}", text, {"results": np.zeros(32, np.uint32), "values": values}, ("results", "values"),
                {"results": expected}, kernel, block=64)  # fmt: skip


if __name__ == "__main__":
    from emu.hopper import record

    record.Device()
    for chosen in sys.argv[2:] or FORMS:
        kernel = case(chosen, sys.argv[1])
        kernel.check(record.run(kernel))
        print(kernel.name, flush=True)
