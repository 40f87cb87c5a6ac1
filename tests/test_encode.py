"""Serving a batch: an encoder against transformers, in the caller's order; its programs; `nntile encode`."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

import nntile_py as nt
from nntile_py.data.tokenizer import MASK, number_of
from nntile_py.inference import encode_file
from nntile_py.inference.texts import placed_texts, with_limit
from nntile_py.system.folders import replaced

POSITIONS, VOCAB = 40, 90
LINES = [
    "the tasks of a step", "a tile", "", "tiles of tiles of tiles of a tensor", "one task reads what another writes",
    "step", "the order of the texts is the order of the vectors, whatever the order of the work",
]  # fmt: skip
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MORE = {"intermediate_size": 32, "num_labels": 3}
MODELS: dict[str, Any] = {
    "Bert": {**SIZES, **MORE, "max_position_embeddings": POSITIONS},
    "Roberta": {**SIZES, **MORE, "max_position_embeddings": POSITIONS + 2, "pad_token_id": 1, "type_vocab_size": 1},
    "Albert": {**SIZES, **MORE, "max_position_embeddings": POSITIONS, "embedding_size": 8},
    "DistilBert": {
        "vocab_size": VOCAB, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 3,
        "max_position_embeddings": POSITIONS,
    },
}  # fmt: skip
DEBERTA = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_position_embeddings": POSITIONS,
           "position_biased_input": False, "type_vocab_size": 0}  # fmt: skip
BARE: dict[str, Any] = {  # those that have the hidden states alone
    "Deberta": {**SIZES, **MORE, **DEBERTA, "max_relative_positions": 8},
    "DebertaV2": {**SIZES, **MORE, **DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    "ModernBert": {
        **SIZES, "intermediate_size": 24, "max_position_embeddings": POSITIONS, "local_attention": 8,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    },
}  # fmt: skip


@functools.cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[pad]", "[UNK]", "[CLS]", "[SEP]"]  # number 1 is RoBERTa's padding
    made.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special))
    ends = [(token, made.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`folder("Bert", "Model")`: such a model of transformers, saved with a tokenizer."""
    root, numbers = tmp_path_factory.mktemp("models"), itertools.count()

    def make(family: str, kind: str, **more: Any) -> tuple[Path, Any]:
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**(MODELS | BARE)[family] | more)
        model = getattr(transformers, f"{family}{kind}")(config).eval()
        with torch.no_grad():
            for param in model.parameters():
                param += 0.1 * torch.randn_like(param)
        path = root / str(next(numbers))
        model.save_pretrained(path)
        tokenizer().save(str(path / "tokenizer.json"))
        return path, model

    return make


def of_transformers(model: Any, output: str, ids: list[int], kinds: list[int] | None = None) -> Any:
    with torch.no_grad():
        more = {"token_type_ids": torch.tensor([kinds])} if kinds else {}
        made = model(torch.tensor([ids]), **more)
    if output == "logits":
        return made.logits[0].numpy()
    if output == "pooled":
        return made.pooler_output[0].numpy()
    hidden = made.last_hidden_state[0].numpy()
    return hidden.mean(0) if output == "mean" else hidden


