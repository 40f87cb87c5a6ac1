"""Each attribute of transformers' config classes is honoured, harmless for a listed reason, or refused by its name."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import pytest
import torch
import transformers

import nntile_py as nt
from nntile_py.models.hf_keys import HARMLESS, Keys, harmless

torch.set_num_threads(1)
FAMILIES = {
    "Bert": "BERT", "Roberta": "RoBERTa", "XLMRoberta": "XLMRoBERTa", "Camembert": "CamemBERT",
    "DistilBert": "DistilBERT", "Albert": "ALBERT", "Deberta": "DeBERTa", "DebertaV2": "DeBERTaV2",
    "ModernBert": "ModernBERT", "GPT2": "GPT2", "Llama": "Llama", "Mistral": "Mistral", "Qwen2": "Qwen2",
    "Qwen3": "Qwen3",
}  # fmt: skip
NOT_CHANGED = {"id2label", "label2id", "num_labels", "problem_type"}  # they make another head
RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
# Keys that the weights decide, or that count only with other keys.
ELSEWHERE = {
    "share_att_key": "the weights have other names", "max_window_layers": "layer_types says the same",
    "use_sliding_window": "layer_types says the same", "sliding_window": "without use_sliding_window there is none",
    "id2label": "names of classes", "label2id": "names of classes",
    "legacy": "names of weights",
}  # fmt: skip


TINY: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 12, "dim": 12, "n_embd": 12, "num_hidden_layers": 1, "n_layers": 1, "n_layer": 1,
    "num_attention_heads": 2, "n_heads": 2, "n_head": 2, "num_key_value_heads": 2, "intermediate_size": 10,
    "hidden_dim": 10, "max_position_embeddings": 20, "n_positions": 20, "embedding_size": 8, "head_dim": 6,
    "pooler_hidden_size": 12, "pad_token_id": 3, "cls_token_id": 1, "sep_token_id": 2, "layer_types": None,
}  # fmt: skip


def raw_of(kind: str) -> dict[str, Any]:
    config = getattr(transformers, f"{kind}Config")(**(RELATIVE if "Deberta" in kind else {}))
    return {key: value for key, value in config.to_dict().items() if key != "architectures"}


def changed(value: Any) -> Any:
    """Return another value of about the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return abs(value) * 2 or 1
    if isinstance(value, str):
        return "other"
    return ["other"]


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_attribute(kind: str) -> None:
    cls, raw = getattr(nt.models, FAMILIES[kind]), raw_of(kind)
    fields = cls.saved_fields(raw)
    refused, honoured, ignored = set(), set(), set()
    for key, value in raw.items():
        if key == "model_type":
            continue
        try:
            other = cls.saved_fields(raw | {key: changed(value)})
        except nt.ConfigError as error:
            assert key in str(error) or key in cls.keys.values(), (key, str(error))
            refused.add(key)
        else:
            (honoured if other != fields else ignored).add(key)
    wrong = {key for key in ignored if not harmless(key)} - ELSEWHERE.keys()
    assert not wrong, f"{sorted(wrong)} change nothing, and no list says why"
    assert len(honoured) >= 6 and refused, (honoured, refused)


def read_by(kind: str) -> set[str]:
    """Return the attributes of the config that transformers' code of the family reads."""
    source = inspect.getsource(sys.modules[getattr(transformers, f"{kind}PreTrainedModel").__module__])
    return {*re.findall(r"config\.([a-z]\w+)", source), *re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source)}


