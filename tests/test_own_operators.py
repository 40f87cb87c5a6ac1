"""Operators of a user's own file, with kernels in Python: in programs, by `nt.testing`, and where they fail."""

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CPUS

import nntile_py as nt
from nntile_py import tasks as ops
from nntile_py.execution.program import Store, programs
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import Normal
from nntile_py.graph.lowering import lower
from nntile_py.graph.params import Traced
from nntile_py.models.model_config import TokenConfig
from nntile_py.tasks.contract import contract
from nntile_py.tasks.cross_entropy import cross_entropy
from nntile_py.tasks.embedding import embedding
from nntile_py.testing import check_operator, error
from nntile_py.tiles import Tiling
from nntile_py.tiles.tasklist import POLICIES

HERE = Path(__file__).parent


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The user's file, in a folder that has nothing to do with the project."""
    path = tmp_path_factory.mktemp("user") / "my_operators.py"
    shutil.copy(HERE / "own_operators.py", path)
    return load(path)


@pytest.fixture
def runtime() -> Iterator[nt.Runtime]:
    with nt.Runtime(cpus=CPUS) as running:
        yield running


# -- checked against its reference


def norm_row(own: Any) -> Any:
    return lambda case: case.add(
        own.RMSNorm(
            case.x("batch seq embed"), case.x("embed"), case.y("batch seq embed"),
            case.y("batch seq one", case.sum_dtype), 1e-5,
        )
    )  # fmt: skip


def test_rms_norm(own: Any) -> None:
    check_operator(norm_row(own))  # starts its own runtime


def test_swish_in_torch(runtime: nt.Runtime, own: Any) -> None:
    def row(case: Any) -> Any:
        return case.add(own.Swish(case.x("mine ffn"), case.y("mine ffn"), 0.7))

    check_operator(row, {"mine": 3}, dtypes=("fp64", "fp32", "bf16", "fp16"))


def wrong_gradient(own: Any, patch: pytest.MonkeyPatch) -> None:
    right = own.RMSNormGrad.reference

    def scaled(self: Any, *inputs: Any) -> Any:
        dx, *others = right(self, *inputs)
        return 1.001 * dx, *others

    patch.setattr(own.RMSNormGrad, "reference", scaled)


def wrong_kernel(own: Any, patch: pytest.MonkeyPatch) -> None:
    @nt.task(squares="ACC", x="R")
    def overwrites(squares: Any, x: Any) -> None:
        squares[...] = (x * x).sum(-1, keepdims=True)

    patch.setattr(own, "sum_squares", overwrites)


def wrong_in_tiles(own: Any, patch: pytest.MonkeyPatch) -> None:
    @nt.task(y="W", x="R", squares="R", gamma="R")
    def of_the_tile(y: Any, x: Any, squares: Any, gamma: Any, *, width: int, eps: float) -> None:
        y[...] = x * own.rstd(squares, x.shape[-1], eps) * gamma

    patch.setattr(own, "normalise", of_the_tile)


def no_gradient(own: Any, patch: pytest.MonkeyPatch) -> None:
    right = own.RMSNorm.gradient
    patch.setattr(own.RMSNorm, "gradient", lambda *args: [right(*args)[0], None])


@pytest.mark.parametrize(
    ("mistake", "text"),
    [
        (wrong_gradient, r"RMSNorm\.gradient of input 0: off by 1\.0e-03 from finite differences"),
        (wrong_kernel, r"off by .*chain, .*'embed': 8"),
        (wrong_in_tiles, r"off by .*chain, .*'embed': 8"),
        (no_gradient, r"RMSNorm\.gradient of input 1: off by 1\.0e\+00"),
    ],
)
def test_mistakes_are_seen(
    runtime: nt.Runtime, own: Any, monkeypatch: pytest.MonkeyPatch, mistake: Any, text: str
) -> None:
    mistake(own, monkeypatch)
    with pytest.raises(AssertionError, match=text):
        check_operator(norm_row(own))


# -- trained in a small network

SIZES = {"batch": 3, "seq": 5, "embed": 6, "ffn": 8, "vocab": 11}
PARAMS = {"up": "embed ffn", "gamma": "ffn", "head": "ffn vocab"}
LR, STEPS = 0.5, 4


