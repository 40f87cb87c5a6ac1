"""Layouts: which are products, which are chosen, that a program in others computes the same; `nntile layouts`."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import forks
import numpy as np
import pytest
from model_cases import BATCH, CASES, SEQ, reference
from rich.console import Console

import nntile_py as nt
from nntile_py import cli, models
from nntile_py.analysis import layout_analysis as parts
from nntile_py.analysis.workloads import preset
from nntile_py.errors import ConfigError
from nntile_py.graph.edges import edges_of
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import arrange, cheapest, search
from nntile_py.graph.layouts import described, laid, layout_of, products, tensors_of
from nntile_py.graph.step import StepSpec
from nntile_py.graph.timings import Timing, Timings, opened
from nntile_py.measure import experiment, experiments, layout_experiment
from nntile_py.measure.torch_layer import torch_layer
from nntile_py.profiling import layout_timer as profiled
from nntile_py.system import launcher
from nntile_py.tasks import Generated, Tensor, activation, contract
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import Dropout, Transpose
from nntile_py.tasks.layer_norm import LayerNorm
from nntile_py.testing import error
from nntile_py.tiles import Tiling

OF = {"device": "1 x test", "version": "0", "dtype": "fp32", "method": "drawn"}
TINY = ["model.embed=16", "model.heads=2", "train.batch=3", "train.seq=8", "runtime.cpus=1"]


@dataclass(eq=False)
class Drawn(Timings):
    """Of everything, at random; transpositions for nothing, so that many are taken."""

    seed: int = 0

    def best(self, operator: str, layout: str) -> Timing:
        draw = np.random.default_rng([zlib.crc32(f"{operator} {layout}".encode()), self.seed]).random()
        return Timing(operator, layout, 1e-3 * draw if operator.startswith("Transpose") else 1 + draw)


# -- what is a product


def tensor(axes: str, kind: str = "temp", **sizes: int) -> Tensor:
    every = {"batch": 2, "heads": 3, "seq": 4, "key": 5, "head_dim": 6, "embed": 7, "ffn": 8} | sizes
    names = axes.split()
    return Tensor(axes, names, [every[a] for a in names], "fp32", kind)


@pytest.mark.parametrize(
    ("a", "b", "out", "distinct"),
    [
        ("batch seq embed", "embed ffn", "batch seq ffn", 2**3),
        ("batch heads seq head_dim", "batch heads key head_dim", "batch heads seq key", 4**3),
        ("batch heads seq key", "batch heads key head_dim", "batch seq heads head_dim", 4**3),
    ],
)
def test_products(a: str, b: str, out: str, distinct: int) -> None:
    """Each is one (batch of) matrix product: no tensor is copied to be a matrix, without gaps in rows or columns."""
    op = Contract(tensor(a), tensor(b), tensor(out))
    found = list(products(op))
    assert len({described(laid(op, layout), Tiling()) for layout in found}) == distinct
    assert len(set(found)) == len(found)
    for layout in found:
        made = laid(op, layout)
        assert isinstance(made, Contract) and layout_of(made) == layout
        sizes = {**made.a.sizes, **made.b.sizes}
        for t, rows, columns in ((made.a, made.m, made.k), (made.b, made.k, made.n), (made.output, made.m, made.n)):
            array = np.empty(t.shape)
            turned = array.transpose([t.axes.index(axis) for axis in (*made.batch, *rows, *columns)])
            steps = []
            for group in (made.batch, rows, columns):
                strides = [turned.strides[k] for k, axis in enumerate((*made.batch, *rows, *columns)) if axis in group]
                dense = itertools.pairwise(zip(strides, [sizes[axis] for axis in group], strict=True))
                assert all(step == after * size for (step, _), (after, size) in dense), (layout, t)
                steps += strides[-1:] if group is not made.batch else []
            assert 8 in steps  # bytes of an element


def test_a_bias_and_a_weight_stay_as_they_are() -> None:
    bias = tensor("heads head_dim", "param")
    out = tensor("batch seq heads head_dim")
    op = Contract(tensor("batch seq embed"), tensor("embed heads head_dim", "param"), out, bias=bias)
    for layout in products(op):
        order = layout[tensors_of(op).index(out)]
        assert order.index("heads") < order.index("head_dim")
        assert layout[tensors_of(op).index(bias)] == bias.axes


def test_the_same_work_is_described_alike() -> None:
    """Names and order of axes do not matter where the memory is the same."""
    one = Contract(tensor("batch seq embed"), tensor("embed ffn"), tensor("batch seq ffn"))
    same = Contract(tensor("seq batch embed"), tensor("embed ffn"), tensor("seq batch ffn"))
    other = Contract(tensor("embed batch seq"), tensor("embed ffn"), tensor("batch seq ffn"))
    mixed = Contract(tensor("batch embed seq"), tensor("embed ffn"), tensor("batch seq ffn"))
    assert described(one, Tiling()) == described(same, Tiling())
    assert described(one, Tiling())[0] == described(other, Tiling())[0] == described(mixed, Tiling())[0]
    assert len({described(op, Tiling())[1] for op in (one, other, mixed)}) == 3
    assert described(one, Tiling({"ffn": 3}))[0] != described(one, Tiling())[0]
    assert described(one, Tiling())[1] == "M K, K N -> M N"


# -- the search


def test_cheapest_is_the_least_of_all() -> None:
    """Against all combinations, on random factors of up to three variables."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        sizes = rng.integers(1, 5, rng.integers(1, 7)).tolist()
        factors = []
        for _ in range(rng.integers(1, 9)):
            of = rng.permutation(len(sizes))[: rng.integers(0, 4)].tolist()
            factors.append((of, rng.random([sizes[v] for v in of])))

        def total(values: Any, factors: Any = factors) -> float:
            return float(sum(table[tuple(values[v] for v in of)] for of, table in factors))

        best = min(total(values) for values in itertools.product(*map(range, sizes)))
        assert total(cheapest(factors, sizes)) == pytest.approx(best)


