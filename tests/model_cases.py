"""The models beside GPT-2 as PyTorch has them: sizes, data, and what it makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers

import nntile_py as nt
from nntile_py.tasks.cross_entropy import IGNORED

transformers.logging.set_verbosity_error()
torch.set_num_threads(1)

BATCH, SEQ, MEMORY, VOCAB, EMBED, HEADS, KV_HEADS, FFN, LAYERS, CLASSES = 4, 12, 8, 60, 24, 6, 3, 40, 2, 3
STEPS = 10
# eps as BERT's authors have it. Adam divides by the gradient's size: a gradient of nothing but rounding must not count.
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

Inputs = dict[str, Any]
Weights = Mapping[str, Any]


def bert(kind: str, **config: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "intermediate_size": FFN, "max_position_embeddings": SEQ + 3, "num_labels": CLASSES,
    }  # fmt: skip
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = getattr(transformers, kind)
    return model(model.config_class(**sizes | off | config))


def distilbert(kind: str, **config: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB, "dim": EMBED, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FFN,
        "max_position_embeddings": SEQ + 3, "num_labels": CLASSES,
    }  # fmt: skip
    off = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    return getattr(transformers, kind)(transformers.DistilBertConfig(**sizes | off | config))


def modernbert(kind: str, **config: Any) -> Any:
    """Five layers, of which 0 and 3 are global; a local one sees two positions before and after."""
    sizes = {
        "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": 5, "num_attention_heads": HEADS,
        "intermediate_size": FFN, "max_position_embeddings": SEQ + 3, "num_labels": CLASSES, "local_attention": 5,
        "classifier_pooling": "cls", "attn_implementation": "sdpa",
    }  # fmt: skip
    tokens = dict.fromkeys(f"{name}_token_id" for name in ("pad", "bos", "eos", "cls", "sep"))
    return getattr(transformers, kind)(transformers.ModernBertConfig(**sizes | tokens | config))


def llama(**config: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB, "hidden_size": EMBED, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "intermediate_size": FFN, "max_position_embeddings": SEQ + 3,
    }  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | config))


def layers(kind: str) -> Any:
    """torch.nn.TransformerEncoder or -Decoder, with norms after the residual and ReLU."""
    layer = getattr(torch.nn, f"Transformer{kind}Layer")(EMBED, HEADS, FFN, dropout=0.0, batch_first=True)
    options = {"enable_nested_tensor": False} if kind == "Encoder" else {}
    return getattr(torch.nn, f"Transformer{kind}")(layer, LAYERS, **options)


# -- data of a step


def tokens(rng: np.random.Generator, mask: bool = False, types: bool = False, causal: bool = False) -> Inputs:
    """input_ids and labels [batch, seq], a third of them counted (all, if causal); two rows padded, if asked for."""
    ids = rng.integers(1, VOCAB, (BATCH, SEQ))
    made: Inputs = {"input_ids": ids, "labels": np.where(causal | (rng.random(ids.shape) < 0.3), ids, IGNORED)}
    if mask:
        made["attention_mask"] = np.ones_like(ids)
        made["attention_mask"][1, 7:] = made["attention_mask"][2, 3:] = 0
        made["labels"] = np.where(made["attention_mask"] == 1, made["labels"], IGNORED)
    if types:
        made["token_type_ids"] = rng.integers(0, 2, ids.shape)
    return made


def numbers(rng: np.random.Generator, memory: bool = False) -> Inputs:
    names = {"x": SEQ, "labels": SEQ} | ({"memory": MEMORY} if memory else {})
    return {name: rng.standard_normal((BATCH, seq, EMBED), np.float32) for name, seq in names.items()}


# -- what PyTorch makes of it


def of_transformers(model: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    out = model(**{name: torch.from_numpy(value) for name, value in inputs.items()})
    return out.loss, {name: value for name, value in out.items() if name.endswith("logits")}


def of_layers(model: Any, inputs: Inputs) -> tuple[Any, dict[str, Any]]:
    given = {name: torch.from_numpy(value) for name, value in inputs.items()}
    if "memory" in given:
        causal = torch.nn.Transformer.generate_square_subsequent_mask(SEQ)
        out = model(given["x"], given["memory"], tgt_mask=causal, tgt_is_causal=True)
    else:
        out = model(given["x"])
    return torch.nn.functional.mse_loss(out, given["labels"]), {"logits": out}


def of_torch(cls: str, **more: int) -> Callable[[Any], Any]:
    def ours(model: Any) -> Any:
        config = getattr(nt.models, f"{cls}Config")(layers=LAYERS, embed=EMBED, heads=HEADS, ffn=FFN, **more)
        weights = {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}
        return getattr(nt.models, cls)(config, weights)

    return ours


@dataclass(frozen=True)
class Case:
    """make: PyTorch's model; inputs: of a step; zero: part of the names of weights without a gradient."""

    make: Callable[[], Any]
    inputs: Callable[[np.random.Generator], Inputs]
    run: Callable[[Any, Inputs], tuple[Any, dict[str, Any]]] = of_transformers
    ours: Callable[[Any], Any] = nt.models.from_hf
    zero: str | None = None
    attention: str | None = None  # the only form that the model has


