"""PyTorch modules in a YAML: classes of transformers by their folder, and functions of a user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.testing import CliRunner

import nntile_py as nt
from nntile_py.cli import app
from nntile_py.config.run_config import load
from nntile_py.models.registry import find

ROOT = Path(__file__).parents[1]
VOCAB = 300
RUN = """
model: {{type: {type}, from: {folder}}}
data: {{source: {text}}}
train: {{batch: 4, seq: 16, steps: 6, eval_every: 3, log_every: 3}}
tiles: {{batch: 2, ffn: 40, vocab: 100}}
checkpoint: {{every: 3}}
runtime: {{cpus: 2}}
sample: {{tokens: 4}}
"""
OWN = '''
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, vocab, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.mix = nn.GRU(width, width, batch_first=True) if width == 7 else nn.Linear(width, width)

    def forward(self, input_ids):
        return self.head(torch.tanh(self.mix(self.embed(input_ids))))


def make_model(vocab: int, width: int = 32, *, scale: float = 1.0):
    """A small model."""
    net = Net(vocab, width)
    net.head.weight.data *= scale
    return net


def no_module(vocab: int):
    return vocab


def on_meta(vocab: int):
    return Net(vocab, 8).to("meta")


def reserved(lora: int):
    return None


def broken(vocab: int):
    raise OSError("no such disk")


class NotTorch:
    pass
'''


def run(*args: Any) -> str:
    """Return what a command prints. Raises AssertionError if it fails."""
    result = CliRunner().invoke(app, [*map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*args: Any) -> str:
    """Return the message of a command that fails."""
    result = CliRunner().invoke(app, [*map(str, args)])
    assert result.exit_code != 0
    return " ".join((str(result.exception) + result.output).split())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders opt and electra, a text, and a Python file with modules."""
    root = tmp_path_factory.mktemp("torch_yaml")
    (root / "text.txt").write_text((ROOT / "setup.py").read_text() * 3)
    (root / "own.py").write_text(OWN)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 48}
    torch.manual_seed(0)
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(**sizes, ffn_dim=96, word_embed_proj_dim=48, max_position_embeddings=32, dropout=0)
    )
    electra = transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(**sizes, intermediate_size=96, embedding_size=24, max_position_embeddings=32)
    )
    for name, module, special in (
        ("opt", opt, ["<|endoftext|>"]), ("electra", electra, ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]),
    ):  # fmt: skip
        module.save_pretrained(root / name)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        how: dict[str, Any] = {"vocab_size": VOCAB, "special_tokens": special, "initial_alphabet": letters}
        tokenizer.train([str(root / "text.txt")], trainers.BpeTrainer(show_progress=False, **how))
        tokenizer.save(str(root / name / "tokenizer.json"))
    return root


def config(folders: Path, name: str) -> Path:
    """Return the YAML of a run that starts from one of the folders."""
    path = folders / f"{name}.yaml"
    path.write_text(RUN.format(type="torch", folder=folders / name, text=folders / "text.txt"))
    return path


def own(folders: Path, function: str, **keys: Any) -> Path:
    path = folders / f"own-{function}.yaml"
    model = json.dumps({"type": f"{folders / 'own.py'}:{function}", **keys})
    text = RUN.format(type="torch", folder="none", text=folders / "text.txt").splitlines()
    path.write_text("\n".join([f"model: {model}", "tokenizer: {vocab_size: 300}", *text[2:]]))
    return path


def test_a_class_of_transformers_is_trained_by_its_folder(folders: Path) -> None:
    out = folders / "run-opt"
    text = run("train", config(folders, "opt"), "--out", out)
    assert "no sample" not in text and "sample:" in text
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0]
    trained = transformers.OPTForCausalLM.from_pretrained(out).eval()  # transformers reads the run's folder
    before = transformers.OPTForCausalLM.from_pretrained(folders / "opt").eval()
    ids = torch.arange(64).reshape(4, 16) + 5
    with torch.no_grad():
        want = trained(input_ids=ids, labels=ids)
        first = before(input_ids=ids, labels=ids).loss
    assert want.loss != first
    model = find("torch").from_hf(out)
    with nt.Runtime(cpus=1):
        trainer = nt.Trainer(model, 4, 16, {"batch": 2, "embed": 20})
        loss, logits = trainer.evaluate({"input_ids": ids.numpy(), "labels": ids.numpy()}, return_logits=True)
        assert loss == pytest.approx(float(want.loss), rel=1e-5)
        assert np.abs(logits - want.logits.numpy()).max() < 1e-4
    report = run("eval", out, "--data", folders / "text.txt")
    assert "perplexity" in report
    assert "no cache of keys and values" in refused("generate", out, "--prompt", "a")


