"""What a sweep shows: tables, the best point, the spread of repeats, pictures."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_sweep import write

from nntile_py.measure import runner as sweep_run
from nntile_py.measure import sweep_points as sweep
from nntile_py.measure.plots import caption, figure_of, shown_rows, spread
from nntile_py.measure.results import best_row, best_text, pooled, summary, table, within_spread
from nntile_py.measure.sweep_spec import Best, Plot
from nntile_py.system.pictures import files_of


def test_table_and_best() -> None:
    rows = [
        {"id": "a", "sets": {"x": None}, "status": "ok", "seconds": 2.0},
        {"id": "b", "sets": {"x": 3}, "status": "failed", "error": "no, not this"},
    ]
    assert table(rows).splitlines() == ["x,status,seconds,error", "uncut,ok,2.0,", '3,failed,,"no, not this"']
    assert best_row(rows, Best()) is rows[0]


@pytest.mark.parametrize("end", ["failed", "interrupted"])
def test_nothing_to_draw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    def bad(point: sweep.Point, *_: Any) -> dict[str, Any]:
        if end == "interrupted":
            raise KeyboardInterrupt
        return {"id": point.id, "sets": point.sets, "measure": {}, "status": "failed", "error": f"no {point.sets}"}

    monkeypatch.setattr(sweep_run, "measure_point", bad)
    plots = [{"kind": "heat", "x": "tiles.batch", "series": "fusion"}, {"x": "tiles.batch"}]
    grid = {"tiles.batch": [1, 2, 4], "fusion": [True, False]}
    made, told = sweep.load_sweep(write(tmp_path, {"grid": grid, "plots": plots})), io.StringIO()
    console = Console(file=told, width=200)
    for number in ("", 2, 3):  # of an earlier sweep, that had three
        for form in ("png", "svg", "pdf"):
            (tmp_path / f"plot{number}.{form}").touch()
    (tmp_path / "plot4.png").touch()  # the user's
    (tmp_path / "results.json").write_text('{"sweep": {"plots": [1, 2, 3]}}')
    if end == "interrupted":
        with pytest.raises(KeyboardInterrupt):
            sweep_run.run(made, tmp_path, console)
    else:
        console.print(summary(made, sweep_run.run(made, tmp_path, console)))
        assert "failed: fusion true, tiles.batch 1: no {" in told.getvalue() and "and 1 more" in told.getvalue()
    assert "plot.png: not drawn" in told.getvalue() and "plot2.png: not drawn" in told.getvalue()
    assert list(tmp_path.glob("plot*")) == [tmp_path / "plot4.png"] and (tmp_path / "results.csv").exists()
    for plot in made.plots:  # as an experiment does
        assert files_of(figure_of([plot], []))["png"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("plot", "best", "value", "over"),
    [
        ({"y": "seconds"}, {}, [1.0, 2.0], ["c"]),
        ({"y": "tokens_per_s"}, {}, [5.0, 2.0], ["c"]),
        ({"y": "tokens_per_s"}, {"metric": "tokens_per_s", "of": "least"}, [1.0, 2.0], ["c"]),
        ({"y": "seconds"}, {"of": "greatest"}, [5.0, 2.0], ["c"]),
        ({"y": "seconds", "panel": "c"}, {}, [5.0, 1.0, 2.0], []),
    ],
)
def test_rows_of_one_place(plot: dict[str, Any], best: dict[str, Any], value: list[float], over: list[str]) -> None:
    """The best is drawn, not the last."""
    rows = [
        {"sets": {"a": a, "b": 1, "c": c}, "status": "ok", "seconds": of, "tokens_per_s": of}
        for a, c, of in ((1, True, 5.0), (1, False, 1.0), (2, True, 2.0))
    ]
    made = Plot(kind="heat", x="a", series="b", **plot)
    shown, told = shown_rows(made, rows, Best(**best))
    assert [row["seconds"] for row in shown] == value and told == over
    assert files_of(figure_of([made], rows))["png"].startswith(b"\x89PNG")


def timed(sets: dict[str, Any], times: list[float]) -> dict[str, Any]:
    middle = sorted(times)[len(times) // 2]
    facts = {"seconds": middle, "seconds_min": min(times), "seconds_max": max(times), "tokens_per_s": 12 / middle}
    return {"id": str(sets), "sets": sets, "status": "ok", "times": times} | facts


def test_the_spread_of_repeats() -> None:
    """Of few all of them, of many the middle half, in the metric's own unit; of a rate the other way round."""
    assert spread(timed({}, [2.0, 3.0, 4.0])) == (2.0, 4.0)
    many = timed({}, [2.0, 2.0, 3.0, 4.0, 90.0])
    assert spread(many) == (2.0, 4.0) and spread(many, "ms") == (2e3, 4e3)
    assert spread(many, "tokens_per_s") == (pytest.approx(3.0), pytest.approx(6.0))
    assert spread(many, "tasks") is None and spread(timed({}, [2.0])) is None


