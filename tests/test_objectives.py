"""`nntile train` of BERT, its family, Llama, and what it refuses; plan, graph, profile and sweep of their YAMLs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
import yaml

import nntile_py as nt
from nntile_py.analysis import draw
from nntile_py.analysis.plan import plan
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import load
from nntile_py.data import tokenization as data
from nntile_py.data.documents import Documents
from nntile_py.data.tokenizer import END_OF_TEXT, MASKED, ROBERTA, load_tokenizer, special_numbers
from nntile_py.errors import ConfigError
from nntile_py.inference.texts import with_limit
from nntile_py.models.registry import known
from nntile_py.training.datasets import build_dataset, check_objective

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
BERT = {"type": "bert", "layers": 1, "embed": 16, "heads": 2}
FAMILY = {
    "bert": "BertForMaskedLM", "distilbert": "DistilBertForMaskedLM", "albert": "AlbertForMaskedLM",
    "roberta": "RobertaForMaskedLM", "deberta": "DebertaForMaskedLM", "deberta-v2": "DebertaV2ForMaskedLM",
    "modernbert": "ModernBertForMaskedLM",
}  # fmt: skip
LLAMA = {"type": "llama", "layers": 1, "embed": 16, "heads": 4, "kv_heads": 2, "ffn": 24}
TREE: dict[str, Any] = {
    "model": BERT,
    "data": {"max_bytes": 200_000},
    "tokenizer": {"vocab_size": 300},
    "train": {"steps": 20, "batch": 8, "seq": 12, "eval_every": 10, "eval_batches": 8, "log_every": 10},
    "optimizer": {"lr": 0.02, "warmup_steps": 2, "clip_grad_norm": 1.0},
    "tiles": {"batch": 3, "embed": 7, "heads": 1, "ffn": 15, "vocab": 130},
    "runtime": {"cpus": 2},
    "sample": {"tokens": 12},
}


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TREE | changes))
    return path


def nntile(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path}
    return forks.run([sys.executable, "-m", "nntile_py.cli", *arguments], **how, check=False)


def trained(tmp_path: Path, model: dict[str, Any]) -> tuple[Path, str]:
    """The folder of a run that has learnt something, and what it printed."""
    write(tmp_path, model=model)
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["held_out_loss_before"] == pytest.approx(np.log(300), abs=0.15)
    assert lines[-1]["held_out_loss"] < lines[0]["held_out_loss_before"] - 0.3
    return folder, done.stdout


def of_transformers(folder: Path, name: str) -> float:
    """The held-out loss of the folder's model there."""
    transformers = pytest.importorskip("transformers")
    import torch

    model, found = getattr(transformers, name).from_pretrained(folder, output_loading_info=True)
    assert {key: list(value) for key, value in found.items() if value} == {}
    config = load(folder / "config.yaml")
    losses = []
    with torch.no_grad():
        for inputs in build_dataset(config, step_spec(config)).held_out():
            losses.append(model(**{key: torch.tensor(value) for key, value in inputs.items()}).loss.item())
    return float(np.mean(losses))


def last_loss(folder: Path) -> float:
    return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["held_out_loss"])


