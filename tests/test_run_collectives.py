"""Traces of several ranks as one: clocks put right, messages paired, who waited for whom. All made up, without MPI."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from traces import US, check_format, info, scheduled

from nntile_py import profiling as profile
from nntile_py.analysis import roofline
from nntile_py.profiling import diagnosis, gantt, message_waits, perfetto, trace_analysis
from nntile_py.profiling.merge_ranks import RankClock, merge_traces, with_ends
from nntile_py.profiling.trace import MessageEnd, Trace
from nntile_py.system.load import Load, among
from nntile_py.tiles.dependencies import TileUse

PEAKS = {"CPU": roofline.Peak(1e9, 1e9, "test")}
TILES = {"batch": {"size": 8, "tile": 4, "tiles": 2}}
OFFSET, DRIFT = 5 * 10**9, 1e-4  # of the second rank's clock: ns, ns a ns
MS = 1000 * US
COLUMNS = ("submit", "pop", "fetch", "fetched", "start", "end", "released")


def theirs(ns: Any) -> Any:
    """A date on the second rank's clock."""
    return np.asarray(ns) + OFFSET + np.rint(np.asarray(ns) * DRIFT).astype(np.int64)


def rank(number: int, uses: list[list[TileUse]], spans: list[tuple[int, int]], ends: list[Any]) -> Trace:
    """One rank's trace: a task for each of `uses`, run in `spans` (ns); ends: (place in its list, uses, MessageEnd)."""
    made = [info(f"h{k}.Contract", of) for k, of in enumerate(uses)] or [info("none", [])]
    trace = scheduled(made, [1.0] * len(made), workers=1)
    trace = replace(trace, nodes=["RAM"], **{f.name: getattr(trace, f.name)[: len(uses)] for f in fields(Trace)
                                             if f.type == "Ints"})  # fmt: skip
    clock = theirs if number else np.asarray
    for name in COLUMNS:
        dates = [0 if name == "submit" else end if name in ("end", "released") else start for start, end in spans]
        setattr(trace, name, clock(np.array(dates, np.int64)))
    passages = [
        (1, at, info("message", of), replace(end, posted=int(clock(end.posted)), ended=int(clock(end.ended))))
        for at, of, end in ends
    ]
    places = [at for at in range(len(uses) + len(ends)) if at not in [place for place, *_ in ends]]
    with_ends(trace, passages, np.ones(len(uses), np.int64), np.array(places))
    return trace


def pair() -> Trace:
    """Rank 0 makes x in 1 to 2 ms, which arrives at 2.6 ms, and goes on to 4 ms; rank 1 works on it from 2.61 ms."""
    x, tile = [TileUse("x", "W")], dict(tag=7, bytes=4000, name="x[0, 0]", step=1)
    sends = MessageEnd(True, 1, posted=100 * US, ended=2500 * US, **tile)
    receives = MessageEnd(False, 0, posted=50 * US, ended=2620 * US, **tile)  # told of after it has let its task go on
    first = rank(0, [x, [TileUse("y", "W")]], [(MS, 2 * MS), (2 * MS, 4 * MS)], [(1, [TileUse("x", "R")], sends)])
    reads = [[TileUse("x", "R"), TileUse("z", "W")]]
    second = rank(1, reads, [(2610 * US, 3610 * US)], [(0, x, receives)])
    readings = [np.array([[t, t, 0], [t, int(theirs(t)), 1500]]) for t in (0, 10 * MS)]
    return merge_traces([first, second], ["here", "there"], *readings)


