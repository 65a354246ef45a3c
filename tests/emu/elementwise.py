"""Per-lane instructions: one table of PTX forms, from which each family's kernel is written. The same text runs on the
software GPU and on a real part.

In a form, the result is `d` (32 bits), `D` (64), `h` (16) or `p` (predicate); the operands are a b c (32 bits), A B C
(64), x y z (16) and the predicates q r. Kernel arguments: pointer to the results (one 64-bit word per form and thread,
upper bits zero), then to the inputs.
"""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
from emu.number_formats import (
    bf16_bits,
    bf16_value,
    exact_fma,
    f16_bits,
    f32,
    flush,
    maximum,
    minimum,
    relu_bf16,
    rounded_sum,
    saturated,
)

THREADS = 256


@dataclasses.dataclass(frozen=True)
class Form:
    """An instruction and what it must give. `expected` maps the inputs to an array; None: only a recording says."""

    text: str
    expected: Callable | None = None
    compare: str = "bits"  # or "float" (NaNs alike), or "approx:<largest relative error>:<largest absolute error>"

    @property
    def result(self) -> str:
        return re.search(r"\b([dDhp])\b", self.text).group(1)


def kernel(forms: list[Form], target: str) -> str:
    """A module whose entry `main` runs every form on every thread's inputs."""
    lines = [".version 8.8", f".target {target}", ".address_size 64", "",
             ".visible .entry main(.param .u64 results, .param .u64 inputs)", "{",
             ".reg .b32 tid, a, b, c;", ".reg .b64 out, in, offset, A, B, C;", ".reg .b16 x, y, z;",
             ".reg .pred q, r;",
             "mov.u32 tid, %tid.x;", "ld.param.u64 out, [results];", "ld.param.u64 in, [inputs];",
             "mul.wide.u32 offset, tid, 48;", "add.s64 in, in, offset;", "mul.wide.u32 offset, tid, 8;",
             "add.s64 out, out, offset;",
             "ld.global.v2.b64 {A, B}, [in];", "ld.global.b64 C, [in+16];", "ld.global.v2.b32 {a, b}, [in+24];",
             "ld.global.b32 c, [in+32];", "ld.global.v2.b16 {x, y}, [in+36];", "ld.global.b16 z, [in+40];",
             "setp.lt.s32 q, a, b;", "setp.lt.u32 r, b, c;"]
    for index, form in enumerate(forms):
        where = f"[out+{index * THREADS * 8}]"
        text = form.text if form.text[0] == "{" else form.text + ";"
        lines += ["{", ".reg .b32 d;", ".reg .b64 D, wide;", ".reg .b16 h;", ".reg .pred p;", text]
        lines += {"d": ["cvt.u64.u32 wide, d;"], "D": ["mov.b64 wide, D;"], "h": ["cvt.u64.u16 wide, h;"],
                  "p": ["selp.b64 wide, 1, 0, p;"]}[form.result]
        lines += [f"st.global.b64 {where}, wide;", "}"]
    return "\n".join([*lines, "ret;", "}", ""])


SPECIAL = np.array([0x00000000, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x00000001,
                    0x807FFFFF, 0x00800000, 0x7F7FFFFF, 0x3F7FFFFF, 0x4B000000, 0x42FE0000, 0xC2FC0000, 0x33800000],
                   np.uint32)


def inputs(kind: str, seed: int = 1) -> dict[str, np.ndarray]:
    """Operands of every thread. kind "integer": all bit patterns; "float": finite values of many sizes, and the special
    values in pairs."""
    rng = np.random.default_rng(seed)
    words = {name: rng.integers(0, 2**32, THREADS, dtype=np.uint32) for name in "abc"}
    wide = {name: rng.integers(0, 2**64, THREADS, dtype=np.uint64) for name in "ABC"}
    half = {name: rng.integers(0, 2**16, THREADS, dtype=np.uint16) for name in "xyz"}
    if kind == "integer":
        for name, step in zip("abc", (1, 7, 13), strict=True):
            words[name][:64] = (np.arange(64) * step % 40).astype(np.uint32)
            words[name][64:80] = [0, 1, 31, 32, 33, 63, 64, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 255, 256, 65535, 65536,
                                  0x55555555, 0xAAAAAAAA]
    else:
        for name in "abc":
            values = rng.standard_normal(THREADS) * 2.0 ** rng.integers(-12, 13, THREADS)
            words[name] = values.astype(np.float32).view(np.uint32).copy()
        words["a"][:64], words["b"][:64] = np.repeat(SPECIAL[:8], 8), np.tile(SPECIAL[:8], 8)
        words["a"][64:80], words["b"][80:96] = SPECIAL, SPECIAL
        for name in "xyz":
            half[name] = rng.standard_normal(THREADS).astype(np.float16).view(np.uint16)
    return {**words, **wide, **half}


