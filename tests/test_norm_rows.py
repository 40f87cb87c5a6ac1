"""LayerNorm of many rows on CUDA, in Triton's interpreter against float64."""

import numpy as np
import pytest
import test_triton  # imports triton's kernels for the interpreter
from operators import ROWS

from nntile_py.testing import Case, error

SIZES = {"batch": 1, "seq": 45, "embed": 768}  # the last program has fewer rows than the others


@pytest.mark.parametrize("row", ["LayerNorm", "LayerNorm residual"])
def test_against_float64(row: str) -> None:
    case = Case(SIZES, "bf16")
    ROWS[row](case)
    values = case.draw(np.random.default_rng(0))
    ran = test_triton.interpret(case, {}, "chain", values)
    for tensor, want in case.expected(values).items():
        assert error(ran.read(tensor), want) < 1e-2, tensor