def check(encoder: Any, model: Any, output: str, texts: list[Any], got: Any) -> None:
    assert len(got) == len(texts)
    for text, one in zip(texts, got, strict=True):
        made = tokenizer().encode_batch([text])[0] if isinstance(text, str | tuple) else None
        ids, kinds = (made.ids, made.type_ids) if made else (text, None)
        assert one.dtype == np.float32
        want = of_transformers(model, output, ids, kinds if encoder.model.config.type == "bert" else None)
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "output"),
    [pair for pair in itertools.product(MODELS, ("hidden", "mean", "pooled")) if pair != ("DistilBert", "pooled")],
)
def test_as_transformers(runtime: nt.Runtime, folder: Any, family: str, output: str) -> None:
    """Texts in their order, an empty one; token numbers of all lengths from one to the longest."""
    path, model = folder(family, "Model")
    encoder = nt.Encoder.from_hf(path, output, tiles={"embed": 7, "ffn": 13} if family == "Roberta" else None)
    check(encoder, model, output, LINES, encoder(LINES))
    check(encoder, model, output, LINES[:1], encoder(LINES[:1]))
    rng = np.random.default_rng(0)
    ids = [rng.integers(2, VOCAB, n).tolist() for n in rng.permutation(np.arange(1, POSITIONS + 1))]
    check(encoder, model, output, ids, encoder(ids))
    empty = encoder([])
    assert empty == [] if output == "hidden" else empty.shape == (0, 16)
    encoder.close()


@pytest.mark.parametrize("family", BARE)
def test_hidden_states_of_others(runtime: nt.Runtime, folder: Any, family: str) -> None:
    """Of folders without a head and with one; what stands for a sequence they do not have."""
    for kind in ("Model", "ForMaskedLM"):
        path, model = folder(family, kind)
        with nt.Encoder.from_hf(path, "mean") as encoder:
            check(encoder, model.base_model, "mean", LINES, encoder(LINES))
    with pytest.raises(nt.ConfigError, match=r"output: .* has no 'pooled'; allowed: hidden, mean, logits"):
        nt.Encoder.from_hf(path, "pooled")