def pack(values: dict[str, np.ndarray]) -> np.ndarray:
    """The kernel's input buffer: 48 bytes a thread."""
    fields = [(n, "<u8") for n in "ABC"] + [(n, "<u4") for n in "abc"] + [(n, "<u2") for n in "xyz"] + [("pad", "V6")]
    record = np.zeros(THREADS, dtype=fields)
    for name, value in values.items():
        record[name] = value
    return record.view(np.uint8)


# ---- integers --------------------------------------------------------------------------------------------------------

def s32(v):
    return v.view(np.int32)


def _rows(v):
    return zip(*[[int(e) for e in v[n]] for n in "abcABCxyz"], strict=True)


def python(width: int, source: str) -> Callable:
    """Expected value from an expression on Python integers: a b c A B C x y z, signed as sa sb ..."""
    code = compile(source, source, "eval")

    def signed(value, bits):
        return value - (1 << bits) if value >> bits - 1 else value

    def run(v):
        out = []
        for a, b, c, A, B, C, x, y, z in _rows(v):
            names = dict(a=a, b=b, c=c, A=A, B=B, C=C, x=x, y=y, z=z, sa=signed(a, 32), sb=signed(b, 32),
                         sc=signed(c, 32), sA=signed(A, 64), sB=signed(B, 64), sx=signed(x, 16), sy=signed(y, 16),
                         q=int(signed(a, 32) < signed(b, 32)), r=int(b < c), signed=signed)
            out.append(int(eval(code, {"min": min, "max": max, "abs": abs, "bin": bin, "int": int}, names))
                       & (1 << width) - 1)
        return np.array(out, np.uint64)

    return run


def integer(text: str, source: str, width: int = 32) -> Form:
    return Form(text, python(width, source))


