"""Attention with relative positions: the Triton kernels in the interpreter, against float64."""

import itertools

import pytest
from relative_rows import CASES, fitted
from test_triton import TORTURE, check_ways  # sets triton up for its interpreter

POINTS = [(name, "fp32", 40) for name in CASES] + [("log of few", "fp32", 100), ("clipped", "fp32", 70)]
POINTS += [("log", "bf16", 40), ("dropout", "bf16", 40), ("padding dropout", "fp16", 40), ("log of few", "bf16", 100)]
if TORTURE:
    POINTS = [*itertools.product(CASES, ("fp32", "bf16", "fp16"), (40, 150))]


@pytest.mark.few(8)
@pytest.mark.parametrize(("name", "dtype", "positions"), POINTS)
def test_against_the_reference(name: str, dtype: str, positions: int) -> None:
    row, sizes, tiles = fitted(name, positions, head_dim={"bf16": 32, "fp16": 64}.get(dtype, 24))
    check_ways(row, sizes, tiles, dtype)
