"""Inputs for flash-attn-4's compiled kernels, and the float64 attention that they must agree with."""

import functools
import pathlib

import ml_dtypes
import numpy as np
import pytest

from jax_fa4.peers import compiled, flash_attn_4
from jax_fa4.peers.compiled import Kernel, aligned

BF16 = np.dtype(ml_dtypes.bfloat16)


@functools.cache
def folder(arch: str, case: str) -> pathlib.Path:
    """Compiled kernels of a case; skips the test without flash-attn-4."""
    try:
        return compiled.folder(arch, case)
    except compiled.MissingPeer as error:
        pytest.skip(str(error))


class Problem:
    """Random attention inputs and float64 results, [B, S, H, D]."""

    def __init__(self, length: int, heads: int, kv_heads: int, head_dim: int, causal: bool, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.scale, self.causal = head_dim**-0.5, causal
        shapes = [(1, length, h, head_dim) for h in (heads, kv_heads, kv_heads, heads)]
        self.q, self.k, self.v, self.do = (aligned(s, BF16, rng.standard_normal(s).astype(BF16)) for s in shapes)
        self.group = heads // kv_heads
        q, k, v = self.q.astype(np.float64), self._wide(self.k), self._wide(self.v)
        scores = np.einsum("bshd,bthd->bhst", q, k) * self.scale
        if causal:
            scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        top = scores.max(-1, keepdims=True)
        total = np.exp(scores - top).sum(-1, keepdims=True)
        self.p = np.exp(scores - top) / total
        self.o, self.lse = np.einsum("bhst,bthd->bshd", self.p, v), (top + np.log(total))[..., 0]

    def _wide(self, x):
        return np.repeat(x.astype(np.float64), self.group, 2)

    def gradients(self, o: np.ndarray) -> tuple[np.ndarray, ...]:
        do, k = self.do.astype(np.float64), self._wide(self.k)
        dp = np.einsum("bshd,bthd->bhst", do, self._wide(self.v))
        delta = np.einsum("bshd,bshd->bhs", do, o.astype(np.float64))
        ds = self.p * (dp - delta[..., None]) * self.scale
        dk = np.einsum("bhst,bshd->bthd", ds, self.q.astype(np.float64))
        dv = np.einsum("bhst,bshd->bthd", self.p, do)
        folded = [x.reshape(*x.shape[:2], -1, self.group, x.shape[-1]).sum(3) for x in (dk, dv)]
        return np.einsum("bhst,bthd->bshd", ds, k), *folded


def relative(x: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(x.astype(np.float64) - exact) / np.linalg.norm(exact))


def find(arch: str, case: str, kernel: str) -> pathlib.Path:
    (found,) = folder(arch, case).glob(f"{case}_FlashAttention{kernel}")
    return found


def forward(arch: str, case: str, problem: Problem, kernel: Kernel | None = None, **settings):
    """(o, lse, report)."""
    kernel = kernel or Kernel(find(arch, case, "Forward" + arch[:-1].replace("sm_", "Sm")))
    o, lse = aligned(problem.q.shape, BF16), aligned(problem.lse.shape, np.float32)
    report = kernel([problem.q, problem.k, problem.v, o, lse], problem.scale, **settings)
    return o, lse, report


def backward(arch: str, case: str, problem: Problem, kernel: Kernel | None = None, **settings):
    """(dq, dk, dv, reports) through flash-attn-4's three kernels."""
    head_dim, causal, _, _, deterministic = flash_attn_4.CASES[case]
    batch, length, heads, _ = problem.q.shape
    kv_heads = problem.k.shape[2]
    tile = 128 if arch == "sm_100a" or head_dim == 64 else 64 if causal else 80
    padded, padded_k = -(-length // tile) * tile, -(-length // 256) * 256
    o, lse = aligned(problem.q.shape, BF16, problem.o.astype(BF16)), aligned(problem.lse.shape, np.float32, problem.lse)
    delta, lse_log2 = (aligned((batch, heads, padded), np.float32) for _ in range(2))
    accumulator = aligned((batch, heads, padded * head_dim), np.float32)
    dq, dk, dv = (aligned(x.shape, BF16) for x in (problem.q, problem.k, problem.v))
    reports = [Kernel(find(arch, case, "BackwardPreprocess"))(
        [o, problem.do, delta, lse, lse_log2, accumulator], problem.scale, **settings)]
    grouped = kv_heads != heads
    sums = [aligned((batch, kv_heads, padded_k * head_dim), np.float32, 0) for _ in range(2)] if grouped else [dk, dv]
    tensors = [problem.q, problem.k, problem.v, problem.do, lse_log2, delta, accumulator, *sums]
    if deterministic:
        tensors.append(aligned((batch, heads, padded // 128, 2), np.int32, 0))
    kernel = kernel or Kernel(find(arch, case, "Backward" + arch[:-1].replace("sm_", "Sm")))
    reports.append(kernel(tensors, problem.scale, **settings))
    reports.append(Kernel(find(arch, case, "BackwardPostprocess"))([accumulator, dq], problem.scale, **settings))
    if grouped:
        finish = Kernel(find(arch, case, "BackwardPostprocess_1"))
        reports += [finish([sums[0], dk], problem.scale, **settings), finish([sums[1], dv], 1.0, **settings)]
    return dq, dk, dv, reports