def chain() -> Graph:
    """x W1, its activation, times W2: the edge between the two products is [batch, seq, ffn]."""
    g = Graph()
    x = g.named("x", ["batch", "seq", "embed"], [2, 4, 6], "input")
    first = g.named("first", ["embed", "ffn"], [6, 8], "param")
    second = g.named("second", ["ffn", "embed"], [8, 6], "param")
    y = contract(g, activation(g, contract(g, x, first, ["batch", "seq", "ffn"]), "relu"), second, x.axes)
    y.kind = "scalar"
    return g


def measured(g: Graph, seconds: Callable[[str, str], float], noise: float = 0.0) -> Timings:
    """All that the search asks for, as a function says; of repeated times the middle one is above that by `noise`."""
    timings = Timings(OF)
    for operator, layout in search(g, timings, Tiling()).missing:
        least = seconds(operator, layout)
        timings.add(Timing(operator, layout, least, (least, least * (1 + noise), least * (1 + 2 * noise))))
    return timings


@pytest.mark.parametrize(
    ("turning", "seconds", "turned", "transposes"),
    [
        (9.0, 10 + 1 + 1, True, 0),  # the second product gains 8 by it, the first loses 7
        (0.2, 3 + 1 + 0.2 + 1, False, 1),  # a transposition before the second costs less
    ],
)
def test_a_path_that_is_known(turning: float, seconds: float, turned: bool, transposes: int) -> None:
    def of(operator: str, layout: str) -> float:
        if operator.startswith("Transpose"):
            return turning
        if operator.startswith("Activation"):
            return 1.0
        if "K 6" in operator:  # the first product: faster as it is
            return 3.0 if layout.endswith("M N") else 10.0
        return 1.0 if layout.startswith("K M") else 9.0  # the second one: faster if what it reads is turned

    g = chain()
    timings = measured(g, of)
    chosen = arrange(g, timings, Tiling())
    assert (chosen.seconds, chosen.default, chosen.least) == (pytest.approx(seconds), 3 + 1 + 9, 3 + 1 + 1)
    assert [op.kind for op in g.ops].count("Transpose") == transposes
    first = g.ops[0]
    assert (first.output.axes[0] == "ffn") == turned == (g.ops[1].output.axes[0] == "ffn")
    assert g.ops[-1].output.axes == ("batch", "seq", "embed")
    assert isinstance(g.ops[-1], Contract) and g.ops[-1].a.axes[0] == "ffn"


