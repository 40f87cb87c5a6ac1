"""Folders as people save them: truncation in tokenizer.json, special tokens by the folder, files that go along."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import numpy as np
import pytest
import transformers
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer

import nntile_py as nt
from nntile_py.checkpoint import model_files as checkpoint_files
from nntile_py.checkpoint.model_files import companions_note, companions_of, incomplete_modules, model_files
from nntile_py.checkpoint.run_folder import OWN
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import RunConfig, load
from nntile_py.data import text_dataset
from nntile_py.data import tokenization as data
from nntile_py.data.documents import TextPart
from nntile_py.data.special_tokens import special_tokens
from nntile_py.data.tokenizer import MASKED, load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.inference.generate import generate
from nntile_py.training.datasets import build_dataset, check_objective

NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end_of_text|>", "</s>", *MASKED)
LINES = [f"line {n}: some words of the {n}th line and a few more" for n in range(60)]


def tokenizer(limited: bool = False) -> Tokenizer:
    """A tokenizer with many special tokens, 0 and those after; limited: it cuts and pads texts to 5 tokens."""
    made = data.train_tokenizer(LINES, 300, NAMES[1:])
    if limited:
        made.enable_truncation(5, stride=1)
        made.enable_padding(length=5, pad_id=5, pad_token="[PAD]")
    return made


def folder(path: Path, limited: bool = False, **given: Any) -> Path:
    """A folder with a small Llama and the tokenizer; further files by name, __ stands for a dot."""
    files = dict(given)
    path.mkdir()
    cls = nt.models.find("llama")
    model = cls(cls.Config(layers=1, embed=8, heads=2, ffn=8, vocab=300, positions=64))
    save_file(model.weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(model.hf_config() | files.pop("config", {})))
    tokenizer(limited).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def config(tmp_path: Path, **tree: Any) -> RunConfig:
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    whole = {"data": {"source": str(tmp_path / "text.txt")}, "train": {"steps": 1, "batch": 2, "seq": 8}, **tree}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(whole))
    return load(tmp_path / "c.yaml")


# -- truncation and padding


@pytest.mark.parametrize("unit", ["window", "lines", "paragraphs", "documents"])
def test_texts_are_read_whole(tmp_path: Path, unit: str) -> None:
    """A tokenizer.json that cuts at 5 tokens and pads gives the tokens of one that does not."""
    made = []
    for limited in (False, True):
        path = tmp_path / str(limited) / "tokenizer.json"
        path.parent.mkdir()
        tokenizer(limited).save(str(path))
        of = config(tmp_path, model={"layers": 1, "embed": 8, "heads": 2}, tokenizer={"path": str(path)},
                    data={"source": str(tmp_path / "text.txt"), "sequences": unit, "val_fraction": 0.2})  # fmt: skip
        dataset = build_dataset(of, step_spec(of))
        assert isinstance(dataset, text_dataset.TextDataset)
        made.append(dataset.corpus)
        files = model_files(SimpleNamespace(hf_config=dict), dataset.tokenizer, of)
        saved = json.loads(files["tokenizer.json"])
        assert (saved["truncation"] is not None) == limited == (saved["padding"] is not None)
        assert not limited or saved == json.loads((tmp_path / "True/tokenizer.json").read_text())
    assert made[0].train[0].ids.tobytes() == made[1].train[0].ids.tobytes()
    assert made[0].held_out[0].ids.tobytes() == made[1].held_out[0].ids.tobytes()
    assert len(made[0].train[0].ids) > 5 * len(LINES)


def test_labelled_texts_and_the_encoder_read_texts_whole(tmp_path: Path, runtime: nt.Runtime) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{line},{n % 2}\n" for n, line in enumerate(LINES)))
    lengths = []
    for limited in (False, True):
        tokenizer(limited).save(str(tmp_path / "tokenizer.json"))
        of = config(
            tmp_path, model={"type": "bert", "layers": 1, "embed": 8, "heads": 2, "head": "classification"},
            tokenizer={"path": str(tmp_path / "tokenizer.json")}, train={"steps": 1, "batch": 2, "seq": 64},
            data={"source": str(tmp_path / "t.csv")},
        )  # fmt: skip
        dataset: Any = build_dataset(of, step_spec(of))
        lengths.append([len(one) for one in dataset.corpus.train.sequences])
        bert = nt.models.find("bert")(of.model)
        with nt.Encoder(bert, "hidden", tokenizer=Tokenizer.from_file(str(tmp_path / "tokenizer.json"))) as encoder:
            lengths.append([len(one) for one in encoder(LINES[:20])])
    assert lengths[0] == lengths[2] and lengths[1] == lengths[3] and min(map(min, lengths)) > 10


def test_tokenizing_ignores_the_limits_of_a_tokenizer() -> None:
    """tokenize takes any tokenizer, whatever truncation it has, and leaves it as it is."""
    limited = tokenizer(True)
    ((_, (whole,)),) = data.tokenize([(TextPart(line), False) for line in LINES], tokenizer(), "window", 3)
    ((_, (cut,)),) = data.tokenize([(TextPart(line), False) for line in LINES], limited, "window", 3)
    assert np.array_equal(whole.ids, cut.ids) and np.array_equal(whole.segments, cut.segments)
    assert limited.truncation["max_length"] == 5


# -- special tokens

# Files of a folder as published, with (end of a document, stops, ids of config.json, role eos).
FOLDERS: dict[str, tuple[dict[str, Any], int | None, set[int], tuple[Any, Any], str | None]] = {
    "smollm2-instruct": (
        {"config": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
         "tokenizer_config__json": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}},
        2, {2}, (1, 2), "<|im_end|>",
    ),
    "llama-3": (
        {"config": {"bos_token_id": 1, "eos_token_id": 3},
         "tokenizer_config__json": {"bos_token": "<|im_start|>", "eos_token": "<|end_of_text|>"}},
        3, {3}, (1, 3), "<|end_of_text|>",
    ),
    "llama-3-instruct": (
        {"config": {"bos_token_id": 1, "eos_token_id": [3, 4, 2]},
         "generation_config__json": {"eos_token_id": [3, 2]},
         "special_tokens_map__json": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}},
        2, {2, 3, 4}, (1, [3, 4, 2]), "<|im_end|>",
    ),
    "gpt2: numbers only": (
        {"config": {"bos_token_id": 0, "eos_token_id": 0}, "tokenizer_config__json": {"model_max_length": 1024}},
        0, {0}, (0, 0), "<|endoftext|>",
    ),
    "only generation_config": (
        {"config": {"bos_token_id": None, "eos_token_id": None}, "generation_config__json": {"eos_token_id": 4},
         "tokenizer_config__json": {"pad_token": "[PAD]"}},
        4, {4}, (None, None), None,
    ),
    "names only": (
        {"config": {"bos_token_id": None, "eos_token_id": None},
         "tokenizer_config__json": {"eos_token": "</s>", "bos_token": None}},
        4, {4}, (None, 4), "</s>",
    ),
    "tokenizer_config before the map": (
        {"config": {}, "tokenizer_config__json": {"eos_token": "</s>"},
         "special_tokens_map__json": {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}},
        4, {4}, (1, 4), "</s>",
    ),
    "no end": (
        {"config": {"eos_token_id": None}, "tokenizer_config__json": {"cls_token": "[CLS]", "eos_token": "<nowhere>"}},
        None, set(), (None, None), None,
    ),
    "numbers of another vocabulary": (
        {"config": {"bos_token_id": 50256, "eos_token_id": 50256}}, 0, {0}, (0, 0), "<|endoftext|>",
    ),
    "nothing": ({"config": {"bos_token_id": None}}, 0, {0}, (0, 0), "<|endoftext|>"),
}  # fmt: skip


class Counting:
    """A model that continues token n by n + 1."""

    def evaluate(self, inputs: Any, **_: Any) -> Any:
        ids = inputs["input_ids"]
        return 0.0, 50.0 * np.eye(300)[(ids + 1) % 300]


@pytest.mark.parametrize("name", FOLDERS)
def test_special_tokens_are_those_of_the_folder(tmp_path: Path, name: str) -> None:
    """Documents end with its token, a sample stops there, and config.json keeps its numbers."""
    files, end, stops, ids, eos = FOLDERS[name]
    source = folder(tmp_path / "source", **files)
    of = config(tmp_path, model={"from": str(source)}, sample={"prompt": "<|endoftext|>", "temperature": 0})
    dataset = build_dataset(of, step_spec(of))
    assert isinstance(dataset, text_dataset.TextDataset)
    found = special_tokens(dataset.tokenizer, of.tokenizer.path, of.model.from_)
    assert (found.end, found.stops, found.roles.get("eos_token")) == (end, stops, eos)
    last = dataset.corpus.held_out[0].ids[-1]
    assert last == end if end is not None else last > len(NAMES)
    assert ("no token ends a document" in dataset.describe()) == (end is None)
    hf = json.loads((source / "config.json").read_text())
    saved = model_files(SimpleNamespace(hf_config=lambda: hf), dataset.tokenizer, of)
    written = json.loads(saved["config.json"])
    assert (written["bos_token_id"], written["eos_token_id"]) == ids
    assert written.get("pad_token_id") == hf.get("pad_token_id")
    text = generate(Counting(), dataset.tokenizer, of, [])  # type: ignore[arg-type]
    first = min((n for n in stops if n), default=None)
    expected = range(first if first else 65)
    assert text == dataset.tokenizer.decode([*expected])


def test_masked_models_mask_with_the_tokens_of_the_folder(tmp_path: Path) -> None:
    """Whatever their names are: the folder's roles count, then the names of BERT and RoBERTa."""
    made = data.train_tokenizer(LINES, 300, ["<a>", "<b>", "<c>", "[MASK]", "[CLS]", "[SEP]", "[PAD]"])
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"a {n},{n % 2}\n" for n in range(9)))
    names = {"cls_token": "<a>", "sep_token": {"content": "<b>"}, "pad_token": "<c>", "eos_token": "<nowhere>"}
    for own in (True, False):
        if own:
            (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
        else:
            (tmp_path / "special_tokens_map.json").unlink()
        of = config(tmp_path, model={"type": "bert", "layers": 1, "embed": 8, "heads": 2},
                    tokenizer={"path": str(tmp_path / "tokenizer.json")},
                    train={"steps": 1, "batch": 4, "seq": 48, "mask_probability": 0.5},
                    data={"source": str(tmp_path / "text.txt"), "sequences": "lines"})  # fmt: skip
        check_objective(of, step_spec(of))
        inputs: Any = build_dataset(of, step_spec(of)).train(1)
        cls, sep, pad = (1, 2, 3) if own else (5, 6, 7)
        assert {*inputs["input_ids"][:, 0]} == {cls} and (inputs["input_ids"] == 4).any()
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            length = mask.sum()
            assert ids[length - 1] == sep and {*ids[length:]} == {pad}
        saved = model_files(SimpleNamespace(hf_config=dict), load_tokenizer(tmp_path / "tokenizer.json"), of)
        framed = Tokenizer.from_str(str(saved["tokenizer.json"])).encode("a", "b").ids
        assert [framed[0], framed[-1], framed.count(sep)] == [cls, sep, 2]
        of = config(tmp_path, model={"type": "bert", "layers": 1, "embed": 8, "heads": 2, "head": "classification"},
                    tokenizer={"path": str(tmp_path / "tokenizer.json")}, data={"source": str(tmp_path / "t.csv")})
        sample = next(iter(build_dataset(of, step_spec(of)).corpus.train.sequences))  # type: ignore[attr-defined]
        assert (sample[0], sample[-1]) == (cls, sep)


def test_special_tokens_of_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    """The model's numbers are of its own tokenizer: config.json and generation_config.json get the other one's."""
    more: Any = {"generation_config__json": {"eos_token_id": [2], "top_k": 7}, "chat_template__jinja": "{{ 1 }}"}
    source = folder(tmp_path / "source", config={"bos_token_id": 1, "eos_token_id": 2}, **more)
    other = folder(tmp_path / "other", tokenizer_config__json={"eos_token": "</s>", "bos_token": "<|im_end|>"})
    of = config(tmp_path, model={"from": str(source)}, tokenizer={"path": str(other / "tokenizer.json")})
    made = load_tokenizer(other / "tokenizer.json")
    files = model_files(SimpleNamespace(hf_config=lambda: {"eos_token_id": 2, "bos_token_id": 1}), made, of)
    assert sorted(files) == ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    ids = {"eos_token_id": 4, "bos_token_id": 2, "pad_token_id": 5}
    assert json.loads(files["generation_config.json"]) == ids | {"top_k": 7}
    assert {"eos_token_id": 4, "bos_token_id": 2}.items() <= json.loads(files["config.json"]).items()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"
    trained = special_tokens(made)  # as if it were trained here
    assert (trained.end, trained.stops, trained.roles["eos_token"]) == (0, {0}, "<|endoftext|>")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["[1]", "{", "[" * 99999])