def loss_of(kind: str, head: str, config: dict[str, Any], state: Any = None) -> tuple[Any, Any]:
    """Return the loss of transformers' tiny model with the weights `state`, by default random ones; and the weights."""
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}{head}")
    model = cls(cls.config_class(**config)).eval()
    if state:
        model.load_state_dict(state)
    ids = torch.arange(20).reshape(2, 10)
    return model(input_ids=ids, labels=ids[:, 0] % 2 if "Classification" in head else ids)[0], model.state_dict()


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"XLMRoberta", "Camembert"}))  # these two are Roberta
def test_what_is_ignored_changes_nothing_in_transformers(kind: str) -> None:
    """Each attribute of the config class, and each that the code reads: ignored here, it does not change the loss."""
    cls, raw = getattr(nt.models, FAMILIES[kind]), raw_of(kind)
    fields, tiny = cls.saved_fields(raw), {key: value for key, value in TINY.items() if key in raw}
    heads = ["LMHeadModel" if kind == "GPT2" else "ForCausalLM" if cls.objective == "causal" else "ForMaskedLM"]
    heads += ["ForSequenceClassification"] if cls.objective == "masked" else []
    wanted = {head: loss_of(kind, head, raw | tiny) for head in heads}
    compared = set()
    for key in {*raw, *read_by(kind)} - {"model_type", *NOT_CHANGED}:
        other = changed(raw.get(key, 1))
        try:
            ignored = cls.saved_fields(raw | {key: other}) == fields
        except nt.ConfigError:  # refused by name: see test_each_attribute
            continue
        for head, (loss, state) in wanted.items() if ignored and not key.endswith("dropout") else ():
            try:
                found, _ = loss_of(kind, head, raw | tiny | {key: other}, state)
            except Exception:  # transformers does not take this value
                continue
            assert torch.equal(found, loss), f"{key}: transformers computes something else with {other}"
            compared.add(key)
    assert len(compared) > 5, compared


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_key_that_nobody_knows(kind: str) -> None:
    cls, raw = getattr(nt.models, FAMILIES[kind]), raw_of(kind)
    with pytest.raises(nt.ConfigError, match=f"alibi is True in the model's config, and {cls.__name__} does not know"):
        cls.saved_fields(raw | {"alibi": True})
    for nothing in (None, False, 0, [], {}, ""):
        assert cls.saved_fields(raw | {"alibi": nothing}) == cls.saved_fields(raw)
    for patterns in HARMLESS.values():
        for pattern in patterns.split():
            key = pattern.replace("*", "some_")
            if key not in (*cls.fixed, *raw, "architectures", "model_type"):
                cls.saved_fields(raw | {key: 3})


def test_keys_remember_what_is_read() -> None:
    keys = Keys({"a": 1, "b": 2, "c": 3, "d": 4, "bos_token_id": 5})
    assert (keys["a"], keys.get("b"), "c" in keys, keys.get("e", 7)) == (1, 2, True, 7)
    assert keys.used == {"a", "b", "c", "e"}
    with pytest.raises(nt.ConfigError, match=r"d is 4 in the model's config, and Mine does not know this key; remove"):
        keys.check_used("Mine")


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("GPT2", {"architectures": ["GPT2DoubleHeadsModel"]}, "GPT2DoubleHeadsModel.* allowed: GPT2LMHead.*, GPT2M"),
        ("GPT2", {"activation_function": "laplace"}, "activation_function is 'laplace' .*; allowed: 'gelu_new'"),
        ("Llama", {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}, "rope_type: got 'axial'; allowed: "),
        ("Llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Qwen2", {"layer_types": ["sliding_attention"] * 32}, "layer_types is .*; allowed: full_attention in"),
        ("Mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 in the .*; allowed: None"),
        ("Llama", {"auto_map": {"AutoModel": "own.Model"}}, "auto_map is .*Llama does not know this key"),
    ],
)
def test_what_is_refused_by_name(kind: str, change: dict[str, Any], message: str) -> None:
    cls = getattr(nt.models, FAMILIES[kind])
    with pytest.raises(nt.ConfigError, match=message):
        config = cls.Config(**cls.saved_fields(raw_of(kind) | change))
        cls(config.changed(layers=1, embed=32, ffn=8, vocab=9, heads=2, kv_heads=2, head_dim=16)).params()
