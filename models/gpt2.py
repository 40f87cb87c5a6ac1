"""GPT-2 (Radford et al. 2019) as in transformers' GPT2LMHeadModel, and its weights under the names used there.

Axes: batch, seq, embed, heads, head_dim, qkv, ffn, vocab, position.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.models.init import fill
from nntile_py.tasks.activation import activation
from nntile_py.tasks.attention import Operand, attention
from nntile_py.tasks.contract import linear
from nntile_py.tasks.cross_entropy import cross_entropy
from nntile_py.tasks.elementwise import add, bias_add, dropout, transpose
from nntile_py.tasks.embedding import embedding
from nntile_py.tasks.layer_norm import layer_norm
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Tensor

if TYPE_CHECKING:
    Weights = dict[str, np.ndarray[Any, Any]]

_ACTIVATIONS = {"gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new", "gelu": "gelu", "relu": "relu"}


@dataclass(frozen=True)
class GPT2Config:
    """Sizes and choices. ffn defaults to 4 embed; attention is vendor, merge, flash or naive."""

    layers: int
    embed: int
    heads: int
    vocab: int
    positions: int
    ffn: int | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation: str = "gelu_new"
    attention: str = "vendor"
    tie: bool = True
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "embed", "heads", "vocab", "positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}: {getattr(self, name)} is not allowed; use a positive integer")
        if self.embed % self.heads:
            raise ConfigError(f"model.heads: {self.heads} does not divide model.embed, {self.embed}")
        if self.attention not in ("vendor", "merge", "flash", "naive"):
            raise ConfigError(f"model.attention: {self.attention!r}; use vendor, merge, flash or naive")
        if self.attention_dropout and self.attention != "naive":
            raise ConfigError("model.attention_dropout: only attention: naive has it; use 0")

    @property
    def head_dim(self) -> int:
        return self.embed // self.heads

    @property
    def inner(self) -> int:
        return self.ffn or 4 * self.embed


@dataclass(frozen=True)
class Binding:
    """A parameter of the graph as a part of a weight in transformers: weight.reshape(shape)[index]."""

    tensor: Tensor
    name: str
    shape: tuple[int, ...]
    index: tuple[slice | int, ...]

    def take(self, weights: Weights) -> np.ndarray[Any, Any]:
        return np.asarray(weights[self.name].reshape(self.shape)[self.index])

    def put(self, weights: Weights, value: np.ndarray[Any, Any], whole: tuple[int, ...]) -> None:
        if self.name not in weights:
            weights[self.name] = np.zeros(whole, value.dtype)
        weights[self.name].reshape(self.shape)[self.index] = value


class GPT2:
    """GPT-2 with a language modelling head. `weights`: {name in transformers: numpy array}, fp32 or fp64."""

    def __init__(
        self,
        config: GPT2Config,
        weights: Weights | None = None,
        *,
        seed: int = 0,
        hf: dict[str, Any] | None = None,
    ) -> None:
        self.config, self.hf = config, hf or {}
        self.weights = initial_weights(config, seed) if weights is None else weights

    # -- the model

    def build(self, g: Graph, batch: int, seq: int, fusion: Fusion) -> tuple[Tensor, Tensor, list[Binding]]:
        """Trace the model; returns (loss, logits, bindings of the parameters). Inputs: input_ids, positions, labels."""
        c = self.config
        bindings: list[Binding] = []

        def param(name: str, axes: list[str], shape: list[int], part: int | None = None) -> Tensor:
            """A parameter; with `part`, this third of a weight that transformers keeps packed."""
            at = 1 if len(axes) == 3 else 0
            full = shape if part is None else [*shape[:at], 3, *shape[at:]]
            index: tuple[slice | int, ...] = () if part is None else (*[slice(None)] * at, part)
            tensor = g.named(name if part is None else f"{name}.{'qkv'[part]}", axes, shape, "param")
            bindings.append(Binding(tensor, name, tuple(full), index))
            return tensor

        def norm(x: Tensor, name: str) -> Tensor:
            gamma = param(f"{name}.weight", ["embed"], [c.embed])
            beta = param(f"{name}.bias", ["embed"], [c.embed])
            return layer_norm(g, x, gamma, beta, c.eps)

        def qkv(x: Tensor, name: str) -> list[Operand]:
            """Queries, keys and values, each [batch, heads, seq, head_dim]: one packed GEMM or three."""
            heads, shape = ["heads", "head_dim"], [c.heads, c.head_dim]
            if fusion.qkv:
                weight = param(f"{name}.weight", ["embed", "qkv", *heads], [c.embed, 3, *shape])
                bias = param(f"{name}.bias", ["qkv", *heads], [3, *shape])
                packed = linear(g, x, weight, ["batch", "seq", "qkv", *heads], bias)
                packed = transpose(g, packed, ["qkv", "batch", "heads", "seq", "head_dim"])
                return [(packed, part) for part in range(3)]
            result: list[Operand] = []
            for part in range(3):
                weight = param(f"{name}.weight", ["embed", *heads], [c.embed, *shape], part)
                bias = param(f"{name}.bias", heads, shape, part)
                y = linear(g, x, weight, ["batch", "seq", *heads], bias)
                result.append(transpose(g, y, ["batch", "heads", "seq", "head_dim"]))
            return result

        def self_attention(x: Tensor) -> Tensor:
            q, k, v = qkv(x, f"{here}.attn.c_attn")
            a = attention(g, q, k, v, Mask(causal=True), c.attention, c.attention_dropout)
            a = transpose(g, a, ["batch", "seq", "heads", "head_dim"])
            name = f"{here}.attn.c_proj"
            weight = param(f"{name}.weight", ["heads", "head_dim", "embed"], [c.heads, c.head_dim, c.embed])
            y = linear(g, a, weight, ["batch", "seq", "embed"], param(f"{name}.bias", ["embed"], [c.embed]))
            return dropout(g, y, c.dropout)

        def mlp(x: Tensor) -> Tensor:
            up, down = f"{here}.mlp.c_fc", f"{here}.mlp.c_proj"
            weight = param(f"{up}.weight", ["embed", "ffn"], [c.embed, c.inner])
            y = linear(g, x, weight, ["batch", "seq", "ffn"], param(f"{up}.bias", ["ffn"], [c.inner]))
            y = activation(g, y, c.activation)
            weight = param(f"{down}.weight", ["ffn", "embed"], [c.inner, c.embed])
            y = linear(g, y, weight, ["batch", "seq", "embed"], param(f"{down}.bias", ["embed"], [c.embed]))
            return dropout(g, y, c.dropout)

        ids = g.named("input_ids", ["batch", "seq"], [batch, seq], "input", "int64")
        positions = g.named("positions", ["seq"], [seq], "input", "int64")
        labels = g.named("labels", ["batch", "seq"], [batch, seq], "input", "int64")
        with g.scope("embed"):
            wte = param("transformer.wte.weight", ["vocab", "embed"], [c.vocab, c.embed])
            wpe = param("transformer.wpe.weight", ["position", "embed"], [c.positions, c.embed])
            x = dropout(g, bias_add(g, embedding(g, ids, wte), embedding(g, positions, wpe)), c.dropout)
        for layer in range(c.layers):
            here = f"transformer.h.{layer}"
            with g.scope(f"h{layer}.attn"):
                x = add(g, self_attention(norm(x, f"{here}.ln_1")), x)
            with g.scope(f"h{layer}.mlp"):
                x = add(g, mlp(norm(x, f"{here}.ln_2")), x)
        with g.scope("head"):
            x = norm(x, "transformer.ln_f")
            table = wte if c.tie else param("lm_head.weight", ["vocab", "embed"], [c.vocab, c.embed])
            logits = linear(g, x, table, ["batch", "seq", "vocab"])
            loss = cross_entropy(g, logits, labels)
        return loss, logits, bindings

    # -- weights in and out

    @staticmethod
    def from_hf(
        source: Any, *, attention: str = "vendor", dropout: float = 0.0, attention_dropout: float = 0.0
    ) -> GPT2:
        """From a transformers GPT2LMHeadModel, or a folder saved by save_pretrained (safetensors).

        Dropout is off unless its rates are given: the model's own are not taken over. Raises ConfigError for a folder
        or a variant of the model that cannot be read.
        """
        if isinstance(source, str | Path):
            raw, weights = _read_folder(Path(source))
        else:
            raw = source.config.to_dict()
            weights = {k: v.detach().cpu().float().numpy().copy() for k, v in source.state_dict().items()}
            if all(v.dtype.itemsize == 8 for v in source.parameters()):
                weights = {k: v.detach().cpu().numpy().copy() for k, v in source.state_dict().items()}
        config = config_from_hf(raw)
        config = replace(config, attention=attention, dropout=dropout, attention_dropout=attention_dropout)
        weights = {
            k if k.startswith(("transformer.", "lm_head.")) else f"transformer.{k}": v for k, v in weights.items()
        }
        names = {name: shape for name, shape, _ in weight_shapes(config)}
        for name, shape in names.items():
            if name not in weights:
                raise ConfigError(f"model: weight {name} is missing")
            if weights[name].shape != shape:
                raise ConfigError(f"model: weight {name} has shape {weights[name].shape}, expected {shape}")
        return GPT2(config, {name: weights[name] for name in names}, hf=raw)

    def with_attention(self, form: str) -> GPT2:
        """The same weights with another form of attention."""
        return GPT2(replace(self.config, attention=form), self.weights, hf=self.hf)

    def without_dropout(self) -> GPT2:
        """The same weights with dropout off, as for evaluation."""
        return GPT2(replace(self.config, dropout=0.0, attention_dropout=0.0), self.weights, hf=self.hf)

    def hf_config(self) -> dict[str, Any]:
        """What transformers' GPT2Config takes; a model that came from there keeps what it came with."""
        c = self.config
        own = {
            "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": c.vocab,
            "n_positions": c.positions, "n_embd": c.embed, "n_layer": c.layers, "n_head": c.heads, "n_inner": c.inner,
            "activation_function": c.activation, "layer_norm_epsilon": c.eps, "tie_word_embeddings": c.tie,
            "embd_pdrop": c.dropout, "resid_pdrop": c.dropout, "attn_pdrop": c.attention_dropout,
            "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        return own | self.hf

    def to_hf(self) -> Any:
        """A transformers GPT2LMHeadModel with these weights."""
        import torch
        import transformers

        model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**self.hf_config()))
        dtype = torch.float64 if next(iter(self.weights.values())).dtype == np.float64 else torch.float32
        missing, unexpected = model.to(dtype).load_state_dict(
            {name: torch.from_numpy(np.array(value)) for name, value in self.weights.items()}, strict=False
        )
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
        model.tie_weights()
        return model.eval()