def test_robertas_special_tokens() -> None:
    """A tokenizer with <s> and </s> and without a template is given one, a pair with two of the latter between."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # type: ignore[call-arg]
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    made.train_from_iterator(LINES, trainers.WordPieceTrainer(vocab_size=VOCAB, special_tokens=special))
    framed = with_limit(made, 20, framed=True)
    a, b = (framed.encode(text, add_special_tokens=False).ids for text in ("a tile", "step"))
    assert framed.encode("a tile").ids == [0, *a, 2] and number_of(made, MASK) == 4
    pair = framed.encode("a tile", "step")
    assert pair.ids == [0, *a, 2, 2, *b, 2] and not any(pair.type_ids)
    assert not with_limit(made, 20, framed=False).num_special_tokens_to_add(False)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", ["ForSequenceClassification", "ForMaskedLM"])
def test_logits_and_models_with_a_head(runtime: nt.Runtime, folder: Any, family: str, kind: str) -> None:
    """Logits of classes and of tokens; the head of a folder is left out where none is asked for."""
    path, model = folder(family, kind)
    encoder = nt.Encoder.from_hf(path, "logits")
    got = encoder(LINES)
    assert isinstance(got, list) == (kind == "ForMaskedLM")
    check(encoder, model, "logits", LINES, got)
    model = model.base_model
    check(encoder, model, "mean", LINES, nt.Encoder.from_hf(path, "mean")(LINES))
    made = nt.Encoder(nt.models.from_hf(path), "mean", tokenizer=tokenizer())
    check(encoder, model, "mean", LINES, made(LINES))


def test_pairs_and_passes(runtime: nt.Runtime, folder: Any) -> None:
    """Kinds of tokens in pairs of texts; the same whether texts are computed together or one after the other."""
    path, model = folder("Bert", "Model")
    pairs = [*itertools.product(LINES[:3], LINES[:2])]
    results = []
    for tokens in (1, 30, 4096):
        encoder = nt.Encoder.from_hf(path, batch_tokens=tokens)
        results.append(encoder(pairs))
        check(encoder, model, "hidden", pairs, results[-1])
        assert all(np.array_equal(a, b) for a, b in zip(encoder.each(pairs), results[-1], strict=True))


def test_programs_are_kept(runtime: nt.Runtime, folder: Any) -> None:
    """None is built for other lengths; one for larger bins, once; fp64 has its own dtype."""
    encoder = nt.Encoder.from_hf(folder("Bert", "Model")[0], precision="fp64")
    rng = np.random.default_rng(1)

    def encode(lengths: list[int]) -> int:
        ids = [rng.integers(2, VOCAB, n).tolist() for n in lengths]
        assert [one.shape for one in encoder(ids)] == [(n, 16) for n in lengths]
        return int(encoder.programs)

    assert encoder.programs == 0
    assert encode([5, 30, 7]) == 1
    assert encode([1, 1]) == encode([40, 12]) == encode(list(range(1, 10))) == encode([33, 3]) == 1
    assert encode([40] * 6) == encode([40] * 5) == 2
    assert encode([3]) == encode([40]) == 3 - (nt.Runtime.current is not None and nt.Runtime.current.cpus == 1)
    assert encoder([[3]])[0].dtype == np.float64


def test_texts_that_are_too_long_are_cut_and_it_is_said_once(runtime: nt.Runtime, folder: Any) -> None:
    path, model = folder("Bert", "Model")
    encoder = nt.Encoder.from_hf(path, max_length=12)
    long = "tiles of tiles of tiles of tiles of tiles of tiles"
    with pytest.warns(UserWarning, match="than 12 tokens are cut at this limit; encoder.cut counts them") as warned:
        got = encoder([LINES[0], long])
    assert warned[0].filename == __file__, "the user's line"
    ids = tokenizer().encode(long).ids
    assert len(ids) > 12
    check(encoder, model, "hidden", [ids[:11] + ids[-1:]], got[1:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoder([long, long])
    assert encoder.cut == 3


def test_a_single_text_is_a_list_of_one(runtime: nt.Runtime, folder: Any) -> None:
    encoder = nt.Encoder.from_hf(folder("Bert", "Model")[0], "mean")
    for one in (LINES[0], tokenizer().encode(LINES[0]).ids):
        assert (encoder(one) == encoder([LINES[0]])).all() and encoder(one).shape[0] == 1


def test_refused(runtime: nt.Runtime, folder: Any, tmp_path: Path) -> None:
    path, _ = folder("Bert", "Model")
    encoder = nt.Encoder.from_hf(path)
    for texts, told in (
        (5, "texts: got 5; allowed: a list of texts"),
        ({"input_ids": [[3]]}, "texts: got .*; allowed: a list of texts"),
        ([[3], []], r"texts\[1\]: 0 tokens; allowed: 1 to 40"),
        ([[3], [4] * 41], r"texts\[1\]: 41 tokens; allowed: 1 to 40"),
        ([[3], [VOCAB]], r"texts\[1\]: token numbers from 90 to 90; allowed: 0 to 89"),
        ([[-1]], r"texts\[0\]: token numbers from -1"),
        ([[3], "text"], r"texts\[1\]: got 'text'; allowed: .* not both"),
        ([[0.5]], r"texts\[0\]: got \[0\.5\]; allowed"),
        (["a", "a\ud800"], r"texts\[1\]: half of a character \(a lone surrogate\); allowed: whole characters"),
        ([("a", "b"), ("a", "\ud800")], r"texts\[1\]: half of a character"),
    ):
        with pytest.raises(ValueError, match=told):
            encoder(texts)
    with pytest.raises(nt.ConfigError, match=r"model: got 'runs/first'; allowed: a model of nt\.models, or nt"):
        nt.Encoder("runs/first")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"output": "vectors"}, "output: got 'vectors'; allowed: hidden, mean, pooled, logits"),
        ({"output": "logits"}, "output: got 'logits'; allowed: hidden"),
        ({"batch_tokens": 0}, "batch_tokens: got 0; allowed: "),
        ({"max_length": 41}, "max_length: got 41; allowed: at most 40, the positions of the model"),
        ({"max_length": 2}, "max_length: got 2; allowed: more than 2, as the template has 2 tokens"),
        ({"tiles": {"seq": 4}}, r"tiles\.seq: got a size, but a bin is one tile; allowed: embed, heads, ffn, vocab"),
    ]
    short = nt.Encoder.from_hf(path, max_length=3)
    with pytest.warns(UserWarning, match="texts with more than 3 tokens"):
        assert [len(one) for one in short(["a tile", "step"])] == [3, 3]
    with pytest.raises(ValueError, match=r"texts\[1\]: a pair, whose template alone has 3 tokens; allowed: single te"):
        short(["a", ("a", "tile")])
    for options, told in wrong:
        with pytest.raises(nt.ConfigError, match=told):
            nt.Encoder.from_hf(path, **options)
    with pytest.raises(nt.ConfigError, match="output: DistilBERT has no 'pooled'; allowed: hidden, mean, logits"):
        nt.Encoder.from_hf(folder("DistilBert", "Model")[0], "pooled")
    with pytest.raises(nt.ConfigError, match=r"weight bert\.pooler\.dense\.weight is missing"):
        nt.Encoder.from_hf(folder("Bert", "ForMaskedLM")[0], "pooled")
    gpt2 = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8))
    with pytest.raises(nt.ConfigError, match="output: GPT2 has no 'pooled'; allowed: hidden, mean, logits"):
        nt.Encoder(gpt2, "pooled")
    assert nt.Encoder(gpt2, "logits")([[1, 2, 3]])[0].shape == (3, 20)
    with pytest.raises(nt.ConfigError, match=r"model\.positions: missing; how many tokens"):
        nt.Encoder(nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20)), "logits")
    with pytest.raises(nt.ConfigError, match="texts: there is no tokenizer"):
        nt.Encoder(gpt2, "logits")(["text"])
    with pytest.raises(nt.ConfigError, match=r"config\.json is missing"):
        nt.Encoder.from_hf(tmp_path)


# -- runtimes and the command: each starts its own


WITHOUT_A_RUNTIME = """
import sys, numpy as np, nntile_py as nt
path = sys.argv[1]
encoder = nt.Encoder.from_hf(path, "mean")
one = encoder(["a tile", "step"])
assert nt.Runtime.current is not None and (encoder(["a tile", "step"]) == one).all() and encoder.programs == 1
other = nt.Encoder.from_hf(path, "mean")
assert (other(["a tile", "step"]) == one).all()
with nt.Runtime(cpus=1) as mine:  # takes the place of the encoder's own
    assert np.allclose(encoder(["a tile", "step"]), one, atol=1e-6) and nt.Runtime.current is mine