def _pretraining(pairs: str, rng: np.random.Generator) -> Inputs:
    return tokens(rng, mask=True, types=True) | {pairs: rng.integers(0, 2, BATCH)}


def _classes(rng: np.random.Generator) -> Inputs:
    return tokens(rng, mask=True) | {"labels": rng.integers(0, CLASSES, BATCH)}


def _tags(rng: np.random.Generator, filled: bool = False) -> Inputs:
    made = _filled_up(rng) if filled else tokens(rng, mask=True)
    return made | {"labels": np.where(made["labels"] == IGNORED, IGNORED, rng.integers(0, CLASSES, (BATCH, SEQ)))}


def _filled_up(rng: np.random.Generator, classes: bool = False) -> Inputs:
    """For RoBERTa: the token 1 where there is padding, and nowhere else; in front, where no first token counts."""
    made = _classes(rng) if classes else tokens(rng, mask=True)
    if not classes:
        made["attention_mask"][1] = made["attention_mask"][1, ::-1].copy()
        made["labels"] = np.where(made["attention_mask"] == 1, made["labels"], IGNORED)
    return made | {"input_ids": np.where(made["attention_mask"] == 1, np.maximum(made["input_ids"], 2), 1)}


def _bert(kind: str, inputs: Callable[[np.random.Generator], Inputs], masked: int = 0, **config: Any) -> Case:
    ours = functools.partial(nt.models.from_hf, masked=masked)
    return Case(functools.partial(bert, kind, **config), inputs, ours=ours, zero="key.bias")


def _filled_in_front(rng: np.random.Generator, types: bool = False) -> Inputs:
    """Padding in front of a sequence, and a hole in another one."""
    made = tokens(rng, mask=True, types=types)
    made["attention_mask"][1] = made["attention_mask"][1, ::-1].copy()
    made["attention_mask"][0, 3:5] = 0
    return made | {"labels": np.where(made["attention_mask"] == 1, made["labels"], IGNORED)}


def _deberta(
    kind: str, inputs: Callable[[np.random.Generator], Inputs], zero: str | None = None, attention: str = "naive",
    **config: Any,
) -> Case:  # fmt: skip
    options = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]} | config
    return Case(functools.partial(bert, kind, **options), inputs, zero=zero, attention=attention)


ALBERT: dict[str, Any] = {"embedding_size": 10, "num_hidden_layers": 3, "classifier_dropout_prob": 0.0}
GROUPS: dict[str, Any] = {"num_hidden_groups": 2, "inner_group_num": 2, "embedding_size": 32}
DEBERTA_V3: dict[str, Any] = {
    "position_biased_input": False, "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8,
    "legacy": False,
}  # fmt: skip
ROBERTA: dict[str, Any] = {"type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": SEQ + 3}


