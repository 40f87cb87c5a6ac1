"""`nntile analyze`: flop and words of each operator against counts by hand, and what is told of them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forks
import pytest
import yaml
from rich.console import Console

from nntile_py.analysis import analysis_report
from nntile_py.analysis.operator_row import OperatorRow
from nntile_py.analysis.operators import Analysis, analyse
from nntile_py.analysis.workloads import PRESETS, preset
from nntile_py.config.builders import step_spec
from nntile_py.config.run_config import load
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.measure import experiment, experiments, operator_experiment
from nntile_py.profiling import operator_timer
from nntile_py.system import clock
from nntile_py.tasks.op import CATEGORIES, CONTRACTION, ELEMENTWISE, NORMALIZATION

TINY = ["model.embed=64", "model.heads=4", "train.batch=4", "train.seq=16", "runtime.cpus=1"]
B, L, N, H, FFN = 8, 512, 1024, 16, 4096  # the paper's
X, S = B * L * N, B * H * L * L  # words of an activation, of the scores


@pytest.fixture(scope="module")
def encoder() -> Analysis:
    return analyse(preset("encoder", []), "encoder")


def by_name(made: Analysis) -> dict[str, OperatorRow]:
    assert len({row.name for row in made.operators}) == len(made.operators)
    return {row.name: row for row in made.operators}


def test_the_papers_layer_by_hand(encoder: Analysis) -> None:
    """Flop, words read, written, and the least, of one operator of each kind, and of each contraction."""
    rows = by_name(encoder)
    by_hand = {
        "h0.attn.q.Contract": (2 * 3 * X * N, X + 3 * N * N, 3 * X),
        "h0.attn.Contract": (2 * S * 64, 2 * X, S),
        "h0.attn.Contract (2)": (2 * S * 64, S + X, X),
        "h0.attn.out_proj.Contract": (2 * X * N, X + N * N, X),
        "h0.mlp.linear1.Contract": (2 * X * FFN, X + N * FFN, 4 * X),
        "h0.mlp.linear2.Contract": (2 * X * FFN, 4 * X + N * FFN, X),
        "h0.mlp.linear2.Contract dX": (2 * X * FFN, X + N * FFN, 4 * X),
        "h0.mlp.linear2.Contract dW": (2 * X * FFN, 5 * X, N * FFN),
        "h0.attn.q.Contract dX": (2 * 3 * X * N, 3 * X + 3 * N * N, X),
        "h0.attn.q.Contract dW": (2 * 3 * X * N, 4 * X, 3 * N * N),
        "h0.attn.q.BiasAdd": (3 * X, 3 * X + 3 * N, 3 * X),
        "h0.attn.Transpose": (0, 3 * X, 3 * X),
        "h0.attn.Dropout": (S, S, S),
        "h0.attn.Add": (X, 2 * X, X),
        "h0.attn.LayerNorm": (8 * X, X + 2 * N, X + 2 * B * L),
        "h0.mlp.Activation": (4 * X, 4 * X, 4 * X),
        "h0.mlp.ActivationGrad dX": (4 * X, 8 * X, 4 * X),
        "h0.mlp.linear1.Sum dW": (4 * X, 4 * X, FFN),
        "h0.mlp.LayerNormGrad dX dW": (14 * X, 2 * X + 2 * B * L + N, X + 2 * N),
    }
    for name, (flop, read, written) in by_hand.items():
        row = rows[name]
        assert (row.flop, row.read, row.written, row.least) == (flop, read, written, read + written), name
    # Softmax is two tasks: the scores are read twice, and two numbers a row go between them.
    softmax, state = rows["h0.attn.Softmax"], 2 * B * H * L
    assert (softmax.read, softmax.written, softmax.least) == (2 * S + state, S + state, 2 * S)
    assert rows["h0.attn.Contract"].reduced == {"head_dim": 64}
    assert rows["h0.attn.Contract"].independent == {"batch": B, "heads": H, "seq": L, "key": L}
    classes = {"h0.attn.Contract": CONTRACTION, "h0.attn.Softmax": NORMALIZATION, "h0.mlp.Add": ELEMENTWISE}
    assert all(rows[name].category is of for name, of in classes.items())
    assert rows["h0.mlp.linear1.Sum dW"].category is NORMALIZATION  # a reduction, as in the paper


def test_the_papers_tables(encoder: Analysis) -> None:
    """Table I's shares; Table III's flop and words but for the cells that are told to be wrong, which are."""
    totals = encoder.totals()
    assert totals["contraction"]["flop"] == 312 * 2**30
    for name, percent in (("contraction", 99.80), ("normalization", 0.17), ("element-wise", 0.03)):
        assert abs(totals[name]["percent_flop"] - percent) < 0.04, name  # dropout of the softmax is element-wise here
    made = experiments.load_experiment("table3")
    ours = [name for printed in made.rows for name in printed.ours]
    left = {row.name for row in encoder.operators} - set(ours)
    assert len(ours) == len(set(ours)) and all(re.search("Transpose|Unpack|Pack", name) for name in left)
    wrong = set()
    for printed, rows in operator_experiment.matched(encoder, made.rows):
        flop = sum(row.flop for row in rows)
        norm = 1.14 if "LayerNorm" in printed.name else 1.0  # they count 7 flop an element, 13 backward; we 8 and 14
        assert flop == pytest.approx(printed.gflop * 2**30 * norm, rel=0.1, abs=0.02 * 2**30), printed.name
        ops = [op for row in rows for op, _ in row.ops]
        made_here = {t for op in ops for t in op.outputs}
        words = {"in": {t for op in ops for t in op.inputs} - made_here, "out": made_here}
        for side, cell in (("in", printed.in_), ("out", printed.out)):
            true = sum(t.numel for t in words[side] if not t.name.endswith("stat"))
            true += ops[-1].output.numel if printed.mask == side and "softmax dX" not in printed.name else 0
            if abs(cell - true / 1e6) > 0.13 + 0.003 * cell:
                wrong.add(id(printed))
    assert wrong == {id(printed) for printed in made.rows if printed.wrong}


@pytest.mark.parametrize("work", ["encoder", "decoder", "mha"])
def test_totals_and_groups(work: Any) -> None:
    """Totals are the sums of the rows; each operator has a group that runs; flop do not change by fusion."""
    made = analyse(preset(work, [*TINY, "train.batch=5", "tiles={batch: 2, embed: 48, heads: 3, ffn: 100}"]), work)
    totals = made.totals()
    fields = {"flop": "flop"} | {f"{of}_elements": of for of in ("read", "written", "least")}
    for key, of in fields.items():
        whole = sum(getattr(row, of) for row in made.operators)
        assert totals["all"][key] == whole == sum(totals[c.name][key] for c in CATEGORIES), key
        assert totals["fused"][key] == sum(getattr(row, of) for row in made.groups)
    assert totals["all"]["flop"] == totals["fused"]["flop"]
    assert {row.group for row in made.operators} == {row.name for row in made.groups}
    assert totals["movement_saved_percent"] > 0
    assert all(row.moved >= row.least for row in (*made.operators, *made.groups))
    phases = {row.phase for row in made.operators}
    assert {"forward", "dX", "dW"} <= phases and "update" not in phases


def test_a_training_step_of_several_layers() -> None:
    """Layers that are alike are one row; micro-batches count as often as they run, the update once."""
    config = load("experiments/gpt2_tiny.yaml", ["train.grad_accumulation=3"])
    made, single = analyse(config), analyse(load("experiments/gpt2_tiny.yaml"))
    rows, once = by_name(made), by_name(single)
    assert rows["h*.mlp.c_fc.Contract"].count == 3 * config.model.layers == 3 * once["h*.mlp.c_fc.Contract"].count
    assert rows["h*.mlp.c_fc.Contract"].flop == 3 * once["h*.mlp.c_fc.Contract"].flop
    assert rows["AdamW"].flop == once["AdamW"].flop and rows["AdamW"].phase == "update"
    assert rows["h*.attn.q.BiasAdd"].group == "h*.attn.q.Contract"
    graph = step_spec(load("experiments/gpt2_tiny.yaml")).graphs.graph
    assert single.totals()["contraction"]["flop"] == graph.flop()
    forward = analyse(config, "inference")
    assert {row.phase for row in forward.operators} == {"forward"}


@pytest.mark.parametrize("name", ["bert", "llama", "deberta", "modernbert"])
def test_other_models(name: str) -> None:
    """Each operator is done by one that runs, none moves fewer words than are needed, flop do not change by fusion."""
    made = analyse(load(f"experiments/{name}_tiny.yaml"))
    assert {row.group for row in made.operators} == {row.name for row in made.groups}
    assert all(row.moved >= row.least for row in (*made.operators, *made.groups)), name
    assert made.totals()["all"]["flop"] == pytest.approx(made.totals()["fused"]["flop"], rel=1e-12)


def test_cut_contractions_read_their_operands_again() -> None:
    config = preset("mha", [*TINY, "tiles={embed: 16}", "model.attention=vendor", "model.attention_dropout=0"])
    rows, whole = (by_name(analyse(c, "mha")) for c in (config, preset("mha", TINY)))
    row, one = rows["attn.out_proj.Contract"], whole["attn.out_proj.Contract"]
    assert row.flop == one.flop and row.least == one.least and row.read > one.read


def test_peaks_of_the_config() -> None:
    """Count without --measure, too, of all workers; one of the two alone is refused."""
    peaks = ["profile.peak_flop=1e12", "profile.peak_bytes=2e10", "runtime.cpus=3"]
    made = analyse(load("experiments/gpt2_tiny.yaml", peaks)).peak
    assert (made.flop, made.bytes, made.source) == (3e12, 6e10, "config")
    for one in peaks[:2]:
        with pytest.raises(ConfigError, match=r"profile.peak_flop, profile.peak_bytes: got only one of them; allowed"):
            load("experiments/gpt2_tiny.yaml", [one])


def test_searched_layouts_are_not_analysed() -> None:
    """Which is told; no timings are needed. A forward pass runs in the default ones."""
    sets = ["layout=searched"]
    config = load("experiments/gpt2_tiny.yaml", sets)
    made = analyse(config)
    assert made.title.endswith(", fp32, in the default layouts, though it runs in searched ones")
    assert made.totals() == analyse(load("experiments/gpt2_tiny.yaml")).totals()
    assert "operators" in analysis_report.dot_of(made, "after")
    assert analyse(config, "inference").title.endswith(", fp32")


def test_what_bounds_an_operator(encoder: Analysis) -> None:
    """MUE above the share of the peak, whatever time it takes."""
    for row in encoder.operators:
        for seconds in (1e-4, 1.0):
            timed = replace(row, seconds=seconds)
            mue, share = timed.mue(encoder.peak), timed.peak_share(encoder.peak)
            assert mue is not None and share is not None
            assert timed.memory_bound(encoder.peak) == (mue > share)
    softmax = replace(by_name(encoder)["h0.attn.Softmax"], seconds=1.0)
    assert encoder.peak.bytes is not None
    assert softmax.mue(encoder.peak) == pytest.approx(100 * 4 * 2 * S / encoder.peak.bytes)  # Q/D B/Bpeak, B = D/s


FIELDS = {
    "name", "phase", "class", "flop", "read_elements", "written_elements", "least_elements", "seconds", "peak_share",
    "mue", "memory_bound", "group",
}  # fmt: skip


def nntile(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nntile_py.cli", "analyze", *args]
    return forks.run(command, capture_output=True, text=True, env=os.environ | env, check=False)


def sets(items: list[str]) -> list[str]:
    return [part for item in items for part in ("--set", item)]


@pytest.mark.long
def test_measured(tmp_path: Path) -> None:
    """Seconds of all operators, whose sum is about that of a step; JSON, CSV, page and pictures."""
    out = tmp_path / "out"
    # Large enough that an operator takes longer than a busy machine lets a worker wait for its core.
    config = ["model.embed=256", "model.heads=4", "train.batch=2", "train.seq=256", "runtime.cpus=1", "tiles={}"]
    ran = nntile("--work", "encoder", "--measure", "--repeats", "5", "--json", "--out", str(out), *sets(config))
    assert ran.returncode == 0, ran.stderr
    made = json.loads(ran.stdout)
    assert json.loads((out / "analysis.json").read_text()) == made
    for row in (*made["operators"], *made["groups"]):
        assert row.keys() >= FIELDS
        assert row["seconds"] > 0 and row["mue"] > 0 and row["peak_share"] >= 0, row["name"]
        assert row["memory_bound"] == (row["mue"] > row["peak_share"])
    assert made["totals"]["fused"]["seconds"] == pytest.approx(sum(row["seconds"] for row in made["groups"]))
    assert max(row["peak_share"] for row in (*made["operators"], *made["groups"])) <= 100.001
    with (out / "operators.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == [row["name"] for row in made["operators"]]
    assert float(rows[0]["seconds"]) == made["operators"][0]["seconds"]
    _check_page(out, made)
    path = Path(__file__).parents[1] / "experiments" / PRESETS["encoder"][0]
    sweep = {"config": str(path), "set": dict(_pairs([*PRESETS["encoder"][1], *config])), "grid": {"seed": [0]}}
    sweep["measure"] = {"work": "encoder", "repeats": 9, "warmup": 3}
    (tmp_path / "s.yaml").write_text(json.dumps(sweep))
    command = [sys.executable, "-m", "nntile_py.cli", "sweep", str(tmp_path / "s.yaml"), "--json"]
    ran = forks.run([*command, "--out", str(tmp_path / "w")], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    step = json.loads(ran.stdout)["rows"][0]["seconds"]
    # Measured one after the other, each with whatever else the machine had to do: wide enough to tell units apart only.
    assert step / 30 < made["totals"]["fused"]["seconds"] < 30 * step


def test_an_operators_time_is_that_of_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only runs go by: so many in flight that a measurement lasts, what looks alike is timed once."""
    now, counts = [0.0], list[int]()

    def run(count: int) -> None:
        counts.append(count)
        now[0] += 0.25 * clock.SHORTEST * count

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(operator_timer, "runner", lambda *_: run)
    timer = operator_timer.OperatorTimer(preset("mha", TINY), 3)
    (op, _), *_ = next(iter(analyse(timer.config, "mha").operators)).ops
    assert [timer.seconds(op) for _ in range(2)] == 2 * [pytest.approx(0.25 * clock.SHORTEST)]
    assert counts == [1, 1, 4, 4, 4]


