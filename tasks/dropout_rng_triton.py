"""Random numbers of dropout on CUDA, equal to `dropout_hash` in scalar/evaluate.py.

Two neighbouring elements, a pair, share one hash, so a thread that holds both computes the hash once. The start of the
hash is computed once per row, not per element.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
import triton
import triton.language as tl

from .interpreted_triton import INTERPRETED


@triton.jit
def _starts(low, high, seed, key):
    """Return the start of a pair's hash and the number that `_mixed` adds. low, high: halves of the pair's number."""
    start = (seed.to(tl.uint64) * 0x9E3779B97F4A7C15) ^ key.to(tl.uint64)
    return low * 0x9E3779B1 + start.to(tl.uint32), (start >> 32).to(tl.uint32) + high * 0x85EBCA77


@triton.jit
def _mixed(h, second):
    h = (h ^ (h >> 16)) * 0x7FEB352D + second
    return (h ^ (h >> 15)) * 0x846CA68B


@triton.jit
def kept(index, seed, key, limit):
    """Return whether dropout keeps the elements with these indices in the whole tensor; key: from `mixed_key`."""
    pair = index >> 1
    h = _mixed(*_starts(pair.to(tl.uint32), (pair >> 32).to(tl.uint32), seed, key))
    return tl.where((index & 1) != 0, h, h * 0x10001) >= limit


@triton.jit
def dropped(x, index, seed, key, limit, scale):
    """Return x * mask / (1 - p). index: of each element in the whole tensor; the arguments after it: from `mask_of`."""
    return tl.where(kept(index, seed, key, limit), x * scale, 0.0)


@triton.jit
def _of_pairs(begin, second, at, COLUMNS: tl.constexpr):
    """Return the hashes, one per pair, of COLUMNS elements of each row, from the even column `at` on.

    begin, second: from `_starts`, for each row.
    """
    step = ((at >> 1) + tl.arange(0, COLUMNS // 2)).to(tl.uint32)[None, :]
    return _mixed(step * 0x9E3779B1 + begin, second)


@triton.jit
def kept_columns(first, at, seed, key, limit, COLUMNS: tl.constexpr, EVEN: tl.constexpr, SAME: tl.constexpr):
    """Return whether dropout keeps the elements first + at + k for k < COLUMNS, as an array [rows, COLUMNS].

    first: [rows, 1]; the elements are less than 2**31 after `first`. EVEN: first and at are even. SAME: the upper half
    of a pair's number is the same along a row.
    """
    if EVEN:
        pair = first >> 1
        low, high = pair.to(tl.uint32), (pair >> 32).to(tl.uint32)
        if not SAME:
            step = ((at >> 1) + tl.arange(0, COLUMNS // 2)).to(tl.uint32)[None, :]
            high = tl.where(low + step < low, high + 1, high)
        begin, second = _starts(low, high, seed, key)
        h = _of_pairs(begin, second, at, COLUMNS)
        return tl.reshape(tl.join(h * 0x10001, h), (h.shape[0], COLUMNS)) >= limit
    else:
        return kept(first + (at + tl.arange(0, COLUMNS))[None, :], seed, key, limit)


@triton.jit
def _factors(h, limit, scale):
    """Return the factors, scale or 0, of an even element and of the next odd element. h: the hash that both share."""
    if INTERPRETED:
        even, odd = tl.where(h * 0x10001 >= limit, scale, 0.0), tl.where(h >= limit, scale, 0.0)
    else:  # inline assembly: LLVM would pack the comparisons of 16 elements into one integer and unpack them
        even, odd = tl.inline_asm_elementwise(
            """{.reg .pred p; .reg .u32 h; mul.lo.u32 h, $2, 0x10001;
            setp.ge.u32 p, h, $3; selp.f32 $0, $4, 0f00000000, p;
            setp.ge.u32 p, $2, $3; selp.f32 $1, $4, 0f00000000, p;}""",
            "=f,=f,r,r,f", [h, limit, scale], (tl.float32, tl.float32), True, 1,
        )  # fmt: skip
    return even, odd


@triton.jit
def drop_factors(
    first, row, at, seed, key, limit, scale,
    STEP: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, SAME: tl.constexpr,
):  # fmt: skip
    """Return mask / (1 - p) of the elements first + row * STEP + at + k for k < COLUMNS, as an array [rows, COLUMNS].

    row: [rows, 1]. All elements are less than SIZE after `first`. This function is for blocks of matrix products, where
    a thread may hold only one pair of each of many rows. So the start of a row's hash is computed by additions.
    `kept_columns` would be slower for such blocks, because LLVM stores the result of `kept_columns` as bits.
    """
    if EVEN and SIZE <= 2**33:
        low, high = (first >> 1).to(tl.uint32), (first >> 33).to(tl.uint32)
        begin, second = _starts(low, high, seed, key)
        offset = row.to(tl.uint32) * (STEP // 2)
        if not SAME:
            offset += ((at >> 1) + tl.arange(0, COLUMNS // 2)).to(tl.uint32)[None, :]
        second = tl.where(low + offset < low, _starts(low, high + 1, seed, key)[1], second)
        begin += row.to(tl.uint32) * (STEP // 2 * 0x9E3779B1 % 2**32)
        even, odd = _factors(_of_pairs(begin, second, at, COLUMNS), limit.to(tl.uint32), scale)
        return tl.reshape(tl.join(even, odd), (row.shape[0], COLUMNS))
    else:
        first += row.to(tl.int64) * STEP
        return tl.where(kept_columns(first, at, seed, key, limit.to(tl.uint32), COLUMNS, EVEN, SAME), scale, 0.0)
