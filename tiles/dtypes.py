"""The element types of tiles: one table for Python, Triton and C++ (scripts/args_headers.py generates the C++ text)."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 16  # a tile's scales begin and end at multiples of this number of bytes; each scale is an fp32 number
# cuBLASLt multiplies matrices of 8 bits only if the numbers of columns and of summed elements are multiples of UNIT.
UNIT = 16


def scale_offset(values: int) -> int:
    """Return the offset of a tile's scale in bytes; values: the bytes of the tile's values."""
    return -(-values // SCALE_BYTES) * SCALE_BYTES


@dataclass(frozen=True, slots=True)
class DType:
    """An element type and its names in other libraries.

    Attributes:
        numpy: dtype of arrays that programs take and return.
        torch: name in torch and triton.language.
        aten: name in at::ScalarType.
        triton: name in signatures of kernels.
        accumulation: dtype of statistics, states and sums over tensors of this dtype.
        largest: largest finite value of an 8-bit dtype. Each tile of such a dtype ends with one fp32 scale, or with one
            for each of its rows. The value of an element is its 8-bit number times its scale. 0: tiles have no scales.
    """

    name: str
    bytes: int
    numpy: str
    torch: str
    aten: str
    triton: str
    accumulation: str
    largest: float = 0.0

    def tile_bytes(self, numel: int, scales: int = 1) -> int:
        """Return the bytes of a tile with `numel` values, with its scales if the dtype has scales."""
        values = numel * self.bytes
        return values if not self.largest else scale_offset(values) + scale_offset(4 * scales)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 4, "float32", "float32", "Float", "fp32", "fp32"),
        DType("fp64", 8, "float64", "float64", "Double", "fp64", "fp64"),
        DType("bf16", 2, "float32", "bfloat16", "BFloat16", "bf16", "fp32"),  # numpy has no bfloat16
        DType("fp16", 2, "float16", "float16", "Half", "fp16", "fp32"),
        DType("e4m3", 1, "float32", "float8_e4m3fn", "Float8_e4m3fn", "fp8e4nv", "fp32", 448.0),
        DType("e5m2", 1, "float32", "float8_e5m2", "Float8_e5m2", "fp8e5", "fp32", 57344.0),
        DType("bool", 1, "bool", "bool", "Bool", "i1", "bool"),
        DType("int16", 2, "int16", "int16", "Short", "i16", "int16"),
        DType("int32", 4, "int32", "int32", "Int", "i32", "int32"),
        DType("int64", 8, "int64", "int64", "Long", "i64", "int64"),
    )
}


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype of statistics, states and sums over tensors of a dtype: fp32 for 8-bit dtypes, bf16, fp16."""
    return DTYPES[dtype].accumulation


def is_low(dtype: str) -> bool:
    """Return True for bf16 and fp16: sums over such tensors have a wider dtype. Only GPUs compute in bf16 and fp16."""
    return accumulation_dtype(dtype) != dtype and not is_scaled(dtype)


def is_scaled(dtype: str) -> bool:
    """Return True for the 8-bit dtypes. Their tiles have a scale."""
    return bool(DTYPES[dtype].largest)


def host_dtype(dtype: str) -> str:
    """Return numpy's dtype of the arrays that programs return: float32 for fp16, bf16 and 8-bit dtypes."""
    return DTYPES[accumulation_dtype(dtype)].numpy