INTEGER = [
    integer("add.s32 d, a, b", "a + b"), integer("add.u32 d, a, 7", "a + 7"), integer("sub.s32 d, a, b", "a - b"),
    integer("mul.lo.s32 d, a, b", "a * b"), integer("mul.hi.s32 d, a, b", "sa * sb >> 32"),
    integer("mul.hi.u32 d, a, b", "a * b >> 32"), integer("mul.wide.s32 D, a, b", "sa * sb", 64),
    integer("mul.wide.u32 D, a, b", "a * b", 64), integer("mul.wide.u16 d, x, y", "x * y"),
    integer("mul.wide.s16 d, x, y", "sx * sy"), integer("mad.lo.s32 d, a, b, c", "a * b + c"),
    integer("mad.hi.u32 d, a, b, c", "(a * b >> 32) + c"), integer("mad.wide.u32 D, a, b, A", "a * b + A", 64),
    integer("mad.lo.s64 D, A, B, C", "A * B + C", 64), integer("add.s64 D, A, B", "A + B", 64),
    integer("sub.s64 D, A, B", "A - B", 64), integer("mul.lo.s64 D, A, B", "A * B", 64),
    integer("mul.hi.u64 D, A, B", "A * B >> 64", 64), integer("neg.s32 d, a", "-a"), integer("neg.s64 D, A", "-A", 64),
    integer("abs.s32 d, a", "abs(sa)"), integer("min.s32 d, a, b", "min(sa, sb)"),
    integer("max.s32 d, a, b", "max(sa, sb)"), integer("min.u32 d, a, b", "min(a, b)"),
    integer("max.u32 d, a, b", "max(a, b)"), integer("min.s64 D, A, B", "min(sA, sB)", 64),
    integer("and.b32 d, a, b", "a & b"), integer("or.b32 d, a, b", "a | b"), integer("xor.b32 d, a, b", "a ^ b"),
    integer("not.b32 d, a", "~a"), integer("and.b64 D, A, B", "A & B", 64), integer("or.b64 D, A, B", "A | B", 64),
    integer("xor.b64 D, A, B", "A ^ B", 64), integer("not.b64 D, A", "~A", 64),
    integer("shl.b32 d, a, b", "a << min(b, 32)"), integer("shl.b64 D, A, b", "A << min(b, 64)", 64),
    integer("shr.u32 d, a, b", "a >> min(b, 32)"), integer("shr.s32 d, a, b", "sa >> min(b, 31)"),
    integer("shr.u64 D, A, b", "A >> min(b, 64)", 64), integer("shr.s64 D, A, b", "sA >> min(b, 63)", 64),
    integer("shl.b16 h, x, b", "x << min(b, 16)", 16), integer("shr.u16 h, x, b", "x >> min(b, 16)", 16),
    integer("shr.s16 h, x, b", "sx >> min(b, 15)", 16), integer("add.s16 h, x, y", "x + y", 16),
    integer("sub.s16 h, x, y", "x - y", 16), integer("mul.lo.s16 h, x, y", "x * y", 16),
    integer("neg.s16 h, x", "-x", 16), integer("and.b16 h, x, y", "x & y", 16), integer("or.b16 h, x, y", "x | y", 16),
    integer("shf.l.wrap.b32 d, a, b, c", "(b << (c & 31) | (a << (c & 31)) >> 32) if c & 31 else b"),
    integer("shf.r.wrap.b32 d, a, b, c", "(b << 32 | a) >> (c & 31)"),
    integer("shf.l.clamp.b32 d, a, b, c", "((b << 32 | a) << min(c, 32)) >> 32"),
    integer("prmt.b32 d, a, b, 0x5410", "a & 0xffff | (b & 0xffff) << 16"),
    integer("prmt.b32 d, a, b, 0x7632", "a >> 16 | b >> 16 << 16"),
    integer("prmt.b32 d, a, b, 0x3b2a", "(0xff if a >> 23 & 1 else 0) | (a >> 16 & 0xff) << 8 "
            "| (0xff0000 if a >> 31 else 0) | (a >> 24) << 24"),
    integer("lop3.b32 d, a, b, c, 0xe8", "a & b | a & c | b & c"), integer("lop3.b32 d, a, b, c, 0x96", "a ^ b ^ c"),
    integer("lop3.b32 d, a, b, c, 0xca", "a & b | ~a & c"),
    integer("popc.b32 d, a", "bin(a).count('1')"), integer("popc.b64 d, A", "bin(A).count('1')"),
    integer("clz.b32 d, a", "32 - a.bit_length()"), integer("clz.b64 d, A", "64 - A.bit_length()"),
    integer("brev.b32 d, a", "int(bin(a)[2:].zfill(32)[::-1], 2)"),
    integer("bfind.u32 d, a", "a.bit_length() - 1"),
    integer("bfe.u32 d, a, 5, 9", "a >> 5 & 511"), integer("bfe.s32 d, a, 5, 9", "signed(a >> 5 & 511, 9)"),
    integer("bfi.b32 d, a, b, 4, 12", "b & ~0xfff0 | (a & 0xfff) << 4"),
    integer("div.u32 d, a, 13", "a // 13"), integer("rem.u32 d, a, 13", "a % 13"),
    integer("div.s32 d, a, 13", "abs(sa) // 13 * (-1 if sa < 0 else 1)"),
    integer("rem.s32 d, a, 13", "abs(sa) % 13 * (-1 if sa < 0 else 1)"),
    integer("selp.b32 d, a, b, q", "a if q else b"), integer("selp.b64 D, A, B, q", "A if q else B", 64),
    integer("selp.b16 h, x, y, q", "x if q else y", 16),
    integer("mov.b64 D, {a, b}", "a | b << 32", 64), integer("mov.b32 d, {x, y}", "x | y << 16"),
    integer("{ .reg .b32 u; mov.b64 {u, d}, A; }", "A >> 32"), integer("{ .reg .b16 u; mov.b32 {h, u}, a; }", "a", 16),
    integer("mov.b32 d, 0x12345678", "0x12345678"),
    integer("cvt.u32.u16 d, x", "x"), integer("cvt.s32.s16 d, x", "sx"), integer("cvt.u16.u32 h, a", "a", 16),
    integer("cvt.s64.s32 D, a", "sa", 64), integer("cvt.u64.u32 D, a", "a", 64), integer("cvt.u32.u64 d, A", "A"),
    integer("cvt.s16.s8 h, x", "signed(x & 255, 8)", 16), integer("cvt.s32.s8 d, a", "signed(a & 255, 8)"),
    integer("cvt.u32.u8 d, a", "a & 255"), integer("cvt.sat.u8.s32 d, a", "min(max(sa, 0), 255)"),
    integer("setp.eq.s32 p, a, b", "a == b"), integer("setp.ne.b32 p, a, b", "a != b"),
    integer("setp.lt.s32 p, a, b", "sa < sb"), integer("setp.le.u32 p, a, b", "a <= b"),
    integer("setp.gt.s32 p, a, b", "sa > sb"), integer("setp.ge.u32 p, a, b", "a >= b"),
    integer("setp.lt.u64 p, A, B", "A < B"), integer("setp.gt.s64 p, A, B", "sA > sB"),
    integer("setp.ne.b16 p, x, y", "x != y"), integer("setp.lt.and.s32 p, a, b, r", "sa < sb and r"),
    integer("setp.ge.or.u32 p, a, b, r", "a >= b or r"), integer("and.pred p, q, r", "q and r"),
    integer("or.pred p, q, r", "q or r"), integer("xor.pred p, q, r", "q ^ r"), integer("not.pred p, q", "not q"),
    integer("mov.pred p, q", "q"),
    integer("mov.b32 d, a; @q add.s32 d, a, b; @!q sub.s32 d, a, b", "a + b if q else a - b"),
]


