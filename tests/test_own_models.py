"""A user's own model: from a YAML and from Python, parameters out of several weights, and what goes wrong in it."""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import torch
import transformers
import yaml
from command import nntile
from safetensors.numpy import load_file
from torch.nn import functional as F

import nntile_py as nt
from nntile_py import cli
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import load
from nntile_py.inference.open_model import open_model
from nntile_py.models import registry
from nntile_py.tasks import (
    contract,
    cross_entropy,
    embedding,
    linear,
    multiply,
    select,
)
from nntile_py.testing import error

OWN = """
import nntile_py as nt
from nntile_py.schema import Count
from nntile_py.tasks import activation, cross_entropy, embedding, linear


class MyConfig(nt.ModelConfig):
    embed: Count
    ffn: Count = 20
    vocab: Count | None = None


class MyModel(nt.Model):
    Config = MyConfig
    objective = "causal"

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        c, tokens = self.config, {"batch": batch.size, "seq": batch.seq}
        ids = g.input("input_ids", tokens, below=c.vocab)
        labels = g.input("labels", tokens, below=c.vocab, ignored=-100, shifted=True, scale="loss_scale")
        table = g.param("table", {"vocab": c.vocab, "embed": c.embed}, nt.Normal(0.5))
        up = g.param("up.weight", {"ffn": c.ffn, "embed": c.embed}, nt.Normal(0.3))
        bias = g.param("up.bias", {"ffn": c.ffn}, nt.ZEROS)
        down = g.param("down.weight", {"embed": c.embed, "ffn": c.ffn}, nt.Normal(0.3))
        x = activation(g, linear(g, embedding(g, ids, table), up, ["batch", "seq", "ffn"], bias), "relu")
        logits = linear(g, linear(g, x, down, ["batch", "seq", "embed"]), table, ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"logits": logits})
"""
VOCAB, TILES = 300, {"batch": 2, "seq": 4, "embed": 5, "ffn": 9, "vocab": 110}


def write(folder: Path, text: str = OWN, **more: Any) -> Path:
    """my_file.py and a YAML whose model it is."""
    (folder / "my_file.py").write_text(text)
    (folder / "text.txt").write_text("\n".join(f"the {k}th line is much like the others" for k in range(300)))
    config = {
        "model": {"type": f"{folder}/my_file.py:MyModel", "embed": 12}, "data": {"source": f"{folder}/text.txt"},
        "tokenizer": {"vocab_size": VOCAB}, "train": {"steps": 8, "batch": 3, "seq": 10, "eval_batches": 1},
        "optimizer": {"lr": 0.02}, "runtime": {"cpus": 2}, "tiles": TILES, "sample": {"tokens": 2},
    } | more  # fmt: skip
    (folder / "own.yaml").write_text(yaml.safe_dump(config))
    return folder / "own.yaml"


