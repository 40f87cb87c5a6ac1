"""Folders of sentence-transformers: vectors against transformers with limits, prompts and pooling written here."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from command import nntile
from pairwise import pairwise
from safetensors.torch import save_file
from test_encode import LINES, MODELS, tokenizer
from tokenizers import Tokenizer, normalizers

import nntile_py as nt
from nntile_py.inference.sentence import Pooling, SentenceModel
from nntile_py.inference.texts import prompted

TYPE = "sentence_transformers.models."
TEXTS = [*LINES, "  THE Tasks of a STEP\n", "one task, which reads what another task writes, is one of many tasks"]
MODES = {
    "cls": "pooling_mode_cls_token", "max": "pooling_mode_max_tokens", "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens", "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}  # fmt: skip
PROMPTS = {"query": "the order: ", "document": "", "long": "one task reads "}


@functools.cache
def cased() -> Tokenizer:
    """A tokenizer that tells upper from lower case."""
    made = Tokenizer.from_str(tokenizer().to_str())
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    return made


class Case:
    """A folder as sentence-transformers lays it out, and its vectors by transformers and torch."""

    def __init__(self, path: Path, kind: str = "Bert", modes: tuple[str, ...] = ("mean",), normalize: bool = True,
                 dense: str | None = None, length: int | None = 9, lower: bool = False, prompted: bool = True,
                 inner: str = "", default: str | None = None) -> None:  # fmt: skip
        torch.manual_seed(0)
        self.path, self.modes, self.normalize, self.length, self.lower = path, modes, normalize, length, lower
        self.prompted = prompted
        config = getattr(transformers, f"{kind}Config")(**MODELS[kind])
        self.model = getattr(transformers, f"{kind}Model")(config).eval()
        with torch.no_grad():
            for param in self.model.parameters():
                param += 0.1 * torch.randn_like(param)
        folder = path / inner
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        cased().save(str(folder / "tokenizer.json"))
        self.json(f"{inner}/sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": lower})
        width = 16 * len(modes)
        self.modules = [("Transformer", inner), ("Pooling", "1_Pooling")]
        flags = {key: mode in modes for mode, key in MODES.items()}
        self.json("1_Pooling/config.json", {"word_embedding_dimension": 16, "include_prompt": prompted} | flags)
        self.dense = None
        if dense:
            self.modules.append(("Dense", "2_Dense"))
            self.dense = torch.nn.Sequential(torch.nn.Linear(width, 5), getattr(torch.nn, dense)())
            sizes = {"in_features": width, "out_features": 5, "bias": True}
            name = f"torch.nn.modules.activation.{dense}"
            self.json("2_Dense/config.json", sizes | {"activation_function": name})
            state = {"linear.weight": self.dense[0].weight.data, "linear.bias": self.dense[0].bias.data}
            save_file(state, path / "2_Dense/model.safetensors")
        if normalize:
            self.modules.append(("Normalize", f"{len(self.modules)}_Normalize"))
        modules = [{"path": place, "type": TYPE + name} for name, place in self.modules]
        self.json("modules.json", [{"idx": n, "name": str(n)} | module for n, module in enumerate(modules)])
        self.json("config_sentence_transformers.json", {"prompts": PROMPTS, "default_prompt_name": default})

    def json(self, name: str, content: Any) -> None:
        file = self.path / name.removeprefix("/")
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content))

    def tokens(self, text: str, length: int | None) -> list[int]:
        text = text.strip().lower() if self.lower else text.strip()
        ids: list[int] = cased().encode(text).ids
        return ids if length is None or len(ids) <= length else [*ids[: length - 1], ids[-1]]

    def vector(self, text: str, prompt: str = "", length: int | None = None) -> Any:
        length = length or self.length or 40
        ids = torch.tensor([self.tokens(prompt + text, length)])
        with torch.no_grad():
            x = self.model(ids).last_hidden_state.double()
        mask = torch.ones(ids.shape, dtype=torch.float64)
        if prompt and not self.prompted:
            mask[:, : len(self.tokens(prompt, length)) - 1] = 0
        mask = mask[..., None]
        places = torch.arange(1, ids.shape[1] + 1)[None, :, None] * mask
        parts = {
            "cls": x[:, 0], "max": torch.where(mask == 0, -1e9, x).max(1)[0], "mean": (x * mask).sum(1) / mask.sum(1),
            "mean_sqrt_len_tokens": (x * mask).sum(1) / mask.sum(1).sqrt(), "lasttoken": x[:, -1],
            "weightedmean": (x * places).sum(1) / places.sum(1),
        }  # fmt: skip
        y = torch.cat([parts[mode] for mode in MODES if mode in self.modes], 1)
        with torch.no_grad():
            y = self.dense.double()(y) if self.dense else y
        return (torch.nn.functional.normalize(y, dim=1) if self.normalize else y)[0].numpy()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The vectors of the folder without --output; --prompt-name, --max-length and --output count.

    The first test of the file, since the command starts a runtime of its own."""
    case = Case(tmp_path / "st", length=6, lower=True, modes=("max",))
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))

    def vectors(*options: str) -> Any:
        out = tmp_path / "v.npy"
        files = [str(tmp_path / "st"), "--input", str(tmp_path / "x.jsonl"), "--out", str(out), "--overwrite"]
        assert nntile("encode", *files, "--cpus", 1, *options) == 0, capsys.readouterr().err
        return np.load(out)

    def close(got: Any, *given: Any) -> None:
        np.testing.assert_allclose(got, [case.vector(one, *given) for one in TEXTS], rtol=2e-5, atol=2e-5)

    close(vectors())
    close(vectors("--prompt-name", "query", "--max-length", "8"), PROMPTS["query"], 8)
    case.normalize, case.modes = False, ("mean",)
    close(vectors("--output", "mean"))


