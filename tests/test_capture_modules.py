"""Unusual PyTorch modules, captured: each is computed as PyTorch computes it, or refused with a message."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from captured_models import MODELS
from test_capture import worst

import nntile_py as nt


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with nt.Runtime(cpus=1, scheduler="lws"):
        yield


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return dy


class Gradients(torch.nn.Module):
    """Two layers, of which the first is used as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.first.requires_grad_(kind != "frozen")
        if kind == "hook":
            self.first.weight.register_hook(lambda dw: 2 * dw)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.kind == "no_grad":
            with torch.no_grad():
                y = y * torch.tanh(self.first(x)) + self.second(x)
            y = y * self.first(x)
        if self.kind == "counted":
            self.count += 1
            y = y * self.count
        return self.second(Straight.apply(y) if self.kind == "own" else y).square().mean()


@pytest.mark.parametrize("kind", ["frozen", "no_grad"])
def test_parts_without_gradients_are_those_of_eager(kind: str) -> None:
    torch.manual_seed(0)
    module, x = Gradients(kind), torch.randn(4, 6, 8)
    want = module(x)
    want.backward()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    grads = {name: value.grad.numpy() for name, value in module.named_parameters() if value.grad is not None}
    model = nt.from_torch(module, {"x": x})
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.AdamW(lr=0.1, weight_decay=0.1))
    assert trainer.step({"x": x.numpy()}) == pytest.approx(float(want.detach()), rel=1e-5)
    assert trainer.gradients().keys() == grads.keys()
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    trainer.close()
    nt.to_torch(model)
    assert {name for name, value in module.named_parameters() if (value != before[name]).any()} == grads.keys()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("own", "Straight in Gradients"), ("hook", r"the hook of first\.weight"), ("counted", "changes count, and the")],
)
def test_what_a_capture_would_compute_differently_is_refused(kind: str, message: str) -> None:
    model = nt.from_torch(Gradients(kind), {"x": torch.randn(4, 6, 8)})
    with pytest.raises(nt.ConfigError, match=message):
        nt.Trainer(model, *model.sizes)


@torch.library.custom_op("nntile_py_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, dy: 2 * dy)


class Library(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return doubled(super().forward(x)).square().mean()


def test_operators_of_a_library_have_their_own_gradients() -> None:
    torch.manual_seed(0)
    module, x = Library(8, 8), torch.randn(4, 6, 8)
    module(x).backward()
    model = nt.from_torch(module, {"x": x})
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.0))
    trainer.step({"x": x.numpy()})
    grads = {name: value.grad.numpy() for name, value in module.named_parameters() if value.grad is not None}
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    trainer.close()


class Unusual(torch.nn.Module):
    """A convolution with one channel, an LSTM, a frozen weight, a tuple as output."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.conv = torch.nn.Linear(8, 6), torch.nn.Conv1d(3, 1, 3, padding=1)
        self.lstm = torch.nn.LSTM(6, 5, batch_first=True)
        self.fixed.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.fixed(x)
        return self.conv(x), self.lstm(x)[0]


def of_two(output: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return output[0].square().mean() + (output[1] - inputs["y"]).square().mean()


def test_lstm_single_channel_frozen_weight_and_tuple() -> None:
    torch.manual_seed(0)
    module, example = Unusual(), {"x": torch.randn(4, 3, 8), "y": torch.randn(4, 3, 5)}
    loss = of_two(module(example["x"]), example)
    loss.backward()
    model = nt.from_torch(module, example, of_two)
    trainer = nt.Trainer(model, *model.sizes, tiles={"batch": 2})
    first = trainer.step({name: value.numpy() for name, value in example.items()})
    assert first == pytest.approx(loss.item(), rel=1e-5)
    found = trainer.gradients()
    trainer.close()
    wanted = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    assert found.keys() == wanted.keys() and "fixed.weight" not in found
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_a_config_may_cache_keys_and_values(dtype: torch.dtype, rel: float) -> None:
    """The config is unchanged afterwards."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 50}
    config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=2, rotary_pct=1.0)
    module = transformers.GPTNeoXForCausalLM(config).to(dtype)
    ids = torch.randint(0, 50, (2, 8))
    model = nt.from_torch(module, {"input_ids": ids, "labels": ids})
    trainer = nt.Trainer(model, *model.sizes)
    loss = trainer.step({"input_ids": ids.numpy(), "labels": ids.numpy()})
    trainer.close()
    assert module.config.use_cache
    assert loss == pytest.approx(module(input_ids=ids, labels=ids).loss.item(), rel=rel)