def of_torch(weights: Any, ids: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of MyModel."""
    p = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    x = F.relu(p["table"][ids] @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T
    loss = F.cross_entropy((x @ p["table"].T)[:, :-1].reshape(-1, VOCAB), torch.tensor(ids[:, 1:]).reshape(-1))
    loss.backward()
    return loss.item(), {name: value.grad.numpy() for name, value in p.items() if value.grad is not None}


# -- from a YAML


def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nntile("plan", write(tmp_path), "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["parameters"] == VOCAB * 12 + 2 * 12 * 20 + 20
    assert made["tasks"] > 50


def test_train_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns; the folder holds the weights under the names of its text, from which a second run starts."""
    path, out = write(tmp_path), tmp_path / "out"
    monkeypatch.chdir(tmp_path)
    assert nntile("train", path, "--set", "model.type=my_file.py:MyModel", "--out", out) == 0
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["held_out_loss"] < 0.9 * metrics[0]["held_out_loss_before"]
    saved = load_file(out / "model.safetensors")
    assert {name: w.shape for name, w in saved.items()} == {
        "table": (VOCAB, 12), "up.weight": (20, 12), "up.bias": (20,), "down.weight": (12, 20),
    }  # fmt: skip
    monkeypatch.chdir(out)  # the type of config.yaml names the file wherever it is read
    config = load(out / "config.yaml", [f"model.from={out}", "tokenizer.vocab_size=null"])
    again = build_model(config)
    assert type(again).__name__ == "MyModel" and again.config.ffn == 20
    assert all(np.array_equal(again.weights[name], saved[name]) for name in saved)


def test_code_of_a_folder_runs_only_if_a_user_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint, a run's config.yaml, its saved options and its config.json may be downloaded, and name any file."""
    code = OWN + "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\n"
    path, out, ran, short = write(tmp_path, code), tmp_path / "out", tmp_path / "ran", ("--set", "train.steps=1")
    name = f"{tmp_path / 'my_file.py'}:MyModel"
    assert nntile("train", path, "--out", out, *short) == 0 and ran.exists()
    ran.unlink()
    shutil.move(tmp_path / "my_file.py", tmp_path / "evil.py")  # which this process has not imported
    evil = name.replace("my_file", "evil")
    (step,) = (out / "checkpoints").iterdir()
    for file in (out / "config.yaml", out / "config.json", step / "state.json"):
        file.write_text(file.read_text().replace(name, evil))
    (tmp_path / "plain.yaml").write_text(path.read_text().replace(name, "gpt2\n  layers: 1\n  heads: 2"))
    state = json.loads((step / "state.json").read_text())
    (step / "state.json").write_text(json.dumps(state | {"overrides": [f"model={{type: {evil}, embed: 12}}"]}))
    from_folder = ("--set", f"model={{from: {out}}}", "--set", "tokenizer={}")
    capsys.readouterr()
    for command in (
        ("train", "--resume", out), ("train", out / "config.yaml", "--resume"), ("plan", out / "config.yaml"),
        ("train", tmp_path / "plain.yaml", "--resume", "--out", out), ("train", "--resume", step),
    ):  # fmt: skip
        assert nntile(*command) == 2 and not ran.exists()
        told = f"the model is a class in {tmp_path}/evil.py, whose code would run; allowed: --set model.type={evil}, if"
        assert told in capsys.readouterr().err
    assert nntile("plan", tmp_path / "plain.yaml", *from_folder) == 2
    for opened in (nt.Encoder.from_hf, nt.models.from_hf, nt.Generator):
        with pytest.raises(nt.ConfigError, match=r"code would run; allowed: .* Python model_type='.*evil\.py:MyModel'"):
            opened(out)
    with pytest.raises(nt.ConfigError, match=r"evil\.py, whose code would run; allowed: model=MODEL, .* trust_code"):
        nt.Trainer.load(step)
    assert not ran.exists()
    with nt.Runtime(cpus=1):
        assert nt.Trainer.load(step, trust_code=True).steps == 1 and ran.exists()
        assert nt.Trainer.load(step).steps == 1  # the file is imported now
    named = ("--set", f"model.type={evil}", "--set", "train.steps=2")
    assert nntile("train", "--resume", out, *named) == 0


def test_all_commands_open_a_run_whose_file_the_user_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal names the option that the command takes; with it, the command uses the model."""
    out, name = tmp_path / "out", f"{tmp_path / 'my_file.py'}:MyModel"
    assert nntile("train", write(tmp_path), "--out", out, "--set", "train.steps=1") == 0
    commands: list[tuple[Any, ...]] = [
        ("generate", out, "--prompt", "the", "--max-tokens", 2),
        ("encode", out, "--input", tmp_path / "text.txt", "--out", tmp_path / "v.npz", "--output", "logits"),
        ("eval", out, "--data", tmp_path / "text.txt"), ("serve", out, "--port", 0),
        ("merge", out, tmp_path / "merged"),
    ]  # fmt: skip
    reasons = {"serve": "the server begins", "merge": "has no adapters"}  # ends of commands

    def no_server(*of: Any) -> None:
        raise nt.ConfigError(reasons["serve"])

    for command in commands:
        monkeypatch.setattr(sys, "modules", {k: v for k, v in sys.modules.items() if "own model" not in k})
        registry._loaded.cache_clear()
        assert nntile(*command) == 2
        assert f"whose code would run; allowed: --set model.type={name} (in Python" in capsys.readouterr().err
        with monkeypatch.context() as patch:
            patch.setattr("nntile_py.inference.serve_command._listener", no_server)
            status = nntile(*command, "--set", f"model.type={name}")
        assert status == 2 * (command[0] in reasons) and reasons.get(command[0], "") in capsys.readouterr().err
    with nt.Generator(out, model_type=name) as generator:
        assert len(generator("the", max_tokens=2)[0].tokens) <= 2
    assert nt.Encoder.from_hf(out, "logits", model_type=name).of_tokens
    model = nt.models.from_hf(out, model_type=name)
    assert model.config.embed == 12
    with pytest.raises(nt.ConfigError, match=r"^model_type: allowed with a folder$"):
        nt.Generator(model, model_type=name)


def test_an_attribute_type_of_a_transformers_model_is_no_model_type() -> None:
    """Only config.json of a folder names a type of nntile_py."""
    for name in ("encoder", "evil.py:MyModel"):
        sizes = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, type=name)
        model = transformers.GPT2LMHeadModel(sizes)
        with pytest.raises(nt.ConfigError, match=f"type is '{name}' in the model's config, and GPT2 does not know"):
            nt.models.from_hf(model)


def test_a_captured_module_is_refused_before_its_code_would_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`generate`, `serve` and `encode` cannot use it, so they do not ask for trust in its file."""
    bodies = (
        "def Mix(vocab):\n    pass\n",
        "class Mix(nn.Module):\n    pass\n",
        "class Top(nn.Module, Generic[T]):\n    pass\nclass Base(Top[int]):\n    pass\nclass Mix(Base):\n    pass\n",
        "class Mix(torch.nn.Sequential):\n    pass\n",
    )
    for number, body in enumerate(bodies):
        out = tmp_path / f"run{number}"
        out.mkdir()
        (tmp_path / "module.py").write_text(body)
        (out / "config.json").write_text(json.dumps({"type": f"{tmp_path}/module.py:Mix", "vocab": 9}))
        (out / "model.safetensors").touch()
        (out / "tokenizer.json").touch()
        (tmp_path / "t.txt").write_text("a")
        for command in (("generate", "--prompt", "a"), ("encode", "--input", tmp_path / "t.txt", "--out", "v.npy")):
            assert nntile(command[0], out, *command[1:]) == 2
            assert "module.py:Mix is a captured PyTorch module, which generates no text" in capsys.readouterr().err
        with pytest.raises(nt.ConfigError, match=r"allowed: --set model\.type="):
            open_model(out)  # as `nntile eval`, which can measure it


@pytest.mark.parametrize(
    "body",
    [
        "class Mix(nt.Model[Sizes]):\n    pass\n",
        "class Module(nt.Model):\n    pass\nclass Mix(Module):\n    pass\n",
        "class Mix(Base):\n    pass\nclass Base(Mix):\n    pass\n",
        "class Other(nn.Module):\n    pass\nMix = 3\n",
        "class Mix(\n",
    ],
)
def test_other_code_is_no_captured_module(body: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(body)
    (tmp_path / "config.json").write_text(json.dumps({"type": f"{tmp_path}/module.py:Mix"}))
    with pytest.raises(nt.ConfigError, match=r"allowed: --set model\.type="):
        registry.class_in(tmp_path, torch_modules=False)


@pytest.mark.parametrize("outputs", ["{}", '{"scores": logits}', '{"logits": ids}'])
def test_no_sample_without_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str], outputs: str) -> None:
    path = write(tmp_path, OWN.replace('{"logits": logits}', outputs))
    assert nntile("train", path, "--set", "train.steps=1", "--out", tmp_path / "out") == 0
    told = capsys.readouterr()
    lines = [line for line in told.out.splitlines() + told.err.splitlines() if "no sample" in line]
    assert len(lines) == 1 and "logits [batch, seq, vocab]; the outputs of MyModel are" in lines[0]
    assert (tmp_path / "out" / "model.safetensors").is_file() and "Traceback" not in told.err


