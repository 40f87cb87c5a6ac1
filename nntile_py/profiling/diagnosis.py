"""What held a run back, from the figures of its profile, and which key of the config to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nntile_py.system.load import BUSY, is_busy
from nntile_py.tiles.placement import GOOD

IDLE = 0.15  # of the workers' time: worth a finding
MOVING = 0.10
OVERHEAD = 0.05
SUBMITTING = 0.8  # of the run
SERIAL = 0.5  # of the critical path
LOW, LARGE = 0.3, 0.15  # share of the roofline reached, share of the tasks' time

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """`rule`: its name; `cause`: with the figures that show it; `advice`: what to change."""

    rule: str
    cause: str
    advice: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def findings(summary: Summary) -> list[Finding]:
    """All that hold, the first cause first: the runtime's come before the kernels', as they hide those."""
    return [found for rule in RULES if (found := rule(summary))]


def other_ranks(s: Summary) -> Finding | None:
    """Workers idle as what they need has to come from another rank, which is most of their idle time."""
    ranks, waiting = s.get("ranks"), sum(w.get("waiting", 0.0) for w in s["workers"]) / max(len(s["workers"]), 1)
    if not ranks or waiting < MOVING or waiting < 0.5 * _share(s, "idle"):
        return None
    worst, longest = max(ranks, key=lambda r: r["waiting"]), s["waited_for"][0]
    unready = sum(r["waiting_for_tasks"] * r["workers"] for r in ranks) / len(s["workers"])
    moved, count = (sum(m[key] for m in s["messages"]) / max(s["steps"], 1) for key in ("bytes", "messages"))
    cause = f"Workers wait for another machine {waiting:.0%} of the time, those of rank {worst['rank']} most"
    cause += f" ({worst['waiting']:.0%}); of all that they wait for, longest for {longest['tile']}"
    cause += f" (rank {longest['rank']} for rank {longest['for_rank']}). {unready / waiting:.0%} of that time it was"
    cause += f" not made yet, else on its way: {moved / 1e6:,.2f} MB in {count:,.0f} messages a step."
    batch = s["tiles"].get("batch")
    now = f" (now {batch['tiles']} in all)" if batch else ""
    if unready >= 0.5 * waiting:
        advice = f"Give ranks equal work: as many tiles of the batch for each, two or more{now}; and compute more"
        advice += " between two updates: a larger `train.batch` or `train.grad_accumulation`."
    else:
        advice = "Send less often: a larger `train.batch` or `train.grad_accumulation`; let a rank compute while it"
        advice += f" sends: two or more tiles of the batch for each{now}; or a faster network, or cores not shared."
    return Finding("other-ranks", cause, advice)


def short_tasks(s: Summary) -> Finding | None:
    """Tasks shorter than GOOD times the overhead, and it shows; or submission is what the workers wait for."""
    mean, overhead = s["mean_task_s"], s["overhead_per_task_s"]
    starved = s["submission"] >= SUBMITTING and _share(s, "idle") >= IDLE
    serial = _path_bound(s) and _share(s, "idle") > 2 * _share(s, "overhead")  # longer tasks would not help
    # Where other processes take the cores, what seems the runtime's time is theirs; unless the plan expects it too.
    theirs = busy_machine(s) and not _too_fine(s)
    if not starved and (serial or theirs or mean >= GOOD * overhead or _share(s, "overhead") < OVERHEAD):
        return None
    cause = f"A task lasts {_us(mean)} on average, and the runtime needs {_us(overhead)} of a worker for each: "
    cause += f"{_share(s, 'overhead'):.0%} of the workers' time."
    if starved:
        cause += f" Tasks are used up as fast as they are submitted, which takes {s['submission']:.0%} of the run."
    return Finding("short-tasks", cause, f"Fewer, larger tasks: {_coarser(s)}, and `fusion: true` if it is off.")


def serial_chain(s: Summary) -> Finding | None:
    """Workers idle while one tile after the other is added up in order."""
    path = s["critical_path"]
    if _share(s, "idle") < IDLE or not _path_bound(s) or path["accumulation_share"] < SERIAL:
        return None
    return Finding(
        "serial-chain",
        f"Workers are idle {_share(s, 'idle'):.0%} of the time; the critical path takes "
        f"{path['share_of_run']:.0%} of the run, and {path['accumulation_share']:.0%} of it are tasks that add to one "
        f"tile after the other, most of them {_top(path)}.",
        "Let partial results meet in another order: `accumulate: tree` or `redux` (or `commute`, which reorders "
        "but does not overlap them); or cut the summed axis into fewer tiles.",
    )


def few_tiles(s: Summary) -> Finding | None:
    """Workers idle as fewer independent tasks exist than workers."""
    if _share(s, "idle") < IDLE or not _path_bound(s):
        return None
    workers, path = len(s["workers"]), s["critical_path"]
    return Finding(
        "few-tiles",
        f"Workers are idle {_share(s, 'idle'):.0%} of the time: all tasks together last {s['parallelism']:.1f} times "
        f"as long as the longest chain among them, for {workers} workers. That chain is mostly {_top(path)}.",
        f"Cut finer, so that more tasks can run at once: {_finer(s)}.",
    )


def transfers(s: Summary) -> Finding | None:
    """Workers wait for their data."""
    if _share(s, "communicating") < MOVING:
        return None
    moved = sum(t["bytes"] for t in s["transfers"])
    if not moved:
        return Finding(
            "allocation",
            f"Workers spend {_share(s, 'communicating'):.0%} of their time on getting memory for their tiles.",
            f"Fewer, larger tiles of fewer different sizes: {_coarser(s)}; or more memory (`runtime.memory`).",
        )
    worst = max(s["transfers"], key=lambda t: t["bytes"])
    return Finding(
        "transfers",
        f"Workers wait for their data {_share(s, 'communicating'):.0%} of the time; {moved / 1e9:.2f} GB were moved, "
        f"most of it from {worst['from']} to {worst['to']}.",
        "Place tasks where their data is (`runtime.placement: planned`, or `runtime.scheduler: dmdar`), give "
        "more memory (`runtime.cuda_memory`), or cut along batch, which moves activations least.",
    )


def low_roofline(s: Summary) -> Finding | None:
    """An operator that takes much of the time and reaches little of what the machine can do."""
    rows = [r for r in s["operators"] if r["share"] >= LARGE and r["roofline"] is not None and r["roofline"] < LOW]
    if not rows:
        return None
    row = max(rows, key=lambda r: r["share"] * (1 - r["roofline"]))
    seq = s["tiles"].get("seq")
    if row["bound_by"] == "memory" and "Attention" in row["operator"] and seq and seq["tile"] < seq["size"]:
        advice = "It moves more than it computes: with `tiles.seq` uncut `model.attention: vendor` is one fused kernel"
    elif row["bound_by"] == "memory":
        advice = "It moves more than it computes: fuse it, if it is not (`fusion: true`, `model.attention: vendor`)"
    else:
        advice = "Its tiles are too small or too narrow for the kernel"
    about = "about " if row["estimated"] else ""
    return Finding(
        "low-roofline",
        f"{row['operator']} ({row['phase']}) takes {about}{row['share']:.0%} of the tasks' time at "
        f"{row['roofline']:.0%} of the roofline ({row['tflop_per_s'] * 1e3:.1f} Gflop/s, {row['gb_per_s']:.1f} GB/s).",
        f"{advice}; larger tiles help: {_coarser(s)}.",
    )


def imbalance(s: Summary) -> Finding | None:
    """Workers idle although enough independent tasks exist."""
    if _share(s, "idle") < IDLE:
        return None
    worst = max(s["workers"], key=lambda w: w["idle"])
    return Finding(
        "imbalance",
        f"Workers are idle {_share(s, 'idle'):.0%} of the time ({worst['name']}: {worst['idle']:.0%}) although "
        f"there is work for {s['parallelism']:.1f} of them at once.",
        "Try another scheduler, one that knows priorities (`scheduler: cpu_dmdas`), or a larger `runtime.window`; "
        "on a machine that others use, measure again.",
    )


def busy_machine(s: Summary) -> Finding | None:
    """Other processes took processor time from the run, or from the measurement of the peak."""
    load, told = s.get("load") or {}, []
    if is_busy(load.get("others")):
        told.append(f"other processes kept {load['others']:.1f} of the {load['cores']} cores busy while the steps ran")
    shares = [p["cpu_share"] for p in s["peaks"].values() if p.get("cpu_share") is not None]
    if shares and min(shares) < 1 - BUSY:
        told.append(
            f"the threads that measured the peak had a core for {min(shares):.0%} of the time (processor time over "
            "wall time)"
        )
    if not told:
        return None
    text = "; ".join(told)
    return Finding(
        "busy-machine",
        f"The machine was busy: {text}. Tasks took longer than they would alone; all times are of this run only.",
        "Measure again when nothing else runs before comparing these times with others.",
    )


# Each explains the idle time that those after it would be blamed for.
RULES: list[Callable[[Summary], Finding | None]] = [
    busy_machine,
    other_ranks,
    short_tasks,
    serial_chain,
    few_tiles,
    transfers,
    imbalance,
    low_roofline,
]
# Explanations of the same idle time.
EXCLUSIVE = {"other-ranks", "short-tasks", "serial-chain", "few-tiles", "imbalance"}


# Where no config has chosen the tiles: tasks in Python, in a block under nt.profile.
IN_BLOCKS = {
    "other-ranks": "Give ranks equal work, and more of it between two exchanges.",
    "short-tasks": "Fewer, larger tasks: larger tiles, or lists of tiles as arguments.",
    "serial-chain": "Let tasks that add to one tile use mode REDUX, or cut the sum into fewer parts.",
    "few-tiles": "Cut the arrays finer, so that more tasks can run at once.",
    "imbalance": "Give tasks that others wait for a priority, `NAME.options(priority=1)(...)`, or another scheduler.",
}


DOUBT = "Only if a quiet machine shows it, too: "


def report(summary: Summary) -> list[dict[str, str]]:
    """For summary.json: the findings, one explanation of the idle time, or that there is none.

    What asks for larger tiles is left out beside what asks for smaller ones; advice from times that other processes
    have made longer says so."""
    result, idle_explained = [], ""
    for found in findings(summary):
        if found.rule in EXCLUSIVE:
            if idle_explained:
                continue
            idle_explained = found.rule
        if found.rule == "low-roofline" and idle_explained == "few-tiles":
            continue
        if not summary["tiles"]:
            found = replace(found, advice=IN_BLOCKS.get(found.rule, found.advice))
        if _doubtful(found.rule, summary):
            found = replace(found, advice=DOUBT + found.advice)
        result.append(found.to_dict())
    if not result:
        busy = f"Workers compute {_share(summary, 'working'):.0%} of the time and no operator stands out."
        result.append(Finding("none", busy, "Nothing to change that this profile would show.").to_dict())
    return result


def _doubtful(rule: str, s: Summary) -> bool:
    """Whether others may be why a rule holds: they had the cores while the steps ran, or as the peak was measured."""
    if rule == "busy-machine" or (rule == "short-tasks" and _too_fine(s)):
        return False
    busy = is_busy((s.get("load") or {}).get("others"))
    return busy or (rule == "low-roofline" and busy_machine(s) is not None)


def _share(s: Summary, name: str) -> float:
    return float(sum(w[name] for w in s["workers"]) / max(len(s["workers"]), 1))


def _path_bound(s: Summary) -> bool:
    """Whether more workers than these could not have been kept busy."""
    return bool(s["parallelism"] < 1.25 * len(s["workers"]) or s["critical_path"]["share_of_run"] > 0.8)


def _top(path: Mapping[str, Any]) -> str:
    top = max(path["operators"], key=lambda row: row["seconds"])
    return f"{top['operator']} ({top['phase']})".replace(" ()", "")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def _too_fine(s: Summary) -> list[tuple[str, Any]]:
    """The axes whose tiles the plan, too, finds smaller than is good."""
    return [(name, a) for name, a in s["tiles"].items() if a.get("good", a["tile"]) > a["tile"]]


def _coarser(s: Summary) -> str:
    """Tiles that are coarse enough, all at once; where they are, the two axes with most tiles, their tile doubled.

    Never fewer tiles of the batch than workers."""
    if good := _too_fine(s):
        return " and ".join(f"`tiles.{name}: {a['good']}` (now {a['tile']})" for name, a in good)
    workers = len(s.get("workers", ()))
    able = (a for a in s["tiles"].items() if a[1]["tiles"] > (workers if a[0] == "batch" else 1))
    cut = sorted(able, key=lambda a: -a[1]["tiles"])
    if not cut:
        batch = s["tiles"].get("batch")
        twice = f" (`train.batch: {2 * batch['size']}`, `tiles.batch: {2 * batch['tile']}`)" if batch else ""
        return "a larger batch" + twice
    return " or ".join(f"`tiles.{n}: {min(2 * a['tile'], a['size'])}` (now {a['tile']})" for n, a in cut[:2])


def _finer(s: Summary) -> str:
    """Batch first, which needs no summing up, then the axes with fewest tiles."""
    order = {"batch": 0, "heads": 1, "ffn": 2, "vocab": 3, "embed": 4, "seq": 5}
    able = [(name, a) for name, a in s["tiles"].items() if a["tile"] > 1]
    able.sort(key=lambda item: (item[1]["tiles"] * 2 if item[0] == "batch" else 4 * item[1]["tiles"], order[item[0]]))
    if not able:
        return "use a larger batch, or fewer workers (`runtime.cpus`)"
    return " or ".join(f"`tiles.{n}: {-(-a['tile'] // 2)}` (now {a['tile']})" for n, a in able[:2])
