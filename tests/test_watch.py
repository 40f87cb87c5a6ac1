"""Curves of runs, and the commands that compare runs and report on one."""

import html
import itertools
import json
import math
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import Python
from PIL import Image
from test_loop import metrics, nntile

from nntile_py.config.run_config import resolve
from nntile_py.data.tokenization import train_tokenizer
from nntile_py.errors import ConfigError
from nntile_py.system import pages
from nntile_py.training.curves import Curves, curves_of, draw_losses, save_curve, smoothed, terminal_curve
from nntile_py.training.loggers import Loggers
from nntile_py.training.run_comparison import differences, parameters, read_run
from nntile_py.training.run_report import changed_keys, report_page

LINES = [
    {"step": k, "loss": 8 - 0.05 * k, "lr": 0.01, "tokens_per_s": 100.0, "step_time_s": 2.0, "data_wait_s": 0.01}
    | ({"held_out_loss": 8.1 - 0.04 * k} if k % 10 == 0 else {}) | ({"held_out_loss_before": 8.2} if k == 1 else {})
    for k in range(1, 41)
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("watched")
    for name, rate in (("one", 0.01), ("two", 0.02)):
        sets = "train.steps=22", "train.eval_every=11", f"optimizer.lr={rate}", "sample.tokens=0"
        done = nntile(folder, *sets, f"out={folder}/{name}")
        assert done.returncode == 0 and f"losses drawn in {folder}/{name}/loss.png" in done.stdout, done.stderr
    return folder / "one", folder / "two"


def test_curves_of_metrics() -> None:
    curves = curves_of([*LINES, {"step": 41, "loss": None, "lr": 0.01, "skipped": True}])
    assert curves.steps == [*range(1, 41)] and curves.measured == [0, 10, 20, 30, 40]
    assert curves.held_out[0] == 8.2 and curves.values["lr"][0][-1] == 41


def test_smoothing_is_an_average_without_bias() -> None:
    assert smoothed([3.0] * 50) == pytest.approx([3.0] * 50)
    noisy = np.random.default_rng(0).normal(5, 1, 2000).tolist()
    assert abs(smoothed(noisy)[-1] - 5) < 0.4 and smoothed(noisy)[0] == noisy[0] and smoothed([]) == []
    falling = [math.exp(-step / 10) for step in range(100)]
    assert smoothed(falling)[:97] == pytest.approx(falling[:97], rel=0.05)  # does not lag


def test_the_curve_in_a_terminal() -> None:
    rows = terminal_curve(curves_of(LINES)).splitlines()
    assert len(rows) == 11 and max(map(len, rows)) <= 80
    assert rows[0].startswith("8.200 │o") and rows[9].startswith("6.")
    columns = [row.index("·") for row in rows[:10] if "·" in row]
    assert columns == sorted(columns)  # the loss falls from the left to the right
    assert terminal_curve(Curves()) == ""
    same = terminal_curve(curves_of([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}]))
    assert same.count("·") == 3  # two points and the legend


def test_losses_after_another_sequence_length_are_a_part_of_their_own(tmp_path: Path) -> None:
    """From step 21 on, losses are higher by 3: sequences are shorter."""
    lines = [line | {key: line[key] + 3 for key in ("loss", "held_out_loss") if key in line} for line in LINES[20:]]
    lines[0] |= {"held_out_loss_before": 10.3, "changed": "train.seq was 64, is 16"}
    curves = curves_of([*LINES[:20], *lines])
    before, after = curves.parts()
    assert before.measured == [0, 10, 20] and after.measured == [20, 30, 40] and after.held_out[0] == 10.3
    assert before.steps == [*range(1, 21)] and after.steps == [*range(21, 41)] and max(before.loss) < min(after.loss)
    assert terminal_curve(curves).endswith(
        "after step 20: train.seq was 64, is 16; losses before and after cannot be compared"
    )
    axes = draw_losses({"run": curves}).axes[0]
    assert [text.get_text() for text in axes.texts] == ["train.seq was 64, is 16"]
    drawn = [line.get_xdata() for line in axes.lines if len(line.get_xdata()) > 2]  # without the change's own line
    assert all(max(x) <= 20 or min(x) >= 20 for x in drawn) and len(drawn) == 6  # none joins the two kinds of losses
    assert axes.get_ylim()[1] > 10.3
    assert axes.get_legend_handles_labels()[1] == ["training loss, smoothed", "held-out loss"]
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*LINES[:20], *lines]))
    summary = read_run(tmp_path).summary()
    assert summary["best_step"] == 40 and summary["best_held_out_loss"] == pytest.approx(9.5)  # not 7.3, of step 20