def test_best_names_those_that_are_no_worse() -> None:
    rows = [
        timed({"fusion": fusion, "tiles.embed": embed, "seed": 1}, times)
        for fusion, embed, times in (
            (True, 96, [1.0, 2.0, 3.0]),
            (True, None, [2.5, 4.0, 5.0]),
            (False, 96, [3.5, 4.0, 5.0]),
        )
    ]
    assert within_spread(rows, Best()) == rows[1:2]
    lines = best_text(rows, Best()).splitlines()
    assert lines[0].startswith("no clear winner; least seconds: --set fusion=true --set tiles.embed=96")
    assert lines[1] == "within the spread of: fusion fused, embed uncut (4)"
    assert best_text(rows[::2], Best()).startswith("best: --set fusion=true --set tiles.embed=96")
    assert len(best_text(rows[::2], Best()).splitlines()) == 1


def test_one_disturbed_round_makes_no_winner() -> None:
    """Of three rounds the fused side had one beside another process: its median is worse, its other rounds are not."""
    quiet = {1: [1.00, 1.01, 1.02], 2: [1.03, 1.02, 1.04], 3: [1.01, 1.02, 1.03]}
    disturbed = quiet | {2: [1.9, 2.0, 2.1], 3: [1.04, 1.06, 1.07]}

    def row(fusion: bool, rounds: dict[int, list[float]]) -> dict[str, Any]:
        return pooled([timed({"fusion": fusion}, times) for times in rounds.values()])

    rows = [row(True, disturbed), row(False, quiet)]
    assert best_row(rows, Best()) is rows[1]
    assert best_text(rows, Best()).startswith("no clear winner; least seconds: --set fusion=false")
    busy = [rows[0], rows[1] | {"others": 64.0}]
    assert "other processes kept up to 64.0 cores busy: measure again" in best_text(busy, Best())
    slower = {number: [2 * of for of in times] for number, times in quiet.items()}
    assert best_text([row(True, slower), rows[1]], Best()) == "best: --set fusion=false"
    once = [timed({"fusion": fusion}, [seconds]) for fusion, seconds in ((True, 2.0), (False, 1.0))]
    assert "measured once: measure.repeats and rounds show" in best_text(once, Best())


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ([2.0, 2.2, 1.9], "2.00 times as fast as the config's own tiles (2 s), by round 1.90 to 2.20"),
        ([1.05, 0.98, 1.1], "1.05 times as fast as the config's own tiles (1.05 s), by round 0.98 to 1.10: no clear"),
        ([0.5, 0.5, 0.5], "the config's own tiles (0.5 s) are the best: keep them"),
    ],
)
def test_the_gain_over_the_own_tiles(own: list[float], text: str) -> None:
    """By round, as each round measures both."""
    base = pooled([timed({"tiles.batch": 8, "tiles.seq": None}, [of, of]) for of in own])
    other = pooled([timed({"tiles.batch": 2, "tiles.seq": None}, [1.0, 1.0]) for _ in own])
    first, *_, last = best_text([base, other], Best(), base).splitlines()
    assert text in last
    assert first.endswith("the config's own" if own[0] < 1 else "--set tiles.batch=2"), "not keys as in the config"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"work": "train"}, "a step"),
        ({"work": "attention"}, "a forward pass"),
        ({"work": "inference"}, "a forward pass"),
        ({"work": "mha", "phase": "forward"}, "a forward pass"),
        ({"work": "mha", "phase": "all"}, "a step"),
    ],
)
def test_what_was_timed(how: dict[str, Any], told: str) -> None:
    rows = [timed({"train.seq": seq}, [2.0, 3.0]) | {"measure": how} for seq in (1, 2)]
    (part,) = figure_of([Plot(x="train.seq")], rows).subfigs
    assert part.axes[0].get_ylabel() == f"time of {told} (s)"


