"""Programs as CUDA graphs: which may be one, roles of tiles, computed sizes, when a graph runs; without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nntile_py as nt
from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution import cuda_graph
from nntile_py.execution.cuda_graph import (
    LEAST,
    Served,
    TrainingProgram,
    most_filled,
    refusal,
    roles,
    rounded,
    shares,
    training_refusal,
)
from nntile_py.graph.step import StepSpec
from nntile_py.measure.sweep_spec import Measure
from nntile_py.tiles import Access, Slot, TaskList, Tile, Tiling
from nntile_py.tiles.arguments import TaskArgs
from nntile_py.tiles.placement import assign_parts
from nntile_py.tiles.task import Task
from nntile_py.tiles.task_groups import grouped

CONFIG = nt.models.BERTConfig(layers=2, embed=16, heads=2, vocab=40, positions=32, head="pooler")


def forward(pack: bool = True, **tiles: int) -> TaskList:
    spec = StepSpec(nt.models.BERT(CONFIG), 4, 32, Tiling(tiles), pack=pack)
    return spec.outputs("pooled").forward.tasks


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("tiles", [{}, {"batch": 2, "heads": 1, "ffn": 24}], ids=["uncut", "cut"])
def test_a_forward_pass(tiles: dict[str, int], pack: bool) -> None:
    """Alone and in groups: its weights, its inputs, its output; all else is written first, and freed."""
    tasks = forward(pack, **tiles)
    for of in (tasks, grouped(tasks, 1e12, 1e12, 1e-3, one_worker=True)):
        assert refusal(of) == ""
        weights, accesses = roles(of)
        parts = [part for task in of.tasks for part in task.parts or [task]]
        tiles_of = {a.tile for part in parts for a in part.accesses if a.tile.persistent}
        assert {*weights} == {tile for tile in tiles_of if tile.kind == "param"}
        assert tiles_of == {*weights, *(a.tile for a in accesses)}
        assert {(a.tile.kind, a.mode) for a in accesses} == {("input", "R"), ("output", "W")}


def test_workers_that_exchange_tiles_have_no_graphs() -> None:
    apart, together = forward(batch=2), forward(heads=1, ffn=24)
    assert {share.worker for share in shares(apart)} == {0}
    assign_parts(apart, 0, 2, 2)
    split = shares(apart)
    assert [share.worker for share in split] == [0, 1] and refusal(apart) == ""
    held = [{*roles(share.tasks).weights} for share in split]
    assert held[0] == held[1] == {*roles(apart).weights}
    for number, task in enumerate(together.tasks):
        task.worker = number % 2
    assert "workers exchange" in refusal(together)


def test_how_much_a_run_fills() -> None:
    most = most_filled(forward(batch=2))
    assert most["seq of 0"] == most["seq of 1"] == 64 and most["offset of 0"] == 65
    assert most_filled(forward(pack=False)) == {}


BERT = nt.models.BERTConfig(layers=1, embed=16, heads=2, vocab=40, positions=32)


def test_training() -> None:
    """A step changes its weights, so its graph must not run several times; packed steps differ in their sizes."""
    made = StepSpec(nt.models.BERT(BERT), 4, 32).step()
    assert "which outlives the program" in refusal(made.update.tasks)
    assert refusal(made.first.tasks)
    assert training_refusal([lowering.tasks for lowering in made.lists]) == ""
    packed = StepSpec(nt.models.BERT(BERT), 4, 32, Tiling({"batch": 2}), pack=True).step()
    assert training_refusal([packed.update.tasks, packed.first.tasks]) == "sequences are packed"
    redux = StepSpec(nt.models.BERT(BERT), 4, 32, Tiling({"batch": 2}), accumulate="redux").step()
    assert "adds by reduction" in training_refusal([redux.first.tasks])
    made.update.tasks.tasks[0].evicts.append(made.update.tasks.tasks[0].accesses[0].tile)
    assert "makes room on the device" in training_refusal([lowering.tasks for lowering in made.lists])


class SlotArgs(TaskArgs):
    value: float


def task(mode: str = "W", *, kind: str = "output", args: Any = None) -> TaskList:
    made, tile = TaskList(), Tile("x", (0,), (4,), "fp32", persistent=kind != "temp", kind=kind)
    made.tasks = [Task("fill", [Access(tile, mode)], args or TaskArgs(), "op")]
    return made


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        (task(), ""),
        (task(args=SlotArgs(Slot("seed"))), ""),
        (task("RW"), "changes x"),
        (task("COMMUTE"), "changes x"),
        (task("REDUX"), "by reduction"),
        (task("W", kind="temp"), ""),
    ],
)  # fmt: skip
def test_what_is_refused(tasks: TaskList, reason: str) -> None:
    found = refusal(tasks)
    assert re.search(reason, found) if reason else found == ""


def test_room_made_for_others_is_refused() -> None:
    for field in ("evicts", "clears"):
        tasks = task()
        getattr(tasks.tasks[0], field).append(tasks.tasks[0].accesses[0].tile)
        assert "makes room" in refusal(tasks)


@nt.task(x="R", y="W")
def doubled(x: Any, y: Any) -> None:
    y[...] = x


def test_tasks_in_python_are_refused(runtime: nt.Runtime) -> None:
    tasks, (x, y) = TaskList(), (Tile(name, (0,), (4,), "fp32", persistent=True, kind="output") for name in "xy")
    tasks.emit(doubled, [Access(x, "R"), Access(y, "W")])
    assert "in Python" in refusal(tasks.resolve())


@pytest.mark.parametrize("most", [8, 64, 65, 512, 1000, 4096, 8192, 16384, 20000])
def test_rounded(most: int) -> None:
    """There are few sizes, all at least the filled size and within the tile; products choose the same algorithms."""
    source = (Path(__file__).parents[1] / "tasks/cublaslt_cuda.cpp").read_text()
    assert "(most / 16 + 127) / 128 * 128;" in source  # as below

    def chosen_for(rows: int) -> int:
        step = (most // 16 + 127) // 128 * 128
        return min(most, -(-rows // step) * step) if step else rows

    found = {n: rounded(n, most) for n in range(1, most + 1)}
    assert all(n <= size <= most for n, size in found.items())
    assert all(size <= max(2 * n, LEAST, n + most // 16 + 128) for n, size in found.items())
    assert all(chosen_for(size) == chosen_for(n) for n, size in found.items() if most >= 16)
    graphs = (Path(cuda_graph.__file__).parent / "csrc/cuda_graph_cuda.cpp").read_text()
    kept = int(re.findall(r"kGraphs = (\d+);", graphs)[0])
    assert len({*found.values()}) <= kept


def test_on_cpu_workers(runtime: nt.Runtime) -> None:
    """captured: true is an error here; with the default, the tasks run one by one."""
    with pytest.raises(ConfigError, match=r"captured: got true, but a graph needs a runtime of GPUs"):
        nt.Encoder(MODEL, captured=True)([[1, 2]])
    with pytest.raises(ConfigError, match="captured: got 'no'; allowed: True, False or None"):
        nt.Encoder(MODEL, captured="no")
    encoder = nt.Encoder(MODEL)
    encoder([[1, 2]])
    assert "of GPUs" in served(encoder).reason


@pytest.mark.parametrize("other", [{"work": "train"}, {"contestant": "torch_eager"}, {"how": "plan"}])
def test_a_sweep_that_captures_nothing(other: dict[str, Any]) -> None:
    asked = {"work": "inference", "captured": False}
    assert Measure(**asked).captured is False
    with pytest.raises(ConfigError, match=r"measure.captured: got false; allowed: null where measure.work is train"):
        Measure(**asked | other)


# -- runs of a program, with a substitute for the graph: the same tasks, on the part of tiles that a graph computes

MODEL = nt.models.BERT(CONFIG, seed=1)
TEXTS = [[1, 2, 3], [*range(30)], [4], [5] * 17]


class Graph:
    """As _core.Captured."""

    room, fault, fails = True, "", False

    def __init__(
        self, program: Any, numbers: list[int], worker: int, weights: Any, tiles: Any, modes: Any, own: int,
        changing: list[int], measures: bool,
    ) -> None:  # fmt: skip
        assert worker == 0 and numbers == [*range(len(numbers))]
        assert len(modes) == len(tiles) and own >= 0
        assert not measures or (changing == [] and weights and own > 0 and {*modes} == {"R", "W"})
        assert measures or not weights
        self._program, self.graphs, self.broken, self.held, self.measures = program, 0, "", False, measures

    def hold(self, most: int) -> bool:
        self.held = self.room
        return self.held

    def let_go(self) -> None:
        self.held = False

    def run(self, slots: list[float]) -> int:
        assert self.held and (not self.measures or all(slot >= LEAST for slot in slots))
        if self.fails:
            raise TaskError("it fails")
        self.graphs, self.broken = self.graphs + 1, self.fault
        return int(self._program.run(slots))


@pytest.fixture
def graph(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    class Own(Graph):
        pass

    monkeypatch.setattr(_core, "Captured", Own, raising=False)
    monkeypatch.setattr(cuda_graph, "_not_here", lambda most=None: "")
    monkeypatch.setattr(cuda_graph, "LONG", float("inf"))
    monkeypatch.setattr(cuda_graph, "_lacks_room", lambda lists, room: "")
    return Own


def served(encoder: nt.Encoder) -> Served:
    assert encoder._bound_model
    (one,) = encoder._bound_model.programs.values()
    return one.served


@pytest.mark.parametrize("output", ["hidden", "mean", "pooled"])
def test_what_lies_behind_the_filled_changes_nothing(graph: type[Graph], output: str) -> None:
    want, encoder = nt.Encoder(MODEL, output, captured=False)(TEXTS), nt.Encoder(MODEL, output, captured=True)
    for got in (encoder(TEXTS), encoder(TEXTS)):
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert served(encoder).graphs == 2 and served(encoder).captured


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_way_is_chosen(graph: type[Graph], monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    def seconds(way: Any, runs: int) -> float:
        for _ in range(runs):
            way()
        return 2.0 if (way.__name__ == "launch") is faster else 3.0

    monkeypatch.setattr(cuda_graph, "_seconds", seconds)
    encoder = nt.Encoder(MODEL, "pooled")
    want = nt.Encoder(MODEL, "pooled", captured=False)(TEXTS)
    for runs in (1, 2):
        np.testing.assert_allclose(encoder(TEXTS), want, rtol=1e-5, atol=1e-6)
        one = served(encoder)
        assert one.captured is faster and one._natives[0].held is faster
        assert one.reason == ("" if faster else "a graph is no faster")
        assert one.graphs == 2 + cuda_graph.TURNS * cuda_graph.RUNS + runs * faster


def test_a_long_program_is_not_tried(graph: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "LONG", 0.0)
    encoder = nt.Encoder(MODEL, "pooled")
    np.testing.assert_array_equal(encoder(TEXTS), nt.Encoder(MODEL, "pooled", captured=False)(TEXTS))
    one = served(encoder)
    assert one.captured is False and one.graphs == 0 and "where a graph gains nothing" in one.reason
    encoder = nt.Encoder(MODEL, "pooled", captured=True)
    encoder(TEXTS)
    assert served(encoder).graphs == 1


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [({"room": False}, "no room"), ({"fault": "a kernel waits"}, "a kernel waits"), ({"fails": True}, "it fails")],
)
def test_what_cannot_be_a_graph_runs_without(graph: type[Graph], trouble: dict[str, Any], reason: str) -> None:
    for name, value in trouble.items():
        setattr(graph, name, value)
    want, encoder = nt.Encoder(MODEL, "pooled", captured=False)(TEXTS), nt.Encoder(MODEL, "pooled")
    np.testing.assert_array_equal(encoder(TEXTS), want)
    one = served(encoder)
    assert one.captured is False and reason in one.reason and not one._natives[0].held
    if "fails" not in trouble:  # of one that was asked for it is said, once
        encoder = nt.Encoder(MODEL, "pooled", captured=True)
        with pytest.warns(UserWarning, match=rf"captured: the program is no graph: .*{reason}"):
            for _ in range(2):
                np.testing.assert_allclose(encoder(TEXTS), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(encoder(TEXTS), want)


# -- training steps


def steps(captured: bool | None, *, passes: int = 1) -> tuple[nt.Trainer, list[float]]:
    model = nt.models.GPT2(nt.models.GPT2Config(layers=1, embed=16, heads=2, vocab=40, positions=16, dropout=0.1))
    trainer = nt.Trainer(model, 2, 16, captured=captured, grad_accumulation=passes, clip_grad_norm=1.0)
    ids = np.random.default_rng(0).integers(0, 40, (2 * passes, 16))
    return trainer, [trainer.step(ids, ids, lr=0.01 / (k + 1)) for k in range(3)]


def graphs(trainer: nt.Trainer) -> list[TrainingProgram]:
    (made,) = trainer._programs.steps.values()
    return [one for one in (made.first, made.more, made.update) if one]


@pytest.mark.parametrize("passes", [1, 3])
def test_a_step_as_graphs(graph: type[Graph], passes: int) -> None:
    """Slots reach the graphs; an evaluation between steps reads the weights; captured: false has none."""
    plain, want = steps(False, passes=passes)
    assert all(one.reason == "captured: false" and one.graphs == 0 for one in graphs(plain))
    for captured in (True, None):
        trainer, losses = steps(captured, passes=passes)
        assert losses == want and all(one.captured for one in graphs(trainer))
        assert [one.graphs for one in graphs(trainer)] == ([3, 3] if passes == 1 else [3, 3 * (passes - 1), 3])
        ids = np.arange(32).reshape(2, 16)
        assert trainer.evaluate(ids, ids) == plain.evaluate(ids, ids)
        for name, weight in trainer.state_dict().items():
            np.testing.assert_array_equal(weight, plain.state_dict()[name])


def test_long_tasks_are_no_graph(graph: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "LONG_STEP", 0.0)
    one_gpu(monkeypatch, 1 << 40)
    trainer, losses = steps(None)
    assert losses == steps(False)[1]
    assert all("where a graph gains nothing" in one.reason and not one._natives for one in graphs(trainer))
    assert all(one.captured for one in graphs(steps(True)[0]))


@pytest.mark.parametrize("trouble", [{"room": False}, {"fault": "a kernel waits"}])
def test_a_step_without_room(graph: type[Graph], trouble: dict[str, Any]) -> None:
    (name, value), (_, want) = *trouble.items(), steps(False)
    setattr(graph, name, value)
    assert steps(None)[1] == want
    with pytest.warns(UserWarning, match="captured: the program is no graph: "):
        assert steps(True)[1] == want


def one_gpu(monkeypatch: pytest.MonkeyPatch, room: int, ranks: Any = None) -> None:
    """Let this module's programs be built as for a runtime of one GPU with `room` bytes."""
    current = SimpleNamespace(cuda=1, cpus=0, ranks=ranks, cuda_memory=room)
    monkeypatch.setattr(cuda_graph, "Runtime", SimpleNamespace(current=current, watched=None))