def test_a_resume_with_another_sequence_length_measures_again(tmp_path: Path) -> None:
    sets = "sample.tokens=0", "train.eval_every=2", "model.positions=16", "train.seq=16"
    for steps, seq, first in ((2, 16, "before the first step"), (4, 8, "after step 2 (train.seq was 16, is 8)")):
        how = ("--resume",) * (steps > 2)
        done = nntile(tmp_path, *sets, f"train.steps={steps}", f"train.seq={seq}", arguments=how)
        assert done.returncode == 0 and f" {first}, " in done.stdout, done.stdout + done.stderr
    done = nntile(tmp_path, *sets, "train.steps=6", "train.seq=8", arguments=("--resume",))
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path / "runs" / "tiny")
    again = lines[2]["held_out_loss_before"]
    assert f"held-out loss {again:.4f} {first}, {lines[5]['held_out_loss']:.4f} at the last" in done.stdout, done.stdout
    assert [line["step"] for line in lines if "held_out_loss_before" in line] == [1, 3]
    assert [line.get("changed") for line in lines] == [None, None, "train.seq was 16, is 8", None, None, None]
    assert again != lines[1]["held_out_loss"]


def test_a_peak_does_not_press_the_curve_flat() -> None:
    lines: list[dict[str, Any]] = [dict(line) for _ in range(5) for line in LINES]
    lines[77]["loss"] = 1e6
    figure = draw_losses({"run": curves_of(lines)})
    assert figure.axes[0].get_ylim()[1] < 10


def test_a_run_draws_its_losses(runs: tuple[Path, Path]) -> None:
    with Image.open(runs[0] / "loss.png") as picture:
        assert picture.size == (1200, 900)
    lines = metrics(runs[0])
    assert all(line["data_wait_s"] >= 0 for line in lines)
    times = [line["time"] for line in lines]
    assert times == sorted(times) and times[0] > 1.7e9


def test_a_full_disk_or_a_short_run_has_no_picture(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES[:19]))
    save_curve(tmp_path, said.append, terminal=True)
    assert not said and not (tmp_path / "loss.png").exists()
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    (tmp_path / "loss.png").mkdir()  # nothing can be written in its place
    save_curve(tmp_path, said.append, terminal=False)
    assert len(said) == 1 and said[0].startswith("no picture of the losses: ")


def test_compare(runs: tuple[Path, Path], tmp_path: Path, python: Python) -> None:
    command = ["compare", *map(str, runs), "--out", str(tmp_path / "c.svg")]
    code = f"import sys; sys.argv = ['nntile', *{command!r}]; from nntile_py.cli import main; main()"
    done = python(code)
    assert done.returncode == 0, done.stderr
    losses = [smoothed([line["loss"] for line in metrics(run)])[-1] for run in runs]
    assert re.search(rf"training loss, smoothed +{losses[0]:.4f} +{losses[1]:.4f}", done.stdout)
    assert not re.search("^ *loss ", done.stdout, re.M)
    assert re.search(r"optimizer\.lr +0\.01 +0\.02", done.stdout) and "train.steps" not in done.stdout
    assert "one: training" in (tmp_path / "c.svg").read_text() or (tmp_path / "c.svg").stat().st_size > 10_000
    found = json.loads(python(code.replace("'compare'", "'compare', '--json'")).stdout)
    first = found["runs"][0]
    assert first["run"] == "one" and first["steps"] == 22 and first["best_step"] in (0, 11, 22)
    of = read_run(runs[0]).config
    assert first["tokens"] == 22 * of["train.batch"] * of["train.seq"] * of["train.grad_accumulation"]
    assert first["smoothed_loss"] == losses[0] and "loss" not in first
    assert first["held_out_loss"] == metrics(runs[0])[-1]["held_out_loss"]
    assert found["differences"]["optimizer.lr"] == [0.01, 0.02]


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, told in (("none", "none: no such folder; allowed: the folder of a run"), ("file", "file is a file; al")):
        with pytest.raises(ConfigError, match=rf"RUN: {tmp_path}/{told}"):
            read_run(tmp_path / name)
    with pytest.raises(ConfigError, match=r"has no readable config\.yaml and metrics\.jsonl"):
        read_run(tmp_path)