def test_broken_files_are_named(tmp_path: Path, name: str, content: str) -> None:
    source = folder(tmp_path / "source", config={}, **{name.replace(".", "__"): content})
    of = config(tmp_path, model={"from": str(source)})
    with pytest.raises(ConfigError, match=rf"(cannot read|holds no object).*{name}|{name}.* holds no object"):
        build_dataset(of, step_spec(of))


# -- files that go along


ALONG = {
    "chat_template.jinja": "{{ messages }}", "generation_config.json": '{"eos_token_id": [2, 3], "top_k": 7}',
    "added_tokens.json": '{"<|im_end|>": 2}', "special_tokens_map.json": '{"eos_token": "<|im_end|>"}',
    "sentence_bert_config.json": '{"max_seq_length": 7}', "vocab.txt": "a\nb\n", "spiece.model": "\x00\x01",
    "modules.json": '[{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"path": "2_Dense"}]',
    "1_Pooling/config.json": '{"pooling_mode_cls_token": true}', "2_Dense/model.safetensors": "w",
    "additional_chat_templates/rag.jinja": "{{ 1 }}",
}  # fmt: skip
STAYS = {
    "modeling.py": "1/0", "README.md": "text", "pytorch_model.bin": "w", "pytorch_model.bin.index.json": "{}",
    "trainer_state.json": "{}", "all_results.json": "{}", "3_Other/config.json": "{}", "state.json": "{}",
    "2_Dense/code.py": "1/0", "sample.txt": "text of another run",
}  # fmt: skip


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(content)