assert nt.Runtime.current is None
with encoder:
    assert (encoder(["a tile", "step"]) == one).all()
assert nt.Runtime.current is None
print("done")
"""


def test_without_a_runtime(folder: Any, python: Any) -> None:
    done = python(WITHOUT_A_RUNTIME, folder("Bert", "Model")[0])
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@pytest.fixture
def nntile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """`nntile(arguments)` in a folder of its own: exit status, what it printed, its errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: Any) -> tuple[int, str, str]:
        return command.nntile(*arguments), *capsys.readouterr()

    return run


CODE = "import sys; from nntile_py.cli import main; sys.argv[0] = 'nntile'; main()"


def test_the_command(folder: Any, python: Any, tmp_path: Path) -> None:
    path, model = folder("Bert", "Model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (tmp_path / "texts.txt").write_text("\n".join(LINES) + "\n")
    (tmp_path / "texts.csv").write_text('number,body\n1,"a, ""tile"""\n2,"two\nlines"\n')
    for source, out, more in (
        ("texts.jsonl", "vectors.npy", []),
        ("texts.txt", "pooled.safetensors", ["--output", "pooled"]),
        ("texts.txt", "hidden.npz", ["--output", "hidden", "--batch-tokens", "40"]),
        ("texts.txt", "new/folder/vectors.npy", []),
        ("texts.csv", "cut.npy", ["--text", "body", "--max-length", "5"]),
    ):
        if "/" not in out:
            (tmp_path / f".{out}.0123456789abcdef.tmp").touch()  # of a process that was killed
        files = ["--input", tmp_path / source, "--out", tmp_path / out, "--cpus", 1]
        done = python(CODE, "encode", path, *files, *more)
        assert done.returncode == 0, done.stderr
        assert not done.stderr and "texts" in done.stdout and out in done.stdout  # without a terminal, there is no bar
    encoder = nt.Encoder.from_hf(path)
    vectors = np.load(tmp_path / "vectors.npy")
    assert vectors.shape == (len(LINES), 16)
    assert np.array_equal(np.load(tmp_path / "new" / "folder" / "vectors.npy"), vectors)
    shutil.rmtree(tmp_path / "new")
    check(encoder, model, "mean", LINES, vectors)
    check(encoder, model, "pooled", LINES, load_file(tmp_path / "pooled.safetensors")["pooled"])
    hidden = np.load(tmp_path / "hidden.npz")
    rows = [hidden["hidden"][a:b] for a, b in itertools.pairwise(hidden["offsets"])]
    check(encoder, model, "hidden", LINES, rows)
    assert np.load(tmp_path / "cut.npy").shape == (2, 16) and "2 texts, 2 of them cut at 5 tokens" in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["texts.jsonl", "texts.txt", "texts.csv", "vectors.npy", "pooled.safetensors", "hidden.npz", "cut.npy"]
    )


