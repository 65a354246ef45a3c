"""Compile flash-attn-4's own kernels, unchanged, to host object + PTX, without a GPU.

    python jax_fa4/peers/flash_attn_4.py sm_100a OUTPUT_DIRECTORY case...

Needs flash-attn-4 (4.0.0b36) and torch. Each kernel goes to OUTPUT_DIRECTORY/<case>_<kernel class>/: kernel.ptx, host.o
and call.json. The kernels are compiled without TVM-FFI argument packing, so that they are called with pointers to
arguments; the device code is the same.
"""

import json
import os
import pathlib
import shutil
import sys
import tempfile

CASES = {  # name -> head dim, causal, KV heads of 4 query heads, backward, deterministic
    "d128_causal": (128, True, 4, False, False), "d128_full": (128, False, 4, False, False),
    "d64_causal": (64, True, 4, False, False), "d64_full": (64, False, 4, False, False),
    "d128_causal_gqa4": (128, True, 1, False, False), "d256_full": (256, False, 4, False, False),
    "d128_causal_bwd": (128, True, 4, True, False), "d128_full_bwd": (128, False, 4, True, False),
    "d64_causal_bwd": (64, True, 4, True, False), "d64_full_bwd": (64, False, 4, True, False),
    "d128_full_bwd_deterministic": (128, False, 4, True, True),
    "d128_causal_gqa4_bwd": (128, True, 1, True, False),
}
SMS = {"sm_100a": 148, "sm_90a": 132}


def describe(argument) -> list | None:
    """An argument as JSON: ["tensor", rank], ["float"], ["int", value], ["stream"] or null."""
    if argument is None:
        return None
    if hasattr(argument, "element_type") and hasattr(argument, "shape"):
        return ["tensor", len(argument.shape)]
    name = type(argument).__name__
    if "Stream" in name:
        return ["stream"]
    if isinstance(argument, int):
        return ["int", argument]
    return ["float"] if name in ("float", "Float32") else None


def main() -> int:
    arch, out = sys.argv[1], pathlib.Path(sys.argv[2])
    os.environ.update(CUTE_DSL_ARCH=arch, FLASH_ATTENTION_ARCH=arch.rstrip("a"), FLASH_ATTENTION_FAKE_TENSOR="1",
                      FLASH_ATTENTION_NUM_SMS=str(SMS[arch]), FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED="0")
    import cutlass.utils
    import torch
    from cutlass import cute
    from torch._subclasses.fake_tensor import FakeTensorMode

    hardware = cutlass.utils.HardwareInfo  # asks the driver; there is none
    hardware.__init__ = lambda self, *a, **k: None
    hardware.get_max_active_clusters = lambda self, cluster_size=1, *a, **k: SMS[arch] // cluster_size
    hardware.get_device_multiprocessor_count = lambda self: SMS[arch]
    hardware.get_l2_cache_size_in_bytes = lambda self: 126 << 20 if arch == "sm_100a" else 50 << 20
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda *a: (10, 0) if arch == "sm_100a" else (9, 0)
    original = cute.compile
    made: list[str] = []

    class NotRun:
        def __call__(self, *a, **k):
            raise RuntimeError("not to be run")

    def compile_and_keep(function, *arguments, options="", **keywords):
        arguments = [cute.runtime.make_fake_stream() if "Stream" in type(a).__name__ else a for a in arguments]
        name = f"{case}_{type(function).__name__}"
        again = made.count(name)
        made.append(name)
        folder = out / (f"{name}_{again}" if again else name)
        folder.mkdir(parents=True, exist_ok=True)
        dump = tempfile.mkdtemp()
        compiled = original(function, *arguments, options=f"--keep-ptx --dump-dir={dump}", **keywords)
        (folder / "host.o").write_bytes(compiled.dump_to_object("known"))
        (ptx,) = pathlib.Path(dump).rglob("*.ptx")
        shutil.copy(ptx, folder / "kernel.ptx")
        shutil.rmtree(dump)
        (folder / "call.json").write_text(json.dumps([describe(a) for a in arguments]))
        return NotRun()

    cute.compile = compile_and_keep
    from flash_attn.cute import interface

    for case in sys.argv[3:]:
        head_dim, causal, kv_heads, backward, deterministic = CASES[case]
        for cached in (interface._flash_attn_fwd, interface._flash_attn_bwd, interface._bwd_preprocess,
                       interface._bwd_postprocess_convert):
            cached.compile_cache.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            q, k, v = (torch.empty(2, 1024, heads, head_dim, dtype=torch.bfloat16, device="cuda")
                       for heads in (4, kv_heads, kv_heads))
            if backward:
                lse = torch.empty(2, 4, 1024, dtype=torch.float32, device="cuda")
                interface._flash_attn_bwd(q, k, v, q, q, lse, causal=causal, deterministic=deterministic)
            else:
                interface._flash_attn_fwd(q, k, v, causal=causal, return_lse=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
