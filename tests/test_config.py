"""The YAML of a run: what it resolves to, and the one message that each mistake gives."""

import json
import re
import subprocess
import sys
from pathlib import Path

import forks
import pytest
import yaml

from nntile_py import _core, cli
from nntile_py.config.run_config import load
from nntile_py.config.scheduler_file import load_scheduler
from nntile_py.errors import ConfigError
from nntile_py.runs import run_folder

TINY = Path(__file__).parents[1] / "experiments" / "gpt2_tiny.yaml"
SMALL = {"model": {"layers": 1, "embed": 12, "heads": 2}, "train": {"steps": 3, "batch": 2, "seq": 8}}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What `nntile ARGUMENTS` says on stderr, having ended with status 2."""
    monkeypatch.setattr(sys, "argv", ["nntile", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    text = capsys.readouterr().err
    assert end.value.code == 2, text
    assert "Traceback" not in text
    return text


# --set arguments, the key that the message must name, and what it must say is allowed.
MISTAKES = [
    ("tile.embed=96", "tile", "did you mean tiles?"),
    ("tiles.embd=96", "tiles.embd", "did you mean embed? allowed: batch, seq, embed, heads, ffn, vocab"),
    ("model.frm=x", "model.frm", "did you mean from?"),
    ("train.lr=1", "train.lr", "did you mean optimizer.lr? allowed: steps, batch"),
    ("lr=1", "lr", "did you mean optimizer.lr?"),
    ("model.tokens=1", "model.tokens", "did you mean sample.tokens?"),
    ("model.seq=8", "model.seq", "did you mean train.seq or tiles.seq?"),
    ("train.layers=8", "train.layers", "did you mean model.layers?"),
    ("train.seed=8", "train.seed", "did you mean seed?"),
    ("optimizer.warmup_step=8", "optimizer.warmup_step", "did you mean warmup_steps?"),
    ("train.warmup_step=8", "train.warmup_step", "did you mean optimizer.warmup_steps?"),
    ("optimizer.decay=some", "optimizer.decay", "'all' or 'matrices'"),
    ("optimiser.lr=1", "optimiser", "did you mean optimizer?"),
    ("tiles.embed=0", "tiles.embed", "an integer of at least 1"),
    ("tiles.seq=-3", "tiles.seq", "an integer of at least 1"),
    ("tiles.seq=2.5", "tiles.seq", "an integer of at least 1"),
    ("tiles=4", "tiles", "a section with batch, seq, embed"),
    ("tiles=all", "tiles", "a section with batch, seq, embed"),
    ("model.heads=5", "model.heads", "a divisor of model.embed = 12: 1, 2, 3, 4, 6, 12"),
    ("model.positions=7", "train.seq", "at most model.positions = 7"),
    ("model.vocab=100", "model.vocab", "at least the tokenizer's size, 4096"),
    ("model.activation=swish", "model.activation", "'relu', 'gelu', 'gelu_new', 'tanh', 'silu', 'quick_gelu'"),
    ("model.attention=fused", "model.attention", "'flash', 'naive', 'segments', 'varlen' or 'cudnn'"),
    ("model.dropout=1", "model.dropout", "below 1"),
    ("model.from=/no/such/folder", "model.from", "save_pretrained"),
    ("model.tie_embeddings='yes'", "model.tie_embeddings", "true or false"),
    ("model.layers=null", "model.layers", "an integer from 1 to 1000"),
    ("train=null", "train.steps", "required; allowed: an integer of at least 1"),
    ("train.steps=true", "train.steps", "an integer of at least 1"),
    ("train.steps='10'", "train.steps", "an integer of at least 1"),
    ("train.seq=1", "train.seq", "an integer from 2 to 16777216"),
    ("data.source=/no/such/file", "data.source", "'python-stdlib' or a path that exists"),
    ("data.val_fraction=0.9", "data.val_fraction", "at most 0.5"),
    ("data.max_bytes=3 parsecs", "data.max_bytes", "20GiB"),
    ("tokenizer.vocab_size=256", "tokenizer.vocab_size", "at least 257"),
    ("tokenizer.path=/no/such/file", "tokenizer.path", "a path that exists"),
    ("optimizer.lr=fast", "optimizer.lr", "a number of at least 0"),
    ("optimizer.lr=.nan", "optimizer.lr", "a number of at least 0"),
    ("optimizer.betas=[0.9]", "optimizer.betas", "two numbers"),
    ("optimizer.betas=[0.9, 1.0]", "optimizer.betas", "below 1"),
    ("optimizer.name=adam", "optimizer.name", "'adamw' or 'lion' or 'muon' or 'sgd'"),
    ("optimizer.min_lr=1", "optimizer.min_lr", "at most optimizer.lr = 0.001"),
    ("optimizer.momentum=0.9", "optimizer.momentum", "0.95 or 0.0 unless optimizer.name is muon or sgd"),
    ("optimizer.adamw_lr=0.1", "optimizer.adamw_lr", "null unless optimizer.name is muon"),
    ("optimizer.clip_grad_norm=0", "optimizer.clip_grad_norm", "a number above 0"),
    ("precision=fp4", "precision", "fp32 (CPU and CUDA workers), fp64 (CPU workers)"),
    ("precision=bf16", "precision", "allowed on CPU workers: fp32, fp64"),
    ("precision=fp16", "precision", "allowed on CPU workers: fp32, fp64"),
    ("train.loss_scale=0", "train.loss_scale", "a number of at least 1"),
    ("accumulate=chian", "accumulate", "'chain', 'commute', 'redux' or 'tree'"),
    ("fusion.bias=3", "fusion.bias", "true or false"),
    ("fusion.found=3", "fusion.found", "true or false"),
    ("fusion.exclude=softmax", "fusion.exclude", "a list of names"),
    ("fusion.exclude=[1]", "fusion.exclude", "a list of names"),
    ("fusion.gelu=true", "fusion.gelu", "bias, activation, reshape, qkv, residual_norm"),
    ("scheduler=nope", "scheduler", "cpu_dmdas"),
    ("scheduler=no/such.yaml", "scheduler", "the path of a YAML file"),
    ("scheduler=3", "scheduler", "a name in scheduler_configs/"),
    ("runtime.scheduler=lsw", "runtime.scheduler", "lws"),
    ("runtime.cpus=some", "runtime.cpus", "or 'all'"),
    ("runtime.cpus=0", "runtime.cpus", "at least 1"),
    ("runtime.memory=20Gib/s", "runtime.memory", "20GiB"),
    ("runtime.memory=1000000.5", "runtime.memory", "a number of bytes"),
    ("runtime.memory=10", "runtime.memory: got 10", "such as '500MB' or '20GiB', of at least 1 MiB"),
    ("runtime.cuda_memory=10KB", "runtime.cuda_memory: got '10KB'", "of at least 1 MiB"),
    ("runtime.disk={path: /, size: 1GiB}", "runtime.disk: got a disk", "only with runtime.memory"),
    ("runtime.disk.path=/no/such", "runtime.disk.path", "a path that exists"),
    ("runtime.disk={path: /, size: 15MiB}", "runtime.disk.size: got '15MiB'", "of at least 16 MiB"),
    ("runtime.disk={path: /}", "runtime.disk.size", "20GiB"),
    ("runtime.disk={path: /, size: 1GiB, kinds: optimizer}", "runtime.disk.kinds", "'weights', 'gradients' or"),
    ('runtime.disk={path: "a\\0b", size: 1GiB}', "runtime.disk.path", "a path that exists"),
    ("tiles=5", "tiles", "'auto', or a section with batch, seq"),
    ("fusion=5", "fusion", "a section with bias, "),
    ("seed=-1", "seed", "an integer of at least 0"),
    ("sample.top_k=0", "sample.top_k", "an integer of at least 1"),
    ("out=3", "out", "a text"),
    ("model.layers.deep=3", "model.layers.deep", "not a section"),
    ("tiles.embed", "tiles.embed", "key=value"),
    ("tiles..embed=1", "tiles..embed", "key=value"),
    ("tiles.embed=[1", "tiles.embed", "YAML"),
]


HEAD = "model:\n  type: gpt2\n  layers: 2\n"
NO_SPACE = {  # a YAML with a key without a space after its colon: where the message says that this key is
    HEAD.replace("layers: 2", "layers:2"): ", line 3: got layers:2",
    f"{HEAD}  heads:4\n  embed: 8\n": ", line 4: got heads:4",
    f"{HEAD}  embed: 8\n  heads:4\n\n  # wide\n  ffn: 9\n": ", line 5: got heads:4",
    f"{HEAD}train:\n  # short\n\n  steps:4\n  batch: 2\n": ", line 7: got steps:4",
    "model:\n  layers:2\ntrain: {steps: 4}\n": ", line 2: got layers:2",
    "model:\n  layers:2\n  heads:4\n": ", line 2: got layers:2",
    "model: {layers:2, heads: 4}\n": ", line 1: got layers:2",
    "model: {heads: 4, layers:2}\n": ", line 1: got layers:2",
    f"{HEAD}tiles:{{}}\n": ", line 4: got tiles:{}",
    f"{HEAD}seed:4\n": ", line 4: got seed:4",
    "seed:4\n": ": got seed:4",
}


@pytest.mark.parametrize("text", NO_SPACE, ids=range(len(NO_SPACE)))
def test_a_colon_needs_a_space(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    got = f"{path}{NO_SPACE[text]}"
    need = got.rpartition("got ")[2].replace(":", ": ")
    with pytest.raises(ConfigError, match=f"^{re.escape(got)}, with no space after the colon; allowed: {need}$"):
        load(path)


def test_texts_with_a_colon_are_no_keys(small: Path) -> None:
    prompts = "{prompt: a:b}", '{prompt: "key:value"}', "{prompt: http://a}", "{prompt: 'a:\n\n  b:c'}", "a:b"
    for text in prompts[:-1]:
        assert load(small, [f"sample={text}"]).sample.prompt
    assert load(small, ["sample.prompt=a:b"]).sample.prompt == "a:b"


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n"])
def test_an_empty_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml: is empty; allowed: a mapping of model, data"):
        load(tmp_path / "x.yaml")


@pytest.mark.parametrize(("override", "key", "allowed"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_ends_with_status_2_naming_the_key(
    override: str,
    key: str,
    allowed: str,
    small: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = message(capsys, monkeypatch, "train", str(small), "--set", override)
    assert text.startswith("error: ")
    assert key in text
    assert allowed in text


def test_fp64_is_for_cpu_workers(small: Path) -> None:
    """Kernels for GPUs compute in fp32."""
    with pytest.raises(ConfigError, match="allowed on CUDA workers: fp32, bf16, fp16, tf32"):
        load(small, ["precision=fp64", "runtime.cuda=1"])


# The text of the file, and what the message must hold.
FILES = [
    ("model: {layers: 1", ["line 1", "allowed: YAML"]),
    ("train:\n\tsteps: 3", ["line 2"]),
    ("seed: 1\nseed: 2\n", ["line 2", "'seed' is given twice; allowed: once\n"]),
    ("- 1\n- 2\n", ["a mapping of model, data"]),
    ("", ["is empty", "a mapping of model"]),
    ("a: *b", ["line 1", "undefined alias", 'allowed: a text that begins with * in quotes: "*b"']),
    ("freeze: [*.wte.*]", ["line 1", "'.'; allowed: a text that begins with * in quotes: \"*.wte.*\""]),
    ("freeze:\n- *.h.[01].*", ["line 2", '; allowed: a text that begins with * in quotes: "*.h.[01].*"']),
    ("3: 4", ["3", "unknown key"]),
    ("seed: 0", ["model: not given, but required", "type", "train: not given, but required", "steps"]),
    ("seed: \x00", ["allowed: YAML"]),
    ('seed: {a: "x\\ny"}', ['seed: got {a: "x\\ny"}; allowed: an integer']),  # on one line
    (f"seed: {'[' * 350}{']' * 350}", ["seed: got [[[[", "; allowed: an integer"]),  # too many levels for PyYAML
    ("config: a.yaml\ngrid: {seed: [1]}", ["is the file of a sweep; allowed: the config of a run, such as a.yaml; "]),
]


@pytest.mark.parametrize(("content", "parts"), FILES, ids=[f"{c!r:.60}" for c, _ in FILES])
def test_a_bad_file_is_explained(
    content: str, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    text = message(capsys, monkeypatch, "train", str(path))
    assert [p for p in ["bad.yaml", *parts] if p not in text] == []


def test_a_file_that_is_not_there_or_not_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no such file: nowhere.yaml" in message(capsys, monkeypatch, "plan", "nowhere.yaml")
    assert "is a folder" in message(capsys, monkeypatch, "plan", str(tmp_path))
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe")
    assert "UTF-8" in message(capsys, monkeypatch, "plan", str(tmp_path / "x.yaml"))


def test_all_mistakes_are_told_at_once(small: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load(small, ["tiles.embed=0", "train.stepz=3", "precision=fp4"])
    assert all(key in str(error.value) for key in ("tiles.embed", "train.stepz", "precision"))


def test_the_command_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "nntile_py.cli", "train", str(TINY), "--set", "tiles.embed=0"]
    done = forks.run(command, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {TINY}: tiles.embed: got 0; allowed: an integer of at least 1\n"
    assert list(tmp_path.iterdir()) == []


LARGE = ("transformers", "scipy", "matplotlib")
HEAVY = ("torch", "nntile_py._core", "tokenizers", "safetensors", *LARGE)
TRAIN = ["train", str(TINY), "--set", "train.steps=1", "--set", "data.max_bytes=200000"]


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (["--help"], (*HEAVY, "numpy", "pydantic", "yaml")),
        (["plan", str(TINY)], HEAVY),
        (TRAIN, LARGE if _core.has_cuda else ("torch", *LARGE)),  # with CUDA torch brings the libraries
    ],
    ids=["help", "plan", "train"],
)
def test_a_command_imports_only_what_it_needs(arguments: list[str], unwanted: tuple[str, ...], tmp_path: Path) -> None:
    told = "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr))"
    code = f"{told}; from nntile_py import cli; cli.main()"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout and "nntile_py.cli" in done.stderr.split()
    assert not {*unwanted} & {*done.stderr.split()}


def test_defaults_are_filled_in(small: Path) -> None:
    config = load(small)
    assert (config.model.ffn, config.model.positions, config.model.vocab) == (48, 8, 4096)
    assert config.tiles == "auto" and config.tile_sizes == {}
    assert config.fusion.model_dump() == {**dict.fromkeys(type(config.fusion).model_fields, True), "exclude": ()}
    assert (config.accumulate, config.precision, config.runtime.cuda) == ("chain", "fp32", 0)
    assert config.optimizer.min_lr is None  # a tenth of lr, also of another lr with which the run goes on


@pytest.mark.parametrize("overrides", [[], ["fusion=false", "scheduler=cpu_dmdas", "tokenizer.vocab_size=500"]])
@pytest.mark.parametrize("path", [TINY, None])
def test_the_resolved_config_loads_to_the_same(
    path: Path | None, overrides: list[str], small: Path, tmp_path: Path
) -> None:
    config = load(path or small, overrides)
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "resolved.yaml") == config


def test_overrides_are_yaml_and_come_last(small: Path) -> None:
    overrides = ["optimizer.lr=1e-2", "optimizer.lr=3e-3", "optimizer.betas=[0.8, 0.9]", "tiles.embed=1000"]
    config = load(small, [*overrides, "runtime.memory=1.5MiB", "fusion.bias=false", "data={max_bytes: 2MB}"])
    assert config.optimizer.lr == 3e-3
    assert config.optimizer.settings["betas"] == (0.8, 0.9)
    assert config.tiles.embed == 1000  # longer than the axis: not cut
    assert config.runtime.memory == 1536 << 10
    assert config.fusion.model_dump() == {
        "bias": False,
        "activation": True,
        "reshape": True,
        "qkv": True,
        "residual_norm": True,
        "found": True,
        "exclude": (),
    }
    assert config.data.max_bytes == 2_000_000


def test_a_switch_of_fusion_false_leaves_the_others_off(small: Path) -> None:
    on = [name for name, value in load(small, ["fusion=false", "fusion.qkv=true"]).fusion.model_dump().items() if value]
    assert on == ["qkv"]


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(SMALL) + "optimizer: {lr: 1e-3, eps: 1E-9, min_lr: .5e-4}\n")
    optimizer = load(path).optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.min_lr) == (1e-3, 1e-9, 5e-5)
    assert load(path, ["runtime.memory=2e9"]).runtime.memory == 2_000_000_000


def test_priority_of_scheduler_file_config_and_override(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("{cpus: 3, window: 7, memory: 1GB, scheduler: dmda, accumulate: tree}")
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump(SMALL | {"scheduler": f"{tmp_path}/s.yaml", "runtime": {"window": 9}})
    )
    config = load(tmp_path / "c.yaml", ["runtime.memory=2GB"])
    others = {"cuda", "cuda_memory", "disk", "calibrate", "placement", "nodes", "shard_weights", "on_cpu"}
    assert config.runtime.model_dump(exclude=others) == {
        "cpus": 3,
        "window": 9,
        "memory": 2_000_000_000,
        "scheduler": "dmda",
    }
    assert config.accumulate == "tree"
    assert load(tmp_path / "c.yaml", ["accumulate=chain"]).accumulate == "chain"
    # A scheduler chosen on the command line wins over the runtime keys of the file, not over those of the command line.
    chosen = load(tmp_path / "c.yaml", ["scheduler=cpu", "runtime.cpus=1"])
    assert (chosen.runtime.window, chosen.runtime.cpus, chosen.accumulate) == (
        load_scheduler("cpu")["window"],
        1,
        "chain",
    )


def test_a_bad_scheduler_file_is_named(small: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("cpu: 3")
    with pytest.raises(ConfigError, match=r"s\.yaml: cpu: unknown key; did you mean cpus\?"):
        load(small, [f"scheduler={tmp_path}/s.yaml"])


@pytest.mark.parametrize("name", ["cpu", "cpu_dmdas"])
def test_every_scheduler_file_is_valid(name: str, small: Path) -> None:
    assert load(small, [f"scheduler={name}"]).runtime.scheduler == load_scheduler(name)["scheduler"]


def test_a_warm_up_longer_than_the_run_is_told(small: Path) -> None:
    """It is no error: a run cut short by --set train.steps has one."""
    assert load(small, ["optimizer.warmup_steps=3"]).short_warmup is None
    told = load(small, ["optimizer.warmup_steps=4", "optimizer.lr=1"]).short_warmup
    assert told and "train.steps = 3: the learning rate ends at 0.75 and never reaches optimizer.lr = 1" in told


def test_the_folder_that_a_second_run_takes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_folder("x", None, None, False) == Path("runs/x") and not capsys.readouterr().err
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/metrics.jsonl").touch()
    assert run_folder("x", None, None, False) == Path("runs/x-2")
    assert capsys.readouterr().err.startswith("runs/x holds an earlier run; this run goes to runs/x-2")
    assert run_folder("x", None, None, True) == Path("runs/x") and not capsys.readouterr().err


def saved_model(folder: Path) -> None:
    """What save_pretrained leaves, weights aside."""
    folder.mkdir()
    shape = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 300, "n_inner": None}
    (folder / "config.json").write_text(json.dumps(shape | {"model_type": "gpt2", "activation_function": "relu"}))
    (folder / "model.safetensors").write_bytes(b"")


def test_a_saved_model_gives_shape_and_tokenizer(tmp_path: Path) -> None:
    from nntile_py.data.tokenization import train_tokenizer

    saved_model(tmp_path / "saved")
    train_tokenizer(["some text"], 260).save(str(tmp_path / "saved" / "tokenizer.json"))
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"model": {"from": str(tmp_path / "saved"), "attention": "flash"}}))
    config = load(path)
    model = config.model
    assert (model.layers, model.embed, model.ffn, model.positions, model.vocab) == (2, 8, 32, 16, 300)
    assert (model.activation, model.attention) == ("relu", "flash")
    assert config.tokenizer.path == str(tmp_path / "saved" / "tokenizer.json")
    (tmp_path / "resolved.yaml").write_text(config.to_yaml())
    assert load(tmp_path / "resolved.yaml") == config
    with pytest.raises(ConfigError, match=r"model.embed: got 9; allowed: 8"):
        load(path, ["model.embed=9"])
    with pytest.raises(ConfigError, match=r"train.seq: got 17; allowed: at most model.positions = 16"):
        load(path, ["train.seq=17"])


def test_a_saved_model_without_tokenizer_asks_for_one(tmp_path: Path) -> None:
    saved_model(tmp_path / "saved")
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"model": {"from": str(tmp_path / "saved")}}))
    with pytest.raises(ConfigError, match=r"model.from: .*saved has no tokenizer.json, .*or give tokenizer.path"):
        load(path)


BREAKS = "a\x85 b", "a \u2028\n b\u2029", "\x85", "\ue000\u2028"  # characters in YAML 1.2, line ends in YAML 1.1


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_line_ends_are_those_of_yaml_1_2(small: Path, tmp_path: Path, quote: str) -> None:
    """Next line, line separator and paragraph separator are characters of a text, of a key and of a comment."""
    path = tmp_path / "more.yaml"
    for char in "\x85\u2028\u2029":
        text = f"a{char} b{char}{char}c"
        path.write_text(f"{small.read_text()}\n# comment{char}tiles: {{}}\nsample: {{prompt: {quote}{text}{quote}}}\n")
        assert load(path).sample.prompt == text
        path.write_text(f"{small.read_text()}\nsam{char}ple: {{}}\n")
        with pytest.raises(ConfigError, match=r"sam.ple: unknown key") as error:
            load(path)
        assert char in str(error.value) or repr(char)[1:-1] in str(error.value)


def test_the_samples_prompt(small: Path) -> None:
    """Without a prompt: a function of Python's sources, else the beginning of a document."""
    tree = yaml.safe_load(small.read_text())
    for source, prompt in ((str(small), ""), ("python-stdlib", "def __init__(self")):
        for given in ([], ["sample.prompt=null"]):
            assert load(small, [f"data.source={source}", *given]).sample.prompt == tree.get("sample", {}).get(
                "prompt", prompt
            )


