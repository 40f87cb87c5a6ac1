"""PyTorch modules that someone else wrote, captured and cut into tiles: loss, gradients and steps are PyTorch's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
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
    with pytest.raises(ValueError, match=r"x: .* is not allowed; expected numbers \(4, 1, 8, 12\)"):
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
        with pytest.raises(ValueError, match=rf"labels: values go from .*; allowed are 0 to {classes - 1} and -100"):
            call(arrays)
    trainer.close()
