"""LoRA: the numbers of torch with adapters beside the same layers, checkpoints, merged weights, and what is refused."""

import math
import re
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from test_freeze import RAGGED, llama
from test_loop import HOW, nntile
from test_parity import close_gradients, data, gpt2, torch_loss

import nntile_py as nt

CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"targets": ["c_attn", "c_fc"], "rank": 3, "alpha": 6.0},
    "gpt2 all": {"targets": ["c_attn", "c_proj", "c_fc"], "rank": 8, "modules_to_save": ["ln_f"]},
    "llama": {"targets": ["q_proj", "v_proj"], "rank": 4},
    "llama all": {"targets": ["*_proj"], "rank": 2, "alpha": 1.0},
}


class Adapted(torch.nn.Module):
    """W x + alpha / rank * B A x, as peft computes it."""

    def __init__(self, of: Any, a: Any, b: Any, scale: float) -> None:
        super().__init__()
        self.of, self.scale = of, scale
        self.lora_A, self.lora_B = torch.nn.Parameter(torch.tensor(a)), torch.nn.Parameter(torch.tensor(b))

    def forward(self, x: Any) -> Any:
        return self.of(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


def adapted(model: Any, weights: dict[str, Any], scale: float) -> dict[str, Adapted]:
    made = {}
    for name in [name.removesuffix(".lora_A.weight") for name in weights if name.endswith("lora_A.weight")]:
        parent, _, child = name.rpartition(".")
        a, b = (weights[f"{name}.lora_{one}.weight"].astype(np.float64) for one in "AB")
        made[name] = Adapted(getattr(model.get_submodule(parent), child), a, b, scale)
        setattr(model.get_submodule(parent), child, made[name])
    return made


@pytest.mark.few(3)
@pytest.mark.parametrize("tiles", [{}, RAGGED], ids=["uncut", "ragged"])
@pytest.mark.parametrize("kind", CASES)
def test_adapters_of_torch(runtime: nt.Runtime, tmp_path: Path, kind: str, tiles: dict[str, int]) -> None:
    """The trainer is saved and loaded after the second step."""
    lora = CASES[kind]
    theirs, of = (llama(), nt.models.Llama) if "llama" in kind else (gpt2(), nt.models.GPT2)
    model, (ids, labels) = of.from_hf(theirs, lora=lora), data(37, 611)
    before = {name: value.copy() for name, value in model.weights.items()}
    for name, value in before.items():
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(value.shape[1])
            assert value.shape[0] == lora["rank"] and 0.8 * bound < np.abs(value).max() <= bound
        assert not name.endswith("lora_B.weight") or not value.any()
    theirs = theirs.double().eval()
    made = adapted(theirs, before, lora.get("alpha", 16.0) / lora["rank"])
    assert made
    for name, weight in theirs.named_parameters():
        weight.requires_grad = "lora_" in name or any(f"{one}." in name for one in lora.get("modules_to_save", []))
    adamw = torch.optim.AdamW([p for p in theirs.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1, eps=1e-4)
    trainer = nt.Trainer(model, 4, 37, tiles, "fp64", nt.AdamW(lr=0.01, weight_decay=0.1, eps=1e-4, decay="all"))
    for step in range(4):
        if step == 2:
            trainer.save(tmp_path / "saved")
            trainer = nt.Trainer.load(tmp_path / "saved")
        loss = torch_loss(theirs, ids[step], labels[step])
        adamw.zero_grad()
        loss.backward()
        adamw.step()
        assert trainer.step(ids[step], labels[step]) == pytest.approx(loss.item(), rel=1e-8)
    after = trainer.state_dict()
    for name, layer in made.items():
        for one in "AB":
            want = getattr(layer, f"lora_{one}").detach().numpy()
            close_gradients({"w": after[f"{name}.lora_{one}.weight"]}, {"w": want}, 1e-6)
    saved = lora.get("modules_to_save", [])
    for name, value in before.items():
        trained = "lora_" in name or any(f"{one}." in name for one in saved)
        assert np.array_equal(after[name], value) != trained, name


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft
@pytest.mark.parametrize("kind", CASES)
def test_merged_weights_and_files(runtime: nt.Runtime, tmp_path: Path, kind: str) -> None:
    """The merged model, the model of the saved adapter, and the model with adapters compute the same."""
    lora = CASES[kind]
    theirs, of = (llama(), nt.models.Llama) if "llama" in kind else (gpt2(), nt.models.GPT2)
    model, (ids, _) = of.from_hf(theirs, lora=lora), data(37, 611)
    rng = np.random.default_rng(5)
    noise = {n: rng.normal(0, 0.1, v.shape).astype(v.dtype) for n, v in model.weights.items() if "lora" in n}
    model.weights = {n: v + noise.get(n, 0) for n, v in model.weights.items()}

    def logits(one: Any) -> Any:
        return nt.Trainer(one, 4, 37, precision="fp64").evaluate(ids[0], return_logits=True)[1]

    want, merged = logits(model), model.merged()
    assert not any("lora" in name for name in merged.weights) and np.abs(want - logits(of.from_hf(theirs))).max() > 1e-3
    assert np.abs(logits(merged) - want).max() < 1e-4
    with torch.no_grad():
        assert np.abs(model.to_hf().double()(torch.from_numpy(ids[0])).logits.numpy() - want).max() < 1e-4
    nt.save_adapter(model, tmp_path / "adapter")
    again = nt.load_adapter(of.from_hf(theirs), tmp_path / "adapter")
    assert np.abs(logits(again) - want).max() < 1e-12
    peft = pytest.importorskip("peft")
    with torch.no_grad():
        of_peft = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").double().eval()
        assert np.abs(of_peft(torch.from_numpy(ids[0])).logits.numpy() - want).max() < 1e-6
        of_peft.save_pretrained(tmp_path / "theirs")
    again = nt.load_adapter(of.from_hf(llama() if "llama" in kind else gpt2()), tmp_path / "theirs")
    assert np.abs(logits(again) - want).max() < 1e-6


@pytest.mark.parametrize("pack", [False, True])
def test_adapters_of_an_encoder(runtime: nt.Runtime, pack: bool) -> None:
    """With dropout; a step trains the adapters and the head alone."""
    targets = ["query", "value", "intermediate.dense"]
    lora = {"targets": targets, "rank": 2, "dropout": 0.1, "modules_to_save": ["classifier"]}
    config = nt.models.BERT.Config(
        layers=2, embed=24, heads=4, ffn=60, vocab=101, positions=19, head="classification", classes=3, lora=lora
    )
    rng, model = np.random.default_rng(2), nt.models.BERT(config)
    noise = {n: rng.normal(0, 0.1, v.shape).astype(v.dtype) for n, v in model.weights.items() if "lora_B" in n}
    model.weights = {n: v + noise.get(n, 0) for n, v in model.weights.items()}
    inputs = {"input_ids": rng.integers(0, 101, (5, 19)), "labels": rng.integers(0, 3, 5)}
    inputs["attention_mask"] = (np.arange(19) < rng.integers(4, 20, (5, 1))).astype(np.int64)
    tiles = {"batch": 2} if pack else {"batch": 2, "seq": 7, "embed": 10, "heads": 2, "ffn": 17, "vocab": 33}
    trainer, before = nt.Trainer(model, 5, 19, tiles, "fp64", pack=pack, seed=1), dict(model.weights)
    whole = nt.Trainer(model.merged(), 5, 19, precision="fp64")
    assert trainer.evaluate(inputs) == pytest.approx(whole.evaluate(inputs), rel=1e-6)
    trainer.step(inputs)
    changed = {name for name, value in trainer.state_dict().items() if not np.array_equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name or name.startswith("classifier.")}


@pytest.mark.parametrize("tiles", [{}, {"batch": 2, "heads": 1}], ids=str)
def test_dropout_of_packed_heads(runtime: nt.Runtime, tiles: dict[str, int]) -> None:
    """An adapter of the product after attention reads heads: packed and padded sequences drop the same elements."""
    lora = {"targets": ["o_proj"], "rank": 2, "dropout": 0.3}
    config = nt.models.LlamaConfig(layers=1, embed=16, heads=2, ffn=20, vocab=20, positions=8, lora=lora)
    ids, lengths = np.random.default_rng(0).integers(2, 20, (4, 8)), np.array([[8], [3], [5], [2]])
    inputs = {"input_ids": ids, "labels": ids, "attention_mask": (np.arange(8) < lengths).astype(np.int64)}
    inputs["labels"] = np.where(inputs["attention_mask"], ids, -100)
    found = []
    for pack in (False, True):
        model = nt.models.Llama(config)
        rng = np.random.default_rng(1)
        model.weights = {n: rng.normal(0, 0.3, v.shape) for n, v in model.weights.items()}
        trainer = nt.Trainer(model, 4, 8, tiles, "fp64", nt.SGD(lr=0.1), pack=pack)
        found.append(([trainer.step(inputs) for _ in range(2)], trainer.state_dict()))
    (padded, weights), (packed, others) = found
    assert packed == pytest.approx(padded, rel=1e-12)
    for name, value in weights.items():
        np.testing.assert_allclose(others[name], value, rtol=1e-9, atol=1e-12)


def test_refused(runtime: nt.Runtime, tmp_path: Path) -> None:
    for lora, message in (
        ({"targets": ["c_atn"]}, r"model\.lora\.targets: 'c_atn' names no module; allowed: modules such as c_attn"),
        ({"targets": ["wte"]}, r"transformer\.wte\.weight is read by .*; allowed: weights of products"),
        ({"targets": []}, r"model\.lora\.targets: "),
        ({"targets": ["c_fc"], "rank": 0}, r"model\.lora\.rank: "),
        ({"targets": ["c_fc"], "rank": 10**12}, r"model\.lora\.rank: .*; allowed: .* 1 to 65,?536"),
        ({"targets": ["c_fc"], "alpha": 1e308}, r"model\.lora\.alpha: "),
        ({"targets": ["c_fc"], "dropout": 1.0}, r"model\.lora\.dropout: "),
        ({"targets": ["c_fc"], "modules_to_save": ["x"]}, r"model\.lora\.modules_to_save: 'x' names no module"),
        ({}, r"model\.lora\.targets: not given"),
    ):
        with pytest.raises(nt.ConfigError, match=message):
            nt.models.GPT2.from_hf(gpt2(), lora=lora)
    model = nt.models.GPT2.from_hf(gpt2(), lora=CASES["gpt2"])
    nt.save_adapter(model, tmp_path / "adapter")
    with pytest.raises(nt.ConfigError, match=r"which the model lacks; allowed: adapters of a Llama of this size"):
        nt.load_adapter(nt.models.Llama.from_hf(llama()), tmp_path / "adapter")
    with pytest.raises(nt.ConfigError, match=r"lora_A.weight has shape .* expected"):
        nt.load_adapter(nt.models.GPT2.from_hf(gpt2(n_embd=32)), tmp_path / "adapter")
    with pytest.raises(nt.ConfigError, match=r"has no adapter_config\.json or no adapter_model\.safetensors"):
        nt.load_adapter(model.merged(), tmp_path)
    with pytest.raises(nt.ConfigError, match="GPT2 already has adapters; allowed: a model without"):
        nt.load_adapter(model, tmp_path / "adapter")
    with pytest.raises(nt.ConfigError, match="has no adapters; allowed: a model with lora"):
        nt.save_adapter(model.merged(), tmp_path / "none")
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(file.read_text().replace('"peft_type"', '"use_dora": true, "peft_type"'))
    with pytest.raises(nt.ConfigError, match="use_dora: got True; allowed: False"):
        nt.load_adapter(model.merged(), tmp_path / "adapter")
    for alpha in ('"x"', "null", "0", "true"):
        text = file.read_text().replace('"use_dora": true, ', "")
        file.write_text(re.sub('"lora_alpha": [^,]*', f'"lora_alpha": {alpha}', text))
        with pytest.raises(nt.ConfigError, match=r"config\.json: lora_alpha: got .*; allowed: a number above 0"):
            nt.load_adapter(model.merged(), tmp_path / "adapter")


def test_a_run_with_adapters(tmp_path: Path) -> None:
    """Train, resume to the same bits, generate, merge; transformers reads the merged folder."""
    from transformers import AutoModelForCausalLM

    assert nntile(tmp_path, "train.steps=2", f"out={tmp_path}/base", "sample.tokens=0").returncode == 0
    lora = "model={type: gpt2, from: base, lora: {targets: [c_attn, c_proj], rank: 2, dropout: 0.1}}"
    more = lora, "tokenizer={}", "optimizer.lr=0.01"
    done = nntile(tmp_path, *more, "train.steps=4", f"out={tmp_path}/run", "checkpoint.every=2")
    assert done.returncode == 0 and " parameters are trained, the others are frozen" in done.stdout, done.stderr
    assert "sample:" in done.stdout
    half = f"{tmp_path}/run/checkpoints/step-000002"
    done = nntile(tmp_path, *more, "train.steps=4", arguments=("--resume", half, "--out", f"{tmp_path}/again"))
    assert done.returncode == 0, done.stderr
    one, two = (tmp_path / name / "model.safetensors" for name in ("run", "again"))
    assert one.read_bytes() == two.read_bytes()
    base, tuned = load_file(tmp_path / "base/model.safetensors"), load_file(one)
    assert all(np.array_equal(tuned[name], value) for name, value in base.items())
    assert all(value.any() for name, value in tuned.items() if "lora_B" in name)
    one.unlink()  # as after a kill before the end of the save
    (tmp_path / "run/config.json").unlink()
    done = nntile(tmp_path, *more, "train.steps=4", arguments=("--resume", f"{tmp_path}/run"))
    assert done.returncode == 0 and one.read_bytes() == two.read_bytes(), done.stderr
    assert (tmp_path / "run/config.json").read_bytes() == (tmp_path / "again/config.json").read_bytes()

    def run(*words: str) -> Any:
        return forks.run([sys.executable, "-m", "nntile_py.cli", *words], **HOW, cwd=tmp_path, check=False)

    done = run("generate", "run", "--prompt", "import ", "--max-tokens", "5", "--temperature", "0", "--cpus", "1")
    assert done.returncode == 0, done.stderr
    assert (merged := run("merge", "run", "merged")).returncode == 0, merged.stderr
    again = run("generate", "merged", "--prompt", "import ", "--max-tokens", "5", "--temperature", "0", "--cpus", "1")
    assert again.stdout == done.stdout
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert not np.allclose(whole["transformer.h.0.attn.c_attn.weight"], base["transformer.h.0.attn.c_attn.weight"])
    assert run("merge", "run", "adapter", "--adapter-only").returncode == 0
    assert run("merge", "base", "merged2", "--adapter", "adapter").returncode == 0
    same = load_file(tmp_path / "merged/model.safetensors"), load_file(tmp_path / "merged2/model.safetensors")
    assert all(np.array_equal(same[0][name], same[1][name]) for name in same[0])
    (tmp_path / "texts.txt").write_text("import os\ndef f():\n")
    for name in ("run", "merged"):  # vectors of the adapted model
        done = run("encode", name, "--input", "texts.txt", "--out", f"{name}.npy", "--cpus", "1")
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "run.npy"), np.load(tmp_path / "merged.npy"), atol=1e-5)
    for words, message in (
        (("merge", "base", "new"), "has no adapters; allowed: a run with model.lora, or --adapter FOLDER"),
        (("merge", "run", "new", "--adapter", "adapter"), "GPT2 already has adapters; allowed: a model without"),
        (("merge", "run", "merged"), "exists; allowed: a new or empty folder"),
    ):
        done = run(*words)
        assert done.returncode == 2 and message in done.stderr, done.stderr
    done = nntile(tmp_path, "model={type: gpt2, from: run}", "tokenizer={}", f"out={tmp_path}/other")
    assert done.returncode == 2 and "the checkpoint has the adapter" in done.stderr, done.stderr


