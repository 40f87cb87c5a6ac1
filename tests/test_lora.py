"""LoRA against a plain implementation in PyTorch; adapters in the form of peft; merging; resuming."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_freeze import HOW, RAGGED, RAGGED_LLAMA, SEQ, VOCAB, llama
from test_parity import BATCH, data, gpt2, over_all, torch_loss

import nntile_py as nt
from nntile_py.testing import error

STEPS = 3
SECTIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"rank": 4, "alpha": 8, "targets": ["c_attn", "c_fc", "attn.c_proj"]},
    "llama": {"rank": 3, "alpha": 16, "targets": ["q_proj", "v_proj", "down_proj", "o_proj"]},
}
MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama}
CUTS = {"gpt2": RAGGED, "llama": RAGGED_LLAMA}


class PlainLora(torch.nn.Module):
    """x W^T + b + (alpha / rank) (x A^T) B^T."""

    def __init__(self, base: Any, a: Any, b: Any, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = (torch.nn.Parameter(torch.from_numpy(value.copy())) for value in (a, b))

    def forward(self, x: Any) -> Any:
        return self.base(x) + self.scale * (x @ self.a.T) @ self.b.T


def with_factors(model: Any, section: dict[str, Any], also: str = "") -> tuple[Any, dict[str, Any]]:
    """Return an nt model with factors that are all random, and its weights."""
    ours = nt.models.from_hf(model, lora=section | ({"train_also": [also]} if also else {}))
    rng = np.random.default_rng(7)
    for name, value in ours.weights.items():
        if name.endswith("lora_B.weight"):
            assert not value.any()
            value[:] = 0.1 * rng.standard_normal(value.shape)
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(value.shape[1])
            assert 0.8 * bound < abs(value).max() <= bound
    return ours, {name: value.copy() for name, value in ours.weights.items()}


def plain(model: Any, weights: dict[str, Any], scale: float, also: str = "") -> dict[str, Any]:
    """Put PlainLora into a transformers model; return {name as of nt: trained parameter}."""
    trained = {}
    for name, param in model.named_parameters():
        param.requires_grad = fnmatch(name, also)
        if param.requires_grad:
            trained[name] = param
    for module in [name.removesuffix(".lora_A.weight") for name in weights if name.endswith("lora_A.weight")]:
        parent, _, last = module.rpartition(".")
        a, b = (weights[f"{module}.lora_{one}.weight"] for one in "AB")
        new = PlainLora(getattr(model.get_submodule(parent), last), a, b, scale)
        setattr(model.get_submodule(parent), last, new)
        trained |= {f"{module}.lora_A.weight": new.a, f"{module}.lora_B.weight": new.b}
    return trained


def trained_by_torch(model: Any, trained: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    optimizer, losses = torch.optim.AdamW(trained.values(), **HOW), []
    for ids, labels in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True):
        optimizer.zero_grad()
        loss = torch_loss(model, ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained.values(), 0.5)
        optimizer.step()
    return losses, {name: param.detach().numpy() for name, param in trained.items()}


@pytest.mark.parametrize("tiles", [False, True], ids=["uncut", "ragged"])
@pytest.mark.parametrize("also", ["", "*norm*", "*ln_*"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_torch(runtime: nt.Runtime, name: str, also: str, tiles: bool) -> None:
    if also == {"gpt2": "*norm*", "llama": "*ln_*"}[name]:
        pytest.skip("of the other model")
    section = SECTIONS[name]
    model, before = with_factors(MODELS[name](), section, also)
    theirs = MODELS[name]()
    trained = plain(theirs, before, section["alpha"] / section["rank"], also)
    losses, weights = trained_by_torch(theirs, trained)
    cuts = CUTS[name] if tiles else {}
    ours = nt.Trainer(model, BATCH, SEQ, cuts, optimizer=nt.AdamW(**HOW), clip_grad_norm=0.5)
    results = [ours.step(*of) for of in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True)]
    assert error(results, losses) < 1e-5
    after = ours.state_dict()
    assert over_all({key: after[key] for key in weights}, weights) < 1e-5
    assert all(np.array_equal(after[key], before[key]) for key in before.keys() - weights.keys())
    assert ours.gradients().keys() == weights.keys()
    assert all(of.keys() == weights.keys() for of in ours.live().state().averages.values())


def test_dropout(runtime: nt.Runtime) -> None:
    """The numbers of dropout do not depend on the tiling; an evaluation has none."""

    def losses(tiles: dict[str, int], rate: float) -> list[float]:
        model, _ = with_factors(gpt2(), SECTIONS["gpt2"] | {"dropout": rate})
        trainer = nt.Trainer(model, BATCH, SEQ, tiles, optimizer=nt.AdamW(**HOW))
        first = trainer.evaluate(*(of[0] for of in data(SEQ, VOCAB)))
        return [first, *(trainer.step(*of) for of in zip(*data(SEQ, VOCAB, steps=STEPS), strict=True))]

    dropped, uncut, none = losses(RAGGED, 0.3), losses({}, 0.3), losses({}, 0.0)
    assert error(dropped, uncut) < 1e-5
    assert abs(dropped[0] - none[0]) < 1e-5 < abs(dropped[1] - none[1])


def test_bert(runtime: nt.Runtime) -> None:
    config = nt.models.BERT.Config(
        layers=1, embed=24, heads=4, ffn=60, vocab=101, positions=19,
        lora={"rank": 2, "alpha": 2, "targets": ["all-linear"]},
    )  # fmt: skip
    model, ids = nt.models.BERT(config), np.arange(38).reshape(2, 19)
    trainer = nt.Trainer(model, 2, 19, optimizer=nt.AdamW(lr=0.1))
    first = trainer.step({"input_ids": ids, "labels": ids})
    for _ in range(10):
        last = trainer.step({"input_ids": ids, "labels": ids})
    assert last < first


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"targets": ["q_prj"]}, r"lora\.targets: 'q_prj' matches no product; allowed: .*c_attn"),
        ({"targets": []}, r"lora\.targets: '' matches no product"),
        ({"train_also": ["*nrom*"]}, r"lora\.train_also: '\*nrom\*' matches no weight; allowed: a pattern of names"),
        ({"rank": 0}, r"lora\.rank: got 0; allowed: an integer of at least 1"),
        ({"targets": "c_attn"}, r"lora\.targets: got .*allowed: a list of names"),
    ],
)
def test_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(nt.ConfigError, match=message):
        nt.models.from_hf(gpt2(), lora=SECTIONS["gpt2"] | section)


def test_saved_and_loaded(runtime: nt.Runtime, tmp_path: Path) -> None:
    """A model of transformers' object: the base's weights are in the checkpoint. A folder: they are not."""
    gpt2().save_pretrained(tmp_path / "base")
    ids, labels = data(SEQ, VOCAB, steps=4)
    for source in (gpt2(), tmp_path / "base"):
        model, _ = with_factors(source, SECTIONS["gpt2"] | {"dropout": 0.1}, "*ln_f*")
        straight = nt.Trainer(model, BATCH, SEQ, RAGGED, optimizer=nt.AdamW(**HOW))
        for step in range(2):
            straight.step(ids[step], labels[step])
        straight.save(tmp_path / "saved")
        for step in range(2, 4):
            straight.step(ids[step], labels[step])
        loaded = nt.Trainer.load(tmp_path / "saved")
        for step in range(2, 4):
            loaded.step(ids[step], labels[step])
        want, got = straight.state_dict(), loaded.state_dict()
        assert want.keys() == got.keys()
        assert all(np.array_equal(want[name], got[name]) for name in want)
        names = load_file(tmp_path / "saved/model.safetensors").keys()
        assert ("transformer.wte.weight" in names) == (source != tmp_path / "base")


@pytest.mark.parametrize("name", MODELS)
def test_adapter_files(runtime: nt.Runtime, name: str, tmp_path: Path) -> None:
    """The factors in the file are those of peft; a folder with them opens with merged weights."""
    MODELS[name]().save_pretrained(tmp_path / "base")
    section = SECTIONS[name]
    model, weights = with_factors(tmp_path / "base", section)
    nt.Trainer(model, BATCH, SEQ).save(tmp_path / "saved")
    written = load_file(tmp_path / "saved/adapter_model.safetensors")
    factors = {key: value for key, value in weights.items() if "lora_" in key}
    assert written.keys() == {f"base_model.model.{key}" for key in factors}
    assert all(np.array_equal(written[f"base_model.model.{key}"], value) for key, value in factors.items())
    assert not (tmp_path / "saved/config.json").exists()  # transformers would look for the base's weights beside it
    theirs = MODELS[name]()
    plain(theirs, weights, section["alpha"] / section["rank"])
    ids, labels = (of[0] for of in data(SEQ, VOCAB))
    want = torch_loss(theirs, ids, labels).item()
    bare = tmp_path / "peft"  # as peft writes it, without config.json
    bare.mkdir()
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(tmp_path / "saved" / file, bare)
    for folder in (tmp_path / "saved", bare):
        merged = nt.models.from_hf(folder)
        assert not [key for key in merged.weights if "lora_" in key]
        assert abs(nt.Trainer(merged, BATCH, SEQ).evaluate(ids, labels) - want) < 1e-5
    again = nt.models.from_hf(bare, lora=section)
    assert all(np.array_equal(again.weights[key], value) for key, value in weights.items())
    assert torch_loss(again.to_hf(), ids, labels).item() == pytest.approx(want, abs=1e-5)


def test_adapters_refused(runtime: nt.Runtime, tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path / "base")
    llama().save_pretrained(tmp_path / "llama")
    gpt2(n_embd=32).save_pretrained(tmp_path / "small")
    model, _ = with_factors(tmp_path / "base", SECTIONS["gpt2"])
    nt.Trainer(model, BATCH, SEQ).save(tmp_path / "saved")
    adapter, file = tmp_path / "peft", tmp_path / "peft/adapter_config.json"
    adapter.mkdir()
    shutil.copy(tmp_path / "saved/adapter_model.safetensors", adapter)
    config = json.loads((tmp_path / "saved/adapter_config.json").read_text())
    for changes, fields, message in (
        ({"base_model_name_or_path": "gpt2-xl"}, {}, "base model is gpt2-xl, which is no folder; allowed: the folder"),
        ({"base_model_name_or_path": None}, {}, "base model is null, which is no folder; allowed: the folder"),
        ({"base_model_name_or_path": str(tmp_path / "llama")}, {}, "the adapter has .*c_attn.lora_A.* no such weight"),
        ({"base_model_name_or_path": str(tmp_path / "small")}, {}, r"shape \(4, 48\), expected \(4, 32\); allowed:"),
        ({"use_dora": True}, {}, "use_dora is True in adapter_config.json; allowed: False"),
        ({"r": None}, {}, "no numbers r and lora_alpha"),
        ({}, {"lora": SECTIONS["gpt2"] | {"alpha": 1}}, "lora: differs from the adapter, which has rank 4, alpha 8"),
        ({}, {"lora": SECTIONS["gpt2"] | {"targets": ["c_fc"]}}, "the adapter.*rank 4.* targets c_attn, c_fc, c_proj"),
    ):
        file.write_text(json.dumps(config | changes))
        with pytest.raises(nt.ConfigError, match=message):
            nt.models.from_hf(adapter, **fields)
    with pytest.raises(nt.ConfigError, match=r"train_also: got \[\]; allowed: a pattern that matches score.weight"):
        nt.models.from_hf(tmp_path / "base", head="classification", lora=SECTIONS["gpt2"])