@pytest.mark.filterwarnings("ignore:texts with more than")
@pairwise(
    kind=["Bert", "Roberta", "DistilBert"],
    modes=[("mean",), ("cls", "max"), ("mean_sqrt_len_tokens", "weightedmean"), ("lasttoken",)],
    after=[(True, None), (False, "Tanh"), (True, "ReLU")], length=[9, None, 5],
    prompting=[("", True), ("query", False), ("long", True)], layout=[("", False), ("0_Transformer", True)],
)  # fmt: skip
def test_vectors_of_sentence_transformers(
    runtime: nt.Runtime, tmp_path: Path, kind: str, modes: tuple[str, ...], after: tuple[bool, str | None],
    length: int | None, prompting: tuple[str, bool], layout: tuple[str, bool],
) -> None:  # fmt: skip
    (normalize, dense), (prompt, prompted), (inner, lower) = after, prompting, layout
    case = Case(tmp_path, kind, modes, normalize, dense, length, lower, prompted, inner)
    encoder = nt.Encoder.from_hf(tmp_path, **({"prompt_name": prompt} if prompt else {}))
    assert (encoder.output, encoder.of_tokens, encoder.max_length) == ("sentence", False, length or 40)
    got = encoder(TEXTS)
    text = PROMPTS[prompt] if prompt else ""
    np.testing.assert_allclose(got, [case.vector(one, text) for one in TEXTS], rtol=2e-5, atol=2e-5)
    assert encoder([]).shape == (0, got.shape[1]) and got.dtype == np.float32
    ids = case.tokens(TEXTS[3], 5)  # token numbers are taken as they are
    plain = case.vector(TEXTS[3], length=5)
    np.testing.assert_allclose(encoder([ids])[0], plain, rtol=2e-5, atol=2e-5)
    encoder.close()


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_pooling_modes(mode: str, first: int) -> None:
    """By hand: tokens 1, 2, ... of which the first may be a prompt that does not count."""
    rows = np.array([[1.0, -9.0], [5.0, -8.0], [3.0, -1.0], [2.0, -4.0]])
    wanted = {
        "cls": ([1, -9], [1, -9]), "max": ([5, -1], [3, -1]), "mean": ([11 / 4, -22 / 4], [2.5, -2.5]),
        "mean_sqrt_len_tokens": ([11 / 2, -22 / 2], [5 / 2**0.5, -5 / 2**0.5]), "lasttoken": ([2, -4], [2, -4]),
        "weightedmean": ([28 / 10, -44 / 10], [17 / 7, -19 / 7]),
    }  # fmt: skip
    np.testing.assert_allclose(Pooling((mode,), prompted=False)(rows, first), wanted[mode][first > 0])
    np.testing.assert_allclose(Pooling((mode,))(rows, first), wanted[mode][0])


