"""The Triton kernels: in the interpreter against the operators' float64 references, and compiled for sm_90."""

import importlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest import error
from operators import ROWS, SIZES, Case, Values, adamw, sgd

from nntile_py.lowering import lower
from nntile_py.tasks import Contract, Lowering, Tensor, launch
from nntile_py.tiles import Tile, Tiling

if platform.system() != "Linux":
    pytest.skip("triton is there on Linux only", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the operators' tests run the compiled kernels here", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # triton looks at it when its modules are imported, gluon's at first use
importlib.import_module("triton.experimental.gluon")
launch.load()
del os.environ["TRITON_INTERPRET"]

TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, "int64": torch.int64}
TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "seq": 3, "embed": 8, "heads": 2, "ffn": 10, "vocab": 12},
    "ragged": {"batch": 3, "seq": 4, "embed": 10, "heads": 3, "ffn": 17, "vocab": 17},
}
MASTERS: dict[str, Callable[[Case], Any]] = {
    "AdamW master": adamw(master=True),
    "SGD master": sgd(0.0, master=True),
    "SGD momentum master": sgd(0.8, master=True),
}


def of_triton(row: Callable[[Case], Any]) -> bool:
    """Contractions and attention are C++."""
    case = Case(SIZES, "fp32")
    row(case)
    return not any(isinstance(op, Contract) or op.kind.startswith("Attention") for op in case.graph.ops)


TABLE = {name: row for name, row in ROWS.items() if of_triton(row)} | MASTERS


class Interpreted:
    """A lowered graph on torch tensors, one a tile, its tasks run in order."""

    def __init__(self, low: Lowering) -> None:
        self.low, self.tiles = low, dict[Tile, torch.Tensor]()

    def write(self, tensor: Tensor, value: Any) -> None:
        for where, tile in self.low.grid(tensor):
            self.tiles[tile] = torch.tensor(value[where]).to(TORCH[tensor.dtype])

    def read(self, tensor: Tensor) -> Any:
        out = np.zeros(tensor.shape)
        for where, tile in self.low.grid(tensor):
            out[where] = self.tiles[tile].double().numpy()
        return out

    def run(self, slots: Mapping[str, float]) -> None:
        for task in self.low.tasks.tasks:
            for access in task.accesses:
                tile = access.tile
                if tile not in self.tiles:
                    self.tiles[tile] = torch.full(tile.shape, np.nan).to(TORCH[tile.dtype])
            launch.interpret(task, [self.tiles[a.tile] for a in task.accesses], dict(slots))


def interpret(case: Case, tiles: Mapping[str, int], policy: str, values: Values) -> Interpreted:
    low = lower(case.graph, Tiling({a: t for a, t in tiles.items() if a not in case.whole}), policy)
    ran = Interpreted(low)
    for tensor in {t.storage for op in case.graph.ops for t in op.outputs if t.storage.kind == "scalar"}:
        ran.write(tensor, np.full(tensor.shape, np.nan))
    for tensor, value in values.items():
        ran.write(tensor, value)
    ran.run(case.slots)
    return ran


@pytest.mark.parametrize(("tiling", "policy"), [("uncut", "chain"), ("even", "tree"), ("ragged", "chain")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("row", TABLE.values(), ids=TABLE)
def test_against_the_reference(row: Callable[[Case], Any], dtype: str, tiling: str, policy: str) -> None:
    case = Case(SIZES, dtype)
    row(case)
    values = case.draw(np.random.default_rng(0))
    expected = case.expected(values)
    ran = interpret(case, TILINGS[tiling], policy, values)
    for tensor, want in expected.items():
        there = np.zeros(tensor.shape, bool)
        for where, _ in ran.low.grid(tensor):
            there[where] = True
        wrong = error(ran.read(tensor), want * there)
        assert wrong < {"bf16": 5e-3, "fp32": 1e-5, "fp64": 1e-5}[tensor.dtype], f"{tensor}: off by {wrong:.1e}"