@pytest.mark.parametrize(("sizes", "less"), [([], "train.batch=2"), (["train.batch=1"], "train.seq=8")])
def test_too_little_memory(sizes: list[str], less: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise MemoryError("Unable to allocate 1 TiB")

    monkeypatch.setattr(operator_timer, "_random", none)
    timer = operator_timer.OperatorTimer(config := preset("mha", [*TINY, *sizes]), 1)
    with pytest.raises(NNTileError, match=rf"out of memory at attn.q.Contract: Unable .* 1 TiB; .* --set {less}$"):
        timer.row_seconds(analyse(config, "mha").operators[0])


def _pairs(items: list[str]) -> list[tuple[str, Any]]:
    return [(key, yaml.safe_load(value)) for key, _, value in (item.partition("=") for item in items)]


def _check_page(out: Path, made: dict[str, Any]) -> None:
    """It opens from disk alone: no script, style, font or picture comes from elsewhere."""
    page = (out / "report.html").read_text()
    assert not re.search(r"(?:src|href)\s*=\s*[\"'](?!#)", re.sub(r"<svg.*?</svg>", "", page, flags=re.S))
    assert "@import" not in page and "url(" not in page
    assert all(f"{row['name']}</td>" in page for row in made["operators"])
    if shutil.which("dot"):
        assert page.count("<svg") == 2 and (out / "graph-before.png").read_bytes()[:4] == b"\x89PNG"
        assert "memory-bound" in (out / "graph-before.dot").read_text()
    else:
        assert "No picture of the graph: graphviz" in page


@pytest.mark.parametrize("env", [{"PYTHONIOENCODING": "ascii"}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_terminal_without_the_signs(env: dict[str, str], tmp_path: Path) -> None:
    ran = nntile("--work", "mha", *sets(TINY), "--out", str(tmp_path / "out"), **env, LC_ALL="C")
    assert ran.returncode == 0 and "? attn.q.Contract" in ran.stdout and "Traceback" not in ran.stderr, ran.stderr
    assert "△ attn.q.Contract" in (tmp_path / "out/report.html").read_text("utf-8")


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    ran = nntile("--work", "mha", *sets(TINY), "--out", str(tmp_path))
    assert ran.returncode == 2 and "is not an empty folder" in ran.stderr and "--overwrite" in ran.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    ran = nntile("--work", "mha", *sets(TINY), "--out", str(tmp_path), "--overwrite")
    assert ran.returncode == 0 and (tmp_path / "report.html").read_text() != "mine"


def test_without_graphviz(tmp_path: Path) -> None:
    """All else is written, and the terminal says what is not."""
    ran = nntile("--work", "mha", *sets(TINY), "--out", str(tmp_path), PATH=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    assert f"no pictures of the graph: {tmp_path / 'report.html'} says why" in ran.stderr
    assert "No picture of the graph: graphviz" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "graph-before.dot").exists() and not list(tmp_path.glob("*.svg"))


def test_what_was_not_measured_has_no_share_of_the_time(encoder: Analysis) -> None:
    assert all(row[-2:] == ["", ""] for row in analysis_report.class_rows(encoder))
    timed = [replace(row, seconds=1e-6) for row in encoder.operators]
    *classes, whole, fused = analysis_report.class_rows(replace(encoder, operators=timed))
    assert sum(float(row[-1]) for row in classes) == pytest.approx(100, abs=0.2)
    assert whole[-1] == "100.0" and fused[-1] == ""


def test_the_table_fits(encoder: Analysis) -> None:
    for width, has, lacks in ((80, "bound by", "iterates over"), (400, "iterates over", "nothing")):
        console = Console(width=width, record=True, file=io.StringIO())
        analysis_report.render(encoder, console)
        text = console.export_text()
        assert has in text and lacks not in text
        assert max(map(len, text.splitlines())) <= width
        assert all(f"{row.category.mark} {row.name} " in text for row in encoder.operators), width


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--work", "layers"], "--work: got 'layers'; allowed: train, inference"),
        ([], "neither CONFIG nor --work is given; allowed without CONFIG: --work encoder, decoder, mha"),
        (["--work", "mha", "--repeats", "3"], "error: --repeats: allowed: only with --measure"),
        (["--work", "mha", "--set", "model.heads=7"], "error: --work mha: model.heads: got 7; allowed: a divisor of"),
        (["--work", "mha", "--overwrite"], "error: --overwrite: allowed: only with --out"),
        (["--work", "train"], "--work train; allowed without CONFIG: --work encoder, decoder, mha"),
        (["--work", "mha", "--set", "train.pack=true"], "train.pack"),
        (["--work", "encoder", "--set", "model.embd=7"], "model.embd"),
    ],
)
def test_bad_input(args: list[str], message: str) -> None:
    ran = nntile(*args)
    assert ran.returncode == 2 and message in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr


def test_experiments(encoder: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's rows beside ours, and the pictures; measured elsewhere."""
    for name in ("table3", "fig-mue", "fig-encoder"):
        made = experiments.load_experiment(name)
        for scale in ("cpu", "gpu"):
            experiment.plan(made, scale)
        with pytest.raises(ConfigError, match="--mode"):
            made.part("cpu", "inference")
        part = made.part("cpu").model_copy(update={"measure": False})
        monkeypatch.setattr(experiments.Experiment, "part", lambda *_, part=part: part)
        no_dot = name == "fig-encoder" and not shutil.which("dot")
        with pytest.raises(NNTileError, match="graphviz") if no_dot else nullcontext():
            experiment.run(made, "cpu", tmp_path / name, None, Console(stderr=True))
        monkeypatch.undo()
    text = (tmp_path / "table3/table3.md").read_text()
    assert "| Gamma dX2 |" in text and "* △ contraction: 18 operators" in text
    made = experiments.load_experiment("table3")
    made.rows[0].ours.append("nobody")
    with pytest.raises(ConfigError, match="rows: Q, K, V: no operator 'nobody'"):
        list(operator_experiment.matched(encoder, made.rows))
