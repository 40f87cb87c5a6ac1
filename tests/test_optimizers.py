"""Lion and Muon: their formulas, and training against torch.optim in fp64, in every tiling."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_parity import close_gradients, data, gpt2, torch_gradients

import nntile_py as nt
from nntile_py.graph.optimizers import matrix_axes
from nntile_py.graph.step import StepSpec
from nntile_py.testing import error

TILINGS: dict[str, dict[str, int]] = {
    "uncut": {},
    "even": {"batch": 2, "embed": 24, "heads": 2, "ffn": 48, "vocab": 250},
    "ragged": {"batch": 3, "seq": 10, "embed": 20, "heads": 3, "ffn": 50, "vocab": 200},
}


class TorchLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                c = torch.lerp(m, p.grad, 1 - b1)
                p.copy_(p - lr * (c.sign() + group["weight_decay"] * p))
                m.lerp_(p.grad, 1 - b2)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.optim.Muon iterates in bf16; here in the dtype of the gradient."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


def trained(make: Callable[[Any], Any], grads: list[Any], start: Any) -> Any:
    p = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([p])
    for grad in grads:
        p.grad = torch.tensor(grad)
        optimizer.step()
    return p.detach()


def test_lion() -> None:
    rng = np.random.default_rng(0)
    start, *grads = rng.standard_normal((6, 4, 3))
    lion = nt.Lion(lr=0.1, betas=(0.8, 0.95), weight_decay=0.2)
    p, m = start, np.zeros((4, 3))
    for grad in grads:
        p, m = lion.reference(p, grad, [m], 0.2, 0.1, 1)
    want = trained(lambda params: TorchLion(params, 0.1, (0.8, 0.95), 0.2), grads, start)
    assert error(p, want) < 1e-14


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon(exact: None, shape: tuple[int, int], adjust: Any) -> None:
    rng = np.random.default_rng(0)
    start, *grads = rng.standard_normal((6, *shape))
    for nesterov in (True, False):
        how = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 3}
        muon = nt.Muon(**how, adjust_lr_fn=adjust)
        p, m = start, np.zeros(shape)
        for grad in grads:
            p, m = muon.reference(p, grad, [m], 0.2, 0.1, 1)
        want = trained(lambda params, how=how: torch.optim.Muon(params, **how, adjust_lr_fn=adjust), grads, start)
        assert error(p, want) < 1e-13


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 611, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 40}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def groups(model: Any) -> tuple[list[Any], list[Any]]:
    """The model's hidden matrices and its other parameters."""
    named = dict(model.named_parameters())
    hidden = [name for name, p in named.items() if p.dim() == 2 and "embed" not in name and "lm_head" not in name]
    return [named[name] for name in hidden], [p for name, p in named.items() if name not in hidden]


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("name", ["lion", "muon"])
def test_training_as_in_torch(exact: None, runtime: nt.Runtime, name: str, tiling: str) -> None:
    model, (ids, labels) = llama().double(), data(37, 611)
    if name == "lion":
        ours: Any = nt.Lion(lr=1e-3, betas=(0.8, 0.95), weight_decay=0.2)
        theirs: list[Any] = [TorchLion(model.parameters(), 1e-3, (0.8, 0.95), 0.2)]
    else:
        ours = nt.Muon(lr=0.02, adamw_lr=0.001, momentum=0.9)
        hidden, others = groups(model)
        theirs = [torch.optim.Muon(hidden, lr=0.02, momentum=0.9)]
        theirs.append(torch.optim.AdamW(others, lr=0.001, weight_decay=0.1))
    trainer = nt.Trainer(nt.models.Llama.from_hf(llama()), 4, 37, TILINGS[tiling], "fp64", ours, clip_grad_norm=0.5)
    for x, y in zip(ids[:3], labels[:3], strict=True):
        torch_gradients(model, x, y)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in theirs:
            optimizer.step()
        trainer.step(x, y)
    want = {name: p.detach().numpy() for name, p in model.named_parameters()}
    close_gradients(trainer.state_dict(), want, 1e-6)  # transformers computes norms of Llama in fp32