def named(g: Graph, name: str, axes: str, kind: str, dtype: str | None = None) -> Any:
    return g.named(name, axes.split(), [SIZES[a] for a in axes.split()], kind, dtype)


def network(own: Any, dtype: str = "fp64") -> Graph:
    """loss of rms_norm(swish(x up)) head, its gradients, and SGD."""
    g = Graph(dtype)
    x, labels = named(g, "x", "batch seq embed", "input"), named(g, "labels", "batch seq", "input", "int64")
    p = {name: named(g, name, axes, "param") for name, axes in PARAMS.items()}
    clip = g.named("clip", ["one"], [1], "input", "fp64")
    with g.scope("block"):
        hidden = own.rms_norm(g, own.swish(g, contract(g, x, p["up"], ["batch", "seq", "ffn"])), p["gamma"])
        logits = contract(g, hidden, p["head"], ["batch", "seq", "vocab"])
    loss = g.named("loss", ["one"], [1], "scalar", "fp64")
    lse = g.temp("lse", labels.axes, labels.shape, dtype)
    grads = g.backward(g.add(ops.CrossEntropy(logits, labels, loss, lse)).output)
    assert len(grads) == len(p)
    for param, grad in grads.items():
        g.add(ops.Update(ops.SGD(), param, grad, [], clip))
    return g


def start() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    values: dict[str, Any] = {n: rng.standard_normal([SIZES[a] for a in axes.split()]) for n, axes in PARAMS.items()}
    values["x"] = rng.standard_normal((3, 5, 6))
    return values | {"labels": rng.integers(0, 11, (3, 5)), "clip": np.ones(1)}


def trained(own: Any, tiles: dict[str, int], policy: str, steps: int = STEPS) -> dict[str, Any]:
    g = network(own)
    low, store = lower(g, Tiling(tiles), policy), Store()
    for name, value in start().items():
        store.write(low, g.tensors[name], value)
    (program,) = programs([low.tasks], store)
    for _ in range(steps):
        program.run({"lr": LR, "loss_scale": 1 / 15})
    assert g.loss is not None
    return {name: store.read(low, tensor) for name, tensor in [*((n, g.tensors[n]) for n in PARAMS), ("loss", g.loss)]}


def trained_by_torch(steps: int = STEPS) -> dict[str, Any]:
    values = start()
    p = {name: torch.tensor(values[name], requires_grad=True) for name in PARAMS}
    x, labels = torch.tensor(values["x"]), torch.tensor(values["labels"])
    for _ in range(steps):
        hidden = torch.nn.functional.rms_norm(torch.nn.functional.silu(x @ p["up"]), (8,), p["gamma"], 1e-5)
        loss = torch.nn.functional.cross_entropy((hidden @ p["head"]).reshape(15, 11), labels.reshape(15))
        loss.backward()
        with torch.no_grad():
            for value in p.values():
                assert value.grad is not None
                value -= LR * value.grad
                value.grad = None
    return {name: value.detach().numpy() for name, value in p.items()} | {"loss": loss.detach().numpy().reshape(1)}


RAGGED = {"batch": 2, "seq": 2, "embed": 4, "ffn": 3, "vocab": 4}


@pytest.mark.parametrize(("tiles", "policy"), [({}, "chain"), ({"ffn": 4}, "chain"), *((RAGGED, p) for p in POLICIES)])
def test_training(runtime: nt.Runtime, own: Any, tiles: dict[str, int], policy: str) -> None:
    got, want = trained(own, tiles, policy), trained_by_torch()
    for name, value in want.items():
        assert error(got[name], value) < 1e-10, name


class MineConfig(TokenConfig):
    type: str = "mine"
    embed: int
    ffn: int