# ---- float32 ---------------------------------------------------------------------------------------------------------


def floating(text: str, function: Callable, compare: str = "float") -> Form:
    def expected(v):
        with np.errstate(all="ignore"):
            result = function(*[f32(v[n]) for n in "abc"])
            return np.asarray(result, np.float32).view(np.uint32).astype(np.uint64)

    return Form(text, expected, compare)


COMPARISONS = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: (a != b) & ~np.isnan(a) & ~np.isnan(b),
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)), "neu": lambda a, b: a != b, "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~np.isnan(a) & ~np.isnan(b), "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}  # fmt: skip


FLOAT = [
    floating("add.f32 d, a, b", lambda a, b, c: a + b), floating("add.rn.f32 d, a, b", lambda a, b, c: a + b),
    floating("sub.f32 d, a, b", lambda a, b, c: a - b), floating("mul.f32 d, a, b", lambda a, b, c: a * b),
    floating("mul.rn.ftz.f32 d, a, b", lambda a, b, c: flush(flush(a) * flush(b))),
    floating("add.ftz.f32 d, a, b", lambda a, b, c: flush(flush(a) + flush(b))),
    floating("add.rm.f32 d, b, c", lambda a, b, c: rounded_sum(b, c, -1)),
    floating("add.rp.f32 d, b, c", lambda a, b, c: rounded_sum(b, c, 1)),
    floating("add.rz.f32 d, b, c", lambda a, b, c: rounded_sum(b, c, 0)),
    Form("mul.rm.f32 d, b, c"),
    floating("fma.rn.f32 d, a, b, c", lambda a, b, c: exact_fma(a, b, c)),
    floating("fma.rn.ftz.f32 d, b, c, b", lambda a, b, c: flush(exact_fma(flush(b), c, flush(b)))),
    floating("div.rn.f32 d, a, b", lambda a, b, c: (a.astype(np.float64) / b).astype(np.float32)),
    floating("rcp.rn.f32 d, a", lambda a, b, c: (1 / a.astype(np.float64)).astype(np.float32)),
    floating("sqrt.rn.f32 d, a", lambda a, b, c: np.sqrt(a.astype(np.float64)).astype(np.float32)),
    floating("neg.f32 d, a", lambda a, b, c: -a), floating("abs.f32 d, a", lambda a, b, c: np.abs(a)),
    floating("max.f32 d, a, b", lambda a, b, c: maximum(a, b)),
    floating("min.f32 d, a, b", lambda a, b, c: minimum(a, b)),
    floating("max.NaN.f32 d, a, b", lambda a, b, c: np.where(np.isnan(a) | np.isnan(b), np.nan, maximum(a, b))),
    floating("max.ftz.f32 d, a, b", lambda a, b, c: maximum(flush(a), flush(b))),
    Form("selp.f32 d, a, b, q", lambda v: np.where(s32(v["a"]) < s32(v["b"]), v["a"], v["b"]).astype(np.uint64)),
    floating("mov.f32 d, 0f3FC00000", lambda a, b, c: np.full_like(a, 1.5)),
    *[Form(f"setp.{name}.f32 p, a, b", (lambda f: lambda v: f(f32(v["a"]), f32(v["b"])).astype(np.uint64))(function))
      for name, function in COMPARISONS.items()],
]


