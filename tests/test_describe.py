"""What tells the keys of a YAML and the commands: init, config, the JSON schema, the pages of docs/reference."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
import pytest
import yaml
from command import nntile
from test_mpi import LACKS, OPEN_MPI

from nntile_py import cli
from nntile_py.config.describe import initial, meaning, schema
from nntile_py.config.run_config import load, of_model, resolve
from nntile_py.config.sections import SchedulerFile
from nntile_py.errors import ConfigError
from nntile_py.measure.commands import bench_app
from nntile_py.models.registry import known
from nntile_py.schema import keys, words
from nntile_py.yaml_text import parse

ROOT = Path(__file__).parents[1]
TEXT_MODELS = [name for name, cls in known().items() if cls.objective]
OWN = """
import nntile_py as nt
from nntile_py.models.model_config import TokenConfig
from nntile_py.schema import Count

class MineConfig(TokenConfig):
    type: str = "mine"
    embed: Count
    depth: Count = 2
    '''How deep it is.'''

class Mine(nt.Model):
    Config = MineConfig
    objective = "causal"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- init and config


@pytest.mark.few(4)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_init_writes_the_small_run_of_experiments(model: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert nntile("init", "--model", model, "--set", "train.steps=7") == 0
    assert f"nntile train {model}.yaml" in capsys.readouterr().out
    written, text = load(f"{model}.yaml"), Path(f"{model}.yaml").read_text()
    assert written == load(ROOT / "experiments" / f"{model}_tiny.yaml", ["train.steps=7"])
    for key, field in keys(of_model(type(written.model))):
        if not key.startswith(("runtime.disk.", "logging.wandb.", "model.lora.")):  # sections that may be absent
            assert f"{key.rpartition('.')[2]}:" in text and meaning(field)[:40] in text, key
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.few(4)
@pytest.mark.parametrize("model", TEXT_MODELS)
def test_what_is_commented_out_holds_all_the_same(model: str) -> None:
    text = initial("my.yaml", model, ["fusion=false", "scheduler=null"])
    active = yaml.safe_load(re.sub(r"^( *)#(?! |$)", r"\1", text, flags=re.M))
    assert active["optimizer"]["eps"] == 1e-8 and active["runtime"]["disk"] is None
    assert active["fusion"] == {**dict.fromkeys(active["fusion"], False), "exclude": []}
    assert resolve(active, (), "all keys") == resolve(yaml.safe_load(text), (), "as it is")


def test_init_does_not_overwrite(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("precious")
    assert nntile("init", "mine.yaml") == 2
    assert "mine.yaml exists" in capsys.readouterr().err
    assert Path("mine.yaml").read_text() == "precious"
    assert nntile("init", "x.yaml", "--model", "encoder") == 2
    assert f"allowed: {', '.join(TEXT_MODELS)}, my_file.py:MyModel" in capsys.readouterr().err
    assert nntile("init", "x.yaml", "--set", "tiles.embed=0") == 2
    assert "tiles.embed: got 0" in capsys.readouterr().err and not Path("x.yaml").exists()


def test_init_of_an_own_model(folder: Path) -> None:
    """The values of GPT-2's run as far as the model has them; its own keys are told as those of models/."""
    Path("mine.py").write_text(OWN)
    assert nntile("init", "--model", "mine.py:Mine", "--set", "model.embed=32") == 0
    model = load("mine.yaml").model
    assert (model.embed, model.depth, model.vocab) == (32, 2, 4096)
    assert "# How deep it is.\n  #depth: 2\n" in Path("mine.yaml").read_text()
    Path("mine.py").write_text(OWN.replace("depth: Count = 2", "depth: Count"))
    with pytest.raises(ConfigError, match=r"model.depth: not given, but required; allowed: an integer of at least 1"):
        initial("x.yaml", "mine.py:Mine")


def test_init_from_a_folder(folder: Path) -> None:
    """Sizes and tokenizer are the folder's."""
    from nntile_py.data.tokenization import train_tokenizer

    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 200, "vocab_size": 260}
    Path("saved").mkdir()
    Path("saved/config.json").write_text(json.dumps(shape | {"n_inner": None, "activation_function": "gelu_new"}))
    Path("saved/model.safetensors").write_bytes(b"")
    train_tokenizer(["some text"], 260).save("saved/tokenizer.json")
    Path("x.yaml").write_text(initial("x.yaml", "gpt2", ["model.from=saved"]))
    assert "  from: " in Path("x.yaml").read_text() and "  #layers: 1" in Path("x.yaml").read_text()
    config = load("x.yaml")
    assert (config.model.embed, config.tokenizer.size()) == (8, 260)


def test_init_with_a_text(folder: Path) -> None:
    """The sample begins a document, not a function in Python."""
    Path("long.txt").write_text("some prose " * 100)
    for sets, prompt in {("data.source=long.txt",): "", ("data.source=long.txt", "sample.prompt=Once"): "Once"}.items():
        text = initial("x.yaml", "gpt2", sets)
        Path("x.yaml").write_text(text)
        assert "__init__" not in text.replace("`def __init__(self`", "") and load("x.yaml").sample.prompt == prompt
    assert "  prompt: def __init__(self\n" in initial("x.yaml", "gpt2")


def test_config_prints_what_loads_to_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["fusion=false", "optimizer.lr=3e-3"]
    assert nntile("config", ROOT / "experiments/gpt2_tiny.yaml", "--set", sets[0], "--set", sets[1]) == 0
    Path("resolved.yaml").write_text(capsys.readouterr().out)
    assert load("resolved.yaml") == load(ROOT / "experiments" / "gpt2_tiny.yaml", sets)
    for wrong in ([], ["x.yaml", "--schema"], ["x.yaml", "--model", "gpt2"]):
        assert nntile("config", *wrong) == 2
        assert "allowed: CONFIG, or --schema" in capsys.readouterr().err


# -- the JSON schema


@functools.cache
def validator(*model: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft7Validator.check_schema(schema(*model))
    return jsonschema.Draft7Validator(schema(*model))


def valid(value: Any, *model: str) -> bool:
    return bool(validator(*model).is_valid(value))


RUNS = [*sorted(ROOT.glob("experiments/*_tiny.yaml")), *sorted(ROOT.glob("experiments/*_[1-9]*.yaml"))]


@pytest.mark.few(4)
@pytest.mark.parametrize("path", RUNS, ids=[path.stem for path in RUNS])
def test_the_schema_takes_what_is_right(path: Path) -> None:
    tree = parse(path.read_text(), "the run")
    kind = tree["model"]["type"]
    for model in ((), (kind,)):
        assert valid(tree, *model)
        assert valid(yaml.safe_load(initial("x", kind)), *model)
        assert valid(json.loads(load(path).model_dump_json(by_alias=True)), *model)
        assert valid({"model": {"from": "saved"}, "train": {"steps": 1, "batch": 1, "seq": 2}}, *model)


WRONG: list[tuple[str, Any]] = [
    ("tile", {}), ("tiles", {"embd": 3}), ("tiles", {"embed": 0}), ("tiles", 3), ("fusion", 3), ("fusion", {"bias": 1}),
    ("model", {"type": "gpt2"}), ("model", {"layers": 1, "embed": 8, "heads": 2, "attention": "fast"}),
    ("runtime", {"memory": "20 parsecs?"}), ("runtime", {"scheduler": "lsw"}), ("runtime", {"cpus": "some"}),
    ("optimizer", {"betas": [0.9]}), ("optimizer", {"betas": [0.9, 1.0]}), ("optimizer", {"decay": "some"}),
    ("precision", "fp8"), ("train", {"batch": 1, "seq": 2}), ("data", {"val_fraction": 0.6}), ("accumulate", "all"),
]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize(("key", "value"), WRONG, ids=[f"{k}={v}" for k, v in WRONG])
def test_the_schema_refuses_what_load_refuses(key: str, value: Any, tmp_path: Path) -> None:
    right = {"model": {"layers": 1, "embed": 8, "heads": 2}, "train": {"steps": 1, "batch": 1, "seq": 2}}
    assert valid(right) and not valid(right | {key: value})
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(right | {key: value}))
    with pytest.raises(ConfigError, match=key):
        load(tmp_path / "x.yaml")


def test_the_schema_of_an_own_model(folder: Path) -> None:
    Path("mine.py").write_text(OWN)
    made = schema("mine.py:Mine")["properties"]["model"]
    assert made["properties"]["depth"] == {"description": "How deep it is.", "default": 2} | {
        "type": "integer", "minimum": 1
    }  # fmt: skip
    tree = {"model": {"type": "mine.py:Mine", "embed": 8}, "train": {"steps": 1, "batch": 1, "seq": 2}}
    assert valid(tree, "mine.py:Mine") and valid(tree)


# -- the pages and the help


def test_every_key_has_a_meaning_and_says_what_it_may_hold() -> None:
    for cls in (SchedulerFile, *(of_model(model.Config) for model in known().values())):
        for key, field in keys(cls):
            assert meaning(field).endswith("."), key
            assert "<class" not in words(field) and "typing" not in words(field), key


def test_the_pages_are_those_that_the_script_writes(tmp_path: Path) -> None:
    forks.run([sys.executable, ROOT / "scripts" / "reference.py", tmp_path], check=True)
    for path in tmp_path.iterdir():
        committed = ROOT / "docs" / "reference" / path.name
        assert committed.read_text() == path.read_text(), f"{path.name} is old: run scripts/reference.py"


EXAMPLES = [
    (f"{prefix} {command.name or command.callback.__name__}", str(command.epilog).removeprefix("Example: "))
    for app, prefix in ((cli.app, "nntile"), (bench_app, "nntile bench"))
    for command in app.registered_commands
    if command.callback
]
LM_TASK = """
{task: my_task, dataset_path: json, dataset_kwargs: {data_files: {test: rows.jsonl}}, test_split: test,
 output_type: loglikelihood_rolling, doc_to_text: "", doc_to_target: "{{text}}", metric_list: [{metric: bits_per_byte}]}
"""
SMALL = "--set model.layers=1 --set train.seq=16 --set train.batch=4"
SHORTER = {  # what the examples take too long for here
    "nntile data": "--max-bytes 300kB --vocab-size 300",
    "nntile train": f"{SMALL} --set train.steps=2 --set train.eval_batches=1 --set data.source=my.txt "
    "--set tokenizer.vocab_size=300 --set sample.tokens=0",
    "nntile profile": SMALL,
    "nntile eval": "--stride 8",
    "nntile sweep": f"{SMALL} --set model.embed=16 --set model.heads=2 --budget 1",
    "nntile bench": "--count 100 --repeats 1",
    "nntile bench tasks": "--count 100 --repeats 1",
    "nntile bench metg": "--seconds 0.001 --repeats 1",
    "nntile bench messages": "--seconds 0 --repeats 1",
    "nntile bench step": f"{SMALL} --rounds 1 --peer torch_eager",
    "nntile layouts": "--own --repeats 1 --set model.embed=16 --set model.heads=2 --set train.batch=3 "
    "--set train.seq=8 --set model.layers=1 --set fusion.found=false",
}


# These measure or start ranks, and tests of their own run them.
LONG = ("nntile bench messages", "nntile bench step", "nntile sweep")


@pytest.mark.parametrize(
    ("command", "example"),
    [pytest.param(*one, id=one[0], marks=[pytest.mark.long] * (one[0] in LONG)) for one in EXAMPLES],
)
def test_the_help_ends_with_an_example_that_works(command: str, example: str, tmp_path: Path) -> None:
    ranks, *_ = example.partition(command)
    assert not ranks or ranks.startswith("mpirun")
    helped = in_shell(f"{command} --help", tmp_path)
    assert helped.returncode == 0 and " ".join(helped.stdout.split()).endswith(
        f"Example: {example}" if command != "nntile bench" else "Example: nntile bench tasks"
    )
    if "--cuda 1" in example:
        pytest.skip("needs a GPU")
    if ranks and LACKS:
        pytest.skip(f"no {', no '.join(LACKS)}")
    (tmp_path / "my.txt").write_text("Some words of my own, again and again.\n" * 200)
    (tmp_path / "my.yaml").write_text("" if command == "nntile init" else initial("my.yaml", "gpt2"))
    if command == "nntile init":
        (tmp_path / "my.yaml").unlink()
    if command == "nntile serve":
        pytest.skip("ends by a signal only: tests/test_serve.py runs it")
    if command == "nntile lm-eval":
        pytest.importorskip("lm_eval")
        (tmp_path / "my_task.yaml").write_text(LM_TASK)
        (tmp_path / "rows.jsonl").write_text('{"text": "Some words of my own"}\n')
    if command in ("nntile eval", "nntile lm-eval", "nntile compare", "nntile report"):
        for name in ("my_run", "my_run-2")[: 1 + (command == "nntile compare")]:
            trained = in_shell(f"nntile train my.yaml --out runs/{name} {SHORTER['nntile train']}", tmp_path)
            assert trained.returncode == 0, trained.stderr
    if command == "nntile merge":
        made = in_shell(f"nntile train my.yaml --out my_base {SHORTER['nntile train']}", tmp_path)
        more = "--set model.from=my_base --set model.lora.targets=[c_attn] --set tokenizer={}"
        tuned = in_shell(f"nntile train my.yaml --out runs/my_run {SHORTER['nntile train']} {more}", tmp_path)
        assert made.returncode == 0 and tuned.returncode == 0, made.stderr + tuned.stderr
    if command == "nntile encode":
        (tmp_path / "my.yaml").write_text(initial("my.yaml", "bert"))
        (tmp_path / "texts.jsonl").write_text('{"text": "Some words"}\n')
        trained = in_shell(f"nntile train my.yaml --out my_bert {SHORTER['nntile train']}", tmp_path)
        assert trained.returncode == 0, trained.stderr
    if command == "nntile generate":
        trained = in_shell(f"nntile train my.yaml --out runs/my_run {SHORTER['nntile train']}", tmp_path)
        assert trained.returncode == 0, trained.stderr
        example += " --max-tokens 3"
    done = in_shell(f"{example} {SHORTER.get(command, '')}", tmp_path)
    assert done.returncode == 0, done.stderr


def in_shell(command: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.argv[0] = 'nntile'; from nntile_py.cli import main; main()"
    before, _, after = f" {command} ".partition(" nntile ")
    return (subprocess if before else forks).run(
        [*before.split(), sys.executable, "-c", code, *after.split()], cwd=folder, capture_output=True, text=True,
        check=False, timeout=250, env=os.environ | OPEN_MPI | {"COLUMNS": "200"} | env,
    )  # fmt: skip


def test_a_shell_completes_commands_and_keys(tmp_path: Path) -> None:
    def complete(words: str) -> list[str]:
        number = str(words.count(" "))
        made = in_shell("nntile", tmp_path, _NNTILE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=number)
        return made.stdout.split()

    assert complete("nntile tr") == ["train"]
    assert {"init", "config", "bench"} <= {*complete("nntile ")}
    assert complete("nntile plan x.yaml --set tiles.e") == ["tiles.embed="]