def of_auto_tokenizer(folder: Path, kinds: bool, framed: bool) -> Any:
    """What AutoTokenizer makes of the folder, when it has the tokens that the model was trained on."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    own = load_tokenizer(folder / "tokenizer.json")
    for texts in (["def of_tiles(): # \u03b1\n    return 'a'"], ["some rows", "of tiles"]):
        made, wanted = theirs(*texts), own.encode(*texts).ids
        assert made["input_ids"] == with_limit(own, 99, framed).encode(*texts).ids == wanted
        assert ("token_type_ids" in made) == kinds
    ids = own.encode(texts[0], add_special_tokens=False).ids
    assert theirs(texts[0]).input_ids == ([theirs.cls_token_id, *ids, theirs.sep_token_id] if framed else ids)
    assert theirs.decode(theirs(texts[0]).input_ids, skip_special_tokens=True) == texts[0]
    assert theirs.unk_token == theirs.bos_token == theirs.eos_token == END_OF_TEXT
    rows = theirs(["a", "some rows of tiles"], padding=True).input_ids
    assert len(rows[0]) == len(rows[1]) and rows[0][-1] == theirs.pad_token_id
    return theirs


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "theirs"), FAMILY.items())
def test_bert_learns_and_transformers_reads_it(tmp_path: Path, kind: str, theirs: str) -> None:
    folder, said = trained(tmp_path, BERT | {"type": kind})
    assert "guesses at its masked tokens in [[ ]]:\n[CLS]" in said and said.rstrip().endswith("[SEP]")
    assert of_transformers(folder, theirs) == pytest.approx(last_loss(folder), rel=1e-5)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    numbers = [tokenizer.token_to_id(token) for token in (END_OF_TEXT, *MASKED)]
    assert None not in numbers and special_numbers(tokenizer) == set(numbers)
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == tokenizer.token_to_id("[PAD]")
    auto = of_auto_tokenizer(folder, kind in ("bert", "albert"), framed=True)
    assert (auto.pad_token, auto.mask_token, auto.model_max_length) == ("[PAD]", "[MASK]", 12)


def test_llama_learns_and_transformers_reads_it(tmp_path: Path) -> None:
    folder, said = trained(tmp_path, LLAMA)
    assert "sample:\ndef " in said
    assert of_transformers(folder, "LlamaForCausalLM") == pytest.approx(last_loss(folder), rel=1e-5)
    assert of_auto_tokenizer(folder, kinds=False, framed=False).mask_token is None


def test_a_run_goes_on_without_the_tokenizer_that_it_began_with(tmp_path: Path) -> None:
    """Which had no template, as the one that the run has saved does."""
    data.train_tokenizer(["some text"], 270, MASKED).save(str(tmp_path / "bare.json"))
    sets = "tokenizer={path: bare.json}", "train.eval_every=100", "sample.tokens=0"
    for steps, *more in ((2,), (4, "--resume"), (6, "--resume")):
        done = nntile(tmp_path, "train", str(write(tmp_path)), *more, *(f"--set={s}" for s in sets),
                      f"--set=train.steps={steps}")  # fmt: skip
        assert done.returncode == 0, done.stderr
        (tmp_path / "bare.json").unlink(missing_ok=True)
    assert load_tokenizer(tmp_path / "runs/tiny/tokenizer.json").num_special_tokens_to_add(False) == 2


def test_sequences_of_a_masked_model(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["train.grad_accumulation=2", "train.mask_probability=0.5"])
    batches, again = build_dataset(config, step_spec(config)), build_dataset(config, step_spec(config))
    first, second = batches.train(1), batches.train(2)
    number = batches.tokenizer.token_to_id
    for batch, rows in ((first, 16), (batches.held_out()[0], 8)):
        assert {array.shape for array in batch.values()} == {(rows, 12)}
        ends = batch["input_ids"][:, [0, -1]]
        assert (ends == [number("[CLS]"), number("[SEP]")]).all()
        assert 0.3 < (batch["labels"] != -100).mean() < 0.55
    assert (first["labels"] != second["labels"]).any() and (first["labels"] == again.train(1)["labels"]).all()
    for one, other in zip(batches.held_out(), again.held_out(), strict=True):
        assert all((one[name] == other[name]).all() for name in one)
    assert (batches.held_out()[0]["labels"] != batches.held_out()[1]["labels"]).any()


def test_robertas_special_tokens(tmp_path: Path) -> None:
    """A tokenizer that calls them <s>, </s>, <pad>, <mask>."""
    section = load(write(tmp_path)).data
    texts = [part.text for part in Documents(section.source, section.extensions)]
    data.train_tokenizer(texts, 300, [*ROBERTA.values()]).save(str(tmp_path / "roberta.json"))
    config = load(write(tmp_path, tokenizer={"path": str(tmp_path / "roberta.json")}, model=BERT | {"type": "roberta"}))
    dataset = build_dataset(config, step_spec(config))
    batch = dataset.train(1)
    pad, cls, sep, mask = (dataset.tokenizer.token_to_id(ROBERTA[token]) for token in MASKED)
    assert (batch["input_ids"][:, [0, -1]] == [cls, sep]).all() and pad == config.model.padding_token
    assert (batch["input_ids"][batch["labels"] != -100] == mask).mean() > 0.5
    assert not np.isin(batch["labels"], [cls, sep, mask, pad]).any()


def test_a_folder_without_a_head(tmp_path: Path) -> None:
    """It says what to do, and that can be done."""
    model = nt.models.BERT(nt.models.BERTConfig(layers=1, embed=16, heads=2, vocab=300, positions=12, head="none"))
    model.to_hf().save_pretrained(tmp_path / "bare")
    data.train_tokenizer(["some text"], 270, MASKED).save(str(tmp_path / "bare/tokenizer.json"))
    path = write(tmp_path, model={"from": str(tmp_path / "bare")}, tokenizer={})
    with pytest.raises(ConfigError, match=r"BERT with head: none \(from .*bare\) has no loss; .* head: masked_lm"):
        check_objective(loaded := load(path), step_spec(loaded))
    config = load(path, ["model.head=masked_lm"])
    assert check_objective(config, step_spec(config)) == "masked"
    made = build_model(config).weights
    assert all((made[name] == value).all() for name, value in model.weights.items())
    assert made["cls.predictions.transform.dense.weight"].std() > 0.01


def test_models_that_text_does_not_train(tmp_path: Path) -> None:
    write(tmp_path, model={"type": "encoder", "embed": 16, "heads": 2})
    done = nntile(tmp_path, "train", "tiny.yaml")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and not (tmp_path / "runs").exists()
    texts = ", ".join(name for name, cls in known().items() if cls.objective)
    told = "model.type: encoder is not trained on text"
    assert f"{told} (its objective is None); allowed: {texts}, or train it from Python with nt.Trainer" in done.stderr
    for head, needs in (
        ("pretraining", "next_sentence_label [batch]"), ("question_answering", "start_positions [batch] below"),
    ):  # fmt: skip
        config = load(write(tmp_path, model=BERT | {"head": head}))
        with pytest.raises(ConfigError, match=r"model: bert with head: .* from Python with nt.Trainer") as refused:
            check_objective(config, step_spec(config))
        assert needs in str(refused.value) and head in str(refused.value)


def test_another_padding_token_than_the_tokenizers(tmp_path: Path) -> None:
    config = load(write(tmp_path, model=BERT | {"type": "roberta", "padding_token": 2}))
    with pytest.raises(ConfigError, match=r"model.padding_token: got 2; allowed: 1, the tokenizer's \[PAD\]"):
        build_dataset(config, step_spec(config))


def test_masked_settings_that_are_refused(tmp_path: Path) -> None:
    data.train_tokenizer(["some text"], 300).save(str(tmp_path / "plain.json"))
    for changes, told in (
        ({"tokenizer": {"path": str(tmp_path / "plain.json")}},
         r"tokenizer.path: .*plain.json has no token \[PAD\], \[CLS\], \[SEP\], \[MASK\]"),
        ({"tokenizer": {"vocab_size": 260}}, "tokenizer.vocab_size: got 260; allowed: at least 261"),
        ({"train": {"steps": 1, "batch": 1, "seq": 2}}, "train.seq: got 2; allowed: at least 3"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=told):
            config = load(write(tmp_path, **changes))
            check_objective(config, step_spec(config))
    for value in (0, 1, "x"):
        with pytest.raises(ConfigError, match=r"train.mask_probability: got .*; allowed: a number above 0 and below 1"):
            load(write(tmp_path), [f"train.mask_probability={value}"])


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*(f"{kind}_tiny" for kind in FAMILY), "llama_tiny", "encoder_layer", "decoder_layer"])
def test_plan_and_graph(name: str) -> None:
    config = load(EXPERIMENTS / f"{name}.yaml")
    assert plan(config).tasks > 50
    whole, layer = (draw.draw(config, layer=one, phase="update") for one in (None, 0))
    assert 0 < layer.count("AdamW") <= whole.count("AdamW")
    forward = draw.draw(config, layer=0, phase="forward")
    assert "h0.attn" in forward and "h1." not in forward
    with pytest.raises(ConfigError, match=r"--layer 9: train has no such operators; the model has [124] layers"):
        draw.draw(config, layer=9)


@pytest.mark.parametrize("name", ["bert_base", "llama_1b"])
def test_configs_for_gpus(name: str) -> None:
    config = load(EXPERIMENTS / f"{name}.yaml")
    assert config.precision == "bf16" and config.runtime.cuda == 1
    assert check_objective(config, step_spec(config)) == {"bert_base": "masked", "llama_1b": "causal"}[name]
    millions = {"bert_base": 109.5, "llama_1b": 1235.8}[name]  # as published
    assert plan(config).parameters / 1e6 == pytest.approx(millions, rel=0.002)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bert_tiny", "encoder_layer"])
def test_profile(name: str, tmp_path: Path) -> None:
    smaller = ("--set", "model.layers=1", "--set", "train.batch=2", "--set", "train.seq=16")
    done = nntile(tmp_path, "profile", str(EXPERIMENTS / f"{name}.yaml"), "--steps", "1", *smaller, "--out", name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / name / "report.html").exists()


@pytest.mark.long
def test_sweep(tmp_path: Path) -> None:
    sweep = {
        "config": str(EXPERIMENTS / "llama_tiny.yaml"), "set": {"model.layers": 1, "train.batch": 2},
        "grid": {"tiles.embed": [96, None]}, "measure": {"repeats": 1},
    }  # fmt: skip
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    done = nntile(tmp_path, "sweep", "sweep.yaml", "--out", "swept")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "swept" / "rows.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok", "ok"]