def weight_shapes(c: GPT2Config) -> list[tuple[str, tuple[int, ...], float]]:
    """(name in transformers, shape, standard deviation at the start; -1: ones) of every weight."""
    residual = 0.02 / math.sqrt(2 * c.layers)
    result: list[tuple[str, tuple[int, ...], float]] = [
        ("transformer.wte.weight", (c.vocab, c.embed), 0.02),
        ("transformer.wpe.weight", (c.positions, c.embed), 0.02),
    ]
    for layer in range(c.layers):
        h = f"transformer.h.{layer}"
        shapes: list[tuple[str, tuple[int, ...], float]] = [
            ("ln_1.weight", (c.embed,), -1), ("ln_1.bias", (c.embed,), 0),
            ("attn.c_attn.weight", (c.embed, 3 * c.embed), 0.02), ("attn.c_attn.bias", (3 * c.embed,), 0),
            ("attn.c_proj.weight", (c.embed, c.embed), residual), ("attn.c_proj.bias", (c.embed,), 0),
            ("ln_2.weight", (c.embed,), -1), ("ln_2.bias", (c.embed,), 0),
            ("mlp.c_fc.weight", (c.embed, c.inner), 0.02), ("mlp.c_fc.bias", (c.inner,), 0),
            ("mlp.c_proj.weight", (c.inner, c.embed), residual), ("mlp.c_proj.bias", (c.embed,), 0),
        ]  # fmt: skip
        result += [(f"{h}.{name}", shape, std) for name, shape, std in shapes]
    result += [("transformer.ln_f.weight", (c.embed,), -1), ("transformer.ln_f.bias", (c.embed,), 0)]
    if not c.tie:
        result.append(("lm_head.weight", (c.vocab, c.embed), 0.02))
    return result


