"""What keeps searched layouts from being slower: times out of cache, in turns with the default, and whole steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_layouts import MODELS, OF, TINY, Drawn, chain, measured, tensor

import nntile_py as nt
from nntile_py import errors
from nntile_py.analysis import layout_analysis as parts
from nntile_py.analysis.workloads import preset
from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.layout_search import arrange, search
from nntile_py.graph.layouts import layout_of
from nntile_py.graph.step import StepSpec
from nntile_py.graph.timings import LayoutComparison, Timing, Timings, opened
from nntile_py.profiling import layout_timer as profiled
from nntile_py.profiling import operator_timer
from nntile_py.tasks.contract import Contract
from nntile_py.tiles import Tiling


@pytest.mark.parametrize(
    ("default", "searched", "slower"),
    [
        ([10, 10.1, 9.9, 10, 10.2], [10.5, 10.6, 10.4, 10.5, 10.7], True),
        ([10, 20, 30, 40, 50], [10.5, 20.6, 30.4, 40.5, 50.7], True),  # the machine slows down for both
        ([10, 10.1, 9.9, 10, 10.2], [9.5, 9.6, 9.4, 9.5, 9.7], False),
        ([10, 12, 9, 14, 10], [12, 10, 14, 9, 11], False),  # as much above as below
        ([10, 10, 10, 10, 10], [10, 10, 10, 10, 10], False),
        ([37.5, 36.4, 40.8, 37, 38], [42.1, 36.9, 43.9, 42, 43], True),
    ],
)
def test_slower_beyond_noise(default: list[float], searched: list[float], slower: bool) -> None:
    comparison = LayoutComparison("", tuple(default), tuple(searched))
    assert comparison.slower == slower
    assert ("searched is slower" in str(comparison)) == slower and f"{len(default)} steps in turns" in str(comparison)


def turned(operator: str, layout: str) -> float:
    """The second product of the chain is faster if what it reads is turned, and nothing costs more by it."""
    return 1.0 if layout.endswith("M N") or "Contract" not in operator else 0.5


SLOWER, FASTER = ((1.0,) * 5, (2.0,) * 5), ((2.0,) * 5, (1.0,) * 5)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What `arrange` has told."""
    texts: list[str] = []
    monkeypatch.setattr("nntile_py.graph.layout_search.say_once", texts.append)
    return texts


@pytest.fixture
def turning(tmp_path: Path) -> tuple[Graph, Timings]:
    """The chain, and times by which another layout than the default is chosen."""
    g = chain()
    timings = measured(g, turned)
    timings.path = tmp_path / "timings.jsonl"
    return g, timings


def test_a_comparison_decides(said: list[str], turning: tuple[Graph, Timings]) -> None:
    """Of this program alone: cut otherwise it is another one."""
    g, timings = turning
    before = [(op, layout_of(op)) for op in g.ops]
    program = search(g, timings, Tiling()).program
    assert program
    timings.add_comparison(LayoutComparison(program, *SLOWER))
    chosen = arrange(g, opened_as(timings), Tiling())
    assert chosen.refused and [(op, layout_of(op)) for op in g.ops] == before
    assert len(said) == 1 and said[0].startswith("layout: searched takes the default layouts here: default 1000.000 ms")
    timings.add_comparison(LayoutComparison(program, *FASTER))
    assert not arrange(g, opened_as(timings), Tiling()).refused and [layout_of(op) for op in g.ops] != before
    assert len(said) == 1
    cut, timings = Tiling({"ffn": 4}), Timings(OF, comparisons={program: LayoutComparison(program, *SLOWER)})
    for operator, layout in search(chain(), timings, cut).missing:
        timings.add(Timing(operator, layout, turned(operator, layout)))
    other = arrange(chain(), timings, cut)
    assert other.program not in (None, program) and not other.refused and len(said) == 1


def opened_as(timings: Timings) -> Timings:
    """With the comparisons that are in its file."""
    assert timings.path
    return Timings(timings.of, timings.path, timings.known, opened(OF, timings.path).comparisons)


def test_no_comparison_yet(said: list[str], turning: tuple[Graph, Timings]) -> None:
    """The search is used, and a hint is given; none where the default is chosen anyway."""
    g, timings = turning
    before = [layout_of(op) for op in g.ops]
    assert not arrange(g, timings, Tiling()).refused and [layout_of(op) for op in g.ops] != before
    (told,) = said
    assert "not yet compared" in told and "nntile layouts tune" in told
    same = measured(chain(), lambda operator, layout: 1.0)
    same.path = timings.path
    assert arrange(chain(), same, Tiling()).program is None and len(said) == 1


