"""The operators' float64 references, and their gradients, against PyTorch."""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from operators_attention import operands
from pairs import AXES, Pair

from nntile_py import tasks as ops
from nntile_py.errors import ConfigError
from nntile_py.system.parallel import BLOCK
from nntile_py.tasks import Tensor
from nntile_py.tasks.activation import ACTIVATIONS
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.optimizer import joined, split
from nntile_py.tasks.scalar.evaluate import dropout_hash
from nntile_py.testing import error


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize(
    ("a", "b", "out", "formula"),
    [
        ("batch seq embed", "embed ffn", "batch seq ffn", "bse,ef->bsf"),
        ("batch seq embed", "embed qkv heads head_dim", "qkv batch heads seq head_dim", "bse,eqhd->qbhsd"),
        ("batch heads seq head_dim", "batch heads key head_dim", "batch heads seq key", "bhsd,bhkd->bhsk"),
        ("vocab embed", "batch seq embed", "batch seq vocab", "ve,bse->bsv"),
    ],
)
def test_contract(pair: Pair, a: str, b: str, out: str, formula: str) -> None:
    x, y = pair.param(a), pair.param(b)
    want = 0.3 * torch.einsum(formula, pair.torch[x], pair.torch[y])
    pair.compare(ops.Contract(x, y, pair.temp(out), scale=0.3), want)


TORCH: dict[str, Any] = {
    "relu": F.relu, "gelu": F.gelu, "gelu_new": lambda x: F.gelu(x, approximate="tanh"), "tanh": torch.tanh,
    "silu": F.silu, "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x) ** 2, "relu6": F.relu6, "leaky_relu": F.leaky_relu, "hardswish": F.hardswish,
    "mish": F.mish, "sigmoid": torch.sigmoid,
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(pair: Pair, kind: str) -> None:
    x = pair.param("batch seq ffn")
    act = TORCH[kind]
    pair.compare(ops.Activation(x, pair.temp("batch seq ffn"), kind), act(pair.torch[x]))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_fused_linear(kind: str) -> None:
    """act(x w + b + r) with its pre-activation, and the gradient contraction with act' and the bias' gradient."""
    rng = np.random.default_rng(0)
    x, w, b, r = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((5, 4), (4, 3), (3,), (5, 3)))
    pre = x @ w + b + r
    act = TORCH[kind]
    tensors = {
        name: Tensor(name, axes.split(), shape, "fp64")
        for name, axes, shape in (
            ("x", "seq embed", (5, 4)), ("w", "embed ffn", (4, 3)), ("b", "ffn", (3,)), ("r", "seq ffn", (5, 3)),
            ("y", "seq ffn", (5, 3)), ("pre", "seq ffn", (5, 3)), ("v", "ffn embed", (3, 4)),
            ("dz", "seq embed", (5, 4)), ("dv", "ffn embed", (3, 4)), ("sum", "embed", (4,)),
        )
    }  # fmt: skip
    t = tensors
    op = ops.Contract(t["x"], t["w"], t["y"], bias=t["b"], residual=t["r"], activation=kind, pre=t["pre"])
    y, kept = op.reference(*(v.detach().numpy() for v in (x, w, b, r)))
    assert error(y, act(pre).detach()) < 1e-14 and error(kept, pre.detach()) < 1e-14

    v, c = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((3, 4), (4,)))
    pre.retain_grad()
    dz = torch.tensor(rng.standard_normal((5, 4)))
    (act(pre) @ v + c).backward(dz)
    back = ops.Contract(t["dz"], t["v"], t["y"], activation=kind, aux=t["pre"])
    assert pre.grad is not None and v.grad is not None and c.grad is not None
    assert error(back.reference(dz.numpy(), v.detach().numpy(), kept)[0], pre.grad) < 1e-13
    weight = ops.Contract(t["y"], t["dz"], t["dv"], bias_grad=(1, t["sum"]))
    dv, dc = weight.reference(y, dz.numpy())
    assert error(dv, v.grad) < 1e-13 and error(dc, c.grad) < 1e-13


