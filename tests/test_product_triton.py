"""The Triton product with its epilogue: in the interpreter against float64, and compiled for sm_90."""

import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_triton  # imports triton's kernels for the interpreter
import torch
import triton
import triton.language as tl
from conftest import Python
from operators_contract import linear

from nntile_py.graph.lowering import lower
from nntile_py.tasks import interpret as interpreter
from nntile_py.tasks import launch
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.testing import Case, error
from nntile_py.tiles import Slot, Tiling
from nntile_py.tiles.task import Task

product_triton: Any = importlib.import_module("nntile_py.tasks.product_triton")
epilogue: Any = importlib.import_module("nntile_py.tasks.product_epilogue_triton")
SIZES = {"batch": 1, "seq": 70, "embed": 40, "ffn": 72}  # all of them ragged
SETS = ("FEW", "DEEP", "SOME", "PARTS", "MANY")
EVERY = list(dict.fromkeys([*itertools.chain(*(getattr(product_triton, name) for name in SETS)), product_triton.ONCE]))
WEIGHTS = {"by row": "embed ffn", "by column": "ffn embed"}

os.environ["TRITON_INTERPRET"] = "1"


@triton.jit
def tail_of(TAIL, E, X, N: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, N)
    _, tail, e = epilogue.normal_tail(tl.load(X + at))
    tl.store(TAIL + at, tail)
    tl.store(E + at, e)


del os.environ["TRITON_INTERPRET"]


def task_of(case: Case) -> Task:
    (task,) = lower(case.graph, Tiling({})).tasks.tasks
    return task


KINDS = [("forward", "bf16"), ("kept", "bf16"), ("no bias", "bf16"), ("gradient", "bf16"), ("kept", "fp16"),
         ("plain", "bf16"), ("residual", "bf16")]  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_against_float64(monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, weight: str) -> None:
    """Each block shape with half of the kinds of product, in turns with either order of the weight."""
    monkeypatch.setattr(product_triton, "FEW", EVERY)
    options = {"bias": None if kind in ("no bias", "gradient") else "ffn", "pre": kind == "kept"}
    options |= {"aux": kind == "gradient", "residual": kind == "residual"}
    case = Case(SIZES, dtype)
    linear(b=WEIGHTS[weight], activation=None if kind == "plain" else "gelu", **options)(case)
    values = case.draw(np.random.default_rng(0))
    assert len(launch.load()["contract"]([task_of(case)]).ways) == len(EVERY)
    first = (KINDS.index((kind, dtype)) + 2 * list(WEIGHTS).index(weight)) % 4
    for way in range(first, len(EVERY), 4):
        if EVERY[way].width and kind in ("plain", "residual"):  # not of many rows
            continue
        ran = test_triton.interpret(case, {}, "chain", values, way)
        for tensor, want in case.expected(values).items():
            assert error(ran.read(tensor), want) < 5e-3, (tensor, EVERY[way])


@pytest.mark.parametrize("aux", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if not kind.startswith("gelu")])
def test_other_activations(kind: str, aux: bool) -> None:
    case = Case(SIZES, "bf16")
    linear(activation=kind, aux=aux, scale=0.5)(case)
    values = case.draw(np.random.default_rng(1))
    ran = test_triton.interpret(case, {}, "chain", values)
    for tensor, want in case.expected(values).items():
        assert error(ran.read(tensor), want) < 5e-3, tensor


@pytest.mark.parametrize("way", range(len(EVERY)))
def test_rows_that_a_step_fills(monkeypatch: pytest.MonkeyPatch, way: int) -> None:
    """NaN behind the filled rows is not read, and the result behind them is not written."""
    monkeypatch.setattr(product_triton, "FEW", [EVERY[way]])
    case, filled, slot = Case(SIZES, "bf16"), 37, Slot("filled")
    linear(bias="ffn", activation="gelu", pre=True)(case)
    task, rng = task_of(case), np.random.default_rng(2)
    out, a, b, bias, act = (torch.tensor(rng.standard_normal(x.tile.shape)).bfloat16() for x in task.accesses)
    for tensor in (out, a, act):
        tensor[:, filled:] = np.nan
    out.fill_(7)
    lives = [(k, 1, slot) for k in (0, 1, 4)]
    made = launch.load()["contract"]([with_live_sizes(task, lives)])
    assert "70 72 40" in made.key
    interpreter.interpret([task], [out, a, b, bias, act], {"filled": filled}, lives=lives)
    y = a[0, :filled].double() @ b.double() + bias.double()
    want = torch.nn.functional.gelu(y)
    assert error(out[0, :filled].double().numpy(), y.numpy()) < 5e-3
    assert error(act[0, :filled].double().numpy(), want.numpy()) < 5e-3
    assert (out[0, filled:] == 7).all() and act[0, filled:].isnan().all()


def test_the_fit_of_erf() -> None:
    """Relative to the value: far below the 4e-3 that bf16 keeps, also where the tail is small."""
    x = torch.linspace(-6, 6, 4096)
    tail, e = torch.empty_like(x), torch.empty_like(x)
    tail_of[(1,)](tail, e, x, N=4096)
    want = 0.5 * torch.special.erfc(x.abs().double() * 0.5**0.5)
    assert ((tail - want).abs() / want).max() < 3e-5
    assert ((e - (-0.5 * x.double() ** 2).exp()).abs()).max() < 1e-6