def test_what_the_caller_gives_counts(runtime: nt.Runtime, tmp_path: Path) -> None:
    case = Case(tmp_path, length=9, lower=True, default="query")
    general = {"prompts": PROMPTS, "default_prompt_name": "query"}
    for width in (5, 99, None):  # after Normalize, as sentence-transformers does
        case.json("config_sentence_transformers.json", general | {"truncate_dim": width})
        with nt.Encoder.from_hf(tmp_path, max_length=40) as encoder:
            wanted = case.vector(TEXTS[0], PROMPTS["query"], 40)[:width]
            np.testing.assert_allclose(encoder(TEXTS[:1])[0], wanted, rtol=2e-5, atol=2e-5)
            assert encoder([]).shape == (0, len(wanted))
    long = "tiles of TILES of tiles of tiles of tiles of tiles of tiles of tiles"
    assert len(case.tokens(long, None)) > 12

    def close(encoder: Any, prompt: str, length: int) -> None:
        got = encoder([long])
        np.testing.assert_allclose(got[0], case.vector(long, prompt, length), rtol=2e-5, atol=2e-5)

    with pytest.warns(UserWarning, match="more than 9 tokens"):
        close(nt.Encoder.from_hf(tmp_path), PROMPTS["query"], 9)
    with pytest.warns(UserWarning, match="more than 12 tokens"):
        close(nt.Encoder.from_hf(tmp_path, max_length=12, prompt=""), "", 12)
    close(nt.Encoder.from_hf(tmp_path, max_length=40, prompt_name="document"), "", 40)
    close(nt.Encoder.from_hf(tmp_path, max_length=40, prompt="step: ", prompt_name="long"), "step: ", 40)
    case.normalize = False
    with pytest.warns(UserWarning, match="more than 9 tokens"):
        close(nt.Encoder.from_hf(tmp_path, "mean", prompt=""), "", 9)  # another output, the same limit and case
    with pytest.raises(ValueError, match=r"texts\[0\]: a pair, with a prompt"):
        nt.Encoder.from_hf(tmp_path)([("a", "b")])


def test_other_forms_of_the_files(runtime: nt.Runtime, tmp_path: Path) -> None:
    """A limit in tokenizer_config.json, names of newer and older versions, a folder that has only a limit."""
    case = Case(tmp_path, length=None)
    case.json("tokenizer_config.json", {"model_max_length": 7})
    case.json("1_Pooling/config.json", {"embedding_dimension": 16, "pooling_mode": "weightedmean"})
    listed = json.loads((tmp_path / "modules.json").read_text())
    listed[1]["type"] = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
    case.json("modules.json", [*listed, {"idx": 3, "name": "3", "path": "3_Dropout", "type": f"{TYPE}Dropout"}])
    case.length, case.modes = 7, ("weightedmean",)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_roberta_config.json")
    with pytest.warns(UserWarning, match="more than 7 tokens"):
        got = nt.Encoder.from_hf(tmp_path)(TEXTS)
    np.testing.assert_allclose(got, [case.vector(one) for one in TEXTS], rtol=2e-5, atol=2e-5)
    case.json("1_Pooling/config.json", {"word_embedding_dimension": 16, "pooling_mode_cls_token": True})
    case.modes = ("cls", "mean")  # mean is on where the file does not say otherwise
    np.testing.assert_allclose(nt.Encoder.from_hf(tmp_path)(TEXTS[:1])[0], case.vector(TEXTS[0]), rtol=2e-5, atol=2e-5)
    (tmp_path / "modules.json").unlink()
    case.json("sentence_roberta_config.json", {"max_seq_length": 5})
    encoder = nt.Encoder.from_hf(tmp_path)
    assert (encoder.output, encoder.max_length) == ("hidden", 5)