def test_parameters_and_differences(tmp_path: Path) -> None:
    header = json.dumps({"a": {"shape": [3, 4]}, "b": {"shape": []}, "__metadata__": {}}).encode()
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header)
    assert parameters(tmp_path / "x") == 13 and parameters(tmp_path / "none") is None
    (tmp_path / "x").write_bytes(b"\xff" * 30)
    assert parameters(tmp_path / "x") is None
    assert differences([{"a": 1, "out": 2}, {"a": 1, "b": 3, "out": 4}]) == {"b": [None, 3]}


def test_report(runs: tuple[Path, Path]) -> None:
    page = report_page(read_run(runs[0]))
    names = "Run one", "<td>training loss, smoothed</td>", "Throughput", "Norm of the gradient", "optimizer.lr"
    for text in (*names, "prefers-color-scheme: dark"):
        assert text in page
    assert page.count("<svg") >= 4
    lines = metrics(runs[0])
    assert [line["step"] for line in lines if "machine" in line] == [1] and lines[0]["machine"] in html.unescape(page)
    assert all(line["memory_bytes"] > 0 for line in lines) and "Memory of the tiles" in page
    assert "Sample at the end" not in page  # sample.tokens=0
    outside = [link for link in re.findall(r'(?:src|href)="([^"#]+)"', page) if not link.startswith("data:")]
    assert not outside, "the page loads from elsewhere"
    changed = page[page.index("Keys that differ") : page.index("All keys")]
    assert "train.eval_every" in changed and "runtime.window" not in changed


def test_a_report_lists_only_keys_that_were_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that follow from other keys, or that a folder of model.from has, are not listed. Values are YAML."""
    monkeypatch.chdir(tmp_path)
    shape = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 200, "vocab_size": 270}
    Path("saved").mkdir()
    Path("saved/config.json").write_text(json.dumps(shape | {"n_inner": None, "activation_function": "gelu_new"}))
    Path("saved/model.safetensors").touch()
    train_tokenizer(["some text"], 260).save("saved/tokenizer.json")
    Path("my.txt").write_text("a text")
    tree: dict[str, Any] = {"data": {"source": "my.txt"}, "train": {"batch": 2, "seq": 16, "steps": 4, "pack": True}}
    sizes = {"type": "gpt2", "layers": 1, "embed": 8, "heads": 2}
    tokenizer = {"tokenizer": {"path": "saved/tokenizer.json"}}
    cases: list[tuple[dict[str, Any], dict[str, tuple[str, str]]]] = [
        ({"model": sizes}, {}),
        ({"model": sizes, "tokenizer": {"vocab_size": 300}}, {"tokenizer.vocab_size": ("300", "4096")}),
        ({"model": sizes | {"vocab": 4099, "positions": 32}, "sample": {"prompt": "Once"}},
         {"model.vocab": ("4099", "null"), "model.positions": ("32", "null"), "sample.prompt": ("Once", "null")}),
        ({"model": sizes} | tokenizer, {"tokenizer.path": (str(tmp_path / "saved/tokenizer.json"), "null")}),
        ({"model": {"from": "saved", "lora": {"rank": 4, "targets": ["c_attn"]}}},
         {"model.from": (str(tmp_path / "saved"), "null"), "model.lora.rank": ("4", "")}),
        ({"model": sizes, "fusion": False, "sample": {"top_k": None}}, {"sample.top_k": ("null", "40")}),
    ]  # fmt: skip
    required = {"model.type", "model.layers", "model.embed", "model.heads", "train.batch", "train.seq", "train.steps"}
    for number, (own, wanted) in enumerate(cases):
        run = Path(f"run{number}")
        shutil.copytree("saved", run)
        (run / "config.yaml").write_text(resolve(tree | own, [], "tree").to_yaml())
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
        changed = {key: values for key, *values in changed_keys(read_run(run)) if not key.startswith("fusion.")}
        assert changed.pop("train.pack") == ["true", "false"] and changed.pop("data.source")[0] == f"{tmp_path}/my.txt"
        shown = {key: tuple(values) for key, values in changed.items() if key not in required and "lora." not in key}
        assert shown == {key: values for key, values in wanted.items() if "lora." not in key}, number
        assert all(key in changed for key in wanted)
        page = report_page(read_run(run))
        assert ">null<" in page and "None" not in page and "False" not in page


def luminance(colour: str) -> float:
    """Relative luminance of #rgb or #rrggbb, as WCAG 2 defines it."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_reports_can_be_read_in_light_and_dark() -> None:
    """Text contrasts with its background by 4.5 or more (WCAG 2, level AA). Only pictures have fixed backgrounds."""
    sources = Path(pages.__file__).parents[1]
    base = (sources / "system" / "page.html.j2").read_text()
    light, dark = (dict(re.findall(r"(--\w+): (#\w+)", part)) for part in base.split("prefers-color-scheme: dark"))
    assert "color-scheme: light dark" in base and light.keys() == dark.keys()
    for colours in (light, dark):
        for text, behind in itertools.product(("--text", "--quiet"), ("--page", "--box", "--first")):
            low, high = sorted(luminance(colours[name]) for name in (text, behind))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind)
    assert luminance(light["--page"]) > 0.9 and luminance(dark["--page"]) < 0.05
    for page in sources.rglob("*.html.j2"):
        rules = re.findall(r"([^{}]*)\{([^{}]*)\}", page.read_text().partition("{% block body %}")[0])
        for selector, rule in rules:
            fixed = re.search(r"(?<![\w-])(?:color|background): #", rule)
            assert not fixed or selector.strip() in ("svg", ".picture"), (page.name, selector)


