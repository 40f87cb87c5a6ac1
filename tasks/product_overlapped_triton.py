"""A product with its epilogue for NVIDIA's Hopper: one group of warps multiplies while another finishes."""

# Functions of Gluon's language have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .epilogue_triton import activated, block_of, times_derivative


@gluon.jit
def _load(
    A, B, a_ring, b_ring, full, free, m, n, k, B_BY_K: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Operands of all of a program's blocks, in the order in which they are multiplied."""
    blocks, step = gl.cdiv(m, ROWS) * gl.cdiv(n, COLUMNS), 0
    for number in range(gl.program_id(0), blocks, gl.num_programs(0)):
        row, col = block_of(number, m, n, ROWS, COLUMNS, GROUP)
        for at in range(0, k, DEPTH):
            stage = step % STAGES
            ready = full.index(stage)
            mbarrier.wait(free.index(stage), (step // STAGES & 1) ^ 1)
            mbarrier.expect(ready, A.block_type.nbytes + B.block_type.nbytes)
            tma.async_copy_global_to_shared(A, [row, at], ready, a_ring.index(stage))
            if B_BY_K:
                tma.async_copy_global_to_shared(B, [col, at], ready, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(B, [at, col], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply(
    OUT, PRE, BIAS, AUX, PART, a_ring, b_ring, full, free, space, given, m, n, k, scale, TURN: gl.constexpr,
    B_BY_K: gl.constexpr, KIND: gl.constexpr, BIASED: gl.constexpr, KEEPS: gl.constexpr, GRADIENT: gl.constexpr,
    SUMS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Every second block of the program, from its block number TURN on: its product, then its epilogue, by halves."""
    WIDTH: gl.constexpr = COLUMNS // 2
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    blocks, chunks, programs = gl.cdiv(m, ROWS) * gl.cdiv(n, COLUMNS), gl.cdiv(k, DEPTH), gl.num_programs(0)
    step, turn = TURN * chunks, 0
    for number in range(gl.program_id(0) + TURN * programs, blocks, 2 * programs):
        row, col = block_of(number, m, n, ROWS, COLUMNS, GROUP)
        if GRADIENT:
            tma.store_wait(0)
            gl.thread_barrier()
            mbarrier.expect(given, 2 * AUX.block_type.nbytes)
            tma.async_copy_global_to_shared(AUX, [row, col], given, space.index(0))
            tma.async_copy_global_to_shared(AUX, [row, col + WIDTH], given, space.index(1))
        total = gl.zeros([ROWS, COLUMNS], gl.float32, whole)
        for chunk in range(chunks):
            stage = (step + chunk) % STAGES
            mbarrier.wait(full.index(stage), (step + chunk) // STAGES & 1)
            b = b_ring.index(stage)
            if B_BY_K:
                b = b.permute((1, 0))
            total = warpgroup_mma(a_ring.index(stage), b, total, use_acc=chunk > 0, is_async=True)
            total = warpgroup_mma_wait(1, deps=(total,))
            gl.thread_barrier()  # what the other warps read of the stage before
            mbarrier.arrive(free.index((step + chunk - 1) % STAGES), count=1, pred=chunk > 0)
        total = warpgroup_mma_wait(0, deps=(total,))
        gl.thread_barrier()
        mbarrier.arrive(free.index((step + chunks - 1) % STAGES), count=1)
        step += 2 * chunks
        if GRADIENT:
            mbarrier.wait(given, turn & 1)
            turn += 1
        left, right = gl.split(gl.permute(gl.reshape(total, [ROWS, 2, WIDTH]), (0, 2, 1)))
        for side in gl.static_range(2):
            y = gl.convert_layout(left if side == 0 else right, half) * scale
            at = col + side * WIDTH
            cols = at + gl.arange(0, WIDTH, gl.SliceLayout(0, half))
            if BIASED:
                y += gl.load(BIAS + cols, cols < n, 0.0).to(gl.float32)[None, :]
            if GRADIENT:
                y = times_derivative(y, space.index(side).load(half).to(gl.float32), KIND)
                if SUMS:  # rows beyond the last are zeros
                    gl.store(PART + row // ROWS * n + cols, gl.sum(y, 0), cols < n)
            elif KEEPS:
                tma.store_wait(0)
                gl.thread_barrier()
                space.index(0).store(y.to(PRE.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(PRE, [row, at], space.index(0))
                y = activated(y, KIND)
            else:
                tma.store_wait(1)
                gl.thread_barrier()
                y = activated(y, KIND)
            to = space.index(1 if KEEPS else side)
            to.store(y.to(OUT.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(OUT, [row, at], to)
    tma.store_wait(0)


@gluon.jit
def overlapped(
    OUT, PRE, A, B, BIAS, AUX, PART, m, n, k, scale,
    B_BY_K: gl.constexpr, KIND: gl.constexpr, BIASED: gl.constexpr, KEEPS: gl.constexpr, GRADIENT: gl.constexpr,
    SUMS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """As product_triton's kernel; n and k are multiples of 8. Programs have every num_programs(0)-th block."""
    dtype: gl.constexpr = A.dtype.element_ty
    B_BLOCK: gl.constexpr = [COLUMNS, DEPTH] if B_BY_K else [DEPTH, COLUMNS]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DEPTH], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(B_BLOCK, dtype)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS // 2], dtype)
    a = tma.make_tensor_descriptor(A, [m, k], [k, 1], [ROWS, DEPTH], a_layout)
    if B_BY_K:
        b = tma.make_tensor_descriptor(B, [n, k], [k, 1], B_BLOCK, b_layout)
    else:
        b = tma.make_tensor_descriptor(B, [k, n], [n, 1], B_BLOCK, b_layout)
    out = tma.make_tensor_descriptor(OUT, [m, n], [n, 1], [ROWS, COLUMNS // 2], layout)
    pre, aux = out, out
    if KEEPS:
        pre = tma.make_tensor_descriptor(PRE, [m, n], [n, 1], [ROWS, COLUMNS // 2], layout)
    if GRADIENT:
        aux = tma.make_tensor_descriptor(AUX, [m, n], [n, 1], [ROWS, COLUMNS // 2], layout)
    a_ring = gl.allocate_shared_memory(dtype, [STAGES, ROWS, DEPTH], a_layout)
    b_ring = gl.allocate_shared_memory(dtype, [STAGES, B_BLOCK[0], B_BLOCK[1]], b_layout)
    space = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS // 2], layout)
    other = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS // 2], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(free.index(stage), 1)
    for turn in gl.static_range(2):
        mbarrier.init(given.index(turn), 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out, pre, BIAS, aux, PART, a_ring, b_ring, full, free, space, given.index(0), m, n, k, scale, 0,
                B_BY_K, KIND, BIASED, KEEPS, GRADIENT, SUMS, ROWS, COLUMNS, DEPTH, GROUP, STAGES,
            )),
            (_multiply, (
                out, pre, BIAS, aux, PART, a_ring, b_ring, full, free, other, given.index(1), m, n, k, scale, 1,
                B_BY_K, KIND, BIASED, KEEPS, GRADIENT, SUMS, ROWS, COLUMNS, DEPTH, GROUP, STAGES,
            )),
            (_load, (
                a, b, a_ring, b_ring, full, free, m, n, k, B_BY_K, ROWS, COLUMNS, DEPTH, GROUP, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