CASES = {
    "masked_lm": _bert("BertForMaskedLM", functools.partial(tokens, mask=True, types=True)),
    "masked_lm plain": _bert("BertForMaskedLM", tokens),
    "pretraining": _bert("BertForPreTraining", functools.partial(_pretraining, "next_sentence_label")),
    "classification": _bert("BertForSequenceClassification", _classes),
    "roberta": _bert("RobertaForMaskedLM", _filled_up, **ROBERTA),
    "roberta other activation": _bert(
        "RobertaForMaskedLM", functools.partial(tokens, types=True),
        pad_token_id=0, type_vocab_size=2, hidden_act="relu", layer_norm_eps=1e-5,
    ),
    "roberta classification": _bert(
        "RobertaForSequenceClassification", functools.partial(_filled_up, classes=True), **ROBERTA
    ),
    "albert": _bert("AlbertForMaskedLM", functools.partial(tokens, mask=True, types=True), **ALBERT),
    "albert groups": _bert(
        "AlbertForPreTraining", functools.partial(_pretraining, "sentence_order_label"),
        **ALBERT | GROUPS | {"num_labels": 2},
    ),
    **{
        f"{name} gathered": _bert(kind, inputs, 9, **config) for name, kind, inputs, config in (
            ("masked_lm", "BertForMaskedLM", functools.partial(tokens, mask=True, types=True), {}),
            ("pretraining", "BertForPreTraining", functools.partial(_pretraining, "next_sentence_label"), {}),
            ("albert", "AlbertForMaskedLM", tokens, ALBERT),
            ("roberta", "RobertaForMaskedLM", _filled_up, ROBERTA),
        )
    },
    "albert classification": _bert("AlbertForSequenceClassification", _classes, **ALBERT),
    "distilbert": Case(
        functools.partial(distilbert, "DistilBertForMaskedLM"), functools.partial(tokens, mask=True), zero="k_lin.bias"
    ),
    "distilbert classification": Case(
        functools.partial(distilbert, "DistilBertForSequenceClassification"), _classes, zero="k_lin.bias"
    ),
    "tokens": _bert("BertForTokenClassification", _tags),
    "roberta tokens": _bert("RobertaForTokenClassification", functools.partial(_tags, filled=True), **ROBERTA),
    "albert tokens": _bert("AlbertForTokenClassification", _tags, **ALBERT),
    "distilbert tokens": Case(
        functools.partial(distilbert, "DistilBertForTokenClassification"), _tags, zero="k_lin.bias"
    ),
    "deberta": _deberta(
        "DebertaForMaskedLM", functools.partial(_filled_in_front, types=True),
        type_vocab_size=2, max_relative_positions=7,
    ),
    "deberta fused": _deberta(
        "DebertaForMaskedLM", functools.partial(_filled_in_front, types=True), attention="segments",
        type_vocab_size=2, max_relative_positions=7,
    ),
    "deberta p2c": _deberta("DebertaForMaskedLM", tokens, pos_att_type=["p2c"], legacy=False),
    "deberta classification": _deberta("DebertaForSequenceClassification", _classes, position_biased_input=False),
    "deberta v2": _deberta(
        "DebertaV2ForMaskedLM", functools.partial(tokens, types=True), zero="pos_key_proj.bias",
        type_vocab_size=2, max_relative_positions=5, norm_rel_ebd="layer_norm",
    ),
    "deberta v2 c2p": _deberta("DebertaV2ForMaskedLM", tokens, zero="key_proj.bias", pos_att_type=["c2p"]),
    "deberta v3": _deberta("DebertaV2ForMaskedLM", functools.partial(tokens, mask=True), **DEBERTA_V3),
    "deberta v3 fused": _deberta(
        "DebertaV2ForMaskedLM", functools.partial(tokens, mask=True), attention="segments", **DEBERTA_V3
    ),
    "deberta v3 classification": _deberta("DebertaV2ForSequenceClassification", _classes, **DEBERTA_V3),
    "modernbert": Case(
        functools.partial(modernbert, "ModernBertForMaskedLM"), functools.partial(tokens, mask=True)
    ),
    "modernbert classification": Case(
        functools.partial(modernbert, "ModernBertForSequenceClassification", num_hidden_layers=2), _classes
    ),
    "llama": Case(llama, functools.partial(tokens, mask=True, causal=True)),
    "llama tied": Case(
        functools.partial(llama, tie_word_embeddings=True, rope_parameters=LLAMA3),
        functools.partial(tokens, causal=True),
    ),
    "encoder": Case(
        functools.partial(layers, "Encoder"), numbers, of_layers, of_torch("TransformerEncoder"), "in_proj_bias.k",
    ),
    "decoder": Case(
        functools.partial(layers, "Decoder"), functools.partial(numbers, memory=True), of_layers,
        of_torch("TransformerDecoder", memory=MEMORY), "in_proj_bias.k",
    ),
}  # fmt: skip


def made(name: str) -> Any:
    """PyTorch's model, its biases and norms away from their start values, its attention from the uniform one."""
    torch.manual_seed(0)
    model = CASES[name].make().train()
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    return model


def by_part(weights: Weights) -> dict[str, np.ndarray[Any, Any]]:
    """Packed queries, keys and values apart: what holds for the keys' bias does not for the others."""
    parts: dict[str, np.ndarray[Any, Any]] = {}
    for name, value in weights.items():
        if "in_proj" in name:
            parts |= {f"{name}.{one}": part for one, part in zip("qkv", np.split(np.asarray(value), 3), strict=True)}
        else:
            parts[name] = np.asarray(value)
    return parts


@dataclass
class Reference:
    """PyTorch's: outputs and gradients of the first step, losses of all, weights at the end."""

    model: Any  # as it was at the start
    inputs: list[Inputs]
    outputs: dict[str, Any]
    losses: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]

    def counted(self, tensors: Weights) -> dict[str, Any]:
        """Those whose exact gradient is not zero, told by its size.

        What is added to all keys adds the same to all scores of a query, and softmax does not see it: the gradient of
        the keys' bias is rounding alone, and so is the direction in which Adam moves it.
        """
        sizes = {name: np.linalg.norm(value) for name, value in by_part(self.gradients).items()}
        return {name: value for name, value in by_part(tensors).items() if sizes[name] > 1e-6 * max(sizes.values())}


@functools.cache
def reference(name: str) -> Reference:
    case, trained = CASES[name], made(name)
    rng = np.random.default_rng(1)
    inputs = [case.inputs(rng) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW(trained.parameters(), **ADAMW)
    losses, outputs, gradients = [], {}, {}
    for one in inputs:
        optimizer.zero_grad()
        loss, made_of = case.run(trained, one)
        loss.backward()
        losses.append(loss.item())
        if not gradients:
            outputs = {key: value.detach().numpy() for key, value in made_of.items()}
            gradients = {key: p.grad.numpy().copy() for key, p in trained.named_parameters() if p.grad is not None}
        optimizer.step()
    weights = {key: p.detach().numpy() for key, p in trained.named_parameters() if key in gradients}
    return Reference(made(name), inputs, outputs, losses, gradients, weights)


def deberta(**config: Any) -> Any:
    return bert("DebertaV2ForMaskedLM", **config)


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