def test_little_memory(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state, the graphs and an evaluation must fit, and the graphs into a quarter."""
    monkeypatch.setattr(_core, "Captured", Graph, raising=False)
    lists = [one.program.list for one in graphs(steps(False)[0])]
    temporary, own = max(one.temporary_bytes() for one in lists), sum(2 * one.temporary_bytes() for one in lists)
    tiles = {a.tile for tasks in lists for task in tasks.tasks for a in task.accesses if a.tile.persistent}
    need = max(4 * own, sum(tile.bytes for tile in tiles) + own + temporary)
    for room, reason in ((need - 1, "graphs need 0 MiB, and runtime.cuda_memory is 0 MiB"), (need, "")):
        one_gpu(monkeypatch, room)
        assert all(one.reason == reason and one.graphs == 3 * (not reason) for one in graphs(steps(None)[0]))
    one_gpu(monkeypatch, need - 1)
    with pytest.raises(ConfigError, match=r"captured: got true, but graphs need 0 MiB, and runtime.cuda_mem"):
        steps(True)


def test_ranks_have_no_graphs(runtime: nt.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch, 1 << 40, ranks=object())
    assert {one.reason for one in graphs(steps(None)[0])} == {
        "a graph needs a runtime of one GPU, no CPU workers and one rank"
    }


def test_a_closed_trainer_returns_its_memory(graph: type[Graph]) -> None:
    trainer, _ = steps(None)
    assert all(one._natives[0].held for one in graphs(trainer))
    trainer.close()
    assert not any(one._natives[0].held for one in graphs(trainer))


def test_a_profile_shows_tasks(graph: type[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = steps(True)
    monkeypatch.setattr(nt.Runtime, "watched", [])
    trainer.step(ids := np.arange(32).reshape(2, 16), ids)
    assert [len(tasks.tasks) > 1 for _, tasks in nt.Runtime.watched or []] == [True, True]
    assert [one.graphs for one in graphs(trainer)] == [3, 3]


def test_captured_steps_are_refused(runtime: nt.Runtime) -> None:
    model = nt.models.BERT(BERT)
    with pytest.raises(ConfigError, match=r"captured: got true, but a graph needs a runtime of one GPU"):
        nt.Trainer(model, 4, 32, captured=True)
    with pytest.raises(ConfigError, match="captured: got 'no'; allowed: True, False or None"):
        StepSpec(model, 4, 32, captured="no")  # type: ignore[arg-type]


def test_checked_steps_are_single_tasks(graph: type[Graph]) -> None:
    with pytest.raises(ConfigError, match=r"captured: got true, but debug.nonfinite checks every task"):
        nt.Trainer(nt.models.BERT(BERT), 4, 32, captured=True, check_finite=True)
