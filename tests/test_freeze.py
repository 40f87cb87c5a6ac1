"""Frozen weights: losses and weights as of PyTorch with requires_grad=False; no gradient, no averages of AdamW."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_parity import BATCH, data, gpt2, over_all, torch_loss

import nntile_py as nt
from nntile_py.testing import error

SEQ, VOCAB, STEPS = 37, 611, 3
RAGGED = {"batch": 3, "seq": 20, "embed": 20, "heads": 3, "ffn": 100, "vocab": 300}
RAGGED_LLAMA = RAGGED | {"heads": 2}  # a tile has complete groups of heads
HOW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1}
FREEZE = {
    "embeddings": ["*.wte.*", "*.wpe.*", "*embed_tokens*"],
    "first layer": ["*.0.*"],
    "products": ["*.attn.*", "*.mlp.*", "*_proj.weight"],
    "norms": ["*ln_*", "*norm*"],
}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=120, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


MODELS: dict[str, Any] = {"gpt2": gpt2, "llama": llama}


def patterns(model: Any, case: str) -> list[str]:
    """The patterns of a case that match a weight of the model."""
    names = [name for name, _ in model.named_parameters()]
    return [one for one in FREEZE[case] if any(fnmatch(name, one) for name in names)]


def trained_by_torch(model: Any, freeze: list[str]) -> tuple[list[float], list[float], dict[str, Any]]:
    for name, param in model.named_parameters():
        param.requires_grad = not any(fnmatch(name, one) for one in freeze)
    free = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(free, **HOW)
    losses, norms = [], []
    for ids, labels in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True):
        optimizer.zero_grad()
        loss = torch_loss(model, ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(free, 0.5).item())
        optimizer.step()
    return losses, norms, {name: param.detach().numpy() for name, param in model.named_parameters()}


@pytest.mark.parametrize("tiles", [False, True], ids=["uncut", "ragged"])
@pytest.mark.parametrize("case", FREEZE)
@pytest.mark.parametrize("name", MODELS)
def test_equals_torch(runtime: nt.Runtime, name: str, case: str, tiles: bool) -> None:
    freeze = patterns(MODELS[name](), case)
    losses, norms, weights = trained_by_torch(MODELS[name](), freeze)
    model = nt.models.from_hf(MODELS[name]())
    before = {key: value.copy() for key, value in model.weights.items()}
    cuts = (RAGGED if name == "gpt2" else RAGGED_LLAMA) if tiles else {}

    def trainer(freeze: list[str]) -> nt.Trainer:
        return nt.Trainer(model, BATCH, SEQ, cuts, optimizer=nt.AdamW(freeze=freeze, **HOW), clip_grad_norm=0.5)

    full, ours = trainer([]), trainer(freeze)
    results = [ours.submit(*of).result() for of in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True)]
    assert error([one.loss for one in results], losses) < 1e-5
    assert error([one.grad_norm for one in results], norms) < 1e-5
    after, frozen = ours.state_dict(), {key for key in before if any(fnmatch(key, one) for one in freeze)}
    assert frozen
    assert all(np.array_equal(after[key], before[key]) for key in frozen)
    assert over_all(after, weights) < 1e-5
    assert ours.gradients().keys() == before.keys() - frozen
    averages = ours.live().state().averages
    assert all(of.keys() == before.keys() - frozen for of in averages.values())
    assert ours.tasks_per_step < full.tasks_per_step
    full.close()


@pytest.mark.parametrize("policy", ["commute", "redux", "tree"])
def test_policies(runtime: nt.Runtime, policy: str) -> None:
    freeze = patterns(gpt2(), "norms")
    losses, _, _ = trained_by_torch(gpt2(), freeze)
    optimizer = nt.AdamW(freeze=freeze, **HOW)
    model = nt.models.GPT2.from_hf(gpt2())
    ours = nt.Trainer(model, BATCH, SEQ, RAGGED, optimizer=optimizer, clip_grad_norm=0.5, accumulate=policy)
    results = [ours.step(*of) for of in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True)]
    assert error(results, losses) < 1e-5


def test_saved_and_loaded(runtime: nt.Runtime, tmp_path: Path) -> None:
    def trainer() -> nt.Trainer:
        optimizer = nt.AdamW(freeze=["*.wte.*", "*.attn.*"], **HOW)
        return nt.Trainer(nt.models.GPT2.from_hf(gpt2()), BATCH, SEQ, RAGGED, optimizer=optimizer)

    ids, labels = data(SEQ, VOCAB, steps=4)
    straight, first = trainer(), trainer()
    for step in range(4):
        straight.step(ids[step], labels[step])
    for step in range(2):
        first.step(ids[step], labels[step])
    first.save(tmp_path / "saved")
    loaded = nt.Trainer.load(tmp_path / "saved")
    assert loaded.optimizer.freeze == ("*.wte.*", "*.attn.*")
    for step in range(2, 4):
        loaded.step(ids[step], labels[step])
    want, got = straight.state_dict(), loaded.state_dict()
    assert all(np.array_equal(want[name], got[name]) for name in want)


def test_one_of_queries_keys_and_values(runtime: nt.Runtime) -> None:
    """Weights that fusion.qkv would make one parameter stay apart if only some are frozen."""
    model = nt.models.from_hf(llama())
    before = {key: value.copy() for key, value in model.weights.items()}
    trainer = nt.Trainer(model, BATCH, SEQ, optimizer=nt.AdamW(freeze=["*.q_proj.*"]))
    trainer.step(*(of[0] for of in data(SEQ, VOCAB, steps=1)))
    after = trainer.state_dict()
    same = {name.split(".")[-2] for name in before if np.array_equal(before[name], after[name])}
    assert same == {"q_proj"}


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (["*.wet.*"], r"freeze: '\*\.wet\.\*' matches no weight; allowed: a pattern of names such as transformer\."),
        (["*"], r"optimizer\.freeze: all weights are frozen; allowed: patterns that leave weights to train"),
        ("*.wte.*", r"optimizer\.freeze: got .*allowed: a list of names"),
    ],
)
def test_refused(runtime: nt.Runtime, freeze: Any, message: str) -> None:
    with pytest.raises(nt.ConfigError, match=message):
        nt.Trainer(nt.models.GPT2.from_hf(gpt2()), BATCH, SEQ, optimizer=nt.AdamW(freeze=freeze))