def test_a_resumed_run_has_the_same_bits(folders: Path) -> None:
    whole, part = folders / "whole", folders / "part"
    path = config(folders, "electra")  # with dropout
    run("train", path, "--out", whole)
    run("train", path, "--out", part, "--set", "train.steps=3", "--set", "optimizer.schedule=constant")
    run("train", path, "--out", whole, "--overwrite", "--set", "optimizer.schedule=constant")
    (part / "config.yaml").write_text((part / "config.yaml").read_text().replace("steps: 3", "steps: 6"))
    run("train", "--resume", part)
    assert (part / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def test_masked_models_are_trained_and_not_packed(folders: Path) -> None:
    path = config(folders, "electra")
    assert "does not pack sequences" in refused("plan", path, "--set", "train.pack=true")
    text = run("train", path, "--out", folders / "run-electra")
    assert "guesses at its masked tokens" in text


def test_adapters_are_found_by_name(folders: Path) -> None:
    """The run trains adapters alone; the merged model computes the same as the model with adapters."""
    out, merged = folders / "lora", folders / "lora-merged"
    lora = "model.lora={targets: [q_proj, v_proj, fc1], rank: 4}"
    run("train", config(folders, "opt"), "--out", out, "--set", lora, "--set", "optimizer.lr=0.01")
    run("merge", out, merged)
    ids = np.arange(64).reshape(4, 16) + 5
    with nt.Runtime(cpus=1):
        model = find("torch").from_hf(out, lora={"targets": ["q_proj", "v_proj", "fc1"], "rank": 4})
        adapters = {name for name in model.weights if "lora_" in name}
        assert len(adapters) == 2 * 2 * 3
        assert all(np.abs(model.weights[name]).max() > 0 for name in adapters)
        loss = nt.Trainer(model, 4, 16).evaluate({"input_ids": ids, "labels": ids})
    module = transformers.OPTForCausalLM.from_pretrained(merged).eval()
    start = transformers.OPTForCausalLM.from_pretrained(folders / "opt").eval()
    given = torch.from_numpy(ids)
    with torch.no_grad():
        assert float(module(input_ids=given, labels=given).loss) == pytest.approx(loss, rel=1e-5)
    moved = [name for name, value in module.named_parameters() if (value != start.get_parameter(name)).any()]
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj", "fc1"}
    assert all(name.endswith("weight") for name in moved)
    wrong = refused("plan", config(folders, "opt"), "--set", "model.lora={targets: [nothing]}")
    assert "model.lora.targets: 'nothing' names no module" in wrong


def test_a_function_makes_the_module(folders: Path) -> None:
    path, out = own(folders, "make_model", width=24), folders / "run-own"
    text = run("train", path, "--out", out)
    assert "sample:" in text and "no sample" not in text
    assert json.loads((out / "config.json").read_text())["width"] == 24
    kind = f"{folders / 'own.py'}:make_model"
    model = find(kind).from_hf(out)
    assert model.config.width == 24 and model.config.scale == 1.0 and model.config.vocab == VOCAB
    module, ids = model.to_hf(), torch.arange(64).reshape(4, 16)
    with torch.no_grad():
        logits = module(ids)
        want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    with nt.Runtime(cpus=1):
        got = nt.Trainer(model, 4, 16).evaluate({"input_ids": ids.numpy(), "labels": ids.numpy()})
    assert got == pytest.approx(float(want), rel=1e-5)
    assert "perplexity" in run("eval", out, "--data", folders / "text.txt", "--set", f"model.type={kind}")
    loaded = load(path, ["model.scale=0.5"]).model
    assert loaded.scale == 0.5 and loaded.width == 24


def test_equal_seeds_are_equal_modules(folders: Path) -> None:
    cls = find(f"{folders / 'own.py'}:make_model")
    made = [cls(cls.Config(vocab=VOCAB), seed=seed).weights for seed in (1, 1, 2)]
    assert all((made[0][name] == made[1][name]).all() for name in made[0])
    assert any((made[0][name] != made[2][name]).any() for name in made[0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_module", "returns 300; allowed: a torch.nn.Module"),
        ("reserved", "the parameter lora of the function; allowed: names other than type, from, lora and objective"),
        ("broken", "no such disk"),
        ("on_meta", "returns a module on meta; allowed: one with weights"),
        (
            "NotTorch",
            "no subclass of nt.Model; allowed: a subclass of nt.Model with a Config of nt.ModelConfig, or a fun",
        ),
        ("missing", "no such class in the file"),
    ],
)
def test_other_functions_are_refused(folders: Path, function: str, message: str) -> None:
    assert message in refused("plan", own(folders, function))


def test_unknown_keys_and_classes_are_named(folders: Path) -> None:
    assert "model.widht: unknown key" in refused("plan", own(folders, "make_model", widht=3))
    plan = refused("plan", config(folders, "opt"), "--set", "model.from=null", "--set", "tokenizer.vocab_size=300")
    assert "model.from: missing; allowed with model.type: torch: a folder that save_pretrained wrote" in plan
    bad = folders / "bad"
    bad.mkdir()
    for name in ("tokenizer.json", "model.safetensors"):
        (bad / name).write_bytes((folders / "opt" / name).read_bytes())
    raw = json.loads((folders / "opt" / "config.json").read_text())
    arguments = ("train", config(folders, "opt"), "--set", f"model.from={bad}", "--out", folders / "no")
    for change, message in (
        ({"architectures": ["NoSuchForCausalLM"]}, f"unknown in transformers {transformers.__version__}"),
        ({"architectures": None}, "allowed: a class of transformers"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "names Python code, which would run"),
        ({"ffn_dim": 95}, "has shape (96,), expected (95,)"),
        ({"num_hidden_layers": 3}, "model.decoder.layers.2"),
        ({"num_attention_heads": 0}, "does not take this config (ZeroDivisionError"),
        ({"activation_function": "nope"}, "does not take this config (KeyError: 'nope')"),
    ):
        (bad / "config.json").write_text(json.dumps(raw | change))
        assert message in refused(*arguments), change
    raw["architectures"] = ["OPTModel"]
    (bad / "config.json").write_text(json.dumps(raw))
    assert "model.objective: missing; allowed: causal, masked, or" in refused(*arguments)
    told = refused(*arguments, "--set", "model.objective=causal")
    assert "OPTModel returns last_hidden_state" in told
    assert "allowed: at most model.positions = 32" in refused("plan", config(folders, "opt"), "--set", "train.seq=33")


def test_a_plan_draws_no_weights(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *args, **how: pytest.fail("weights are drawn"))
    monkeypatch.setattr(
        transformers.OPTForCausalLM, "from_pretrained", lambda *args, **how: pytest.fail("weights are read")
    )
    assert "parameters" in run("plan", config(folders, "opt"))


CONVOLUTION = """
import torch
from torch import nn


class Causal(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(vocab, 24), nn.Conv1d(24, 24, 3, padding=2), nn.Linear(24, vocab)

    def forward(self, input_ids):
        x = self.mix(self.embed(input_ids).transpose(1, 2))[:, :, :-2]
        return self.head(torch.relu(x).transpose(1, 2))
"""


def test_a_plan_names_calls_of_pytorch_and_axes(folders: Path) -> None:
    (folders / "own.py").write_text(OWN + CONVOLUTION)
    path = own(folders, "Causal")
    made = json.loads(run("plan", path, "--json"))
    rows = {row["operator"]: row for row in made["operators"] if row["phase"] == "forward"}
    assert rows["AtenCall conv1d"]["flop"] == 2 * 4 * 18 * 24 * 24 * 3  # 16 positions and 2 of the padding
    assert 0.02 < made["torch_calls"]["conv1d"] < 0.9 and "slice" in made["torch_calls"]
    assert made["axes"]["vocab"] == {"size": VOCAB, "tile": 100, "tensor": "head.weight", "dim": 0}
    text = run("plan", path)
    assert "calls of PyTorch" in text and "vocab: 300 in tiles of 100, such as dimension 0 of head.weight" in text
    assert "calls of PyTorch" not in run("plan", config(folders, "opt"))


class Tied(torch.nn.Module):
    """A head with the weight of the embedding and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(20, 8), torch.nn.Linear(8, 20)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids)).square().mean()


def test_adapters_of_a_bias_alone_are_refused() -> None:
    with pytest.raises(nt.ConfigError, match=r"lora\.targets: 'head' names no module"):
        nt.from_torch(Tied(), {"ids": torch.randint(0, 20, (2, 6))}, lora={"targets": ["head"]})


def test_a_module_without_values_is_refused() -> None:
    with pytest.raises(nt.ConfigError, match=r"embed\.weight is on meta"):
        nt.from_torch(Tied().to("meta"), {"ids": torch.randint(0, 20, (2, 6))})