def my_model(own: Any) -> Any:
    class Mine(nt.models.Model):
        """A user's model of a user's operators: rms_norm(swish(rows of a table, up)) head."""

        Config = MineConfig

        def trace(self, g: Graph, batch: Any) -> Any:
            c, tokens = self.config, {"batch": batch.size, "seq": batch.seq}
            ids = g.input("input_ids", tokens, below=c.vocab)
            labels = g.input("labels", tokens, below=c.vocab, ignored=-100, scale="loss_scale")
            words = g.param("words", {"vocab": c.vocab, "embed": c.embed}, Normal(1.0))
            up = g.param("up", {"embed": c.embed, "ffn": c.ffn}, Normal(1.0))
            gamma = g.param("gamma", {"ffn": c.ffn}, Normal(1.0))
            head = g.param("head", {"ffn": c.ffn, "vocab": c.vocab}, Normal(1.0))
            x = contract(g, embedding(g, ids, words), up, ["batch", "seq", "ffn"])
            logits = contract(g, own.rms_norm(g, own.swish(g, x), gamma), head, ["batch", "seq", "vocab"])
            return Traced(cross_entropy(g, logits, labels), {"logits": logits})

    return Mine(MineConfig(vocab=11, embed=6, ffn=8))


@pytest.mark.parametrize("policy", ["chain", "redux"])
def test_trainer_of_a_model_with_them(runtime: nt.Runtime, own: Any, policy: str) -> None:
    model, rng = my_model(own), np.random.default_rng(1)
    ids, labels = rng.integers(0, 11, (2, 3, 5))
    p = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in model.weights.items()}
    hidden = torch.nn.functional.silu(p["words"][ids] @ p["up"])
    logits = torch.nn.functional.rms_norm(hidden, (8,), p["gamma"], 1e-5) @ p["head"]
    loss = torch.nn.functional.cross_entropy(logits.reshape(15, 11), torch.tensor(labels).reshape(15))
    loss.backward()
    trainer = nt.Trainer(model, 3, 5, RAGGED, optimizer=nt.SGD(lr=0.1), accumulate=policy, precision="fp64")
    assert trainer.step({"input_ids": ids, "labels": labels}) == pytest.approx(loss.item(), rel=1e-10)
    grads = trainer.gradients()
    for name, param in p.items():
        assert param.grad is not None and error(grads[name], param.grad) < 1e-10, name
    before = loss.item()
    for _ in range(30):
        trainer.submit({"input_ids": ids, "labels": labels})
    assert trainer.step({"input_ids": ids, "labels": labels}) < 0.8 * before


def test_the_same_to_the_bit_on_any_number_of_workers(own: Any) -> None:
    runs = []
    for cpus in (1, CPUS, CPUS):
        with nt.Runtime(cpus=cpus):
            runs.append(trained(own, RAGGED, "chain", 20))
    assert all(np.array_equal(run[name], runs[0][name]) for run in runs[1:] for name in run)


def test_digest(tmp_path: Path) -> None:
    """The digest is the same for equal sources, and differs if a kernel's source has changed."""
    text, found = (HERE / "own_operators.py").read_text(), []
    for k, change in enumerate(("", "", "0 + ")):
        path = tmp_path / f"load{k}" / "again.py"
        path.parent.mkdir()
        path.write_text(text.replace("squares += ", f"squares += {change}"))
        found.append(lower(network(load(path)), Tiling(RAGGED)).tasks)
    first, second, changed = ({task.kernel for task in tasks.tasks} for tasks in found)
    assert found[0].digest() == found[1].digest() != found[2].digest()
    assert first == second and [name[:18] for name in first - changed] == ["again.sum_squares-"]


def test_a_failure_in_training_is_said_once_and_training_goes_on(runtime: nt.Runtime, own: Any) -> None:
    fails = {"now": False}

    @nt.task("torch", y="W", x="R")
    def sometimes(y: Any, x: Any, *, beta: float) -> None:
        if fails["now"]:
            raise FloatingPointError("as told")
        torch.mul(x, torch.sigmoid(beta * x), out=y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own, "swish_kernel", sometimes)
        fails["now"] = True
        with pytest.raises(nt.TaskError, match=r"^block\.Swish: FloatingPointError: as told"):
            trained(own, RAGGED, "tree")
        fails["now"] = False
        assert error(trained(own, RAGGED, "tree")["loss"], trained_by_torch()["loss"]) < 1e-10
