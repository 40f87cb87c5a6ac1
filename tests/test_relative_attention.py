"""Attention with relative positions on CPUs, against float64; refused combinations."""

import numpy as np
import pytest
from relative_rows import CASES, RelativeRow, fitted

import nntile_py as nt
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.tasks.attention_relative import relative_attention
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.relative import relative_scores
from nntile_py.testing import Case, check, check_gradient, error
from nntile_py.tiles import Tiling


@pytest.mark.few(16)
@pytest.mark.parametrize("dtype", ["fp64", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(runtime: nt.Runtime, name: str, dtype: str) -> None:
    """Several blocks of queries, and heads and rows of the batch that are cut."""
    row, sizes, tiles = fitted(name, 150)
    if name == "an empty bin":  # the relative error of zeros
        sizes["seq"] = sizes["key"] = 9
    check(row, tiles, "chain", dtype, sizes)