def test_matrices_of_a_joined_weight(exact: None, runtime: nt.Runtime) -> None:
    """Queries, keys and values of GPT-2's c_attn are three matrices, whatever the fusion and the tiles."""
    ids, labels = data(37, 611)
    muon = nt.Muon(lr=0.02, momentum=0.0, nesterov=False, weight_decay=0.0)
    model = nt.models.GPT2.from_hf(gpt2())
    name = "transformer.h.0.attn.c_attn.weight"
    start, results = model.weights[name].copy(), []
    for options in ({"fusion": {"qkv": False}}, {"tiles": TILINGS["ragged"]}):
        trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), 4, 37, precision="fp64", optimizer=muon, **options)
        trainer.step(ids[0], labels[0])
        results.append(trainer.state_dict()[name])
        grad = trainer.gradients()[name]
        for part in (slice(0, 48), slice(48, 96), slice(96, 144)):
            want, _ = muon.reference(start[:, part].astype(float), grad[:, part], [np.zeros((48, 48))], 0.0, 0.02, 1)
            assert error(results[-1][:, part], want) < 1e-10
    assert error(*results) < 1e-10


def test_which_optimizer() -> None:
    """Tables, output layers, vectors and matched weights are AdamW's; a source that is part of a weight is a matrix."""
    config = nt.models.GPT2.Config(layers=1, embed=24, heads=4, vocab=101, positions=19)

    def methods(**how: Any) -> dict[str, str]:
        spec = StepSpec(nt.models.GPT2(config), 2, 8, optimizer=nt.Muon(**how))
        ops = [op for op in spec.step().update_graph.ops if op.kind in ("AdamW", "MuonUpdate")]
        return {op.inputs[0].name.removeprefix("transformer.").removeprefix("h.0."): op.kind for op in ops}

    kinds = methods()
    matrices = {name for name, kind in kinds.items() if kind == "MuonUpdate"}
    assert matrices == {f"{name}.weight" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert set(kinds.values()) == {"AdamW", "MuonUpdate"} and kinds["wte.weight"] == "AdamW"
    assert methods(adamw_match=["*mlp*"])["mlp.c_fc.weight"] == "AdamW"
    with pytest.raises(nt.ConfigError, match=r"optimizer\.adamw_match: '\*mpl\*' matches no weight"):
        methods(adamw_match=["*mpl*"])
    with pytest.raises(nt.ConfigError, match=r"optimizer\.adamw_lr: got 0.1; allowed with optimizer.lr = 0: 0 or null"):
        nt.Muon(lr=0.0, adamw_lr=0.1)
    params = StepSpec(nt.models.GPT2(config), 2, 8).graphs.graph.params.values()
    axes = {param.tensor.name.rpartition("h.0.")[2]: matrix_axes(param) for param in params}
    assert axes["attn.c_attn.weight"] == nt.tasks.MatrixAxes(("qkv",), ("embed",), ("heads", "head_dim"))
    assert axes["attn.c_proj.weight"] == nt.tasks.MatrixAxes((), ("heads", "head_dim"), ("embed",))
    assert axes["attn.c_attn.bias"] is None and axes["ln_1.weight"] is None


def test_groups_of_muon(runtime: nt.Runtime) -> None:
    """A group's factor acts on matrices and on AdamW's weights."""
    ids, labels = data(37, 611)
    groups = [{"match": ["*.h.1.*"], "lr_scale": 0}]
    muon = nt.Muon(lr=0.02, adamw_lr=0.01, groups=groups)
    trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), 4, 37, optimizer=muon)
    before = trainer.state_dict()
    trainer.step(ids[0], labels[0])
    same = {name: bool((value == before[name]).all()) for name, value in trainer.state_dict().items()}
    assert all(same[name] == (".h.1." in name) for name in same)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_a_step_with_rate_0(name: str, runtime: nt.Runtime) -> None:
    """The last step of a schedule with min_lr = 0, if some weights have a rate of their own."""
    ids, labels = data(37, 611)
    groups = [{"match": ["*ln_*"], "lr": 0.01}]
    optimizer: Any = nt.Muon(lr=0.02, adamw_lr=0.01, groups=groups) if name == "muon" else nt.AdamW(groups=groups)
    trainer = nt.Trainer(nt.models.GPT2.from_hf(gpt2()), 4, 37, optimizer=optimizer)
    before = trainer.state_dict()
    trainer.step(ids[0], labels[0], lr=0.0)
    assert all((value == before[key]).all() for key, value in trainer.state_dict().items())
    with pytest.raises(nt.ConfigError, match=r"lr: got -1\.0; allowed: a number of at least 0"):
        trainer.step(ids[0], labels[0], lr=-1.0)
    for rate in ("1e-3", True, float("nan")):
        with pytest.raises(nt.ConfigError, match=r"^optimizer\.lr: got .*; allowed: a number of at least 0$"):
            trainer.submit(ids[0], labels[0], lr=rate)  # type: ignore[arg-type]
    assert trainer.step(ids[0], labels[0], lr=np.float64(0)) > 0