def nntile(tmp_path: Path, *arguments: str) -> str:
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 200, "cwd": tmp_path}
    done = forks.run([sys.executable, "-m", "nntile_py.cli", "train", *arguments], **how, check=False)
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@pytest.mark.parametrize("name", [*OWN, "optimizer.safetensors", "state.json", ".nntile_py"])
def test_modules_with_names_of_a_runs_own_files(name: str, tmp_path: Path) -> None:
    """Their folders stay behind, as a run could not put its file beside them, and with them the list of modules."""
    write(tmp_path, {f"{name}/x.json": "{}", "1_Pooling/x.json": "{}"})
    (tmp_path / "modules.json").write_text(json.dumps([{"path": name}, {"path": "1_Pooling"}]))
    found = {str(path.relative_to(tmp_path)) for path in companions_of(tmp_path)}
    assert found == {"1_Pooling/x.json"} and incomplete_modules(tmp_path) == [name]


def test_modules_that_cannot_go_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another folder, or with large weights; the run says so."""
    source = folder(tmp_path / "source", config={})
    write(source, {"1_Pooling/config.json": "{}", "2_Dense/model.safetensors": "w" * 100})
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]))
    of = config(tmp_path, model={"from": str(source)})
    assert companions_note(of) == "" and source / "modules.json" in [*companions_of(source)]
    monkeypatch.setattr(checkpoint_files, "MOST_BYTES", 99)
    assert "nor '2_Dense': a module needs" in companions_note(of)
    (source / "modules.json").write_text(json.dumps([{"path": "../x"}, {"path": "1_Pooling"}]))
    assert "nor '../x': a module needs" in companions_note(of)
    assert source / "modules.json" not in [*companions_of(source)]


def test_files_beside_the_weights_go_along(tmp_path: Path) -> None:
    """Into the run's folder and its checkpoints; they do not outlive their run; transformers reads the folder."""
    names = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    numbers = {"bos_token_id": 1, "eos_token_id": 2}
    source = folder(tmp_path / "source", True, config=numbers, tokenizer_config__json=names)
    write(source, ALONG | STAYS)
    config(tmp_path, model={"from": str(source)}, runtime={"cpus": 1}, sample={"tokens": 2}, out=str(tmp_path / "run"))
    nntile(tmp_path, "c.yaml")
    run = tmp_path / "run"
    shutil.move(source, tmp_path / "gone")
    edited = ("notes.txt", "vocab.txt", "tokenizer_config.json")
    for name in edited:
        (run / name).write_text("mine")
    output = nntile(tmp_path, "--resume", "run", "--set", "train.steps=2", "--set", "sample.tokens=0")
    for name in edited[1:]:
        assert f"run/{name} is not what a run has written: it is now {name}.old1" in output
    assert all((run / f"{name}.old1").read_text() == "mine" for name in edited[1:]) and len([*run.glob("*.old*")]) == 2
    for place in (run, run / "checkpoints/step-000001", run / "checkpoints/step-000002"):
        found = {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}
        assert {*ALONG} <= found
        assert not found & ({*STAYS} - ({"state.json"} if place != run else set()))
        assert all((place / name).read_text() == content for name, content in ALONG.items())
        assert json.loads((place / "config.json").read_text())["eos_token_id"] == 2
    theirs = transformers.AutoTokenizer.from_pretrained(run)
    assert (theirs.eos_token, theirs.eos_token_id) == ("<|im_end|>", 2)
    assert theirs.get_chat_template() == ALONG["chat_template.jinja"]
    model = transformers.AutoModelForCausalLM.from_pretrained(run)
    assert model.generation_config.eos_token_id == [2, 3] and model.config.eos_token_id == 2
    stored = json.loads((run / "tokenizer.json").read_text())
    assert (stored["truncation"]["max_length"], stored["truncation"]["stride"]) == (5, 1)
    shutil.move(tmp_path / "gone", source)
    for name in ALONG:
        (source / name).unlink()
    (run / "config.json").write_text("edited")
    output = nntile(tmp_path, "c.yaml", "--out", "run", "--overwrite", "--set", "sample.tokens=0")
    assert (run / "config.json.old1").read_text() == "edited" and "it is now config.json.old1" in output
    assert json.loads((run / "config.json").read_text())["eos_token_id"] == 2
    assert not [name for name in ALONG if (run / name).exists()] and (run / "notes.txt").read_text() == "mine"
