"""Greedy sampling on CUDA: the largest logit of each row (sample.py). sample_cuda.cpp has all other sampling."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import math

import triton
import triton.language as tl

from nntile_py.tiles.task import Task

from .cached_attention import COUNT, PAST
from .launch import Launches, Scratch, ceil_div, launch, launches, power_of_two, shape, tile
from .sample import NO_TOKEN, SampleArgs

OLD, NEW = tl.constexpr(PAST), tl.constexpr(COUNT)  # entries of a page table's row
NONE = tl.constexpr(NO_TOKEN)
BLOCK = 2048  # logits that a program compares


@triton.jit
def _largest_of_blocks(LOGITS, VALUES, PLACES, vocab, tokens, blocks, BLOCK: tl.constexpr):
    """Store the largest logit of each block, and its index (of equal logits: the first index)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(LOGITS + row * vocab + at, at < tokens, -float("inf")).to(tl.float32)
    value = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("inf"), tl.max(x, 0))  # nan: like infinity
    tl.store(VALUES + row * blocks + block, value)
    tl.store(PLACES + row * blocks + block, tl.min(tl.where(x == value, at, 2147483647), 0))


@triton.jit
def _largest(OUT, TABLE, IDS, VALUES, PLACES, entries, blocks, ring, ADVANCES: tl.constexpr, BLOCK: tl.constexpr):
    """Store the index of each row's largest logit in OUT. ADVANCES: prepare the next pass, see Sample."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(VALUES + row * blocks + at, at < blocks, -float("inf"))
    place = tl.load(PLACES + row * blocks + at, at < blocks, 2147483647)
    past, count = tl.load(TABLE + row * entries + OLD), tl.load(TABLE + row * entries + NEW)
    top = tl.max(x, 0)
    usable = (top > -float("inf")) & (top < float("inf"))
    largest = tl.where(usable, tl.min(tl.where(x == top, place, 2147483647), 0), NONE)
    token = tl.where(count > 0, largest, 0).to(tl.int64)
    tl.store(OUT + row * ring + (past + count) % ring, token)
    if ADVANCES:
        tl.store(IDS + row, tl.maximum(token, 0))  # the next pass needs a token that the model has
        tl.store(TABLE + row * entries + OLD, past + count)


@launches("sample")
def _describe(task: Task) -> Launches:
    args = SampleArgs.of(task)
    if not args.greedy:
        return Launches(())
    (batch, entries), vocab = shape(task, 2), math.prod(shape(task, 1)[1:])
    blocks, scratch = ceil_div(args.tokens, BLOCK), Scratch()
    values, numbers = scratch.take(batch * blocks, "fp32"), scratch.take(batch * blocks, "int32")
    ids = tile(task, 3 if args.advances else 0)
    return Launches(
        (
            launch(
                _largest_of_blocks, (batch, blocks), tile(task, 1), values, numbers, vocab, args.tokens, blocks,
                BLOCK=BLOCK,
            ),
            launch(
                _largest, batch, tile(task, 0), tile(task, 2), ids, values, numbers, entries, blocks, shape(task, 0)[1],
                ADVANCES=args.advances, BLOCK=power_of_two(blocks), warps=1,
            ),
        ),
        scratch.bytes,
    )  # fmt: skip