REFUSED = {
    "fp32": (SIZES, {"activation": "gelu"}, "fp32"),
    "cuBLASLt's own": ({**SIZES, "seq": 140}, {"activation": "gelu_new"}, "bf16"),
    "no activation, 2049 rows": ({**SIZES, "seq": 2049}, {"bias": "ffn"}, "bf16"),
    "sums of columns": (SIZES, {"bias_grad": (1, "ffn"), "b": "batch seq ffn", "out": "embed ffn"}, "bf16"),
    "odd columns": ({**SIZES, "ffn": 71}, {"activation": "gelu"}, "bf16"),
    "bias of rows": (SIZES, {"activation": "gelu", "bias": "seq"}, "bf16"),
    "columns first": (SIZES, {"activation": "gelu", "out": "ffn batch seq"}, "bf16"),
    "rows not first": (SIZES, {"activation": "gelu", "a": "embed batch seq"}, "bf16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cublaslt_computes(name: str) -> None:
    sizes, options, dtype = REFUSED[name]
    case = Case(sizes, dtype)
    linear(**options)(case)
    assert launch.load()["contract"]([task_of(case)]).ways == [()]


def test_parts_of_a_sum_are_cublaslts() -> None:
    """Products that are added to cannot be measured, and the activation waits for the last."""
    case = Case(SIZES, "bf16")
    linear(activation="gelu")(case)
    first, *others = lower(case.graph, Tiling({"embed": 16})).tasks.tasks
    assert "product sum" in launch.load()["contract"]([first]).key
    assert others and not any(launch.load()["contract"]([task]).launches for task in others)


COMPILE = """
import sys
sys.path.insert(0, sys.argv[1])
from operators_contract import linear
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch, launch_binary
from nntile_py.execution.task_payload import NOT_LAUNCHED, encoded_launches
from nntile_py.tasks.dynamic_size import with_live_sizes
from nntile_py.testing import Case
from nntile_py.tiles import Slot, Tiling

gradient = linear(activation="gelu", aux=True)
few = linear(b="ffn embed", bias="ffn", activation="gelu")
deep = linear(b="ffn embed", bias="ffn", residual=True)
many = linear(b="ffn embed", bias="ffn", activation="gelu", pre=True)
cases = (64, 768, 3072, few), (64, 3072, 768, deep), (2048, 768, 3072, gradient), (2049, 768, 3072, many)
for seq, embed, ffn, row in cases:
    case = Case({"batch": 1, "seq": seq, "embed": embed, "ffn": ffn}, "bf16")
    row(case)
    (task,) = lower(case.graph, Tiling({})).tasks.tasks
    made = launch.load()["contract"]([task])
    for one in sum(made.ways if sys.argv[2] == "True" else made.ways[:1], ()):
        binary = launch_binary.compile_launch(one, 90)
        assert binary.shared <= launch_binary.shared_memory(90), (one.constexprs, binary.shared)
        assert binary.warps == one.warps
    print(seq, embed, made.key.partition(" of ")[2])

# Tensor maps of the first rows, as many as a step fills; not for devices without the copy engine.
filled = with_live_sizes(task, [(number, 1, Slot("filled")) for number in (0, 1, 4)])
(one,) = launch.load()["contract"]([filled]).launches
*_, grid, parameters = launch_binary.encode(one, launch_binary.compile_launch(one, 90))
rows = (7, (2, 1, 1, 1))
sizes = [(2, 3072), (3, 3072), (3, 1)]
assert parameters[:5] == [(9, (4, 3072, 2, 9, 128, 32, 2)), rows, *sizes], parameters[:5]
assert parameters[5:10] == [(9, (0, 3072, 2, 9, 128, 32, 2)), rows, *sizes], parameters[5:10]
assert parameters[15:17] == [(9, (2, 768, 2, 9, 128, 64, 3)), (2, 3072)], parameters[15:17]
assert grid == [(2, 264), (2, 1), (2, 1)]
assert encoded_launches([task], 80) == NOT_LAUNCHED

# Candidates that need more shared memory than the device has are left out, so the C++ kernel computes the product.
ways = launch.load()["contract"]([task]).ways
needs = sorted(launch_binary.compile_launch(one, 90).shared for way in ways for one in way)
for room, ways in (needs[-1], 2), (needs[0] - 1, 0):
    launch_binary.shared_memory = lambda capability: room
    assert len(encoded_launches([task], 90)[0]) == ways
assert encoded_launches([task], 90) == NOT_LAUNCHED
"""


@pytest.mark.long
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["first ways", "all ways"])
def test_compiles_for_sm_90(every: bool, python: Python, tmp_path: Path) -> None:
    done = python(COMPILE, Path(__file__).parent, every, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    some = [way for way in product_triton.SOME if way.rows == way.columns == 128]  # the others are of too many programs
    sets = {
        "64 768": product_triton.FEW, "64 3072": product_triton.DEEP, "2049 768": product_triton.MANY,
        "2048 768": [*some, product_triton.TWICE, product_triton.ONCE],
    }  # fmt: skip
    told = {f"{sizes} {', '.join(way.name for way in ways)}" for sizes, ways in sets.items()}
    assert {*done.stdout.splitlines()} == told