def test_a_file_is_read_anew_once_it_is_changed(tmp_path: Path) -> None:
    path = write(tmp_path)
    first = load(path)
    assert step_spec(first).model.config is first.model  # one class, however often it is asked for
    late = "from __future__ import annotations\n" + OWN  # its annotations are looked up by the module's name
    write(tmp_path, late.replace("ffn: Count = 20", "ffn: Count = 30  # more"))
    assert load(path).model.ffn == 30


def test_a_file_may_import_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "widths_of_mine.py").write_text("FFN = 40")
    path = write(tmp_path, "from widths_of_mine import FFN\n" + OWN.replace("ffn: Count = 20", "ffn: Count = FFN"))
    assert load(path).model.ffn == 40


# -- from Python


def my_classes(folder: Path) -> Any:
    return type(build_model(load(write(folder))))


def test_trainer(runtime: nt.Runtime, tmp_path: Path) -> None:
    cls = my_classes(tmp_path)
    assert not issubclass(cls, nt.models.GPT2) and issubclass(cls, nt.Model)
    model = cls(cls.Config(embed=12, vocab=VOCAB), seed=1)
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, 10))
    loss, grads = of_torch(model.weights, ids)
    for tiles in ({}, TILES):
        trainer = nt.Trainer(model, 3, 10, tiles, optimizer=nt.SGD(lr=0.0))
        assert abs(trainer.step({"input_ids": ids, "labels": ids}) / loss - 1) < 1e-6
        got = trainer.gradients()
        assert got.keys() == grads.keys()
        assert max(error(got[name], grads[name]) for name in grads) < 1e-5
        trainer.close()