def test_ties_leave_the_default() -> None:
    """Where all layouts take the same, nothing is turned, and nothing changes."""
    g = chain()
    before = [(op, layout_of(op)) for op in g.ops]
    timings = measured(g, lambda operator, layout: 1.0)
    chosen = arrange(g, timings, Tiling())
    assert [(op, layout_of(op)) for op in g.ops] == before and chosen.seconds == chosen.default == chosen.least == 3


def test_what_was_not_measured() -> None:
    with pytest.raises(ConfigError, match=r"layout: got searched; allowed: default, as the database lacks \d+ timings"):
        arrange(chain(), Timings(OF), Tiling())


def test_an_edge_of_queries_keys_and_values() -> None:
    """The packed projection and its three parts are one edge; what comes from outside of the program is none."""
    config = preset("encoder", TINY)
    graph = parts.graph_of(config, "encoder", True)
    edges = edges_of(graph)
    (unpack,) = (op for op in graph.ops if op.kind == "Unpack")
    assert len({id(edges[t]) for t in tensors_of(unpack)}) == 1
    assert len(edges[unpack.inputs[0]].orders) > 2
    x = next(t for t in edges if t.name == "x")
    assert edges[x].orders == [x.axes]
    for edge in set(edges.values()):
        for number in range(len(edge.orders)):
            assert all(sorted(edge.of(t, number)) == sorted(t.axes) for t in edge.names)


# -- programs in other layouts


WORDS = {"layers": 1, "embed": 24, "heads": 4, "vocab": 61, "positions": 32, "dropout": 0.1}
MODELS: dict[str, Callable[[], Any]] = {
    "encoder": lambda: models.TransformerEncoder(models.TransformerEncoderConfig(
        layers=1, embed=24, heads=4, dropout=0.1, attention="naive", attention_dropout=0.1,
    )),
    "gpt2": lambda: models.GPT2(models.GPT2Config(**WORDS)),
    "gpt2 naive": lambda: models.GPT2(models.GPT2Config(**WORDS, attention="naive", attention_dropout=0.1)),
    # Each weight's gradient is a sum of two products.
    "albert": lambda: models.ALBERT(models.ALBERTConfig(**WORDS | {"layers": 2}, embedding=9)),
}  # fmt: skip
KEYS = "k_proj.bias", "key.bias"  # whose gradients are nothing but rounding
TILINGS = {"uncut": {}, "even": {"batch": 2, "heads": 2, "ffn": 48, "embed": 12, "seq": 8},
           "ragged": {"batch": 3, "heads": 3, "ffn": 40, "seq": 5}}  # fmt: skip
FUSIONS: dict[str, Any] = {"rules": {"found": False}, "found": True, "none": False, "qk": {"qkv": "qk"}}


def trained(spec: StepSpec, model: str = "encoder") -> tuple[list[float], Any]:
    spec = replace(spec, model=MODELS[model]())  # a trainer leaves its weights in its model
    trainer = nt.Trainer.of_spec(spec, seed=3)
    losses = [float(trainer.step(spec.random_inputs(spec.batch, step))) for step in range(2)]
    gradients = trainer.gradients()
    trainer.close()
    return losses, gradients


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("model", "tiling", "fusion"),
    [*itertools.product(["encoder"], TILINGS, ["rules", "none"]), ("encoder", "uncut", "found"),
     ("encoder", "ragged", "qk"), ("encoder", "even", "found"), ("gpt2", "uncut", "rules"), ("gpt2", "even", "found"),
     ("gpt2", "ragged", "rules"), ("gpt2 naive", "ragged", "rules"), ("albert", "ragged", "rules")],
)  # fmt: skip
def test_programs_in_any_layout_compute_the_same(runtime: nt.Runtime, model: str, tiling: str, fusion: str) -> None:
    """Losses and gradients, with the same draws of dropout, in layouts drawn at random."""
    made = MODELS[model]()
    spec = StepSpec(made, 4, 16, Tiling(TILINGS[tiling]), precision="fp64", fusion=Fusion.of(FUSIONS[fusion]))
    losses, gradients = trained(spec, model)
    before = [t.axes for op in spec.graphs.graph.ops for t in op.outputs]
    other = 0
    for seed in range(1 if spec.fusion.found else 2):  # whose kernels are compiled
        searched = replace(spec, timings=Drawn(OF, seed=seed))
        ops = searched.graphs.graph.ops
        other += [t.axes for op in ops if not isinstance(op, Transpose) for t in op.outputs] != before
        got, turned = trained(searched, model)
        assert error(got, losses) < 1e-12
        assert max(error(turned[name], gradients[name]) for name in gradients if not name.endswith(KEYS)) < 1e-9
    assert other


