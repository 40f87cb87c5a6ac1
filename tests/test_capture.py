"""PyTorch modules that someone else wrote, captured and cut into tiles: loss, gradients and steps are PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captured_models import MODELS

import nntile_py as nt
from nntile_py.capture.torch_model import TorchModel

TILES: dict[str, dict[str, int]] = {
    "uncut": {},
    "cut": {"batch": 1, "seq": 5, "embed": 20, "heads": 2, "ffn": 40, "vocab": 30},
}
# Compared in fp64: its last pictures have one value a channel, and a batch norm of two rows amplifies rounding.
DOUBLE = "mobilenetv2"
QUICK = "gpt2", "llama", "bert-classifier", "t5", "vit", "resnet"


@pytest.fixture(scope="module", autouse=True)
def running() -> Iterator[None]:
    with nt.Runtime(cpus=1, scheduler="lws"):
        yield


def eager(module: torch.nn.Module, example: dict[str, torch.Tensor]) -> tuple[float, dict[str, Any]]:
    """Return PyTorch's loss and gradients."""
    module.zero_grad()
    loss = module(**{name: value.clone() for name, value in example.items()}).loss
    loss.backward()
    grads = {name: p.grad.numpy().copy() for name, p in module.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def worst(got: dict[str, Any], want: dict[str, Any]) -> tuple[float, str]:
    """Return the largest error relative to the largest entry of a tensor, and the tensor's name.

    Tensors far below the largest one are compared with one hundredth of it: keys' biases have no gradient but rounding.
    """
    top = max(np.abs(value).max() for value in want.values())
    errors = {
        name: float(np.abs(got[name] - value).max() / max(np.abs(value).max(), 0.01 * top))
        for name, value in want.items()
    }
    name = max(errors, key=lambda one: errors[one])
    return errors[name], name


def built(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], str]:
    """Return a module, a batch and the precision in which it is compared."""
    torch.manual_seed(0)
    module, example = MODELS[name]()
    if name != DOUBLE:
        return module.train(), example, "fp32"
    wide = {one: value.double() if value.is_floating_point() else value for one, value in example.items()}
    return module.double().train(), wide, "fp64"


def quick(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in names else pytest.mark.long) for name in MODELS]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", quick(QUICK))
def test_loss_and_gradients_are_those_of_eager(name: str, tiles: str) -> None:
    module, example, precision = built(name)
    loss, grads = eager(module, example)
    model = nt.from_torch(module, example)
    trainer = nt.Trainer(model, *model.sizes, TILES[tiles], precision, nt.SGD(lr=0.0))
    result = trainer.submit({one: value.numpy() for one, value in example.items()}).result()
    assert result.loss == pytest.approx(loss, rel=2e-6)
    error, where = worst(trainer.gradients(), grads)
    assert error < 1e-5, where
    with torch.no_grad():
        module(**{one: value.clone() for one, value in example.items()})  # updates running statistics
        loss = float(module.eval()(**{one: value.clone() for one, value in example.items()}).loss)
    assert trainer.evaluate({one: value.numpy() for one, value in example.items()}) == pytest.approx(loss, rel=1e-5)
    trainer.close()


@pytest.mark.parametrize("name", quick(QUICK[:3]))
def test_ten_steps_are_those_of_adamw(name: str) -> None:
    module, example, precision = built(name)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
    optimizer = torch.optim.AdamW(module.parameters(), **options)
    model = nt.from_torch(module, example)
    trainer = nt.Trainer(model, *model.sizes, TILES["cut"], precision, nt.AdamW(groups=[], **options))
    arrays = {one: value.numpy() for one, value in example.items()}
    for _ in range(10):
        optimizer.zero_grad()
        loss = module(**{one: value.clone() for one, value in example.items()}).loss
        loss.backward()
        optimizer.step()
        assert trainer.step(arrays) == pytest.approx(float(loss.detach()), rel=2e-4, abs=1e-4)
    trainer.close()


def test_weights_go_back_into_the_module() -> None:
    torch.manual_seed(0)
    module, example = MODELS["gpt2"]()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    model = nt.from_torch(module, example)
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.1))
    arrays = {one: value.numpy() for one, value in example.items()}
    first = trainer.step(arrays)
    trainer.close()
    assert nt.to_torch(model) is module
    assert all((value != before[name]).any() for name, value in module.named_parameters() if "bias" not in name)
    assert float(module(**example).loss.detach()) < first