def test_elementwise(pair: Pair) -> None:
    a, b = pair.param("batch seq embed"), pair.param("batch seq embed")
    pair.compare(ops.Add(a, b, pair.temp("batch seq embed")), pair.torch[a] + pair.torch[b])


def test_multiply(pair: Pair) -> None:
    a, b = pair.param("batch seq embed"), pair.param("batch seq embed")
    pair.compare(ops.Multiply(a, b, pair.temp("batch seq embed")), pair.torch[a] * pair.torch[b])


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_gated(pair: Pair, kind: str) -> None:
    gate, up = pair.param("batch seq ffn"), pair.param("batch seq ffn")
    want = TORCH[kind](pair.torch[gate]) * pair.torch[up]
    pair.compare(ops.Gated(gate, up, pair.temp("batch seq ffn"), kind), want)


@pytest.mark.parametrize(("axis", "index"), [("seq", 0), ("seq", 3), ("embed", 6), ("batch", 1)])
def test_select(pair: Pair, axis: str, index: int) -> None:
    x = pair.param("batch seq embed")
    out = pair.temp(" ".join(a for a in x.axes if a != axis))
    pair.compare(ops.Select(x, out, axis, index), pair.torch[x].select(x.axes.index(axis), index))


def test_gather(pair: Pair) -> None:
    x, places = pair.param("batch seq embed"), pair.temp("batch heads")
    pair.values[places] = np.array([[0, 3, 3], [2, -1, 1]])
    at = pair.torch[places] = torch.tensor(pair.values[places])
    want = torch.take_along_dim(pair.torch[x], at.clamp(min=0)[..., None], 1) * (at >= 0)[..., None]
    pair.compare(ops.Gather(x, places, pair.temp("batch heads embed")), want)


def test_gather_back(pair: Pair) -> None:
    """Padded rows of tokens, several axes of them, and the tokens again: each is the other's gradient."""
    x, rows, tokens = pair.param("batch seq embed"), pair.temp("batch one heads"), pair.temp("batch seq")
    pair.values[rows] = np.array([[[1, 4, -1]], [[-1, 0, -1]]])
    pair.values[tokens] = np.array([[-1, 0, -1, -1, 1], [1, -1, -1, -1, -1]])
    at, back = (torch.tensor(pair.values[one]) for one in (rows, tokens))
    pair.torch |= {rows: at, tokens: back}
    want = torch.take_along_dim(pair.torch[x], at[:, 0].clamp(min=0)[..., None], 1) * (at[:, 0] >= 0)[..., None]
    op = ops.Gather(x, rows, pair.temp("batch one heads embed"), tokens)
    pair.compare(op, want[:, None])
    y = pair.param("batch one heads embed")
    want = torch.take_along_dim(pair.torch[y][:, 0], back.clamp(min=0)[..., None], 1) * (back >= 0)[..., None]
    pair.compare(ops.Gather(y, tokens, pair.temp("batch seq embed"), rows), want)
    for wrong in (pair.temp("seq batch"), pair.temp("batch embed"), pair.temp("batch")):
        with pytest.raises(ValueError, match="gather: places need x's first axes, then new axes"):
            ops.gather(pair.g, x, wrong)


def test_squared_error(pair: Pair) -> None:
    x, target = pair.param("batch embed"), pair.temp("batch embed")
    pair.values[target] = pair.rng.standard_normal(target.shape)
    pair.torch[target] = torch.tensor(pair.values[target])
    want = F.mse_loss(pair.torch[x], pair.torch[target])
    pair.compare(ops.SquaredError(x, target, pair.temp("one")), want.reshape(1))


def test_binary_cross_entropy(pair: Pair) -> None:
    """That of PyTorch's BCEWithLogitsLoss, over the elements that count, for logits of any size."""
    x, target = pair.param("batch embed"), pair.temp("batch embed")
    with torch.no_grad():
        pair.torch[x][0] *= 300
        pair.values[x] = pair.torch[x].detach().numpy()
    pair.values[target] = np.where(pair.rng.random(target.shape) < 0.3, IGNORED, pair.rng.random(target.shape))
    pair.torch[target] = torch.tensor(pair.values[target])
    counted = pair.torch[target] != IGNORED
    want = F.binary_cross_entropy_with_logits(pair.torch[x][counted], pair.torch[target][counted])
    pair.compare(ops.BinaryCrossEntropy(x, target, pair.temp("one")), want.reshape(1))