def approximate(text: str, function: Callable, relative: float, absolute: float = 0.0) -> Form:
    return floating(text, lambda a, b, c: function(a.astype(np.float64)), f"approx:{relative}:{absolute}")


# Bounds of the PTX manual: 2 ulp for ex2 and rcp, 2^-22 absolute (relative far from 1) for lg2, 2^-11 for tanh.
APPROXIMATE = [
    approximate("ex2.approx.ftz.f32 d, a", lambda a: np.where(2.0**a < 2.0**-126, 0, 2.0**a), 2.4e-7),
    approximate("ex2.approx.f32 d, a", lambda a: 2.0**a, 2.4e-7, 1.5e-45),
    approximate("lg2.approx.ftz.f32 d, a", lambda a: np.log2(flush(a.astype(np.float32)).astype(np.float64)), 2.4e-7,
                2.4e-7),
    approximate("lg2.approx.f32 d, a", np.log2, 2.4e-7, 2.4e-7),
    approximate("rcp.approx.ftz.f32 d, a", lambda a: flush((1 / flush(a.astype(np.float32)).astype(np.float64)).astype(
        np.float32)), 1.2e-7),
    approximate("rsqrt.approx.ftz.f32 d, a", lambda a: 1 / np.sqrt(flush(a.astype(np.float32)).astype(np.float64)),
                2.4e-7),
    approximate("sqrt.approx.ftz.f32 d, a", lambda a: np.sqrt(flush(a.astype(np.float32)).astype(np.float64)), 2.4e-7),
    approximate("tanh.approx.f32 d, a", np.tanh, 5e-4, 1e-38),
    floating("{ .reg .b32 u; abs.f32 u, c; min.f32 u, u, 0f40490FDB; sin.approx.f32 d, u; }",
             lambda a, b, c: np.sin(np.minimum(np.abs(c), np.float32(np.pi)).astype(np.float64)), "approx:0:2e-6"),
]


# ---- conversions and 16-bit arithmetic -------------------------------------------------------------------------------