# What the file holds, its name, further arguments, and what the message must say.
WRONG: list[tuple[str, str, list[str], str]] = [
    ('{"text": "a"}\n\n{"text": \n', "x.jsonl", [], "--input: x.jsonl, line 3: broken JSON (Expecting value"),
    ('{"body": "a", "n": 1}\n', "x.jsonl", [], "line 1: no 'text'; it has 'body', 'n'; allowed: a table with"),
    ('{"text": 3}\n', "x.jsonl", [], "line 1: 'text' is 3; allowed: a text\n"),
    ("[1]\n", "x.jsonl", [], "line 1: holds [1]; allowed: one JSON object a line"),
    ("a,b\n1,2\n", "x.csv", [], "line 1: no column 'text'; there are 'a', 'b'; allowed: a table with 'text'"),
    ("a,b\n1,2\n1\n", "x.csv", ["--text", "a"], "x.csv, line 3: 1 field; allowed: 2, one for each column"),
    ('a,b\n1,"2\n', "x.csv", ["--text", "a"], "x.csv, line 2: unexpected end of data; allowed: fields with"),
    ("", "x.txt", [], "no texts in x.txt"),
    ("a", "x.doc", [], "--input: x.doc: not the name of a table; allowed: a table with 'text'"),
    ("a", "x.txt", ["--out", "x.pt"], "--out: got x.pt; allowed: a name that ends in .npy, .npz, .safetensors"),
    ("a", "x.txt", ["--out", "there.npy"], "--out: there.npy exists already; allowed: the name of a new file, or"),
    ("a", "x.txt", ["--out", "there.npy/in/x.npy"], "there.npy is a file; allowed: a file in a folder"),
    ("a", "x.txt", ["--output", "hidden"], "x.npy holds one array; allowed with --output hidden: .npz, .safetensors"),
    ("a", "x.txt", ["--output", "all"], "error: --output: got 'all'; allowed: "),
    ("a", "x.txt", ["--max-length", "41"], "error: --max-length: got 41; allowed: at most 40, the positions"),
    ("a", "x.txt", ["--cpus", "0"], "error: --cpus: got 0; allowed: "),
    (
        "a", "x.txt", ["--precision", "fp16"],
        "error: --precision: fp16 needs GPUs (--cuda); allowed on CPU workers: fp32",
    ),
]  # fmt: skip