@pytest.mark.parametrize("bias", ["embed", "seq embed", "seq", "batch embed"])
def test_bias_add(pair: Pair, bias: str) -> None:
    x, b = pair.param("batch seq embed"), pair.param(bias)
    wide = pair.torch[b].reshape([AXES[a] if a in bias.split() else 1 for a in x.axes])
    pair.compare(ops.BiasAdd(x, b, pair.temp("batch seq embed")), pair.torch[x] + wide)


def test_transpose_rename_unpack(pair: Pair) -> None:
    x = pair.param("batch seq heads head_dim")
    pair.compare(ops.Transpose(x, pair.temp("batch heads seq head_dim")), pair.torch[x].permute(0, 2, 1, 3))
    y = pair.param("batch seq embed")
    pair.compare(ops.Rename(y, {"seq": "key"}), pair.torch[y] * 1)
    z = pair.param("batch qkv heads")
    outs = [pair.temp("batch heads") for _ in range(3)]
    pair.compare(ops.Unpack(z, outs, "qkv"), *pair.torch[z].unbind(1))


def test_dropout_is_linear_and_keeps_the_mean(pair: Pair) -> None:
    x = pair.param("batch seq embed")
    op = ops.Dropout(x, pair.temp("batch seq embed"), 0.25, 9)
    (mask,) = op.reference(np.ones(x.shape), seed=4)
    pair.compare(op, pair.torch[x] * torch.tensor(mask), seed=4)
    big = Tensor("big", ["batch", "embed"], [500, 400], "fp64")
    op = ops.Dropout(big, big, 0.25, 9)
    masks = [op.reference(np.ones(big.shape), seed=seed)[0] for seed in (1, 2)]
    assert set(np.unique(masks)) == {0.0, 1 / 0.75}
    assert abs(np.mean(masks) - 1) < 0.01
    assert abs(np.corrcoef(masks[0].ravel(), masks[1].ravel())[0, 1]) < 0.01
    assert abs(np.corrcoef(masks[0][:, 1:].ravel(), masks[0][:, :-1].ravel())[0, 1]) < 0.01


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_draws_are_independent(p: float) -> None:
    """Dropout is independent between neighbours (which share a hash), distant elements, keys, seeds, large indices."""
    n = 2**20
    index = np.arange(n, dtype=np.uint64)

    def dropped(index: Any, key: int, seed: int) -> Any:
        return (dropout_hash(index, key, seed) < np.uint64(int(p * 2**32))) - p

    one = dropped(index, 3, 5)
    deviations = {"mean": np.mean(one) / np.sqrt(p * (1 - p))}
    for lag in (1, 2, 3, 7, 64, 768, 4096):
        deviations[f"lag {lag}"] = np.mean(one[:-lag] * one[lag:]) / (p * (1 - p))
        deviations[f"lag {lag}, even"] = np.mean(one[:-lag:2] * one[lag::2]) / (p * (1 - p)) / np.sqrt(2)
    others = {"key": (index, 4, 5), "seed": (index, 3, 6), "index": (index + np.uint64(2**33), 3, 5)}
    for name, other in others.items():
        deviations[name] = np.mean(one * dropped(*other)) / (p * (1 - p))
    assert {name: z for name, value in deviations.items() if abs(z := value * np.sqrt(n)) > 4} == {}


def test_embedding(pair: Pair) -> None:
    numbers, table = pair.ints("batch seq", 4), pair.param("vocab embed")  # four of eleven rows: each occurs often
    pair.compare(ops.Embedding(numbers, table, pair.temp("batch seq embed")), pair.torch[table][pair.torch[numbers]])