CONVERT = [
    Form("cvt.rn.bf16x2.f32 d, a, b", lambda v: bf16_bits(f32(v["b"])) | bf16_bits(f32(v["a"])) << 16),
    Form("cvt.rn.f16x2.f32 d, a, b", lambda v: f16_bits(f32(v["b"])) | f16_bits(f32(v["a"])) << 16),
    Form("cvt.rn.bf16.f32 h, a", lambda v: bf16_bits(f32(v["a"]))),
    Form("cvt.rn.f16.f32 h, a", lambda v: f16_bits(f32(v["a"]))),
    Form("cvt.rz.f16.f32 h, c"),
    Form("cvt.rn.relu.bf16x2.f32 d, b, c", lambda v: relu_bf16(f32(v["c"])) | relu_bf16(f32(v["b"])) << 16),
    Form("cvt.f32.bf16 d, x", lambda v: v["x"].astype(np.uint64) << 16, "float"),
    Form("cvt.f32.f16 d, x", lambda v: v["x"].view(np.float16).astype(np.float32).view(np.uint32).astype(np.uint64),
         "float"),
    Form("cvt.rni.s32.f32 d, a", lambda v: saturated(np.rint(f32(v["a"])), True)),
    Form("cvt.rzi.s32.f32 d, a", lambda v: saturated(np.trunc(f32(v["a"])), True)),
    Form("cvt.rmi.s32.f32 d, a", lambda v: saturated(np.floor(f32(v["a"])), True)),
    Form("cvt.rpi.u32.f32 d, a", lambda v: saturated(np.ceil(f32(v["a"])), False)),
    Form("cvt.rzi.u32.f32 d, a", lambda v: saturated(np.trunc(f32(v["a"])), False)),
    Form("cvt.rn.f32.s32 d, a", lambda v: s32(v["a"]).astype(np.float32).view(np.uint32).astype(np.uint64)),
    Form("cvt.rn.f32.u32 d, a", lambda v: v["a"].astype(np.float32).view(np.uint32).astype(np.uint64)),
    Form("cvt.rn.f32.s64 d, A", lambda v: v["A"].view(np.int64).astype(np.float32).view(np.uint32).astype(np.uint64)),
    Form("cvt.rmi.f32.f32 d, a", lambda v: np.floor(f32(v["a"])).view(np.uint32).astype(np.uint64), "float"),
    Form("cvt.rni.f32.f32 d, a", lambda v: np.rint(f32(v["a"])).view(np.uint32).astype(np.uint64), "float"),
    Form("cvt.rzi.f32.f32 d, a", lambda v: np.trunc(f32(v["a"])).view(np.uint32).astype(np.uint64), "float"),
    Form("cvt.sat.f32.f32 d, a", lambda v: np.where(np.isnan(f32(v["a"])), 0, np.clip(f32(v["a"]), 0, 1)).astype(
        np.float32).view(np.uint32).astype(np.uint64) & 0x7FFFFFFF, "float"),
    Form("add.rn.f16 h, x, y", lambda v: f16_bits(v["x"].view(np.float16) + v["y"].view(np.float16))),
    Form("mul.rn.f16 h, x, y", lambda v: f16_bits(v["x"].view(np.float16) * v["y"].view(np.float16))),
    Form("fma.rn.f16 h, x, y, z", lambda v: f16_bits(
        v["x"].view(np.float16).astype(np.float64) * v["y"].view(np.float16) + v["z"].view(np.float16))),
    Form("add.rn.bf16 h, x, y", lambda v: bf16_bits(bf16_value(v["x"]) + bf16_value(v["y"]))),
    Form("mul.rn.bf16 h, x, y", lambda v: bf16_bits(bf16_value(v["x"]) * bf16_value(v["y"]))),
    Form("fma.rn.bf16 h, x, y, z"), Form("max.bf16 h, x, y", lambda v: bf16_bits(maximum(
        bf16_value(v["x"]), bf16_value(v["y"])))),
    Form("fma.rn.bf16x2 d, b, c, b"), Form("mul.rn.bf16x2 d, b, c"), Form("add.rn.f16x2 d, b, c"),
    Form("fma.rn.f16x2 d, b, c, b"), Form("max.f16x2 d, b, c"),
    Form("neg.bf16x2 d, b"), Form("abs.bf16x2 d, b"), Form("neg.f16 h, x"),
]


# What users' functions need besides; not in the recording of an H200.
def halves(name: str, dtype: str, to: Callable) -> Form:
    convert = f"cvt.rn.{dtype}.f32"
    text = f"{{ .reg .b16 u, v; {convert} u, a; {convert} v, b; setp.{name}.{dtype} p, u, v; }}"
    return Form(text, lambda v: COMPARISONS[name](to(f32(v["a"])), to(f32(v["b"]))).astype(np.uint64))