class Selecting(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = super().forward(x)
        return rows[(rows[:, 0] > 0).nonzero()[:, 0]]


@pytest.mark.parametrize(
    ("module", "loss", "message"),
    [
        (torch.nn.Linear(4, 3), None, "the output of Linear has no loss; allowed: nt.from_torch"),
        (torch.nn.Linear(4, 3), lambda out, inputs: out.mean(1), r"^loss: the function returned shape \[2\]"),
        (torch.nn.Linear(4, 3), lambda out, inputs: 1.0, "^loss: the function returned float"),
        (torch.nn.Linear(4, 3).requires_grad_(False), lambda out, inputs: out.mean(), "all weights of Linear"),
        (Selecting(4, 3), lambda out, inputs: out.mean(), "result of nonzero depends on values: File .*test_capture"),
    ],
    ids=["none", "vector", "float", "frozen", "selecting"],
)
def test_losses_and_modules_that_are_refused(module: torch.nn.Module, loss: Any, message: str) -> None:
    name = "x" if isinstance(module, Selecting) else "input"
    model = nt.from_torch(module, {name: torch.randn(2, 4)}, loss)
    with pytest.raises(nt.ConfigError, match=message):
        nt.Trainer(model, *model.sizes)


def test_dropout_beside_an_operator_in_place() -> None:
    """torch.export decomposes dropout then."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.dropout(linear(x), 0.5, module.training)
        return x.mul_(2.0)

    linear = torch.nn.Linear(4, 3)
    module = torch.nn.Module()
    module.linear = linear
    module.forward = forward
    model = nt.from_torch(module, {"x": torch.ones(2, 4)}, lambda out, inputs: out.square().mean())
    trainer = nt.Trainer(model, *model.sizes)
    assert trainer.step({"x": np.ones((2, 4), np.float32)}) != trainer.evaluate({"x": np.ones((2, 4), np.float32)})
    trainer.close()


POINTWISE: dict[str, Any] = {
    "abs": torch.abs, "clamp": lambda x: torch.clamp(x, -1, 1), "clamp_min": lambda x: torch.clamp(x, min=0),
    "hardtanh": torch.nn.functional.hardtanh, "relu6": torch.nn.functional.relu6, "elu": torch.nn.functional.elu,
    "celu": lambda x: torch.nn.functional.celu(x, 0.7), "selu": torch.selu, "softplus": torch.nn.functional.softplus,
    "leaky_relu": torch.nn.functional.leaky_relu, "hardsigmoid": torch.nn.functional.hardsigmoid,
    "hardswish": torch.nn.functional.hardswish, "relu": torch.relu, "log_sigmoid": torch.nn.functional.logsigmoid,
    "maximum": lambda x: torch.maximum(x, x.flip(-1)), "minimum": lambda x: torch.minimum(x, 0.5 * x),
    **{f"power {p}": lambda x, p=p: x**p for p in (0, 1, 2, 3, 9, 10, 13, 40, -2)},
    "power 2.5": lambda x: torch.abs(x) ** 2.5, "power 0.3": lambda x: (torch.abs(x) + 0.1) ** 0.3,
}  # fmt: skip


class Pointwise(torch.nn.Module):
    """A function of a parameter whose values are zeros, bounds of clamps and other numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        values = [-3.0, -1.0, -0.5, 0.0, 0.3, 0.5, 1.0, 1.7, 3.0, 6.0]
        values = [v or 0.25 for v in values] if name == "power -2" else values
        self.values = torch.nn.Parameter(torch.tensor(values))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (POINTWISE[self.name](self.values) * x).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", POINTWISE)
def test_point_wise_functions_at_zeros_and_bounds(name: str) -> None:
    module, x = Pointwise(name), torch.arange(1.0, 21.0).reshape(2, 10)
    want = module(x)
    want.backward()
    model = nt.from_torch(module, {"x": x})
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.0))
    assert trainer.step({"x": x.numpy()}) == pytest.approx(float(want.detach()), rel=1e-5)
    assert module.values.grad is not None
    np.testing.assert_allclose(trainer.gradients()["values"], module.values.grad.numpy(), rtol=2e-5, atol=1e-6)
    trainer.close()