class Own(torch.nn.Module):
    """Residual layers of one width, point-wise functions, and a product of a tensor with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(12, 12), torch.nn.Linear(12, 12, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(torch.sin(self.first(x)) * self.scale)
        y = torch.sigmoid(x) * x
        scores = torch.softmax(y @ y.transpose(-1, -2) / 3, -1)
        return (scores @ x).mean(1)


@pytest.mark.parametrize("tiles", [{}, {"batch": 2}, {"batch": 2, "d0": 3, "d1": 5}], ids=str)
def test_a_module_of_ones_own(tiles: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, example = Own(), {"x": torch.randn(5, 7, 12), "target": torch.randn(5, 12)}
    want = torch.nn.functional.mse_loss(module(example["x"]), example["target"])
    want.backward()
    model = nt.from_torch(module, example, lambda out, given: torch.nn.functional.mse_loss(out, given["target"]))
    trainer = nt.Trainer(model, *model.sizes, tiles, optimizer=nt.SGD(lr=0.0))
    assert trainer.step({one: value.numpy() for one, value in example.items()}) == pytest.approx(
        float(want.detach()), rel=1e-5
    )
    grads = {name: value.grad.numpy() for name, value in module.named_parameters() if value.grad is not None}
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    trainer.close()


def test_accumulated_passes_are_the_whole_batch() -> None:
    torch.manual_seed(0)
    module, example = MODELS["bert-classifier"]()
    double = {one: torch.cat([value, value.flip(0)]) for one, value in example.items()}
    loss, grads = eager(module.train(), double)
    model = nt.from_torch(module, example)
    trainer = nt.Trainer(model, *model.sizes, grad_accumulation=2, optimizer=nt.SGD(lr=0.0))
    assert trainer.step({one: value.numpy() for one, value in double.items()}) == pytest.approx(loss, rel=2e-6)
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    trainer.close()


class Repeated(torch.nn.Module):
    """Attention whose keys are repeated along an axis, as a module's own code may do it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = torch.nn.Linear(16, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(*x.shape[:2], 4, 4).transpose(1, 2)
        k = self.k(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        k = k.repeat(1, 2, 1, 1) * 2.0
        y = torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True) * k.mean(1, keepdim=True)
        return y.square().sum()


@pytest.mark.parametrize("name", ["llama", "vit", "resnet", "own"])
def test_operators_in_bf16_have_tensors_of_one_dtype(name: str) -> None:
    """Kernels of products, norms and sums take bf16 tiles; results of sums are fp32 until they are converted."""
    model = nt.from_torch(*(MODELS[name]() if name in MODELS else (Repeated(), {"x": torch.randn(2, 6, 16)})))
    graph = nt.Graph("bf16")
    traced = model.trace(graph, nt.Batch(*model.sizes))
    assert traced.loss
    graph.backward(traced.loss)
    for op in graph.ops:
        if type(op).__name__ not in (
            "Formula",
            "Total",
            "Sum",
            "ScalarLoss",
            "ScalarLossGrad",
            "CrossEntropy",
            "StatisticsUpdate",
        ):
            others = {t for t in (*op.inputs, *op.outputs) if t.kind != "grad" and not {"stat", "rotary"} & {*t.axes}}
            others -= {t for t in others if t.dtype == "int64" or "lse" in t.name}
            assert {t.dtype for t in others} == {"bf16"}, (op.name, others)


class Branching(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum() if x.mean() > 0 else x.mean()


def test_control_flow_on_data_is_named() -> None:
    model = nt.from_torch(Branching(), {"x": torch.randn(2, 3)})
    with pytest.raises(nt.ConfigError, match=r"cannot capture Branching: .*test_capture\.py"):
        nt.Trainer(model, *model.sizes)


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.Conv2d(8, 8, 3, stride=2)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(8), torch.nn.BatchNorm2d(8, momentum=0.3)])
        self.head = torch.nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for convolution, norm in zip((self.first, self.second), self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def classes(output: torch.Tensor, inputs: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, inputs["labels"])


@pytest.mark.parametrize("passes", [1, 2])
def test_running_statistics_are_trained_and_saved(tmp_path: Path, passes: int) -> None:
    torch.manual_seed(0)
    theirs, rows = Normed(), 4 * passes
    module = copy.deepcopy(theirs)
    whole = {"x": torch.randn(rows, 3, 9, 9), "labels": torch.randint(0, 5, (rows,))}
    parts = [{name: value[4 * k : 4 * k + 4] for name, value in whole.items()} for k in range(passes)]
    arrays = {name: value.numpy() for name, value in whole.items()}
    model = nt.from_torch(module, parts[0], classes)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.1)
    trainer = nt.Trainer(model, 4, 1, {"batch": 2, "d0": 3}, optimizer=nt.SGD(lr=0.1), grad_accumulation=passes)
    for _ in range(3):
        sgd.zero_grad()
        losses = [classes(theirs(part["x"]), part) / passes for part in parts]
        for loss in losses:
            loss.backward()
        sgd.step()
        assert trainer.step(arrays) == pytest.approx(sum(float(loss.detach()) for loss in losses), rel=1e-5)
    first = {name: value[:4] for name, value in arrays.items()}
    loss = classes(theirs.eval()(parts[0]["x"]), parts[0])
    assert trainer.evaluate(first) == pytest.approx(float(loss.detach()), rel=1e-5)
    trainer.save(tmp_path / "saved")
    trainer.close()
    ours, known = dict(nt.to_torch(model).named_buffers()), dict(theirs.named_buffers())
    assert all(torch.allclose(ours[name], value, atol=1e-6) for name, value in known.items() if "running" in name)
    again = nt.Trainer.load(tmp_path / "saved", nt.from_torch(Normed(), parts[0], classes))
    assert again.evaluate(first) == pytest.approx(float(loss.detach()), rel=1e-5)
    again.close()