def test_layer_norm(pair: Pair) -> None:
    x, gamma, beta = (pair.param(axes) for axes in ("batch seq embed", "embed", "embed"))
    op = ops.LayerNorm(x, gamma, beta, pair.temp("batch seq embed"), pair.temp("batch seq stat"), 1e-3)
    pair.compare(op, F.layer_norm(*(pair.torch[x], (AXES["embed"],)), pair.torch[gamma], pair.torch[beta], 1e-3))


def test_layer_norm_of_a_residual() -> None:
    """y = norm(x + r + b) and the sum; the gradient of both outputs is LayerNormGrad with `add`, that of b its sum."""
    rng = np.random.default_rng(0)
    shape = (3, 7)
    x, r, gamma, beta, dy, ds = (rng.standard_normal(s) for s in (shape, shape, 7, 7, shape, shape))
    rows, columns = ["seq", "embed"], ["embed"]
    t = [Tensor(f"t{k}", rows, shape, "fp64") for k in range(8)]
    c = [Tensor(f"c{k}", columns, [7], "fp64") for k in range(5)]
    statistics = Tensor("stat", ["seq", "stat"], [3, 2], "fp64")
    forward = ops.LayerNorm(t[0], c[0], c[1], t[2], statistics, 1e-5, residual=t[1], total=t[3])
    y, statistics, total = forward.reference(x, gamma, beta, r)
    tx, tr, tb, tgamma, tbeta = (torch.tensor(v, requires_grad=True) for v in (x, r, np.zeros(7), gamma, beta))
    want = F.layer_norm(tx + tb + tr, (7,), tgamma, tbeta, 1e-5)
    assert error(y, want.detach()) < 1e-13 and error(total, x + r) < 1e-15
    ((want * torch.tensor(dy)).sum() + ((tx + tb + tr) * torch.tensor(ds)).sum()).backward()
    back = ops.LayerNormGrad(t[4], t[3], statistics, c[0], t[5], c[2], c[3], add=t[6], dbias=c[4])
    for got, param in zip(back.reference(dy, total, statistics, gamma, ds), (tr, tgamma, tbeta, tb), strict=True):
        assert param.grad is not None and error(got, param.grad) < 1e-13


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return gamma * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def test_rms_norm(pair: Pair) -> None:
    x, gamma = pair.param("batch seq embed"), pair.param("embed")
    op = ops.RMSNorm(x, gamma, pair.temp("batch seq embed"), pair.temp("batch seq one"), 1e-3)
    pair.compare(op, rms_norm(pair.torch[x], pair.torch[gamma], 1e-3))


def test_rms_norm_of_a_residual() -> None:
    """y = norm(x + r) and the sum; the gradient of both outputs is RMSNormGrad with `add`."""
    rng = np.random.default_rng(0)
    x, r, dy, ds = (rng.standard_normal((3, 7)) for _ in range(4))
    gamma = rng.standard_normal(7)
    t = [Tensor(f"t{k}", ["seq", "embed"], (3, 7), "fp64") for k in range(7)]
    c = [Tensor(f"c{k}", ["embed"], [7], "fp64") for k in range(2)]
    statistics = Tensor("stat", ["seq", "stat"], [3, 1], "fp64")
    y, statistics, total = ops.RMSNorm(t[0], c[0], t[2], statistics, 1e-5, t[1], t[3]).reference(x, gamma, r)
    tx, tr, tgamma = (torch.tensor(v, requires_grad=True) for v in (x, r, gamma))
    want = rms_norm(tx + tr, tgamma, 1e-5)
    assert error(y, want.detach()) < 1e-13 and error(total, x + r) < 1e-15
    ((want * torch.tensor(dy)).sum() + ((tx + tr) * torch.tensor(ds)).sum()).backward()
    back = ops.RMSNormGrad(t[4], t[3], statistics, c[0], t[5], c[1], add=t[6])
    for got, param in zip(back.reference(dy, total, statistics, gamma, ds), (tr, tgamma), strict=True):
        assert param.grad is not None and error(got, param.grad) < 1e-13