@pytest.mark.parametrize("label", [-1, 100, -101])
def test_labels_out_of_range_are_refused(label: int) -> None:
    module, example = MODELS["gpt2"]()
    model = nt.from_torch(module, example)
    arrays = {name: value.numpy().copy() for name, value in example.items()}
    trainer = nt.Trainer(model, *model.sizes)
    classes = module.config.vocab_size
    arrays["labels"][1, 3] = label if label != 100 else classes
    for call in (trainer.step, trainer.evaluate):
        with pytest.raises(ValueError, match=rf"labels: values go from .*; allowed: 0 to {classes - 1} and -100"):
            call(arrays)
    trainer.close()


class NormedByPyTorch(torch.nn.Module):
    """A gated layer with PyTorch's RMSNorm, and attention with keys repeated for several queries."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.kv = torch.nn.RMSNorm(32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.gate, self.up = torch.nn.Linear(32, 20), torch.nn.Linear(32, 20)
        self.down = torch.nn.Linear(20, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, seq, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(rows, seq, 4, 8).transpose(1, 2)
        k, v = self.kv(y).view(rows, seq, 2, 2, 8).permute(2, 0, 3, 1, 4)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, torch.ones(seq, seq).tril().bool())
        y = y.transpose(1, 2).reshape(rows, seq, 32)
        return self.down(torch.nn.functional.gelu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


def experiment_module(name: str) -> Any:
    """Return a small module of experiments/modules.py, a batch, and the loss function."""
    path = Path(__file__).parents[1] / "experiments/modules.py"
    spec = importlib.util.spec_from_file_location("experiment_modules", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(modules := importlib.util.module_from_spec(spec))
    if name == "gpt2":
        return modules.gpt2(4, 16, 2, 64, 50)
    return modules.qwen(4, 16, (2, 64, 4, 2, 80, 50))


def gated_module() -> Any:
    batch = {"x": torch.randn(4, 6, 32), "labels": torch.randn(4, 6, 32)}
    return NormedByPyTorch(), batch, lambda out, given: torch.nn.functional.mse_loss(out, given["labels"])


@pytest.mark.parametrize("tiles", [{}, {"batch": 3, "seq": 4}], ids=str)
@pytest.mark.parametrize("name, kinds", [
    ("gpt2", {"LayerNorm": 5, "Attention": 2}),
    ("qwen", {"RMSNorm": 5, "Attention": 2, "Rotary": 8, "Gated": 2}),
    ("gated", {"RMSNorm": 1, "Attention": 1, "Gated": 1}),
])  # fmt: skip
def test_patterns_become_the_operators_of_this_library(name: str, kinds: dict[str, int], tiles: dict[str, int]) -> None:
    """Two passes a step; the loss is a function of the output, and some weights are split."""
    torch.manual_seed(0)
    module, example, loss = gated_module() if name == "gated" else experiment_module(name)
    want = loss(module(*[value for key, value in example.items() if key != "labels"]), example)
    want.backward()
    grads = {key: value.grad.numpy() for key, value in module.named_parameters()}
    model = nt.from_torch(module, example, loss)
    rows, seq = model.sizes
    trainer = nt.Trainer(model, rows // 2, seq, tiles, grad_accumulation=2, optimizer=nt.SGD(lr=0.0))
    value = trainer.step({key: value.numpy() for key, value in example.items()})
    assert value == pytest.approx(float(want.detach()), rel=1e-5)
    assert worst(trainer.gradients(), grads)[0] < 2e-5
    assert model.fallbacks == []
    found = Counter(part for op in trainer.built.graph.ops for part in op.title.split(" + "))
    assert {kind: found[kind] for kind in kinds} == kinds
    trainer.close()


class Parts(torch.nn.Module):
    """Uses some columns of a product twice and others never."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer, self.head = how, torch.nn.Linear(8, 12), torch.nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.how == "split":
            a, _, b = y.split(4, -1)
        elif self.how == "chunk":
            a, b, b = y.chunk(3, -1)
        elif self.how == "select":
            y = y.view(*x.shape[:-1], 3, 4)
            a, b = y[..., 0, :], y[..., -1, :] * y[..., 0, :]
        elif self.how == "one":
            a = b = y.view(*x.shape[:-1], 3, 4)[..., 1, :]
        else:
            a, _, b = y.view(*x.shape[:-1], 3, 4).transpose(1, 2).permute(1, 0, 2, 3)
        return self.head(a * torch.tanh(b)).flatten(0, -2)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["split", "chunk", "select", "one", "unbind"])