def test_clocks_are_put_right_and_messages_paired() -> None:
    trace = pair()
    (message,) = trace.messages
    assert (message.source, message.target) == (0, 1) and trace.hosts == ["here", "there"]
    task = int(np.flatnonzero(trace.rank == 1)[0])
    assert abs(int(trace.start[task]) - 2610 * US) <= 2 and trace.clock and trace.clock["error_s"] == 1.5e-6
    assert trace.clock["offsets_s"] == [0, 5] and trace.clock["drift"][1] == pytest.approx(DRIFT, rel=1e-3)
    assert message.ready == 2 * MS  # when the task ended, long after it was posted
    start, end = message.way
    assert start == 2 * MS and abs(end - 2610 * US) <= 2  # not after its task began
    maker = message.send.before[0]
    assert message.receive.after == (task,) and trace.before[task] == [maker] and maker < task
    assert [w.name for w in trace.workers] == ["rank 0 CPU 0", "rank 1 CPU 0"] and trace.nodes[1] == "rank 1 RAM"


def test_who_waits_for_whom() -> None:
    trace = pair()
    (wait,) = message_waits.waits(trace)
    assert (wait.rank, wait.peer) == (1, 0) and wait.late == 2 * MS and abs(wait.end - 2610 * US) <= 2
    summary = trace_analysis.summarise(trace, PEAKS, TILES)
    one, two = summary["ranks"]
    run = 4 * MS
    assert one["waiting"] == 0 and two["waiting"] == pytest.approx(2610 * US / run, rel=1e-3)
    assert two["waiting_for_tasks"] == pytest.approx(2 * MS / run, rel=1e-3)
    for row in (one, two):
        assert row["communicating"] == pytest.approx(610 * US / run, rel=1e-3)
    assert one["hidden"] == pytest.approx(1) and two["hidden"] == pytest.approx(0, abs=1e-3)
    assert one["exposed"] == 0 and two["exposed"] == pytest.approx(610 * US / run, rel=1e-3)
    assert (one["sent_bytes"], one["received_bytes"], two["received_messages"]) == (4000, 0, 1)
    assert summary["messages"][0] | {"share_of_run": 0} == {
        "from": 0, "to": 1, "messages": 1, "bytes": 4000, "share_of_run": 0,
    }  # fmt: skip
    found = {rule["rule"]: rule for rule in diagnosis.report(summary)}
    cause = found["other-ranks"]["cause"]
    assert "x[0, 0] (rank 1 waits for rank 0)" in cause and "equal work" in found["other-ranks"]["advice"]
    assert not found.keys() & {"few-tiles", "imbalance", "serial-chain"}
    # Where the tile is there in time, nobody waits; the rank is idle for another reason.
    trace.messages = [replace(m, receive=replace(m.receive, ended=int(trace.submit.max()))) for m in trace.messages]
    assert not message_waits.waits(trace)
    rules = diagnosis.report(trace_analysis.summarise(trace, PEAKS, TILES))
    assert "other-ranks" not in [rule["rule"] for rule in rules]


def test_a_tile_that_is_sent_on_and_one_that_has_to_be_sent_first() -> None:
    """Rank 1 sends on what it got; rank 0 writes the tile anew when it has gone."""
    x = [TileUse("x", "R")]

    def end(sends: bool, peer: int, tag: int, posted: int, ended: int) -> MessageEnd:
        return MessageEnd(sends, peer, tag, 8, "x", 1, posted, ended)

    made = [[TileUse("x", "W")], [TileUse("x", "W")]]
    one = rank(0, made, [(0, MS), (3 * MS, 4 * MS)], [(1, x, end(True, 1, 1, 0, 3 * MS))])
    # Ranks 1 and 2 have the first one's clock, which is what `rank(0, ...)` gives.
    two = rank(0, [], [], [(0, [TileUse("x", "W")], end(False, 0, 1, 0, 3 * MS)), (1, x, end(True, 2, 2, 0, 5 * MS))])
    three = rank(0, [x], [(6 * MS, 7 * MS)], [(0, [TileUse("x", "W")], end(False, 1, 2, 0, 5 * MS))])
    zeros = np.zeros((3, 3), np.int64)
    trace = merge_traces([one, two, three], ["a"] * 3, zeros, zeros)
    last = len(trace) - 1
    assert trace.before[last] == [0] and trace.rank.tolist() == [0, 0, 2]  # by way of rank 1, which has no task
    relayed = next(m for m in trace.messages if m.target == 2)
    assert relayed.ready == 3 * MS
    assert {(w.rank, w.peer) for w in message_waits.waits(trace)} == {(0, 1), (2, 1)}