class Plain:
    """Not of nt.Model: what the engine needs, and no more."""

    def __init__(self, weights: Any) -> None:
        self.weights = weights

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        ids = g.input("ids", {"batch": batch.size, "seq": batch.seq}, below=7)
        labels = g.input("labels", {"batch": batch.size, "seq": batch.seq}, below=7, ignored=-100, scale="loss_scale")
        table = g.param("weight", {"vocab": 7, "embed": 6}, nt.Normal(1.0))
        logits = linear(g, embedding(g, ids, table), table, ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels), {"scores": logits})


def test_a_class_that_is_no_nt_model(runtime: nt.Runtime) -> None:
    rng = np.random.default_rng(0)
    start = rng.standard_normal((7, 6), np.float32)
    inputs = {"ids": rng.integers(0, 7, (2, 5)), "labels": rng.integers(0, 7, (2, 5))}
    model = Plain({"weight": start})
    trainer = nt.Trainer(model, 2, 5, {"embed": 4, "vocab": 3, "seq": 2}, optimizer=nt.SGD(lr=0.5))
    p = torch.tensor(start, requires_grad=True)
    loss = F.cross_entropy((p[inputs["ids"]] @ p.T).reshape(10, 7), torch.tensor(inputs["labels"]).reshape(10))
    loss.backward()
    assert trainer.evaluate(inputs, return_outputs=True)[1]["scores"].shape == (2, 5, 7)
    with pytest.raises(ValueError, match="return_logits: got True, and the outputs are scores; allowed: return_"):
        trainer.evaluate(inputs, return_logits=True)
    assert abs(trainer.step(inputs) / loss.item() - 1) < 1e-6
    trainer.close()
    assert p.grad is not None and error(model.weights["weight"], start - 0.5 * p.grad.numpy()) < 1e-6
    with pytest.raises(nt.ConfigError, match=r"attention: .*Plain is no nt\.Model"):
        nt.Trainer(model, 2, 5, attention="merge")
    with pytest.raises(nt.ConfigError, match=r"weight weight has shape \(6, 7\), expected \(7, 6\)"):
        nt.Trainer(Plain({"weight": start.T}), 2, 5)
    with pytest.raises(nt.ConfigError, match="weight weight is missing"):
        nt.Trainer(Plain({}), 2, 5)
    with pytest.raises(nt.ConfigError, match=r"Plain\.weights is no dict"):
        nt.Trainer(Plain(None), 2, 5)
    with pytest.raises(nt.ConfigError, match="model: got object; allowed: a model of"):
        nt.Trainer(object(), 2, 5)  # type: ignore[arg-type]


# -- parameters out of several weights


class MixConfig(nt.ModelConfig):
    joined: bool


class Mix(nt.Model):
    """(a x)(b x) + c, scored by rows: a and b are halves of one parameter or two; c is a third of a bias."""

    Config = MixConfig

    def trace(self, g: nt.Graph, batch: nt.Batch) -> nt.Traced:
        tokens, embed = {"batch": batch.size, "seq": batch.seq}, {"embed": 10}
        ids = g.input("ids", tokens, below=13)
        labels = g.input("labels", tokens, below=13, ignored=-100, scale="loss_scale")
        table = g.param("table", {"vocab": 13} | embed, nt.Normal(1.0))
        x, out, init = embedding(g, ids, table), ["batch", "seq", "ffn"], nt.Normal(0.5)
        names = ("a.weight", "b.weight")
        if self.config.joined:
            ab = g.param("ab", {"ffn": 8, "two": 2} | embed, init, nt.Joined("two", names))
            both = contract(g, x, ab, ["batch", "two", "seq", "ffn"])
            parts = [select(g, both, "two", k) for k in range(2)]
        else:
            parts = [linear(g, x, g.param(name, {"ffn": 8} | embed, init), out) for name in names]
        heads = [g.param(f"head{k}", {"vocab": 13, "ffn": 8}, init, nt.Part("head", k, 2, "ffn")) for k in range(2)]
        product = multiply(g, *parts)
        logits = linear(g, multiply(g, product, product), heads[0], ["batch", "seq", "vocab"])
        loss = cross_entropy(g, logits, labels)
        logits = linear(g, product, heads[1], ["batch", "seq", "vocab"])
        return nt.Traced(cross_entropy(g, logits, labels, loss=loss), {"logits": logits})


