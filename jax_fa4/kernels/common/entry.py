"""The host function around a kernel class: pointers and sizes in, tensors and `Dims` for the kernel.

A kernel class has ``buffers`` (see `abi`) and ``__call__(self, g, dims, stream)``, a ``@cute.jit`` method that launches
one or several kernels on `stream`. ``g.<name>`` is the ``cute.Tensor`` of the buffer of that name.
"""

from types import SimpleNamespace

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from jax_fa4.kernels.common import abi

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "float64": cutlass.Float64,
    "int8": cutlass.Int8,
    "int16": cutlass.Int16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
    "uint16": cutlass.Uint16,
    "uint32": cutlass.Uint32,
    "bool": cutlass.Uint8,  # a byte each, as XLA stores them
}


def tensor(pointer: cute.Pointer, buffer: abi.Buffer, dims: abi.Dims) -> cute.Tensor:
    """The buffer as a row-major tensor: Int32 shape, Int64 strides divisible by the static sizes inside them.

    A buffer without dims is a tensor of shape (1,).
    """
    shape = tuple(abi.evaluate(size, dims) for size in buffer.shape) or (1,)
    strides = []
    stride, static = 1, 1
    for size in reversed(shape):
        strides.insert(0, stride if isinstance(stride, int) else cute.assume(stride, divby=static))
        static *= size if isinstance(size, int) else 1
        both_static = isinstance(size, int) and isinstance(stride, int)
        stride = size * stride if both_static else Int64(size) * Int64(stride)
    return cute.make_tensor(pointer, cute.make_layout(shape, stride=tuple(strides)))


@cute.jit
def entry(
    kernel: cutlass.Constexpr,
    B: Int32,
    S: Int32,
    T: Int32,
    H: Int32,
    K: Int32,
    sm_count: Int32,
    stream: cuda.CUstream,
    *pointers: cute.Pointer,
):
    """The compiled host function (more than eight parameters: it is the machine-level calling convention itself)."""
    dims = abi.Dims(B, S, T, H, K, sm_count)
    tensors = {b.name: tensor(p, b, dims) for b, p in zip(kernel.buffers, pointers, strict=True)}
    kernel(SimpleNamespace(**tensors), dims, stream)


def fake_args(kernel) -> tuple:
    """Arguments for ``cute.compile(entry, *fake_args(kernel))``: types only, no memory."""
    pointers = [
        cute.runtime.nullptr(DTYPES[b.dtype], cute.AddressSpace.gmem, assumed_align=abi.ALIGNMENT_BYTES)
        for b in kernel.buffers
    ]
    return kernel, *([Int32(1)] * len(abi.DIM_NAMES)), cuda.CUstream(0), *pointers