def test_values_are_read_as_written(small: Path, tmp_path: Path) -> None:
    """Texts that YAML 1.1 reads as numbers, truth values and dates stay texts, and come back from config.yaml."""
    for text in ("010", "1:30", "0o10", "1_000", "yes", "No", "on", "OFF", "y", "2020-01-01", "0b11", "=", "-00", "1e"):
        config = load(small, [f"sample.prompt={text}", f"data.extensions=[{text}]"])
        assert (config.sample.prompt, config.data.extensions) == (text, [text])
    for text in ("010", "1:30", "0o10", "1_000", "0b11", "2020-01-01"):
        with pytest.raises(ConfigError, match=rf"train\.steps: got '{text}'; allowed: an integer of at least 1"):
            load(small, [f"train.steps={text}"])
        with pytest.raises(ConfigError, match=rf"optimizer\.lr: got '{text}'; allowed: a number"):
            load(small, [f"optimizer.lr={text}"])
    for text in ("yes", "off", "y"):
        with pytest.raises(ConfigError, match=rf"train\.pack: got '{text}'; allowed: true or false"):
            load(small, [f"train.pack={text}"])
    with pytest.raises(ConfigError, match="on: unknown key"):
        load(small, ["train={on: 1}"])
    numbers = {"5": 5, "+5": 5, "0x1F": 31, "1e2": None, "2.": None}
    for text, value in numbers.items():
        if value is None:
            assert load(small, [f"optimizer.lr={text}"]).optimizer.lr == float(text)
        else:
            assert load(small, [f"seed={text}"]).seed == value
    texts = "010", "1e-4", "0o10", "yes", "null", "~", "1_0", "2.", "=", "<<", "", "0x1", ".inf", "1:30", "é\n"
    for prompt in (*texts, *BREAKS):
        config = load(small, [f"sample.prompt={json.dumps(prompt)}"])
        (tmp_path / "again.yaml").write_text(config.to_yaml())
        assert load(tmp_path / "again.yaml").sample.prompt == prompt