@pytest.mark.parametrize("what", ["nothing", "no step", "config"])
def test_a_folder_that_is_no_run(what: str, tmp_path: Path) -> None:
    if what != "nothing":
        (tmp_path / "config.yaml").write_text("a: 1" if what == "no step" else "a: [")
        (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"RUN: .*allowed: the folder of a run of `nntile train`"):
        read_run(tmp_path)


def test_tensorboard_reads_the_metrics_of_a_run_and_its_resume(tmp_path: Path) -> None:
    """Each step is there once, also after a resume from an earlier step than the run had reached."""
    pytest.importorskip("tensorboardX")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sets = "logging.tensorboard=true", "sample.tokens=0", "train.eval_every=2", f"out={tmp_path}/run"
    done = nntile(tmp_path, *sets, "train.steps=4", "checkpoint.every=2")
    assert done.returncode == 0, done.stderr
    done = nntile(tmp_path, *sets, "train.steps=6", arguments=("--resume", f"{tmp_path}/run/checkpoints/step-000002"))
    assert done.returncode == 0, done.stderr
    assert len([*(tmp_path / "run/tensorboard").iterdir()]) == 2  # also if both runs start within the same second
    events = reader.EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    lines = {line["step"]: line for line in metrics(tmp_path / "run")}
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert [event.step for event in events.Scalars("loss")] == sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert losses == pytest.approx({step: line["loss"] for step, line in lines.items()}, rel=1e-6)
    assert {event.step for event in events.Scalars("held_out_loss")} == {2, 4, 6}


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    sets = "logging.wandb={project: p, mode: offline}", "sample.tokens=0", f"out={tmp_path}/run", "train.steps=3"
    done = nntile(tmp_path, *sets)
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    history: dict[str, dict[int, float]] = {}
    for data in wandb_records(file.read_bytes()):
        items = {".".join(item.nested_key) or item.key: json.loads(item.value_json)
                 for item in Record.FromString(data).history.item}  # fmt: skip
        for name, value in items.items():
            history.setdefault(name, {})[items["_step"]] = value
    lines = metrics(tmp_path / "run")
    assert history["loss"] == pytest.approx({line["step"]: line["loss"] for line in lines if "loss" in line}, rel=1e-6)
    assert {*history} >= {"held_out_loss", "grad_norm", "lr"}