WRONG: list[tuple[str, Any, str]] = [
    ("modules.json", {"type": "Router"}, r"module 2 in .* is sentence_transformers.models.Router; allowed: Pool"),
    ("modules.json", {"type": "my_code.Normalize"}, "module 2 in .* is my_code.Normalize; allowed: Pooling"),
    ("modules.json", {"path": "../x", "type": "Normalize"}, r"names '\.\./x'; allowed: folders inside"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length is 0 in .*; allowed: a positive integer"),
    ("sentence_bert_config.json", {"do_lower_case": "no"}, "do_lower_case is 'no' in the model's config; allow"),
    ("sentence_bert_config.json", {"model_args": {"a": 1}}, r"model_args is \{'a': 1\} in the model's config; allowed"),
    ("sentence_bert_config.json", {"other": 1}, r"other is 1 in .*sentence_bert_config.json; allowed: max_seq_length"),
    ("1_Pooling/config.json", {"pooling_mode": "median"}, r"pooling_mode is 'median' in .*1_Pooling.*; allowed: cls"),
    ("1_Pooling/config.json", {"pooling_mode_median": True}, "pooling_mode_median is True in .*; allowed: embed"),
    ("2_Dense/config.json", {"activation_function": "torch.nn.Mish"}, "is 'Mish' in .*2_Dense"),
    ("config_sentence_transformers.json", {"prompts": {"a": 1}}, r"prompts is \{'a': 1\} in .*; allowed: texts"),
    ("config_sentence_transformers.json", {"model_type": "SparseEncoder"}, "model_type is 'SparseEncoder'"),
    ("config_sentence_transformers.json", {"default_prompt_name": "x"}, "prompt_name: got 'x'; allowed: query"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "change", "told"), WRONG, ids=[f"{file} {change}" for file, change, _ in WRONG])
def test_settings_that_are_not_supported(tmp_path: Path, file: str, change: dict[str, Any], told: str) -> None:
    case = Case(tmp_path, dense="Tanh")
    content = json.loads((tmp_path / file).read_text())
    if file == "modules.json":
        kind = change["type"]
        content[2] |= change | {"type": kind if "." in kind else TYPE + kind}
    else:
        content |= change
    case.json(file, content)
    with pytest.raises(nt.ConfigError, match=told):
        nt.Encoder.from_hf(tmp_path)


def test_texts_are_stripped() -> None:
    """As sentence-transformers does before it looks for upper case; a prompt's blank before the text stays."""
    model = SentenceModel(Path(), None, True, PROMPTS, None)
    assert model.prepared(" \n A b\t") == "a b" and replace(model, lower=False).prepared(" A b ") == "A b"
    assert prompted([" A ", ["B ", " c"], [1, 2]], "", model.prepared, 0) == ["a", ["b", "c"], [1, 2]]
    assert prompted([" A "], "Q: ", model.prepared, 0) == ["q:  a"]


def test_folders_without_modules(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (tmp_path / "modules.json").write_text("[" * 99999)
    with pytest.raises(nt.ConfigError, match=r"cannot read .*modules\.json"):
        nt.Encoder.from_hf(tmp_path)
    case.json("modules.json", [{"idx": 0, "path": "", "type": f"{TYPE}Transformer"}])
    with pytest.raises(nt.ConfigError, match="has no Pooling after Transformer"):
        nt.Encoder.from_hf(tmp_path)
    assert nt.Encoder.from_hf(tmp_path, "mean").max_length == 9
    (tmp_path / "modules.json").unlink()
    with pytest.raises(nt.ConfigError, match=r"output: got sentence, and .* has no modules\.json; allowed: a folder"):
        nt.Encoder.from_hf(tmp_path, "sentence")
    with pytest.raises(nt.ConfigError, match=r"output: got 'sentence' in Encoder\(...\); allowed: Encoder\.from_hf"):
        nt.Encoder(nt.models.from_hf(tmp_path), "sentence")
    (tmp_path / "config_sentence_transformers.json").unlink()
    with pytest.raises(nt.ConfigError, match="prompt_name: got 'query'; allowed: none, as the folder has no prompts"):
        nt.Encoder.from_hf(tmp_path, "mean", prompt_name="query")
