"""Contractions by the project's own product on CPU workers, and by the BLAS, whatever the processor would have."""

import json
from pathlib import Path
from typing import Any

# In a process of its own: which of them computes is read once.
CONTRACTIONS = """
import hashlib, json, sys
sys.path.insert(0, sys.argv[1])
import numpy as np
from operators import ROWS
from operators_contract import linear
import nntile_py as nt
from nntile_py.execution.program import Store, programs
from nntile_py.graph.lowering import lower
from nntile_py.testing import SIZES, Case, check
from nntile_py.tiles import Tiling

# Tiles of 16 and more rows, columns and summed elements, which the own product takes, and some of less.
sizes = SIZES | {"batch": 2, "seq": 19, "embed": 37, "heads": 2, "head_dim": 17, "ffn": 41}
tilings = {}, {"embed": 20, "ffn": 23, "batch": 1}, {"embed": 17, "ffn": 17, "seq": 16}
rows = {name: row for name, row in ROWS.items() if name.split()[0] == "Contract"}
rows["permuted, with all of the epilogue"] = linear(
    "batch seq embed", "embed heads head_dim", "heads batch seq head_dim", bias="heads head_dim", residual=True,
    activation="gelu", pre=True)
rows["columns in runs, rows last"] = linear("seq embed batch", "embed heads head_dim", "heads head_dim seq batch")
rows["permuted, of a derivative"] = linear(
    "batch seq embed", "heads head_dim embed", "heads batch seq head_dim", activation="silu", aux=True)
with nt.Runtime(cpus=1):
    for row in rows.values():
        check(row, {}, "chain", "fp32", sizes)
        for tiles in tilings:
            check(row, tiles, "chain", "fp64", sizes)
    # The order of a long sum tells who computed it.
    case = Case(SIZES | {"batch": 1, "seq": 40, "embed": 2000, "ffn": 40}, "fp64")
    linear()(case)
    low, store = lower(case.graph, Tiling({}), "chain"), Store()
    for tensor, value in case.draw(np.random.default_rng(0)).items():
        store.write(low, tensor, value)
    programs([low.tasks], store)[0].run({})
    (out,) = case.graph.ops[0].outputs
    print(json.dumps([len(rows), hashlib.sha256(store.read(low, out).tobytes()).hexdigest()]))
"""


def test_own_and_blas(python: Any) -> None:
    """All rows of contractions in every tiling; the bits of a long sum show that it was not the same one twice."""
    told = []
    for chosen in ("own", "blas"):
        done = python(CONTRACTIONS, Path(__file__).parent, NNTILE_PRODUCT=chosen)
        assert done.returncode == 0, done.stderr
        told.append(json.loads(done.stdout))
    (rows, own), (_, blas) = told
    assert rows > 50
    assert own != blas


def test_a_wrong_choice_is_refused(python: Any) -> None:
    done = python(CONTRACTIONS, Path(__file__).parent, NNTILE_PRODUCT="mkl")
    assert done.returncode == 1
    assert "NNTILE_PRODUCT: got mkl; allowed: own or blas" in done.stderr.splitlines()[-1]