def test_parts_of_a_product_that_are_used_twice_or_never(how: str) -> None:
    torch.manual_seed(0)
    module, example = Parts(how), {"x": torch.randn(2, 3, 8), "labels": torch.randint(0, 5, (2, 3))}
    loss = lambda out, given: torch.nn.functional.cross_entropy(out, given["labels"].flatten())  # noqa: E731
    want = loss(module(example["x"]), example)
    want.backward()
    grads = {key: value.grad.numpy() for key, value in module.named_parameters()}
    model = nt.from_torch(module, example, loss)
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.0))
    assert trainer.step({key: value.numpy() for key, value in example.items()}) == pytest.approx(float(want.detach()))
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    trainer.close()


class GroupNormed(torch.nn.Module):
    """Group norms of one convolution's channels in groups of two sizes; the second is without weights."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 12, 3, padding=1), torch.nn.Linear(12, 5)
        self.first, self.second = torch.nn.GroupNorm(first, 12), torch.nn.GroupNorm(second, 12, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        return self.head((torch.tanh(self.first(x)) * self.second(x)).mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("tiles", [{}, {"batch": 2}], ids=str)
@pytest.mark.parametrize("groups", [(4, 2), (1, 12), (12, 4), (4, 6)], ids=str)
def test_group_norm(groups: tuple[int, int], tiles: dict[str, int]) -> None:
    torch.manual_seed(0)
    module = GroupNormed(*groups).double()
    example = {"x": torch.randn(3, 3, 5, 6).double(), "labels": torch.randint(0, 5, (3,))}
    want = torch.nn.functional.cross_entropy(module(example["x"]), example["labels"])
    want.backward()
    grads = {key: value.grad.numpy() for key, value in module.named_parameters()}
    model = nt.from_torch(module, example, lambda out, given: torch.nn.functional.cross_entropy(out, given["labels"]))
    trainer = nt.Trainer(model, *model.sizes, tiles, "fp64", nt.SGD(lr=0.0))
    value = trainer.step({key: value.numpy() for key, value in example.items()})
    assert value == pytest.approx(float(want.detach()), rel=1e-12)
    assert worst(trainer.gradients(), grads)[0] < 1e-10
    norms = sum(fallback.startswith("group_norm") for fallback in model.fallbacks)
    assert norms == (groups == (4, 6))  # 12 channels have no axes for groups of both sizes
    trainer.close()


def test_gradients_of_a_convolution_are_two_products() -> None:
    """That of the picture and that of the weights have a task each, with the flop of the convolution."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Conv2d(4, 5, 3), torch.nn.Flatten())
    example = {"input": torch.randn(2, 3, 8, 8), "labels": torch.randint(0, 5, (2,))}
    model = nt.from_torch(module, example, lambda out, given: torch.nn.functional.cross_entropy(out, given["labels"]))
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.0))
    ops = [op for op in trainer.built.graph.ops if op.torch_call == "conv2d"]
    trainer.close()
    forward = [op.flop() for op in ops if op.phase == "forward"]
    assert forward == [2 * 2 * 36 * 4 * 3 * 9, 2 * 2 * 16 * 5 * 4 * 9]
    assert [op.flop() for op in ops if op.phase == "backward"] == [forward[1], forward[1], forward[0]]
