"""The cases of ptx_cases.py that multiply matrices."""

import numpy as np
from emu import operands as op
from emu import tensor_ptx
from emu.ptx_case import Case


def _place(matrices: list, swizzles: list, majors: list, dtype: str) -> tuple:
    """Operand buffer with A at 0, where B begins in it, and (leading, stride) of each."""
    start_b = 16384 if matrices[0] is None else max(16384, matrices[0].size * 2)
    shared = np.zeros(start_b + max(32768, matrices[1].size * 2), np.uint8)
    layouts = []
    for matrix, start, swizzle, major in zip(matrices, (0, start_b), swizzles, majors, strict=True):
        layouts.append(None if matrix is None else op.place(shared, start, op.to_bits(matrix, dtype), swizzle, major))
    return shared, start_b, layouts


def wgmma(n, dtype, d_type, swizzle, major_a, major_b, depth=16, in_registers=False, scale_b=1,
          values=op.integers, no_leading=False) -> Case:
    """`no_leading`: MN-major operands of one swizzle line in width are described without what they have no use for."""
    rng = np.random.default_rng(n)
    width = 64 if major_b else 8
    rows_b = -(-n // width) * width
    depth_placed = 64
    a, b = values(rng, (64, depth_placed)), values(rng, (rows_b, depth_placed))
    pair = [None if in_registers else a, b]
    shared, start_b, (layout_a, layout_b) = _place(pair, [swizzle, swizzle], [major_a, major_b], dtype)
    if no_leading:
        layout_a, layout_b = (0, layout_a[1]), (0, layout_b[1])
    if in_registers:
        bits = op.to_bits(a, dtype)
        registers = np.zeros((4, 128), np.uint32)
        for thread in range(128):
            for reg in range(4):
                row, k = thread // 32 * 16 + thread % 32 // 4 + reg % 2 * 8, reg // 2 * 8 + thread % 4 * 2
                registers[reg, thread] = int(bits[row, k]) | int(bits[row, k + 1]) << 16
        shared[:2048] = registers.view(np.uint8).reshape(-1)
    steps = depth // 16
    assert steps == 1 or SPAN_OK[swizzle] >= depth
    text = tensor_ptx.wgmma(n, dtype, d_type, major_a, major_b, 1, scale_b, in_registers, steps,
                            op.k_step(64, swizzle, major_a, 16), op.k_step(rows_b, swizzle, major_b, 16))
    wide_a, wide_b = a[:, :depth].astype(np.float64), b[:n, :depth].astype(np.float64)
    thread, i = np.arange(128), np.arange(n // 2)[:, None]
    where = (thread // 32 * 16 + thread % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + thread % 4 * 2 + i % 2)
    elements = (scale_b * (wide_a @ wide_b.T) + 0.0)[where].astype(np.float32)
    tolerance = None
    if values is not op.integers:
        # Products are exact; a sum of K terms in float32, rounded or truncated at each step, is off by less than this.
        tolerance = depth * 2.0**-23 * (np.abs(wide_a) @ np.abs(wide_b).T)[where]

        def expected(results):
            assert (np.abs(results.view(np.float32) - elements) <= tolerance).all()
    elif d_type == "f32":
        expected = elements.view(np.uint32)
    else:
        halves = elements.astype(np.float16).view(np.uint16).astype(np.uint32)
        expected = halves[0::2] | halves[1::2] << 16
    a_descriptor = 0 if in_registers else op.wgmma_descriptor(0, *layout_a, swizzle)
    kind = ("" if values is op.integers else "_" + values.__name__) + ("_no_leading" if no_leading else "")
    return Case(f"wgmma_n{n}_{dtype}_{d_type}_{swizzle}_{'MN' if major_a else 'K'}{'MN' if major_b else 'K'}"
                f"_k{depth}{'_registers' if in_registers else ''}{kind}", text,
                {"results": np.zeros((n // 2 if d_type == "f32" else n // 4, 128), np.uint32), "operands": shared},
                ("results", "operands", np.uint32(shared.nbytes), np.uint64(a_descriptor),
                 np.uint64(op.wgmma_descriptor(start_b, *layout_b, swizzle)), np.uint32(0)), {"results": expected},
                block=128, shared=shared.nbytes, tolerance=tolerance)


SPAN_OK = {"none": 64, "32B": 16, "64B": 32, "128B": 64}  # K that the first tile of a K-major operand holds


def tcgen05(m, n, group, swizzle="128B", major_a=False, major_b=False, in_tensor_memory=False, dtype="bf16",
            swizzle_b=None, lines=64) -> Case:
    """`lines`: of K that B and an MN-major A have in shared memory, of which the product takes 64 at most."""
    depth = min(64, lines)
    rng = np.random.default_rng(m * n)
    swizzle_b = swizzle_b or swizzle
    a, b = op.integers(rng, (m, lines if major_a else 64)), op.integers(rng, (n, lines))
    rows, columns = m // group, n // group
    buffers = []
    for rank in range(group):
        mine = a[rank * rows:(rank + 1) * rows]
        pair = [None if in_tensor_memory else mine, b[rank * columns:(rank + 1) * columns]]
        shared, start_b, (layout_a, layout_b) = _place(pair, [swizzle, swizzle_b], [major_a, major_b], dtype)
        # Of a single MN-major tile the leading offset says nothing; kernels leave it 0.
        layout_a = (0, layout_a[1]) if layout_a and major_a and rows * 2 == op.SPAN[swizzle] else layout_a
        layout_b = (0, layout_b[1]) if major_b and columns * 2 == op.SPAN[swizzle_b] else layout_b
        if in_tensor_memory:
            cells = np.zeros((128, 32), np.uint32)
            words = op.to_bits(mine, dtype).view(np.uint32)
            if rows == 64 and group == 1:
                for i in range(4):
                    cells[32 * i:32 * i + 16] = words[16 * i:16 * i + 16]
            else:
                cells[:] = np.concatenate([words] * (128 // rows))
            shared[:16384] = cells.view(np.uint8).reshape(-1)
        buffers.append(shared)
    product = a[:, :depth] @ b[:, :depth].T
    width = n if rows != 64 or group == 1 else n // 2
    d = np.full((group, width, 128), np.nan, np.float32)
    for rank in range(group):
        mine = product[rank * rows:(rank + 1) * rows]
        if rows == 128:
            d[rank] = mine.T
        elif group == 1:
            for i in range(4):
                d[rank][:, 32 * i:32 * i + 16] = mine[16 * i:16 * i + 16].T
        else:
            d[rank] = np.concatenate([mine[:, :width].T, mine[:, width:].T], 1)
    known = ~np.isnan(d)

    def check(results):
        np.testing.assert_array_equal(results.reshape(d.shape).view(np.float32)[known], d[known])

    text = tensor_ptx.tcgen05(group, width, in_tensor_memory, depth // 16, op.k_step(rows, swizzle, major_a, 16),
                              op.k_step(columns, swizzle_b, major_b, 16), clear=m == 64)
    operands = np.concatenate(buffers)
    name = (f"tcgen05_m{m}_n{n}_group{group}_{swizzle}_{'MN' if major_a else 'K'}{'MN' if major_b else 'K'}"
            f"{'_tensor_memory' if in_tensor_memory else ''}{'' if swizzle_b == swizzle else '_b' + swizzle_b}"
            f"{'' if lines == 64 else f'_{lines}lines'}{'' if dtype == 'bf16' else '_' + dtype}")
    return Case(name, text, {"results": np.zeros(d.size, np.uint32), "operands": operands},
                ("results", "operands", np.uint32(buffers[0].nbytes),
                 np.uint64(0 if in_tensor_memory else op.tcgen05_descriptor(0, *layout_a, swizzle)),
                 np.uint64(op.tcgen05_descriptor(start_b, *layout_b, swizzle_b)),
                 np.uint32(op.instruction_descriptor(m, n, dtype, major_a, major_b))), {"results": check},
                grid=group, cluster=group, block=128, shared=buffers[0].nbytes, target="sm_100a")
