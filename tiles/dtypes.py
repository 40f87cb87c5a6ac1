"""The element types of tiles: one table for Python, Triton and C++ (scripts/args_headers.py generates the C++ text)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type and its names in other libraries.

    Attributes:
        numpy: dtype of arrays that programs take and return.
        torch: name in torch and triton.language.
        aten: name in at::ScalarType.
        triton: name in signatures of kernels.
        accumulation: dtype of statistics, states and sums over tensors of this dtype.
    """

    name: str
    bytes: int
    numpy: str
    torch: str
    aten: str
    triton: str
    accumulation: str


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 4, "float32", "float32", "Float", "fp32", "fp32"),
        DType("fp64", 8, "float64", "float64", "Double", "fp64", "fp64"),
        DType("bf16", 2, "float32", "bfloat16", "BFloat16", "bf16", "fp32"),  # numpy has no bfloat16
        DType("fp16", 2, "float16", "float16", "Half", "fp16", "fp32"),
        DType("bool", 1, "bool", "bool", "Bool", "i1", "bool"),
        DType("int16", 2, "int16", "int16", "Short", "i16", "int16"),
        DType("int32", 4, "int32", "int32", "Int", "i32", "int32"),
        DType("int64", 8, "int64", "int64", "Long", "i64", "int64"),
    )
}


def accumulation_dtype(dtype: str) -> str:
    """Return the dtype of statistics, states and sums over tensors of a dtype: fp32 for bf16 and fp16."""
    return DTYPES[dtype].accumulation


def is_low(dtype: str) -> bool:
    """Return True for bf16 and fp16: sums over such tensors have a wider dtype. Only GPUs compute in bf16 and fp16."""
    return accumulation_dtype(dtype) != dtype


def host_dtype(dtype: str) -> str:
    """Return numpy's dtype of the arrays that programs return to the host: float32 for bf16 and fp16."""
    return "float32" if is_low(dtype) else DTYPES[dtype].numpy