def test_a_text_is_said_once() -> None:
    with pytest.warns(UserWarning, match="said by a test") as caught:
        for _ in range(2):
            errors.say_once("said by a test")
    assert len(caught) == 1


@pytest.mark.parametrize("rank", ["0", "1"])
def test_of_several_ranks_the_first_says_it(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors.say_once(f"said by rank {rank}")
    assert len(caught) == (rank == "0")


def test_waits_for_another_process_that_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measures, waits = (opened(OF, tmp_path / "timings.jsonl", new=True) for _ in range(2))
    with ExitStack() as measuring:
        measuring.enter_context(measures.exclusive())
        said = []

        def say(text: str) -> None:
            said.append(text)
            measures.add(Timing("a", "M N", 2.0))
            measuring.close()

        monkeypatch.setattr("nntile_py.graph.timings.say_once", say)
        with waits.exclusive():
            assert waits.known == measures.known
    assert said == [f"{measures.path}: waiting for another process that measures into it"]


def test_a_digest_is_of_what_is_in_a_database() -> None:
    one, same, other, compared = (Timings(OF) for _ in range(4))
    entries = [Timing("a", "M N", 2.0), Timing("a", "N M", 3.0), Timing("b", "M", 1.0)]
    for timings, found in ((one, entries), (same, entries[::-1]), (other, entries[1:]), (compared, entries)):
        for entry in found:
            timings.add(entry)
    compared.add_comparison(LayoutComparison("abc", *SLOWER))
    assert one.digest() == same.digest() and len({one.digest(), other.digest(), compared.digest()}) == 3


def test_comparisons_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    timings = opened(OF, path, new=True)
    timings.add(Timing("a", "M N", 2.0, (2.0,)))
    timings.add_comparison(LayoutComparison("abc", *SLOWER))
    timings.add_comparison(LayoutComparison("abc", *FASTER))  # the last one counts
    timings.add(Timing("a", "M N", 3.0, (3.0,), turns=True))
    again = opened(OF, path)
    assert (
        again.comparisons == timings.comparisons == {"abc": LayoutComparison("abc", *FASTER)}
        and again.known == timings.known
    )
    assert again.known["a"]["M N", None].turns
    with path.open("a") as file:
        file.write('{"program": "abc", "default": [1.0], "searched": []}\n')
    with pytest.raises(ConfigError, match="line 6: no timing"):
        opened(OF, path)


@pytest.mark.parametrize(
    "line",
    [
        '{"program": "", "default": [1, 1], "searched": [2, 2]}',  # it would be of whatever has no program
        '{"program": "abc", "default": [1, NaN], "searched": [2, 2]}',
        '{"program": "abc", "default": [1, -1], "searched": [2, 2]}',
        '{"program": "abc", "default": "11", "searched": "22"}',
        f'{{"program": "abc", "default": [1, 1{"0" * 400}], "searched": [2, 2]}}',
        '{"program": ' + "[" * 100_000,
        '{"operator": "a", "layout": "M N", "seconds": 1, "times": [1], "width": Infinity}',
        '{"operator": "a", "layout": "M N", "seconds": 1, "times": [1], "width": -3}',
        f'{{"operator": "a", "layout": "M N", "seconds": 1{"0" * 400}, "times": [1]}}',
        '{"operator": "a", "layout": "M N", "seconds": 1, "times": [NaN]}',
    ],
)
def test_damaged_lines(line: str, tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    opened(OF, path, new=True).add(Timing("a", "M N", 2.0, (2.0,)))
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match="line 3: no timing"):
        opened(OF, path)


def test_programs_of_other_inputs_follow(monkeypatch: pytest.MonkeyPatch, runtime: nt.Runtime) -> None:
    """Where the step's searched layouts are refused, a trainer's other programs have the default ones, too."""
    monkeypatch.setattr("nntile_py.graph.layout_search.say_once", lambda text: None)
    timings = Drawn(OF, seed=3)
    spec = StepSpec(MODELS["encoder"](), 4, 16, timings=timings)
    graph = replace(spec, timings=None).graphs.graph
    program = search(graph, timings, spec.cuts).program
    assert program
    default = [op.title for op in graph.ops]
    for pair, refused in (FASTER, False), (SLOWER, True):
        timings.comparisons = {program: LayoutComparison(program, *pair)}
        trainer = nt.Trainer.of_spec(replace(spec))  # a spec keeps its graphs
        assert (trainer.spec.timings is None) == refused == (trainer.spec.kept is None)
        assert ([op.title for op in trainer.built.graph.ops] == default) == refused
        trainer.close()


# -- how they are taken, by a clock of the test's own


class _Times:
    """Each run takes what is told for it, more by `drift` with each one."""

    def __init__(self, seconds: dict[str, float], drift: float = 0.0) -> None:
        self.seconds, self.drift, self.runs = seconds, drift, list[str]()

    def step(self, name: str) -> Callable[[int], None]:
        def run(count: int) -> None:
            self.runs.append(name)

        return run

    def clocked(self, run: Callable[[int], None], repeats: int, runs: int = 1) -> list[float]:
        run(runs)
        return [self.seconds[self.runs[-1]] + self.drift * len(self.runs)]


@pytest.mark.parametrize(("searched", "slower"), [(1.2, True), (0.9, False)])
def test_whole_steps_in_turns(monkeypatch: pytest.MonkeyPatch, searched: float, slower: bool) -> None:
    """On a machine that slows down all the while; each is as often the first of a turn."""
    clock = _Times({"default": 1.0, "searched": searched}, drift=0.01)
    monkeypatch.setattr("nntile_py.system.clock.clocked", clock.clocked)
    monkeypatch.setattr(profiled, "_small", lambda c, w, timings, s: clock.step("searched" if timings else "default"))
    config = preset("mha", TINY)
    graph = parts.graph_of(config, "mha", True)
    comparison = profiled.compare(config, "mha", measured(graph, turned), True, "abc")
    assert (
        comparison.program == "abc"
        and len(comparison.default) == len(comparison.searched) >= 5
        and comparison.slower == slower
    )
    timed = clock.runs[4:]
    firsts = timed[::2]
    assert {*zip(firsts, timed[1::2], strict=True)} == {("default", "searched"), ("searched", "default")}
    assert abs(firsts.count("default") - firsts.count("searched")) <= 1


def test_a_lucky_layout_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the best by chance: in turns with the default one it is slower, and not chosen any more; a layout that is
    in fact better stays. A second look measures nothing."""
    config, g = preset("encoder", TINY), chain()
    for truth, stays in (2.0, False), (0.4, True):
        timings, asked, told = measured(g, turned), list[str](), list[str]()

        def times(self: Any, ops: Sequence[Any], truth: float = truth, asked: list[str] = asked) -> list[list[float]]:
            asked += [op.title for op in ops]
            plain, _ = ops
            return [[1.0], [1.0 if plain.kind != "Contract" else truth]]

        monkeypatch.setattr(operator_timer.OperatorTimer, "times", times)
        timer = operator_timer.OperatorTimer(config, 1)
        assert search(g, timings, Tiling()).program
        profiled.time_chosen(timer, [g], timings, told.append)
        assert (search(g, timings, Tiling()).program is not None) == stays and asked
        assert told[0].startswith("0 of ") and told[0].endswith("chosen layouts against the default ones, round 1 of 3")
        counts = len(asked), len(told)
        profiled.time_chosen(timer, [g], timings, told.append)
        assert (len(asked), len(told)) == counts


@pytest.mark.parametrize(("room", "copies"), [(0, 1), (1, 1), (2000, 5), (10**9, operator_timer.MOST_COPIES)])
def test_tiles_out_of_cache(monkeypatch: pytest.MonkeyPatch, runtime: nt.Runtime, room: int, copies: int) -> None:
    """Each run takes the next copy of the tiles, so many that they take the room: 464 bytes each here."""
    ran: list[int] = []
    made = operator_timer.programs

    def programs(*args: Any) -> list[Any]:
        (program,) = made(*args)
        number, run = len(numbers), program.run
        numbers.append(number)
        program.run = lambda slots=None: (ran.append(number), run(slots))
        return [program]

    numbers: list[int] = []
    monkeypatch.setattr(operator_timer, "programs", programs)
    op = Contract(tensor("seq embed"), tensor("embed ffn"), tensor("seq ffn"))
    op.fit(Tiling())
    run = operator_timer.runner(op, Tiling(), preset("encoder", TINY), room)
    assert len(numbers) == copies and sum(t.numel for t in (op.a, op.b, op.output)) * 4 == 464
    ran.clear()
    run(2 * copies)
    assert ran == [*numbers, *numbers]


def test_weights_of_small_graphs_are_of_a_models_size() -> None:
    """Products of what is drawn stay where an exponential is fast; inputs are above zero, as roots and divisors are."""
    weight, x = tensor("embed ffn", "param", embed=64, ffn=256), tensor("seq embed", "input", seq=32, embed=64)
    drawn, inputs = operator_timer._random([weight, x])
    assert abs(drawn).max() <= 1 / 16 and drawn.min() < -0.05 and drawn.max() > 0.05
    assert inputs.min() >= 0.1 and inputs.max() <= 1 and abs(inputs @ drawn).max() < 5