def modeling_llama() -> Any:
    """Import the example late, as it imports triton, which test_triton.py sets up first."""
    from transformers.models.llama import modeling_llama as module

    return module


def test_rms_norm_is_that_of_llama() -> None:
    rng = np.random.default_rng(0)
    x, gamma = rng.standard_normal((3, 7)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    llama = modeling_llama().LlamaRMSNorm(7, eps=1e-2)
    llama.weight.data = torch.tensor(gamma)
    t = Tensor("t", ["seq", "embed"], (3, 7), "fp64")
    c, statistics = Tensor("c", ["embed"], [7], "fp64"), Tensor("stat", ["seq", "stat"], [3, 1], "fp64")
    op = ops.RMSNorm(t, c, t, statistics, 1e-2)
    assert error(op.reference(x.astype(float), gamma.astype(float))[0], llama(torch.tensor(x)).detach()) < 1e-6


@pytest.mark.parametrize("axes", ["batch seq heads head_dim", "head_dim heads seq batch"])
def test_rotary(pair: Pair, axes: str) -> None:
    """The rotation equals that of transformers, in float64."""
    x, table = pair.param(axes), pair.temp("seq rotary")
    pair.values[table] = pair.rng.standard_normal(table.shape)
    pair.torch[table] = torch.tensor(pair.values[table])
    cos, sin = (half.repeat(1, 2) for half in pair.torch[table].chunk(2, -1))
    order = [x.axes.index(a) for a in ("batch", "heads", "seq", "head_dim")]
    apply = modeling_llama().apply_rotary_pos_emb
    turned, _ = apply(pair.torch[x].permute(order), torch.zeros(2, 3, 5, 4), cos[None], sin[None])
    pair.compare(ops.Rotary(x, table, pair.temp(axes)), turned.permute([order.index(k) for k in range(4)]))


def test_rotary_of_tensors_that_do_not_fit(pair: Pair) -> None:
    x = pair.temp("batch seq heads head_dim")
    for table in (pair.temp("seq embed"), Tensor("t", ["seq", "rotary"], [6, 4], "fp64"), pair.temp("rotary seq")):
        with pytest.raises(ValueError, match=r"rotary: t\d*\[.* does not fit"):
            ops.Rotary(x, table, x)


LENGTH = {"original_max_position_embeddings": 64}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "default"}, {"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 4},
     {"rope_type": "llama3", **LLAMA3}, {"rope_type": "yarn", "factor": 3.0, **LENGTH},
     {"rope_type": "yarn", "factor": 3.0, **LENGTH, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
     {"rope_type": "yarn", "factor": 3.0, **LENGTH, "attention_factor": 0.8, "beta_fast": 8, "beta_slow": 2},
     {"rope_type": "longrope", "factor": 3.0, **LENGTH, "short_factor": [1.0] * 16, "long_factor": [*range(1, 17)]},
     {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 2048}],
)  # fmt: skip
def test_rotary_table(scaling: dict[str, Any] | None) -> None:
    """The scaled table equals that of transformers, at low, middle and high frequencies."""
    head_dim, positions, theta = 32, 100, 5e3
    parameters = {"rope_theta": theta, **(scaling or {"rope_type": "default"})}
    llama = modeling_llama()
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=2, num_hidden_layers=1, rope_parameters=parameters)
    embedding = llama.LlamaRotaryEmbedding(config)
    table = ops.rotary_table(head_dim, positions, theta, scaling)
    assert table.shape == (positions, head_dim) and table.dtype == np.float64
    cos, sin = embedding(torch.zeros(1), torch.arange(positions)[None])  # makes the frequencies of longrope
    frequencies = np.arctan2(*np.split(table[1], 2)[::-1])
    assert np.allclose(frequencies, embedding.inv_freq, rtol=1e-6, atol=0)
    want = torch.cat([cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]], -1)
    assert np.abs(table - want.numpy()).max() < 2e-5  # transformers' angles, up to 100, are fp32


