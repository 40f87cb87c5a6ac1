"""Files and values that are wrong: one message that names the file or key, and nothing that never ends."""

import json
import sys
from pathlib import Path
from typing import Any

import command
import forks
import pytest
import yaml

import nntile_py as nt
from nntile_py.config.run_config import load
from nntile_py.data.tokenizer import load_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import arrays, tensors_of, translated
from nntile_py.tiles import Tiling
from nntile_py.yaml_text import parse

CONFIG = nt.models.GPT2Config(layers=1, embed=8, heads=2, vocab=20, positions=8)


@pytest.mark.parametrize("dtype", ["complex64", "int8", "bool", "object"])
def test_weights_that_are_no_floating_point_numbers(dtype: str) -> None:
    weights = {name: value.astype(dtype) for name, value in nt.models.GPT2(CONFIG).weights.items()}
    with nt.Runtime(cpus=1), pytest.raises(ConfigError, match=rf"weight \S+ is {dtype}; allowed: float16, float32"):
        nt.Trainer(nt.models.GPT2(CONFIG, weights), 2, 8)


def test_weights_of_a_file_that_are_no_numbers() -> None:
    import torch

    with pytest.raises(ConfigError, match="weight b has values that are not finite in float32"):
        arrays({"a": torch.ones(2), "b": torch.tensor([1.0, float("nan")])})
    with pytest.raises(ConfigError, match="weight b has values that are not finite in float32"):
        arrays({"a": torch.ones(2), "b": torch.tensor([1e300], dtype=torch.float64)})
    with pytest.raises(ConfigError, match="weight a has no values, since it is on the device meta"):
        arrays({"a": torch.ones(2, device="meta")})
    with pytest.raises(ConfigError, match="weight a is float8_e4m3fn; allowed: float16"):
        arrays({"a": torch.ones(2).to(torch.float8_e4m3fn)})


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "", "..", ".", 3, None, "a/b"])
def test_an_index_may_not_leave_its_folder(name: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="allowed: files in its own folder"):
        tensors_of(tmp_path)


def test_a_weight_under_two_names() -> None:
    """A LayerNorm of 2018 and one of today in one file: equal weights are one, others are refused by name."""
    import torch

    two = {"x.LayerNorm.weight": torch.ones(2), "x.LayerNorm.gamma": torch.ones(2)}
    assert [*translated(two, ["x.LayerNorm.weight"], "", {})] == ["x.LayerNorm.weight"]
    for names in (two, dict(reversed(two.items()))):
        differing = {name: torch.full((2,), float(number)) for number, name in enumerate(names)}
        with pytest.raises(ConfigError, match=r"has x\.LayerNorm\.weight also under another name .* one of them"):
            translated(differing, ["x.LayerNorm.weight"], "", {})


def test_class_names_that_do_not_fit_the_number_of_classes() -> None:
    raw = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}
    read = nt.models.BERT.read_head
    assert read(raw)["classes"] == read(raw | {"num_labels": 2})["classes"] == 2 and read(raw)["labels"] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"num_labels is 3, but id2label has 2 classes .* allowed: equal numbers"):
        read(raw | {"num_labels": 3})
    assert read(raw | {"num_labels": 3, "architectures": ["BertModel"]})  # which has no classes


INDICES = ['{"weight_map": []}', "[]", "{", '{"weight_map": {"a": "not_there.safetensors"}}', "\x00"]
TOKENIZERS = ["", "{}", "[]", "null", '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": 3}']
TEXTS = ["!!timestamp x", "!!int ''", "!!binary 3", "!!float []", "a: !!set 3", "&a [*a", "{a: *b}"]


@pytest.mark.parametrize("text", INDICES)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match="model: "):
        tensors_of(tmp_path)


@pytest.mark.parametrize("text", TOKENIZERS)
def test_a_tokenizer_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=r"tokenizer.path: cannot read"):
        load_tokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", TEXTS)
def test_yaml_that_its_library_stumbles_over(text: str) -> None:
    with pytest.raises(ConfigError, match="here"):
        parse(text, "here")


HUGE = {
    "model.embed=1000000000": "model.heads: got 7; allowed: a divisor of model.embed = 1000000000: 1, 2, 4, 5",
    f"model.embed={10**30}": "and less than 2^63",
    f"tokenizer.vocab_size={10**30}": "tokenizer.vocab_size",
    "tokenizer.vocab_size=1e30": "tokenizer.vocab_size",
    f"train.batch={10**18}": "train.batch: got 1000000000000000000; allowed: an integer from 1 to 2147483647",
    f"train.batch={10**9}": "tiles.batch",
    f"train.seq={10**9}": "train.seq",
}