@pytest.mark.parametrize("tiles", [{}, {"batch": 1, "seq": 2, "embed": 4, "ffn": 3, "vocab": 5}])
def test_joined_weights(runtime: nt.Runtime, tiles: dict[str, int]) -> None:
    """A parameter joined from weights is as good as those; Part takes its columns."""
    rng = np.random.default_rng(0)
    inputs = {"ids": rng.integers(0, 13, (2, 5)), "labels": rng.integers(0, 13, (2, 5))}
    apart, joined = (Mix(MixConfig(joined=how), seed=3) for how in (False, True))
    assert joined.weight_shapes() == apart.weight_shapes()
    assert joined.weight_shapes()["head"] == (13, 16) and joined.weight_shapes()["b.weight"] == (8, 10)
    joined.weights = start = apart.weights
    made = []
    for model in (apart, joined):
        trainer = nt.Trainer(model, 2, 5, tiles, optimizer=nt.AdamW(lr=0.01))
        assert all(np.array_equal(value, start[name]) for name, value in trainer.state_dict().items())
        loss = trainer.step(inputs)
        made.append((loss, trainer.gradients(), trainer.state_dict()))
        trainer.close()
    p = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
    x = p["table"][inputs["ids"]]
    product = (x @ p["a.weight"].T) * (x @ p["b.weight"].T)
    logits = torch.stack([product**2 @ p["head"][:, :8].T, product @ p["head"][:, 8:].T])
    targets = torch.tensor(np.stack([inputs["labels"]] * 2)).reshape(20)
    want = 2 * F.cross_entropy(logits.reshape(20, 13), targets)
    want.backward()
    for loss, grads, weights in made:
        assert abs(loss / want.item() - 1) < 1e-6
        assert grads.keys() == weights.keys() == start.keys()
        assert max(error(grads[name], p[name].grad) for name in p) < 1e-5
        assert max(error(weights[name], made[0][2][name]) for name in p) < 1e-6
        assert all(not np.array_equal(weights[name], start[name]) for name in p)


# -- what goes wrong