def test_what_the_command_refuses(folder: Any, nntile: Any, tmp_path: Path) -> None:
    path, _ = folder("Bert", "Model")
    (tmp_path / "there.npy").write_bytes(b"kept")
    for content, name, more, told in WRONG:
        (tmp_path / name).write_text(content)
        status, _, said = nntile("encode", path, "--input", name, "--out", "x.npy", *more)
        assert status == 2 and told in said, (name, more, said)
        (tmp_path / name).unlink()
    status, _, said = nntile("encode", path, "--input", "gone.txt", "--out", "x.npy")
    assert status == 2 and "cannot read gone.txt: No such file" in said
    masked, _ = folder("Bert", "ForMaskedLM")
    (tmp_path / "x.txt").write_text("a")
    status, _, said = nntile("encode", masked, "--input", "x.txt", "--out", "x.npz", "--output", "pooled")
    told = "--output: pooled is not possible: model: weight bert.pooler.dense.weight is missing (in "
    assert status == 2 and told in said and "); allowed: hidden, mean, logits\n" in said, said
    bare = shutil.copytree(path, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json"))
    for name in ("mean", "logits"):
        status, _, said = nntile("encode", bare, "--input", "x.txt", "--out", "x.npy", "--output", name)
        assert status == 2 and said.startswith(f"error: {bare} has no tokenizer.json, which turns texts"), said
    (bare / "tokenizer.json").write_text("none")
    status, _, said = nntile("encode", bare, "--input", "x.txt", "--out", "x.npy")
    assert status == 2 and said.startswith(f"error: tokenizer: cannot read {bare / 'tokenizer.json'} ("), said
    shutil.rmtree(bare)
    (tmp_path / "x.txt").unlink()
    assert [p.name for p in tmp_path.iterdir()] == ["there.npy"] and (tmp_path / "there.npy").read_bytes() == b"kept"


def test_a_text_without_tokens(python: Any, tmp_path: Path) -> None:
    """GPT-2 adds no tokens to an empty text. The message names the file and the line."""
    sizes = {"vocab_size": VOCAB, "n_positions": POSITIONS, "n_embd": 16, "n_layer": 1, "n_head": 2}
    transformers.GPT2Model(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path / "model")
    words = Tokenizer.from_str(tokenizer().to_str())
    words.post_processor = None
    words.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "x.txt").write_text("a\n\nb")
    paths = (str(tmp_path / name) for name in ("model", "x.txt", "new/x.npy"))
    done = python(CODE, "encode", next(paths), "--input", next(paths), "--out", next(paths))
    assert done.returncode == 2 and done.stderr.endswith("x.txt, line 2: 0 tokens; allowed: 1 to 40\n"), done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "x.txt"]


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors"])
def test_a_full_disk_under_the_vectors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is reserved before the outputs are written; without room nothing is left."""

    def full(file: int, begin: int, size: int) -> None:
        assert begin == 0 and size >= 3 * 2**20
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    rows = iter([np.zeros(2**18, np.float32)] * 3)
    full_disk = pytest.raises(OSError, match=r"No space left on device: 3\.0 MiB needed")
    with full_disk as error, replaced(tmp_path / name) as file:
        encode_file._write(file, Path(name).suffix, "mean", rows, 3, False)
    assert error.value.filename == str(tmp_path / name) and not [*tmp_path.iterdir()]


def test_texts_of_files(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("\ufeffone\r\n\r\nthree".encode())
    assert [text for text, _ in placed_texts(tmp_path / "x.txt", "text")] == ["one", "", "three"]
    (tmp_path / "x.txt").write_bytes(b"one\n\xff\n")
    with pytest.raises(nt.ConfigError, match=r"x\.txt, line 2: not UTF-8"):
        placed_texts(tmp_path / "x.txt", "text")
    long = "x" * 200_000
    (tmp_path / "x.csv").write_text(f"text\n{long}\n")
    assert [text for text, _ in placed_texts(tmp_path / "x.csv", "text")] == [long]