@pytest.mark.parametrize("item", HUGE)
def test_sizes_that_no_machine_has(item: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({
        "model": {"layers": 1, "embed": 14, "heads": 7}, "train": {"batch": 4, "seq": 8, "steps": 1},
        "tiles": {"batch": 1, "seq": 4},
    }))  # fmt: skip
    code = "import sys; sys.argv[0] = 'nntile'; from nntile_py.cli import main; main()"
    arguments = [sys.executable, "-c", code, "plan", str(tmp_path / "run.yaml"), "--set", item]
    done = forks.run(arguments, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2 and HUGE[item] in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_tiles_without_end() -> None:
    with pytest.raises(ConfigError, match=r"tiles.embed: 10,000,000 tiles of 10,000,000 elements; allowed: at most"):
        Tiling({"embed": 1}).parts("embed", 10**7)


def test_functions_that_do_not_run_when_they_are_called() -> None:
    async def later(x: Any) -> None: ...

    def one_by_one(x: Any) -> Any:
        yield x

    for function in (later, one_by_one):
        with pytest.raises(TypeError, match="got an async function or a generator; allowed: a plain function"):
            nt.task(x="R")(function)


def test_a_path_that_is_too_long(tmp_path: Path) -> None:
    model, train = {"layers": 1, "embed": 8, "heads": 2}, {"batch": 1, "seq": 8, "steps": 1}
    tree = {"model": model, "data": {"source": "x" * 5000}, "train": train}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"data\.source"):
        load(tmp_path / "run.yaml")


NO_KEYS, TYPE = "--set: the command takes no keys of a config; allowed:", "--set model.type=FILE.py:CLASS"
OTHER_KEYS = NO_KEYS.replace("no keys", "no other keys")
USAGE = {  # what is typed, and the message
    "eval r --data t --batch 0": "--batch: got 0; allowed: an integer of at least 1\nsee: nntile eval --help",
    "serve r --port 70000": "--port: got 70000; allowed: an integer from 0 to 65535",
    "serve r --timeout x": "--timeout: got x; allowed: a number of at least 0.1",
    "bench tasks --count x": "--count: got x; allowed: an integer of at least 1\nsee: nntile bench tasks --help",
    "eval --data t": "RUN: missing",
    "eval r": "--data: missing",
    "eval r --data": "--data: missing; allowed: --data VALUE\nsee: nntile eval --help",
    "eval --nothing": "No such option: --nothing",
    "generate r --set tiles.ffn=8": f"{OTHER_KEYS} {TYPE}, --seed, --batch, --cache, --tiles, --cpus, --cuda,",
    "serve r --set a=b": f"{OTHER_KEYS} {TYPE}, --batch, --max-length, --cache, --cpus, --cuda,",
    "config --model": "--model: missing; allowed: --model VALUE",
    "generate r def": "got the extra argument def; allowed: FOLDER, options. Example: nntile generate runs/my_run",
    "doctor x": "got the extra argument x; allowed: options. Example: nntile doctor --json\nsee: nntile doctor --help",
    "evl": "No such command 'evl'.",
    "eval _ --data t": "RUN: got an empty text; allowed: a text that is not empty",
    "eval r _ --data t": "RUN: got an empty text",
    "eval r --data _": "--data: got an empty text; allowed: a path that is not empty",
    "generate _": "FOLDER: got an empty text; allowed: a path that is not empty",
    "compare r _": "RUN: got an empty text",
    "train _": "CONFIG: got an empty text",
    "train my.yaml --out=": "--out: got an empty text",
    "bench capacity --out _": "--out: got an empty text",
}  # fmt: skip


@pytest.mark.parametrize("typed", USAGE)
def test_usage_errors_have_the_form_of_other_errors(typed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.nntile(*("" if word == "_" else word for word in typed.split())) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith(f"error: {USAGE[typed]}") and len(error.splitlines()) == 2


def test_options_with_a_text_may_be_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.nntile("generate", "nowhere", "--prompt", "", "--system", "", "--stop", "") == 2
    assert "empty text" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(), ("--help",), ("bench",), ("bench", "--help")])
def test_help_lists_commands_with_their_whole_first_sentence(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert command.nntile(*arguments) == (0 if "--help" in arguments else 2)
    help_lines = "".join(capsys.readouterr()).splitlines()
    assert "Commands:" in help_lines and not any(line.endswith("...") for line in help_lines[1:])
    assert max(map(len, help_lines)) <= 80