def test_the_files(tmp_path: Path) -> None:
    trace = pair()
    summary = profile.write(trace, PEAKS, TILES, tmp_path, "two")
    assert {path.name for path in tmp_path.iterdir()} >= {"trace.json", "gantt.png", "report.html", "summary.json"}
    found = check_format(tmp_path / "trace.json")
    names = {e["args"]["name"] for e in found if e["ph"] == "M" and "name" in e["args"]}
    assert {"rank 0: workers", "rank 1: messages", "sends", "receives", "workers wait for another rank"} <= names
    flow = [e for e in found if e["ph"] in "sf" and e["name"] == "message"]
    assert [e["pid"] - perfetto.MESSAGES for e in flow] == [0, perfetto.RANKS]
    assert flow[0]["ts"] == pytest.approx(2000) and flow[1]["ts"] == pytest.approx(2610, abs=0.01)
    waiting = next(e for e in found if e.get("cat") == "wait")
    assert waiting["name"] == "for rank 0: x[0, 0]" and waiting["dur"] == pytest.approx(2610, abs=0.01)
    text = (tmp_path / "report.html").read_text()
    assert "<h2>Ranks</h2>" in text and "rank 1: messages" in text and summary["clock"]["error_s"] > 0
    assert gantt.arrows(trace)[0] == (0, 0.5, 1, pytest.approx(2610 / 4000, rel=1e-4))


def test_messages_that_overlap_share_a_row(tmp_path: Path) -> None:
    ends = [MessageEnd(True, 1, tag, 8, f"t{tag}", 1, 0, 5 * MS) for tag in range(3)]
    others = [replace(end, sends=False, peer=0, ended=(5 + end.tag) * MS) for end in ends]
    uses = [[TileUse(tag, "W")] for tag in range(3)]
    one = rank(0, uses, [(0, MS), (MS, 2 * MS), (2 * MS, 3 * MS)],
               [(3 + k, [TileUse(k, "R")], end) for k, end in enumerate(ends)])  # fmt: skip
    two = rank(0, [[TileUse(tag, "R") for tag in range(3)]], [(8 * MS, 9 * MS)],
               [(k, uses[k], end) for k, end in enumerate(others)])  # fmt: skip
    zeros = np.zeros((2, 3), np.int64)
    trace = merge_traces([one, two], ["a", "a"], zeros, zeros)
    perfetto.write(trace, tmp_path / "trace.json")
    found = check_format(tmp_path / "trace.json")  # no two in a row at a time
    spans = [(e["pid"], e["ts"], e["dur"]) for e in found if e.get("cat") == "message" and e["ph"] == "X"]
    assert [span for span in spans if span[0] == perfetto.MESSAGES] == [
        (perfetto.MESSAGES, 1000, 4000), (perfetto.MESSAGES, 5000, 1000), (perfetto.MESSAGES, 6000, 1000),
    ]  # fmt: skip


def test_a_clock_between_two_readings() -> None:
    clock = RankClock((0, OFFSET, 10), (10 * MS, int(theirs(10 * MS)), 300))
    dates = np.arange(0, 10 * MS, 12345)
    assert np.abs(clock.dates(theirs(dates)) - dates).max() <= 2 and clock.error == 300


def test_ranks_on_the_same_cores_are_no_others() -> None:
    loads = [Load() for _ in range(3)]
    for load, where, others, own in zip(loads, "aab", (1.5, 1.4, 0.2), (1.0, 1.2, 0.9), strict=True):
        load.where, load.others, load.own = (where, frozenset({0, 1})), others, own
    facts = among(loads)
    assert facts["others"] == pytest.approx(0.4)  # of the second; the first has 0.3