def wandb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: blocks of 32 KiB in LevelDB's log format, after a header of 7 bytes.

    Source: https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    block, at, record = 1 << 15, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # a record's header does not fit into the block
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or its last part
            yield record
            record = b""


def test_a_logger_that_fails_is_left_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").write_text("a file where the folder would be")
    said: list[str] = []
    config: Any = SimpleNamespace(logging=SimpleNamespace(tensorboard=True, wandb=None, callback=None))
    loggers = Loggers(config, tmp_path, 0, said.append, [])
    loggers.write({"step": 1, "loss": 2.0})
    assert len(said) == 1 and "training goes on without it" in said[0]
    loggers.close()


def test_tensorboard_on_a_full_disk_does_not_stop_training(python: Python, tmp_path: Path) -> None:
    """A file that cannot grow is reported once; neither later lines nor the end of the process wait for it."""
    pytest.importorskip("tensorboardX")
    code = """
import resource, sys
from pathlib import Path
from types import SimpleNamespace
from nntile_py.training.loggers import Loggers
config = SimpleNamespace(logging=SimpleNamespace(tensorboard=True, wandb=None, callback=None))
loggers = Loggers(config, Path(sys.argv[1]), 3, print, [])
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
for step in range(4, 1000):
    loggers.write({"step": step, "loss": 2.0, "lr": 0.1})
loggers.close()
print("end")
"""
    done = python(code, tmp_path, timeout=60, fresh=True)
    note = "note: TensorBoard failed ([Errno 27] File too large); training goes on without it"
    assert done.returncode == 0 and done.stdout.splitlines() == [note, "end"], done.stdout + done.stderr


def test_a_callback_ends_a_run_early(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text("def watch(line):\n    print('seen', line['step'])\n    return line['step'] == 2\n")
    sets = f"logging.callback={code}:watch", "train.steps=9", f"out={tmp_path}/run"
    done = nntile(tmp_path, *sets)
    last = len(metrics(tmp_path / "run"))
    assert done.returncode == 0 and last in (2, 3, 4), done.stderr
    assert f"seen {last}\n" in done.stdout
    assert f"stopped by logging.callback after step {last} of 9; all trained steps are saved; to" in done.stdout
    assert f"--set logging.callback={code}:watch" in done.stdout and "sample:" not in done.stdout
    refused = nntile(tmp_path, arguments=("--resume", f"{tmp_path}/run"))
    assert refused.returncode == 2 and f"the callback is a function in {code}" in refused.stderr
    (tmp_path / "run/sample.txt").write_text("old")
    done = nntile(tmp_path, *sets, arguments=("--resume", f"{tmp_path}/run", "-q"))
    assert done.returncode == 0 and len(metrics(tmp_path / "run")) == 9, done.stderr
    assert "step 9/9" not in done.stdout and "loss" not in done.stdout
    assert [line["step"] for line in metrics(tmp_path / "run") if "machine" in line] == [1, last + 1]
    sample = (tmp_path / "run/sample.txt").read_text()
    assert sample.startswith("import ") and html.escape(sample.split()[1]) in report_page(
        read_run(tmp_path / "run")
    )


def test_a_callback_that_raises_is_left_out(tmp_path: Path) -> None:
    sets = "train.steps=4", f"out={tmp_path}/run", "train.eval_every=4"
    (tmp_path / "mine.py").write_text("def watch(line):\n    return 1 / (line['step'] - 2)\n\nnumber = 3\n")
    done = nntile(tmp_path, "logging.callback=mine.py:watch", *sets, arguments=("-v",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("note: Callback raises ZeroDivisionError in line 2") == 1, done.stdout
    assert [f"step {step}/4" in done.stdout for step in range(1, 5)] == [True] * 4
    for name, message in (("number", "no such function"), ("other", "no such function"), ("", "my_file.py:function")):
        done = nntile(tmp_path, f"logging.callback=mine.py:{name}" if name else "logging.callback=mine", *sets)
        assert done.returncode == 2 and "logging.callback" in done.stderr and message in done.stderr, done.stderr