@pytest.mark.few(1)
@pytest.mark.parametrize("tiling", TILINGS)
def test_beside_pytorch(runtime: nt.Runtime, tiling: str) -> None:
    """Loss and gradients of torch.nn.TransformerEncoder, in layouts drawn at random."""
    want, case = reference("encoder"), CASES["encoder"]
    tiles = {axis: size // 2 if axis in ("ffn", "embed") else size for axis, size in TILINGS[tiling].items()}
    model = case.ours(want.model).changed(attention="naive")
    spec = StepSpec(model, BATCH, SEQ, Tiling(tiles), fusion=Fusion(), timings=Drawn(OF, seed=5))
    trainer = nt.Trainer.of_spec(spec)
    assert abs(float(trainer.step(want.inputs[0])) / want.losses[0] - 1) < 1e-5
    got, expected = want.counted(trainer.gradients()), want.counted(want.gradients)
    assert max(error(got[name], expected[name]) for name in expected) < 1e-5
    trainer.close()


def test_widths_of_generated_kernels(runtime: nt.Runtime) -> None:
    """Another number of lanes is another kernel with the same result."""

    @dataclass(eq=False)
    class Wide(Drawn):
        def best(self, operator: str, layout: str) -> Timing:
            return replace(super().best(operator, layout), width=8)

    spec = StepSpec(MODELS["encoder"](), 4, 16, precision="fp64", fusion=Fusion())
    wide = replace(spec, timings=Wide(OF))
    sources = [op.kernel.source for op in wide.graphs.graph.ops if isinstance(op, Generated)]
    assert sources and all("simdlen(8)" in text for text in sources)
    assert error(trained(wide)[0], trained(spec)[0]) < 1e-12


# -- the database


def test_a_file_of_timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "not" / "there.jsonl"
    timings = opened(OF, path, new=True)
    timings.add(Timing("a", "M N", 2.0, (1.0, 2.0, 3.0)))
    timings.add(Timing("a", "M N", 1.0, width=8))
    timings.add(Timing("a", "N M", 3.0))
    again = opened(OF, path)
    best = again.best("a", "M N")
    assert best and (best.seconds, best.width) == (1.0, 8) and again.known == timings.known
    assert again.least("a") == 1.0 and again.best("a", "K") is None
    for key in OF:
        with pytest.raises(ConfigError, match=f"a database of {key} '{OF[key]}'; allowed here: 'other'"):
            opened(OF | {key: "other"}, path)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"operator": "a", "lay')  # a disk was full
    assert opened(OF, path).known == opened(OF, path, new=True).known == timings.known and path.read_bytes() == whole
    path.write_bytes(whole[:9])
    assert not opened(OF, path, new=True).known and not path.read_bytes()
    with pytest.raises(ConfigError, match="is a folder"):
        opened(OF, tmp_path)
    path.write_bytes(whole)
    with path.open("a") as file:
        file.write('{"operator": "a"}\n')
    with pytest.raises(ConfigError, match="line 5: no timing"):
        opened(OF, path)
    path.write_text("hello\n")
    with pytest.raises(ConfigError, match="no database of layouts"):
        opened(OF, path)
    path.write_text("")  # made for the lock, and nothing was measured: as none
    with pytest.raises(ConfigError, match="no such database"):
        opened(OF, path)
    with pytest.raises(ConfigError, match="no such database"):
        opened(OF, tmp_path / "nothing")
    two = OF | {"device": "2 x CPU"}
    for file in (tmp_path / "nothing", tmp_path / "one"):  # none, and one of a single worker
        with pytest.raises(ConfigError, match=r"made here for 2 x CPU \(by runtime.cpus or runtime.cuda\)"):
            opened(two, file)
        with monkeypatch.context() as started:
            started.setattr(launcher, "started", lambda: (0, 2))
            with pytest.raises(ConfigError, match=r"made here for 2 x CPU \(a rank's: tune without mpirun, and with"):
                opened(two, file)
        opened(OF | {"device": "1 x CPU"}, tmp_path / "one", new=True).add(Timing("a", "M N", 1.0))


def test_least_of_one_operator(tmp_path: Path) -> None:
    """A norm with a residual, or with dropout, is another operator than one without: its best layout is not theirs."""

    def told(residual: bool, drops: bool) -> str:
        x, r, total, y, dropped = (Tensor(name, ["batch", "embed"], [4, 8], "fp32") for name in "xrtyd")
        gamma, beta = (Tensor(name, ["embed"], [8], "fp32") for name in ("gamma", "beta"))
        more = {"residual": r, "total": total} if residual else {}
        drop = Dropout(x, dropped, 0.1, 1) if drops else None
        stat = Tensor("stat", ["batch", "stat"], [4, 2], "fp32")
        return described(LayerNorm(x, gamma, beta, y, stat, 1e-5, dropout=drop, **more), Tiling())[0]

    keys = [told(False, False), told(True, False), told(True, True)]
    timings = opened(OF, tmp_path / "times.jsonl", new=True)
    for key, layout, seconds in zip([keys[0], *keys], "abcd", (2.0, 1.0, 0.5, 0.25), strict=True):
        timings.add(Timing(key, layout, seconds))
    assert [timings.least(key) for key in keys] == [1.0, 0.5, 0.25]


# With few copies of tiles, see test_tiles_out_of_cache, and with few runs to a measured time.
COMMAND = """
import sys
from nntile_py.cli import main
from nntile_py.profiling import layout_timer
from nntile_py.system import clock
layout_timer.cache_bytes = lambda _: 4096
clock.SHORTEST, layout_timer.STEP_SECONDS, layout_timer.TURNS = 1e-5, 0.01, (2, 2)
main()
"""


def nntile(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", COMMAND, *args]
    return forks.run(command, capture_output=True, text=True, env=os.environ | env, check=False)


def sets(*items: str) -> list[str]:
    return [part for item in items for part in ("--set", item)]


@pytest.mark.long
def test_tuned_shown_used(tmp_path: Path) -> None:
    """A small real tune; what it found is shown, drawn, and what a step runs by."""
    home = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    what = ["--work", "mha", *sets(*TINY, "fusion.found=false")]  # no kernel is generated and compiled
    ran = nntile("layouts", "tune", *what, "--repeats", "1", **home)
    assert ran.returncode == 0, ran.stderr
    (path,) = (tmp_path / "cache" / "nntile_py" / "layouts").iterdir()
    assert str(path) in ran.stdout
    count = len(path.read_text().splitlines())
    again = nntile("layouts", "tune", *what, **home)
    assert again.stdout.startswith("0 measured") and len(path.read_text().splitlines()) == count
    picture = tmp_path / "violins.svg"
    ran = nntile("layouts", "show", *what, "--json", "--out", str(picture), **home)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert [of["qkv"] for of in found] == ["none", "QK", "QKV"] and picture.read_text().count("<svg") == 1
    for of in found:
        assert 0 < of["bound_seconds"] <= of["seconds"] * (1 + 1e-9) <= of["default_seconds"] * (1 + 2e-9)
        total = sum(line["count"] * (line["chosen"] + line["transposes"]) for line in of["operators"]) / 1e3
        assert total == pytest.approx(of["seconds"])
        assert all(line["best"] <= line["chosen"] <= line["worst"] for line in of["operators"])
    text = nntile("layouts", "show", *what, **home).stdout
    assert text.count("Sum of the operators' optima ") == 3 and "attn.out_proj.Contract " in text
    assert text.startswith("Q, K, V as one: none. ")  # the result comes first
    head = next(line for line in text.splitlines() if line.startswith("operator"))
    assert head.rstrip().endswith("layout chosen") and text.count(" -> ") > 8
    assert head.split()[1:7] == ["x", "layouts", "default", "chosen", "transposes", "best"]
    narrow = nntile("layouts", "show", *what, **home, FORCE_COLOR="1", TERM="xterm", COLUMNS="80").stdout
    table = re.sub(r"\x1b\[[0-9;]*m", "", narrow.split("Milliseconds")[0]).splitlines()
    table = table[next(n for n, line in enumerate(table) if line.startswith("operator")) :]
    assert table[0].split() == ["operator", "default", "chosen", "best", "worst"] and max(map(len, table)) <= 80
    planned = nntile("sweep", _sweep(tmp_path, home), "--out", str(tmp_path / "out"), "--json", **home)
    assert planned.returncode == 0, planned.stderr
    assert all(row["status"] == "ok" for row in json.loads(planned.stdout)["rows"])


def _sweep(folder: Path, home: dict[str, str]) -> str:
    """Of the layer, in both layouts."""
    base = Path(__file__).parents[1] / "experiments" / "encoder_layer.yaml"
    keys = dict(item.split("=") for item in TINY)
    given = {key: int(value) for key, value in keys.items()} | {"model.attention": "naive"}
    given |= {"model.attention_dropout": 0.1, "tiles": {}, "fusion.found": False}
    made = {"config": str(base), "set": given, "grid": {"layout": ["default", "searched"]}}
    (folder / "s.yaml").write_text(json.dumps(made | {"measure": {"work": "mha", "repeats": 1}}))
    return str(folder / "s.yaml")


@pytest.mark.long
def test_experiments(tmp_path: Path, runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small layer: the sums, a step in both layouts, and the pictures; PyTorch's own layers run beside ours."""
    made = experiments.load_experiment("fig-layouts")
    part = made.part("cpu", None, TINY).model_copy(update={"work": "mha", "repeats": 1})
    monkeypatch.setattr(layout_experiment, "Runtime", lambda **_: nullcontext())
    monkeypatch.setattr(profiled, "Runtime", lambda **_: nullcontext())
    monkeypatch.setattr(profiled, "cache_bytes", lambda _: 4096)  # few copies of tiles; see test_tiles_out_of_cache
    monkeypatch.setattr(experiments.Experiment, "part", lambda *_: part)
    experiment.run(made, "cpu", tmp_path, None, Console(stderr=True))
    text = (tmp_path / "fig-layouts.md").read_text()
    assert text.count("the least of all choices together") == 3 and text.count("A step of mha, ") == 6
    assert (tmp_path / "fig-layouts.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.undo()
    for name in ("table4", "table5", "fig-layouts"):
        for scale in ("cpu", "gpu"):
            experiment.plan(experiments.load_experiment(name), scale)
    for work, phase in itertools.product(("encoder", "mha"), ("forward", "backward", "all")):
        torch_layer(preset(work, TINY), work, phase, "torch_eager")(2)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["layouts", "find", "--work", "mha"], "ACTION: got 'find'; allowed: tune, show"),
        (["layouts", "show"], "neither CONFIG nor --work is given"),
        (["layouts", "show", "--work", "mha", "--database", "nowhere.jsonl"], "nowhere.jsonl: no such database"),
        (["layouts", "tune", "experiments/gpt2_tiny.yaml", "--work", "attention"], "attention: it has no product"),
        (["layouts", "show", "--work", "mha", "--out", "a.txt"], "--out: got 'txt'; allowed: png, svg, pdf"),
        (["layouts", "show", "--work", "mha", "--own"], "--own: allowed: only with tune"),
        (["layouts", "tune", "--work", "mha", "--json"], "--json: allowed: only with show"),
        (["layouts", "show", "--work", "mha", "--repeats", "3"], "--repeats: allowed: only with tune"),
        (["plan", "experiments/gpt2_tiny.yaml", "--set", "layout=best"], "layout: "),
        (["plan", "experiments/gpt2_tiny.yaml", "--set", "layout=searched"], "no such database of layouts"),
        (
            ["plan", "experiments/gpt2_tiny.yaml", "--set", "layout=searched", "--set", "train.pack=true"],
            "layout: got searched; allowed with train.pack: default",
        ),
        (["plan", "experiments/gpt2_tiny.yaml", "--set", "fusion.qkv=all"], "fusion.qkv: "),
    ],
)
def test_bad_input(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["nntile", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr().err
    assert ended.value.code == 2 and message in told and told.count("\n") == 1, told