@pytest.mark.parametrize(
    ("head_dim", "scaling", "message"),
    [
        (7, None, "head_dim: got 7 with rotary positions; allowed: an even"),
        (8, {"rope_type": "axial", "factor": 2.0}, "rope_type: got 'axial'; allowed: default, "),
        (8, {"rope_type": "yarn", "factor": 2.0}, "rope_scaling.original_max_position_embeddings: got None; allowed"),
        (8, {"rope_type": "yarn", "factor": 2.0, **LENGTH, "mscale": "1"}, "rope_scaling.mscale: got '1'; allowed"),
        (8, {"rope_type": "longrope", "factor": 2, **LENGTH, "short_factor": [1.0], "long_factor": [2.0]}, "got 1 n"),
        (8, {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 3}, "got dynamic for"),
        (8, {"rope_type": "linear"}, "rope_scaling.factor: got None; allowed with rope_type linear: a positive"),
        (8, {"rope_type": "linear", "factor": 0}, "rope_scaling.factor: got 0; allowed"),
        (8, {"rope_type": "linear", "factor": "2"}, "rope_scaling.factor: got '2'; allowed"),
        (8, {"rope_type": "default", "factor": 2.0}, "rope_scaling.factor: unknown key; rope_type default has none"),
        (8, {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor: got 1.0; allowed: more"),
    ],
)
def test_rotary_table_of_wrong_scaling(head_dim: int, scaling: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ops.rotary_table(head_dim, 4, 1e4, scaling)


def test_longrope_of_packed_sequences_beyond_its_length() -> None:
    """transformers takes other frequencies for a sequence up to the original length than for a longer one."""
    scaling = {"rope_type": "longrope", "factor": 2, **LENGTH, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    original = LENGTH["original_max_position_embeddings"]
    ops.rotary_table(8, original, 1e4, scaling, packed=True)
    with pytest.raises(ConfigError, match=f"got longrope for packed .*; allowed: at most .* = {original}"):
        ops.rotary_table(8, original + 1, 1e4, scaling, packed=True)


@pytest.mark.parametrize("causal", [False, True])
def test_softmax(pair: Pair, causal: bool) -> None:
    mask = Mask(causal)
    scores = pair.param("batch heads seq key", band=mask.band)
    x = pair.torch[scores]
    if causal:
        x = x.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    pair.compare(ops.Softmax(scores, pair.temp("batch heads seq key", band=mask.band), mask), torch.softmax(x, -1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qkv", [["qkv batch heads seq head_dim"], ["batch seq heads head_dim"] * 3])
def test_attention(pair: Pair, qkv: list[str], causal: bool) -> None:
    inputs = [pair.param(axes) for axes in qkv]
    q, k, v = pair.torch[inputs[0]] if len(qkv) == 1 else (pair.torch[t].transpose(1, 2) for t in inputs)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    out = qkv[0].replace("qkv", "")
    op = ops.Attention(
        operands(inputs), pair.temp(out), pair.temp("batch heads seq"), mask=Mask(causal), backend="vendor"
    )
    pair.compare(op, want if len(qkv) == 1 else want.transpose(1, 2))
    scores = (q @ k.transpose(-1, -2) / 2).detach()
    if causal:
        scores = scores.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    assert error(pair.values[op.lse], torch.logsumexp(scores, -1)) < 1e-13


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("axes", ["batch seq vocab", "seq classes"])
def test_cross_entropy(pair: Pair, axes: str, ignored: bool) -> None:
    logits = pair.param(axes)
    rows, classes = " ".join(logits.axes[:-1]), logits.shape[-1]
    labels = pair.ints(rows, classes, ignored)
    x, targets = pair.torch[logits].reshape(-1, classes), pair.torch[labels].reshape(-1)
    want = F.cross_entropy(x, targets, ignore_index=IGNORED)
    pair.compare(ops.CrossEntropy(logits, labels, pair.temp("one"), pair.temp(rows)), want.reshape(1))


def optimized(make: Any, grads: list[Any], start: Any) -> Any:
    param = torch.nn.Parameter(torch.tensor(start))
    optimizer = make([param])
    for grad in grads:
        param.grad = torch.tensor(grad)
        optimizer.step()
    return param.detach().numpy()


def test_optimizers() -> None:
    rng = np.random.default_rng(0)
    start, grads = rng.standard_normal((4, 3)), [rng.standard_normal((4, 3)) for _ in range(4)]
    t = [Tensor(f"t{k}", ["embed", "ffn"], [4, 3], "fp64") for k in range(4)]
    clip = Tensor("clip", ["one"], [1], "fp64")

    adamw = ops.Update(ops.AdamW(betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1), *t[:2], t[2:], clip)
    p, m, v = start, np.zeros((4, 3)), np.zeros((4, 3))
    for step, g in enumerate(grads, 1):
        p, m, v = adamw.reference(p, 2 * g, m, v, np.array([0.5]), lr=0.01, step=step)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    assert error(p, optimized(lambda params: torch.optim.AdamW(params, **options), grads, start)) < 1e-14

    for momentum in (0.0, 0.7):
        states = t[2:3] if momentum else []
        sgd = ops.Update(ops.SGD(momentum=momentum, weight_decay=0.1), *t[:2], states, clip)
        state: list[Any] = [start]
        for g in grads:
            rest = state[1:] if len(state) > 1 else [np.zeros((4, 3))] * bool(momentum)
            state = list(sgd.reference(state[0], 2 * g, *rest, np.array([0.5]), lr=0.01))
        options = {"lr": 0.01, "momentum": momentum, "weight_decay": 0.1}
        assert error(state[0], optimized(lambda params, o=options: torch.optim.SGD(params, **o), grads, start)) < 1e-14


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_grad_norm(limit: float) -> None:
    rng = np.random.default_rng(0)
    params = [torch.nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in ((4, 3), (5,))]
    grads = [rng.standard_normal(p.shape) for p in params]
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    t = [Tensor("a", ["embed", "ffn"], [4, 3], "fp64"), Tensor("b", ["embed"], [5], "fp64")]
    one = [Tensor(name, ["one"], [1], "fp64") for name in ("norm", "clip")]
    got, clip = ops.GradNorm(t, one[0], one[1], limit).reference(*grads)
    assert error(got[0], norm) < 1e-14
    for p, g in zip(params, grads, strict=True):
        assert p.grad is not None and error(g * clip[0], p.grad) < 1e-14


SPECIAL = [2**31 - 1, -1, 0x7F7FFFFF, 0x7F800000]  # bits of NaN, NaN, the greatest number, infinity


def test_split_and_joined_in_blocks() -> None:
    """Arrays of several blocks, of no element, without axes, and in another order of axes."""
    large = np.random.default_rng(0).standard_normal((3, BLOCK // 2 + 1)).astype(np.float32)
    large[1, 5] = np.nan
    for value in (large, large.T, large[:, ::2], np.empty((0, 4), np.float32), np.float32(1.0001)):
        near, low = split(value)
        assert near.shape == low.shape == np.shape(value)
        assert np.array_equal(near[~np.isnan(near)], torch.tensor(near[~np.isnan(near)]).bfloat16().float())
        assert np.array_equal(joined(near, low), value, equal_nan=True)


@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.sampled_from(SPECIAL), min_size=1))
def test_split_and_joined(bits: list[int]) -> None:
    """A split parameter equals the fp32 parameter to the bit; NaN stays NaN in both parts."""
    value = np.array(bits, np.int32).view(np.float32)
    near, low = split(value)
    numbers = ~np.isnan(value)
    assert low.dtype == np.int16 and np.array_equal(np.isnan(near), ~numbers)
    assert np.array_equal(joined(near, low), value, equal_nan=True)
    assert np.array_equal(torch.tensor(near).bfloat16().float().numpy(), near, equal_nan=True)
    assert near.shape == low.shape == value.shape
    halves = np.array(bits)[numbers] % 2**16 == 2**15
    assert np.array_equal(near[numbers][~halves], torch.tensor(value).bfloat16().float().numpy()[numbers][~halves])