def test_adapters_are_trained_and_added_to_the_module() -> None:
    torch.manual_seed(0)
    module, example = MODELS["llama"]()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    model = nt.from_torch(module, example, lora={"targets": ["q_proj", "up_proj"], "rank": 2})
    arrays = {name: value.numpy() for name, value in example.items()}
    trainer = nt.Trainer(model, *model.sizes, TILES["cut"], optimizer=nt.AdamW(lr=1e-2))
    losses = [trainer.step(arrays) for _ in range(5)]
    last = trainer.evaluate(arrays)
    trainer.close()
    assert last < losses[0]
    assert nt.to_torch(model) is module
    with torch.no_grad():
        assert float(module.eval()(**example).loss) == pytest.approx(last, rel=1e-5)
    moved = {name.split(".")[-2] for name, value in module.named_parameters() if (value != before[name]).any()}
    assert moved == {"q_proj", "up_proj"}
    with pytest.raises(nt.ConfigError, match=r"lora\.rnak: unknown key"):
        nt.from_torch(module, example, lora={"targets": ["q_proj"], "rnak": 2})


def test_a_captured_model_is_of_this_class() -> None:
    module, example = MODELS["gpt2"]()
    model = nt.from_torch(module, example)
    assert isinstance(model, TorchModel)
    assert repr(model) == "TorchModel(GPT2LMHeadModel)"
    assert model.sizes == (2, 16)


class Patches(torch.nn.Module):
    """Patches of pictures of one channel by views, and by a convolution whose kernels do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 10), torch.nn.Conv2d(1, 10, 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        patches = x.view(rows, 2, 4, 3, 4).transpose(2, 3).reshape(rows, 6, 16)
        return (self.first(patches).transpose(1, 2).reshape(rows, 10, 2, 3) * self.second(x)).flatten(2).sum(-1)


@pytest.mark.parametrize("tiles", [{}, {"batch": 2}], ids=str)
def test_inputs_whose_dimensions_are_split(tiles: dict[str, int]) -> None:
    torch.manual_seed(0)
    module, example = Patches(), {"x": torch.randn(4, 1, 8, 12), "labels": torch.randint(0, 10, (4,))}
    want = torch.nn.functional.cross_entropy(module(example["x"]), example["labels"])
    want.backward()
    model = nt.from_torch(module, example, lambda out, given: torch.nn.functional.cross_entropy(out, given["labels"]))
    trainer = nt.Trainer(model, 2, 1, tiles, grad_accumulation=2, optimizer=nt.SGD(lr=0.0))
    arrays = {one: value.numpy() for one, value in example.items()}
    assert trainer.step(arrays) == pytest.approx(float(want.detach()), rel=1e-5)
    grads = {name: value.grad.numpy() for name, value in module.named_parameters() if value.grad is not None}
    assert worst(trainer.gradients(), grads)[0] < 1e-5
    assert model.fallbacks == []
    with pytest.raises(ValueError, match=r"x: got .*; allowed: numbers \(4, 1, 8, 12\)"):
        trainer.step(arrays | {"x": arrays["x"][:, :, :4]})
    trainer.close()


class Noisy(torch.nn.Module):
    """Drops whole channels, which is no dropout of single values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Conv1d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout1d(self.layer(x), 0.5, self.training).square().sum()


def test_random_numbers_outside_of_dropout_are_refused() -> None:
    """A gradient would be computed with other numbers than the loss."""
    model = nt.from_torch(Noisy(), {"x": torch.randn(2, 3, 8)})
    with pytest.raises(nt.ConfigError, match="feature_dropout draws random numbers: "):
        nt.Trainer(model, *model.sizes)


class Segments(torch.nn.Module):
    """Attention whose mask depends on the padding and on the segments."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        x = self.table(ids).unsqueeze(1)
        seen = (mask[:, None, None, :] != 0) & (kinds[:, None, :, None] == kinds[:, None, None, :])
        return self.head(torch.nn.functional.scaled_dot_product_attention(x, x, x, seen)).square().mean()


def test_a_mask_of_padding_and_segments_is_no_mask_of_padding() -> None:
    torch.manual_seed(0)
    module, kinds = Segments(), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]])
    example = {"ids": torch.randint(0, 20, (2, 6)), "mask": torch.tensor([[1] * 6, [1] * 5 + [0]]), "kinds": kinds}
    want = module(**example)
    model = nt.from_torch(module, example)
    trainer = nt.Trainer(model, *model.sizes, optimizer=nt.SGD(lr=0.0))
    assert trainer.step({one: value.numpy() for one, value in example.items()}) == pytest.approx(float(want.detach()))
    trainer.close()


def test_tiles_of_an_axis_that_a_model_lacks_are_refused() -> None:
    own = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
    for model in (own, nt.from_torch(*MODELS["gpt2"]())):
        with pytest.raises(nt.ConfigError, match=r"tiles\.d99: no axis of this model"):
            nt.Trainer(model, 2, 8, {"d99": 3})