PLAIN_TRACE = "return nt.Traced(cross_entropy(g, logits, labels)"
# What is put in the place of what, and what the one message must say, besides the place.
WRONG_FILES = {
    "raises": ("class MyConfig", "1 / 0\nclass MyConfig", "raises ZeroDivisionError in line 7: division by zero"),
    "does not parse": ("class MyConfig", "class class", "the file raises SyntaxError"),
    "exits": ("class MyConfig", "raise SystemExit(3)\nclass MyConfig", "the file raises SystemExit in line 7: 3"),
    "without the class": ("class MyModel", "class Mine", "no such class in the file; .*in this file: Mine"),
    "no model": ("(nt.Model)", "", "no subclass of nt.Model; allowed: a subclass of nt.Model with a Config"),
    "without Config": ("Config = MyConfig", "", "its Config is missing, or is no subclass of nt.ModelConfig"),
    "another Config": ("Config = MyConfig", "Config = dict", "its Config is missing, or is no subclass"),
    "raises in trace": ("c, tokens =", "[][1]; c, tokens =", r"MyModel \(.*my_file\.py\): line 18: IndexError"),
    "no trace": ("def trace", "def tarce", "MyModel has no trace"),
    "returns the loss": (PLAIN_TRACE, "return (cross_entropy(g, logits, labels)", r"returned tuple; allowed: nt\."),
    "returns no dict": (', {"logits": logits})', ", logits)", r"returned Traced; allowed: nt\.Traced\("),
    "an axis twice": ('["batch", "seq", "embed"]', '["batch", "seq", "embed", "seq"]', "is named twice in"),
    "an unknown axis": ('["batch", "seq", "embed"]', '["batch", "seq", "width"]', "cannot have .*seq, width"),
    "an axis left out": ('["batch", "seq", "embed"]', '["batch", "embed"]', "cannot have the axes batch, embed"),
    "two sizes": ('{"embed": c.embed, "ffn": c.ffn}', '{"embed": c.embed, "ffn": 7}', "axis ffn has 20 .* and 7 in"),
    "a name twice": ('g.param("down.weight"', 'g.param("table"', "parameter table: declared twice"),
    "an input twice": ('g.input("labels"', 'g.input("input_ids"', "input input_ids: declared twice"),
    "no part": ("nt.ZEROS)", 'nt.ZEROS, nt.Part("b", 3, 3, "ffn"))', r"parameter up\.bias: Part\(.*no part"),
    "a part of no axis": ("nt.ZEROS)", 'nt.ZEROS, nt.Part("b", 0, 3, "seq"))', r"up\.bias: Part\(.*axes, ffn"),
    "unlike parts": ("nt.ZEROS)", 'nt.ZEROS, nt.Part("table", 0, 3, "ffn"))', r"shape \(300, 12\) .*\(60,\) here"),
    "a weight twice": ('g.param("down.weight", ', 'g.param("d", {"ffn": 1}, nt.ONES, nt.Part("up.bias", 0, 1, "ffn"))\n'
                       '        g.param("down.weight", ', r"weight up\.bias has shape \(20,\)"),
    "a weight again": ("nt.ZEROS)", 'nt.ZEROS)\n        g.param("b", {"ffn": c.ffn}, nt.ZEROS, "up.bias")',
                       r"parameter b: up\.bias belongs to another parameter; use one parameter for both"),
    "__init__ without seed": ("    objective", "    def __init__(self, config): pass\n    objective",
                              r"its __init__ cannot be called .*; allowed: \(self, config, weights=None, \*, seed=0"),
    "joined": ("nt.ZEROS)", 'nt.ZEROS, nt.Joined("ffn", ("a", "b")))', r"Joined\(.*does not fill an axis of ffn"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    old, new, message = WRONG_FILES[name]
    assert old in OWN
    path = write(tmp_path, OWN.replace(old, new))
    assert nntile("plan", path) == 2
    told = capsys.readouterr()
    assert re.search(message, told.err), told.err
    assert told.err.startswith("error: ") and told.err.count("error: ") == 1 and "Traceback" not in told.err
    assert "my_file.py" in told.err and "MyModel" in told.err
    assert not told.out


# What follows the last field of MyConfig, and what the one message must say.
WRONG_CONFIGS = {
    "a validator's KeyError": ("def model_post_init(self, _):\n        {}['x']", r"raises KeyError in line \d+: 'x'"),
    "a validator's division": ("def model_post_init(self, _):\n        1 / 0", "raises ZeroDivisionError in line"),
    "a validator's ValueError": ("@__import__('pydantic').model_validator(mode='after')\n    def even(self):\n"
                                 "        raise ValueError('even sizes')", "model: got .*; allowed: even sizes"),
    "check_size of an unknown field": ("def model_post_init(self, _):\n        self.check_size('embed', 'heds')",
                                       "raises AttributeError in line .*heds"),
    "check_size of none": ("def model_post_init(self, _):\n        self.check_size('embed', 'vocab')",
                           "model.vocab: got null; allowed: an integer of at least 1"),
    "a field that no YAML can hold": ("thing: object = object()", "model.thing: got .*; allowed: what config.yaml can"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_wrong_own_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    text, message = WRONG_CONFIGS[name]
    last = "    vocab: Count | None = None\n"
    assert nntile("plan", write(tmp_path, OWN.replace(last, f"{last}\n    {text}\n"))) == 2
    told = capsys.readouterr().err
    assert re.search(message, told), told
    assert told.startswith("error: ") and told.count("error: ") == 1 and "Traceback" not in told


def test_fields_of_other_types(tmp_path: Path) -> None:
    """config.yaml and config.json hold them in the way that JSON has."""
    fields = "where: Path = Path('x')\n    odd: set[int] = {1}\n    pair: tuple[int, int] = (1, 2)\n    z: complex = 1j"
    last = "    vocab: Count | None = None\n"
    config = load(write(tmp_path, "from pathlib import Path\n" + OWN.replace(last, f"{last}    {fields}\n")))
    told = yaml.safe_load(config.to_yaml())["model"]
    assert (told["where"], told["odd"], told["pair"]) == ("x", [1], [1, 2]) and "j" in str(told["z"])
    assert json.loads(json.dumps(build_model(config).hf_config()))["where"] == "x"


def test_a_link_that_leads_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, loop = write(tmp_path), tmp_path / "loop.py"
    loop.symlink_to(loop)
    for change in (f"model.type={loop}:MyModel", f"model.from={loop}", f"data.source={loop}"):
        assert nntile("plan", path, "--set", change) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and "loop.py" in told and "Traceback" not in told, told


# What `model` is set to instead, and what the one message must say.
WRONG_SECTIONS = [
    ("model.type=brt", "model.type: got 'brt'; did you mean bert? allowed: .*gpt2.*my_file.py:MyModel"),
    ("model.type=[gpt2]", r"model.type: got \['gpt2'\]; .*allowed: "),
    ("model.type=3", "model.type: got 3; allowed: "),
    ("model.type=my_file.py", "model.type: got 'my_file.py'; "),
    ("model.type=nowhere.py:MyModel", "nowhere.py:MyModel: no such file; allowed: the path of a Python file"),
    ("model.embd=3", "model.embd: unknown key; did you mean embed? allowed: type, from, lora, lora.targets"),
    ("model.embed=few", "model.embed: got 'few'; allowed: an integer of at least 1"),
    ("model.embed=null", "model.embed: not given, but required; allowed: an integer of at least 1"),
    ("model.from=.", "yaml: model.from: [^:]*config.json is missing; allowed: a folder saved by"),
    ("model.from=nowhere", "yaml: model.from: no such folder: [^:]*nowhere; allowed: a folder that save_pretrained"),
    ("model={type: llama, layers: 1, embed: 8, heads: 2, ffn: 8, hed: 1}", "model.hed: .*did you mean head?"),
    ("model={type: bert, layers: 1, embed: 8, heads: 3}", "model.heads: got 3; allowed: a divisor of model.embed = 8"),
    ("model={type: encoder, embed: 8}", "model.heads: not given"),
    ("model=5", "model: got 5; allowed: a section with type"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WRONG_SECTIONS)
def test_wrong_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str, message: str
) -> None:
    path = write(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert nntile("plan", path, "--set", change) == 2
    told = capsys.readouterr().err
    assert re.search(message.replace("?", r"\?"), told), told
    assert told.startswith("error: ") and told.count("error: ") == 1 and "Traceback" not in told


def test_debugging_shows_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNTILE_DEBUG", "1")
    for name in ("raises", "raises in trace"):
        old, new, _ = WRONG_FILES[name]
        monkeypatch.setattr(sys, "argv", ["nntile", "plan", str(write(tmp_path, OWN.replace(old, new)))])
        with pytest.raises(nt.ConfigError) as told:
            cli.main()
        causes, cause = [], told.value.__cause__
        while cause:
            causes, cause = [*causes, type(cause)], cause.__cause__
        assert {ZeroDivisionError, IndexError} & set(causes)


def test_what_a_star_exports() -> None:
    """Functions and classes for a model's trace, no modules and no operators."""
    got: dict[str, Any] = {}
    exec("from nntile_py.tasks import *", got)
    assert {"linear", "attention", "Mask", "layer_norm", "rotary_table", "cross_entropy"} <= got.keys()
    assert not {"norm", "op", "optimizer", "elementwise", "Op", "AdamW", "import_module", "Any"} & got.keys()
    assert all(callable(value) for name, value in got.items() if not name.startswith("__"))


def test_what_is_exported() -> None:
    """Each name of nt.__all__ can be imported; dir, help and type checkers know the same names."""
    assert {"Model", "ModelConfig", "Traced", "Batch", "Normal", "ZEROS", "Part", "Joined", "Mask"} <= set(nt.__all__)
    for name in nt.__all__:
        assert getattr(nt, name) is not None
    assert nt.Joined.__module__ == "nntile_py.graph.params" and nt.tasks.__name__ == "nntile_py.tasks"
    with pytest.raises(AttributeError, match="no attribute 'Modell'"):
        nt.Modell  # noqa: B018
    assert dir(nt) == sorted([*nt.__all__, "__version__"]) and {"GPT2", "GPT2Config", "find"} <= set(dir(nt.models))
    assert str(inspect.signature(nt.SGD)).startswith("(*, lr="), "help() shows no rules of values"
    (block,) = (node for node in ast.parse(Path(nt.__file__).read_text()).body if isinstance(node, ast.If))
    typed = {alias.name: line.module for line in block.body if isinstance(line, ast.ImportFrom) for alias in line.names}
    assert typed == nt.HOMES | dict.fromkeys(("models", "tasks", "testing", "tiles"), "nntile_py")


def test_representations_say_what_an_object_is(runtime: nt.Runtime) -> None:
    model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
    with contextlib.closing(nt.Trainer(model, 2, 8, {"batch": 1})) as trainer:
        ids = np.zeros((2, 8), int)
        handle = trainer.submit({"input_ids": ids, "labels": ids})
        handle.result()
        assert repr(handle).endswith("of step 1: done>")
        assert repr(trainer) == "<Trainer of GPT2: batch=2, seq=8, precision='fp32', tiles {batch: 1}, 1 step>"
    assert repr(model) == "GPT2(vocab=20, layers=1, embed=8, heads=2, positions=8)"
    assert repr(model.changed(ffn=32, classes=5)) == repr(model), "a causal model has no classes"
    classifier = repr(model.changed(head="classification", classes=2, labels=["a", "b"]))
    shown = "GPT2(vocab=20, layers=1, embed=8, heads=2, labels=['a', 'b'], head='classification', positions=8)"
    assert classifier == shown
    assert repr(runtime).startswith("<Runtime cpus=") and repr(runtime).endswith(": running>")
    assert repr(nt.Graph()) == "<Graph in fp32: 0 operators, 0 parameters>"
    assert repr(nt.Encoder(model, "logits")) == "<Encoder of GPT2: output='logits', precision='fp32'>"


def test_a_runtime_starts_and_stops_without_a_block() -> None:
    code = (
        "import nntile_py as nt; runtime = nt.Runtime(cpus=1).start(); assert nt.Runtime.current is runtime;"
        "nt.array([1.0]); runtime.stop(); runtime.stop(); assert nt.Runtime.current is None; print(runtime)"
    )
    done = forks.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("not running>\n")


def test_a_loss_whose_labels_have_no_scale(runtime: nt.Runtime) -> None:
    """A sum over labels is to be divided by how many count: an input must say so."""

    class NoScale(nt.models.GPT2):
        def trace(self, g: Any, batch: Any) -> Any:
            real = g.input

            def unscaled(name: str, *args: Any, **options: Any) -> Any:
                options.pop("scale", None)
                return real(name, *args, **options)

            g.input = unscaled
            return super().trace(g, batch)

    model = NoScale(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
    with pytest.raises(nt.ConfigError, match=r"divided by loss_scale, .* declare .* scale='loss_scale'"):
        nt.Trainer(model, 2, 8)


def test_a_norm_whose_weight_has_another_axis() -> None:
    from nntile_py.tasks.rms_norm import rms_norm

    g = nt.Graph()
    x = g.temp("x", ["batch", "embed"], [2, 4], "fp32")
    gamma = g.temp("gamma", ["ffn"], [4], "fp32")
    with pytest.raises(ValueError, match="a weight must have the last axis of x alone"):
        rms_norm(g, x, gamma, 1e-6)


def test_messages_name_the_users_own_class(tmp_path: Path) -> None:
    """A folder of a model of one's own, and one of a model that it is not, are told how they are read."""
    cls = my_classes(tmp_path)
    model = cls(cls.Config(embed=12, vocab=VOCAB))
    (tmp_path / "config.json").write_text(json.dumps(model.hf_config()))
    for read in (nt.models.from_hf, nt.models.GPT2.from_hf):
        with pytest.raises(nt.ConfigError, match=r"YourModel\.from_hf\(FOLDER\) or model\.type: my_file"):
            read(tmp_path)
    with pytest.raises(nt.ConfigError, match=rf"{cls.__name__}\.from_hf\(FOLDER\) reads what nntile train"):
        model.to_hf()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["T5Model"]}))
    with pytest.raises(nt.ConfigError, match=rf"{cls.__name__}\.from_hf reads what nntile train saved"):
        cls.from_hf(tmp_path)
