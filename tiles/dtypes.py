"""The element types of tiles, in one table for Python, Triton and C++ (scripts/args_headers.py)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """`numpy`: of arrays that go in and out; `accumulation`: of statistics, states and sums over such tensors."""

    name: str
    bytes: int
    numpy: str
    torch: str  # and triton.language
    aten: str  # at::ScalarType
    triton: str  # in signatures of kernels
    accumulation: str


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 4, "float32", "float32", "Float", "fp32", "fp32"),
        DType("fp64", 8, "float64", "float64", "Double", "fp64", "fp64"),
        DType("bf16", 2, "float32", "bfloat16", "BFloat16", "bf16", "fp32"),  # numpy has none
        DType("fp16", 2, "float16", "float16", "Half", "fp16", "fp32"),
        DType("bool", 1, "bool", "bool", "Bool", "i1", "bool"),
        DType("int16", 2, "int16", "int16", "Short", "i16", "int16"),
        DType("int32", 4, "int32", "int32", "Int", "i32", "int32"),
        DType("int64", 8, "int64", "int64", "Long", "i64", "int64"),
    )
}


def accumulation_dtype(dtype: str) -> str:
    """The dtype of statistics, states and sums over tensors of a dtype: fp32 for bf16 and fp16."""
    return DTYPES[dtype].accumulation


def is_low(dtype: str) -> bool:
    """Whether sums over tensors of a dtype are kept in a wider one: of bf16 and fp16, which GPUs alone compute in."""
    return accumulation_dtype(dtype) != dtype


def host_dtype(dtype: str) -> str:
    """numpy's dtype of what programs give the host: float32 for bf16 and fp16."""
    return "float32" if is_low(dtype) else DTYPES[dtype].numpy