def test_vectors_of_a_run_with_adapters_of_the_head(runtime: nt.Runtime, tmp_path: Path) -> None:
    """Hidden states do not depend on the head: its adapters and its other trained modules are left out."""
    config = nt.models.GPT2Config(layers=1, embed=24, heads=2, vocab=50, positions=16, tie_embeddings=False)
    rng, base = np.random.default_rng(3), nt.models.GPT2(config)
    for targets, saved in ((["lm_head"], ["ln_f"]), (["c_attn", "lm_head"], []), (["c_attn"], ["lm_head"])):
        lora = {"targets": targets, "rank": 2, "modules_to_save": saved}
        model = nt.models.GPT2(config.changed(lora=lora), seed=1)
        model.weights = {
            name: base.weights.get(name, rng.normal(0, 0.1, value.shape).astype(value.dtype))
            for name, value in model.weights.items()
        }
        folder, ids = tmp_path / "".join(targets + saved), [[1, 2, 3], [4, 5]]
        trainer = nt.Trainer(model, 1, 8)
        trainer.save(folder)
        trainer.close()
        for output in ("hidden", "logits"):
            encoders = nt.Encoder.from_hf(folder, output), nt.Encoder(model.merged(), output), nt.Encoder(base, output)
            rows, same, plain = (np.concatenate(encoder(ids)) for encoder in encoders)
            np.testing.assert_allclose(rows, same, atol=1e-5)
            changed = np.abs(rows - plain).max()
            assert (changed > 1e-3) == (output == "logits" or "c_attn" in targets)