def through_bf16(values: np.ndarray) -> np.ndarray:
    return bf16_value(bf16_bits(values).astype(np.uint16))


def through_f16(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return values.astype(np.float16)


MORE = [
    Form("copysign.f32 d, a, b", lambda v: np.copysign(f32(v["b"]), f32(v["a"])).view(np.uint32).astype(np.uint64)),
    *[halves(name, *how) for name in COMPARISONS for how in (("bf16", through_bf16), ("f16", through_f16))],
]


# sm_100: two float32 in a 64-bit register, and mixed-precision fused multiply-add.
def pairs(text: str, function: Callable) -> Form:
    def expected(v):
        low = {n: (v[n] & 0xFFFFFFFF).astype(np.uint32).view(np.float32) for n in "ABC"}
        high = {n: (v[n] >> 32).astype(np.uint32).view(np.float32) for n in "ABC"}
        with np.errstate(all="ignore"):
            parts = [function(*h.values()).astype(np.float32).view(np.uint32).astype(np.uint64) for h in (low, high)]
        return parts[0] | parts[1] << 32

    return Form(text, expected, "float2")


PAIRS = [
    pairs("add.rn.f32x2 D, A, B", lambda a, b, c: a + b), pairs("sub.rn.f32x2 D, A, B", lambda a, b, c: a - b),
    pairs("mul.rn.f32x2 D, A, B", lambda a, b, c: a * b), pairs("fma.rn.f32x2 D, A, B, C", exact_fma),
    pairs("add.rm.f32x2 D, A, B", lambda a, b, c: rounded_sum(a, b, -1)),
    Form("fma.rn.f32.bf16 d, x, y, c", lambda v: exact_fma(bf16_value(v["x"]), bf16_value(v["y"]), f32(v["c"])).view(
        np.uint32).astype(np.uint64), "float"),
    floating("{ .reg .b32 u; mov.b32 u, b; max.f32 d, c, u, u; }", lambda a, b, c: maximum(c, b)),
]


@dataclasses.dataclass(frozen=True)
class Family:
    forms: list
    kind: str  # of inputs()
    target: str = "sm_90a"


FAMILIES = {
    "integer": Family(INTEGER, "integer"), "float": Family(FLOAT, "float"), "approximate": Family(APPROXIMATE, "float"),
    "convert": Family(CONVERT, "float"), "more": Family(MORE, "float"), "pairs": Family(PAIRS, "pairs", "sm_100a"),
}


def family_inputs(family: Family) -> dict[str, np.ndarray]:
    values = inputs("integer" if family.kind == "integer" else "float")
    if family.kind == "pairs":
        rng = np.random.default_rng(7)
        for name in "ABC":
            values[name] = (rng.standard_normal((THREADS, 2)) * 2.0 ** rng.integers(-8, 9, (THREADS, 2))).astype(
                np.float32).view(np.uint64)[:, 0].copy()
        values["x"], values["y"] = ((values[n] >> 16).astype(np.uint16) for n in "bc")
    return values


def agree(form: Form, got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Which threads' results (64-bit words) are right."""
    if form.compare == "bits":
        return got == expected
    if form.compare == "float2":
        halves = [[(x >> s & 0xFFFFFFFF).astype(np.uint32).view(np.float32) for s in (0, 32)] for x in (got, expected)]
        return np.logical_and(*[(g.view(np.uint32) == e.view(np.uint32)) | (np.isnan(g) & np.isnan(e))
                                for g, e in zip(*halves, strict=True)])
    g, e = (x.astype(np.uint32).view(np.float32) for x in (got, expected))
    same = (g.view(np.uint32) == e.view(np.uint32)) | (np.isnan(g) & np.isnan(e))
    if form.compare == "float":
        return same
    _, relative, absolute = form.compare.split(":")
    with np.errstate(all="ignore"):
        close = np.abs(g.astype(np.float64) - e) <= float(relative) * np.abs(e.astype(np.float64)) + float(absolute)
    return same | (close & np.isfinite(e))
