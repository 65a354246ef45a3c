"""PTX of single tensor-core products, written for a shape: operands are copied byte by byte from a buffer into shared
memory (so the layout is the test's, see operands.py), multiplied, and D is written out as the registers hold it."""

PROLOGUE = """.version 8.6
.target {target}
.address_size 64

.extern .shared .align 1024 .b8 dynamic[];
.shared .align 8 .b8 arrived[8];
.shared .align 8 .b8 address_box[8];

.visible .entry main(.param .u64 results, .param .u64 operands, .param .b32 bytes, .param .u64 a_descriptor,
    .param .u64 b_descriptor, .param .b32 instruction){cluster}
{{
.reg .b32 tid, warp, i, n, at, v, base, bar, idesc, taddr, zero, rank;
.reg .b64 out, in, offset, ad, bd, base64;
.reg .pred p, accumulate, first, ready;
.reg .b32 r<256>;
ld.param.u64 out, [results];
ld.param.u64 in, [operands];
ld.param.b32 n, [bytes];
ld.param.u64 ad, [a_descriptor];
ld.param.u64 bd, [b_descriptor];
ld.param.b32 idesc, [instruction];
mov.u32 tid, %tid.x;
mov.u32 rank, %cluster_ctarank;
shr.u32 warp, tid, 5;
mov.b32 zero, 0;
setp.eq.s32 first, tid, 0;
mov.b32 base, dynamic;
mul.wide.u32 offset, rank, n;         // each CTA of a pair has operands of its own
add.s64 in, in, offset;
shl.b32 i, tid, 4;
copy:
setp.ge.u32 p, i, n;
@p bra copied;
cvt.u64.u32 offset, i;
add.s64 offset, offset, in;
ld.global.v4.b32 {{r0, r1, r2, r3}}, [offset];
add.s32 at, base, i;
st.shared.v4.b32 [at], {{r0, r1, r2, r3}};
add.s32 i, i, 2048;
bra copy;
copied:
shr.u32 v, base, 4;                   // descriptors hold addresses relative to `dynamic`
and.b32 v, v, 0x3fff;
cvt.u64.u32 base64, v;
add.s64 ad, ad, base64;
add.s64 bd, bd, base64;
fence.proxy.async.shared::cta;
bar.sync 0;
"""

STORE = """mul.wide.u32 offset, rank, {rank_bytes};
add.s64 out, out, offset;
mul.wide.u32 offset, tid, 4;
add.s64 out, out, offset;
"""


def _registers(first: int, count: int) -> str:
    return "{" + ", ".join(f"r{i}" for i in range(first, first + count)) + "}"


def _write(count: int, first: int = 0, slot: int = 0) -> str:
    """Register i of every thread to results[(slot + i) * 128 + thread]."""
    return "".join(f"st.global.b32 [out+{(slot + i) * 512}], r{first + i};\n" for i in range(count))


def wgmma(n: int, dtype: str = "bf16", d_type: str = "f32", transpose_a=False, transpose_b=False, scale_a=1, scale_b=1,
          a_in_registers=False, steps: int = 1, step_a: int = 0, step_b: int = 0) -> str:
    """D = A B (+ D over `steps` of K = 16, descriptors advanced by step_a and step_b bytes). 128 threads. With
    a_in_registers the first 2048 bytes of the operands are A's registers, [4][128 threads]."""
    count = n // 2 if d_type == "f32" else n // 4
    body = PROLOGUE.format(target="sm_90a", cluster="")
    if a_in_registers:
        body += "mul.wide.u32 offset, tid, 4;\nadd.s64 in, in, offset;\n"
        body += "".join(f"ld.global.b32 r{200 + i}, [in+{512 * i}];\n" for i in range(4))
    body += "".join(f"mov.b32 r{i}, 0x7fc07fc0;\n" for i in range(count))  # NaN: scale-d 0 must ignore it
    body += "wgmma.fence.sync.aligned;\n"
    for step in range(steps):
        a = _registers(200, 4) if a_in_registers else "ad"
        tail = [str(scale_a), str(scale_b)]
        tail += [] if a_in_registers else [str(int(transpose_a))]
        tail += [str(int(transpose_b))]
        body += f"mov.b32 v, {step};\nsetp.ne.s32 accumulate, v, 0;\n"
        body += (f"wgmma.mma_async.sync.aligned.m64n{n}k16.{d_type}.{dtype}.{dtype} {_registers(0, count)}, {a}, bd, "
                 f"accumulate, {', '.join(tail)};\n")
        body += f"add.s64 ad, ad, {step_a // 16};\nadd.s64 bd, bd, {step_b // 16};\n"
    body += "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;\n"
    return body + STORE.format(rank_bytes=0) + _write(count) + "ret;\n}\n"


def _allocate(group: int, columns: int) -> str:
    return f"""mov.b32 at, address_box;
setp.eq.s32 p, warp, 0;
@!p bra allocated;
tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [at], {columns};
tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
allocated:
tcgen05.fence::before_thread_sync;
bar.sync 0;
tcgen05.fence::after_thread_sync;
ld.shared.b32 taddr, [at];
mov.b32 bar, arrived;
@first mbarrier.init.shared::cta.b64 [bar], 1;
@first fence.mbarrier_init.release.cluster;
"""


def _deallocate(group: int, columns: int) -> str:
    cluster = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n" if group == 2 else ""
    return f"""tcgen05.fence::before_thread_sync;
bar.sync 0;
{cluster}setp.eq.s32 p, warp, 0;
@p tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 taddr, {columns};
ret;
}}
"""