def initial_weights(c: GPT2Config, seed: int) -> Weights:
    """GPT-2's initialisation: normal 0.02, residual projections smaller by sqrt(2 layers), norms 1 and 0."""
    shapes = weight_shapes(c)
    makers = {-1.0: np.ones, 0.0: np.zeros}
    weights: Weights = {name: makers.get(std, np.empty)(shape, np.float32) for name, shape, std in shapes}
    drawn = [(name, np.float32(std)) for name, _, std in shapes if std > 0]

    def draw(rng: np.random.Generator, block: np.ndarray[Any, Any], number: int) -> None:
        rng.standard_normal(out=block, dtype=np.float32)
        block *= drawn[number][1]

    fill([weights[name] for name, _ in drawn], seed, draw)
    return weights


def config_from_hf(raw: dict[str, Any]) -> GPT2Config:
    """From what transformers wrote into config.json, but its rates of dropout. Raises ConfigError for another model."""
    if raw.get("model_type") != "gpt2":
        raise ConfigError(f"model: model_type is {raw.get('model_type')!r}; only gpt2 can be read")
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if raw.get(key):
            raise ConfigError(f"model: {key} is set in the model's config; it is not supported")
    if not raw.get("scale_attn_weights", True):
        raise ConfigError("model: scale_attn_weights is off in the model's config; it is not supported")
    act = raw.get("activation_function", "gelu_new")
    if act not in _ACTIVATIONS:
        raise ConfigError(f"model: activation_function {act!r}; allowed are {', '.join(_ACTIVATIONS)}")
    return GPT2Config(
        layers=raw["n_layer"], embed=raw["n_embd"], heads=raw["n_head"], vocab=raw["vocab_size"],
        positions=raw["n_positions"], ffn=raw.get("n_inner") or 4 * raw["n_embd"],
        activation=_ACTIVATIONS[act], tie=raw.get("tie_word_embeddings", True),
        eps=raw.get("layer_norm_epsilon", 1e-5),
    )  # fmt: skip


def _read_folder(folder: Path) -> tuple[dict[str, Any], Weights]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config, index, single = (
        folder / "config.json",
        folder / "model.safetensors.index.json",
        folder / "model.safetensors",
    )
    if not config.is_file():
        raise ConfigError(f"model: {config} is missing; expected a folder saved by save_pretrained")
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    elif single.is_file():
        files = [single]
    else:
        raise ConfigError(f"model: no model.safetensors in {folder}; save the model with safetensors")
    weights: Weights = {}
    for file in files:
        try:
            loaded = load_file(file)
        except (OSError, SafetensorError) as error:
            need = "expected weights that save_pretrained wrote"
            raise ConfigError(f"model: cannot read {file} ({error}); {need}") from None
        weights |= {k: (v.float() if v.itemsize == 2 else v).numpy() for k, v in loaded.items()}
    return json.loads(config.read_text()), weights