@pytest.mark.parametrize("kind", ["line", "bar"])
def test_plots_hide_nothing(kind: Any) -> None:
    """Error bars end inside the axes, the legend stands outside; title, repeats and machine are told, words are one."""
    rows = [
        timed({"fusion": fusion, "tiles.embed": embed}, [0.1 * embed, 0.2 * embed, 0.9 * embed])
        for fusion in (True, False)
        for embed in (1, 2, 4)
    ]
    rows[0]["others"] = 1e3
    plot = Plot(kind=kind, x="tiles.embed", series="fusion", title="GPT-2")
    drawn = figure_of([plot], rows, where="a machine")
    drawn.canvas.draw()
    (part,) = drawn.subfigs
    (axis,), (legend,) = part.axes, part.legends
    assert axis.get_ylim()[1] >= 900 * 4 and axis.get_ylim()[0] == 0
    assert legend.get_window_extent().x0 >= axis.get_window_extent().x1
    assert [one.get_text() for one in legend.get_texts()] == ["fused", "naive"]
    assert axis.get_xlabel() == "tile size along embed" and axis.get_ylabel() == "time of a step (ms)"
    small = drawn.get_supxlabel()
    assert "median of 3 repeats; error bars: all repeats" in small and "a machine" in small
    assert "other processes kept up to 1000.0 cores busy" in small and part.get_suptitle() == "GPT-2"
    least = Plot(kind=kind, x="tiles.embed", y=["best ms"], series="fusion")
    assert caption(rows[1:], metrics=least.metrics) == "best of 3 repeats"
    assert caption(rows[1:], metrics=["ms", "best ms"]) == "median and best of 3 repeats; error bars: all repeats"
    heat = figure_of([Plot(kind="heat", x="tiles.embed", series="fusion")], rows)
    ticks = [one.get_text() for one in heat.subfigs[0].axes[0].get_yticklabels()]
    assert ticks == ["fused", "naive"]


@pytest.mark.parametrize("kind", ["line", "bar"])
def test_many_series_are_told_apart(kind: Any) -> None:
    """More than there are colours; on a logarithmic axis, where one would hide the others on a linear one."""
    rows = [timed({"x": x, "variant": f"v{k}"}, [x * 10.0**-k]) for x in (1, 2) for k in range(9)]
    plot = Plot(kind=kind, x="x", series="variant", ylog=True)
    (axis,) = figure_of([plot], rows).get_axes()
    assert axis.get_yscale() == "log" and axis.get_ylim()[0] > 0
    if kind == "bar":
        looks = [(of[0].get_facecolor(), of[0].get_hatch()) for of in axis.containers if len(of) == 2]
    else:
        looks = [(of[0].get_color(), of[0].get_linestyle()) for of in axis.containers]
    assert len(looks) == len(set(looks)) == 9
    (linear,) = figure_of([Plot(kind=kind, x="x", series="variant")], rows).get_axes()
    assert linear.get_yscale() == "linear" and linear.get_ylim()[0] == 0