def _load_all(columns: int) -> str:
    """D's columns 0.. of all 128 lanes, 32 columns at a time."""
    text = "shl.b32 at, warp, 21;\nadd.s32 at, at, taddr;\n"
    for first in range(0, columns, 32):
        text += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(0, 32)}, [at+{first}];\n"
        text += "tcgen05.wait::ld.sync.aligned;\n" + _write(32, 0, first)
    return text


def tcgen05(group: int, columns: int, a_in_tensor_memory=False, steps: int = 1, step_a: int = 0,
            step_b: int = 0, clear=False) -> str:
    """D (columns 0 to `columns`) = A B over `steps` of K = 16. With a_in_tensor_memory the operands begin with the 128
    lanes x 32 columns of A, which a store puts into columns 256 and up. With `clear`, D's columns are cleared before: a
    product of 64 rows leaves half of the lanes alone."""
    cluster = "\n.reqnctapercluster 2" if group == 2 else ""
    body = PROLOGUE.format(target="sm_100a", cluster=cluster) + _allocate(group, 512)
    if a_in_tensor_memory:
        body += "mul.wide.u32 offset, tid, 128;\nadd.s64 in, in, offset;\n"
        body += "".join(f"ld.global.v4.b32 {_registers(4 * i, 4)}, [in+{16 * i}];\n" for i in range(8))
        body += ("shl.b32 at, warp, 21;\nadd.s32 at, at, taddr;\n"
                 f"tcgen05.st.sync.aligned.32x32b.x32.b32 [at+256], {_registers(0, 32)};\n"
                 "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\n")
    if clear:
        body += "shl.b32 at, warp, 21;\nadd.s32 at, at, taddr;\nmov.b32 v, 0;\n"
        zeros = "{" + ", ".join(["v"] * 32) + "}"
        body += "".join(f"tcgen05.st.sync.aligned.32x32b.x32.b32 [at+{c}], {zeros};\n" for c in range(0, columns, 32))
        body += "tcgen05.wait::st.sync.aligned;\ntcgen05.fence::before_thread_sync;\n"
    body += "bar.sync 0;\n" if group == 1 else "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n"
    body += "tcgen05.fence::after_thread_sync;\n"
    body += "setp.eq.s32 p, rank, 0;\nand.pred p, p, first;\n@!p bra issued;\n"
    for step in range(steps):
        a = f"[taddr+{256 + 8 * step}]" if a_in_tensor_memory else "ad"
        body += f"mov.b32 v, {step};\nsetp.ne.s32 accumulate, v, 0;\n"
        body += f"tcgen05.mma.cta_group::{group}.kind::f16 [taddr], {a}, bd, idesc, accumulate;\n"
        body += f"add.s64 ad, ad, {step_a // 16};\nadd.s64 bd, bd, {step_b // 16};\n"
    if group == 1:
        body += "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
    else:
        body += (".reg .b16 both;\nmov.b16 both, 3;\ntcgen05.commit.cta_group::2.mbarrier::arrive::one"
                 ".shared::cluster.multicast::cluster.b64 [bar], both;\n")
    body += """issued:
again:
mbarrier.try_wait.parity.shared::cta.b64 ready, [bar], 0;
@!ready bra again;
tcgen05.fence::after_thread_sync;
"""
    return body + STORE.format(rank_bytes=columns * 512) + _load_all(columns) + _deallocate(group, 512)


def tensor_memory_shapes(shape: str, repeat: int, registers: int, pack: bool, split: int = 0) -> str:
    """Rows stored (32 columns from 0), and loaded in the shape; then registers stored in the shape, and the rows read
    back. Operands: [registers][128 threads] words, then 128 lanes x 32 columns."""
    extra = f", {split}" if split else ""
    body = PROLOGUE.format(target="sm_100a", cluster="") + _allocate(1, 64) + STORE.format(rank_bytes=0)
    body += "shl.b32 at, warp, 21;\nadd.s32 at, at, taddr;\nmul.wide.u32 offset, tid, 128;\n"
    rows = "".join(f"ld.global.v4.b32 {_registers(128 + 4 * i, 4)}, [offset+{16 * i}];\n" for i in range(8))
    body += f"add.s64 offset, offset, in;\nadd.s64 offset, offset, {registers * 512};\n" + rows
    body += f"tcgen05.st.sync.aligned.32x32b.x32.b32 [at], {_registers(128, 32)};\ntcgen05.wait::st.sync.aligned;\n"
    load = f"tcgen05.ld.sync.aligned.{shape}.x{repeat}{'.pack::16b' if pack else ''}.b32"
    store = f"tcgen05.st.sync.aligned.{shape}.x{repeat}{'.unpack::16b' if pack else ''}.b32"
    body += f"{load} {_registers(0, registers)}, [at]{extra};\ntcgen05.wait::ld.sync.aligned;\n" + _write(registers)
    body += "mul.wide.u32 offset, tid, 4;\nadd.s64 in, in, offset;\n"
    body += "".join(f"ld.global.b32 r{i}, [in+{512 * i}];\n" for i in range(registers))
    body += f"{store} [at]{extra}, {_registers(0, registers)};\ntcgen05.wait::st.sync.aligned;\n"
    body += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {_registers(128, 32)}, [at];\ntcgen05.wait::ld.sync.aligned;\n"
    return body + _write(32, 128, registers) + _deallocate(1, 64)
