"""Rules that find what limits a run's speed in the figures of its profile, and which key of the config to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nntile_py.system.load import BUSY, is_busy
from nntile_py.tiles.placement import GOOD

# Shares from which a rule applies.
IDLE = 0.15  # of the workers' time
MOVING = 0.10
OVERHEAD = 0.05
SUBMITTING = 0.8  # of the run
SERIAL = 0.5  # of the critical path
LOW, LARGE = 0.3, 0.15  # share of the roofline reached, share of the tasks' time

Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding. rule: its name; cause: with figures; advice: what to change."""

    rule: str
    cause: str
    advice: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def findings(summary: Summary) -> list[Finding]:
    """Return all findings, the first cause first. Rules on the runtime come first: they hide the kernels' causes."""
    return [finding for rule in RULES if (finding := rule(summary))]


def other_ranks(s: Summary) -> Finding | None:
    """Workers are idle mostly because their inputs must come from another rank."""
    ranks, waiting = s.get("ranks"), sum(w.get("waiting", 0.0) for w in s["workers"]) / max(len(s["workers"]), 1)
    if not ranks or waiting < MOVING or waiting < 0.5 * _share(s, "idle"):
        return None
    worst, longest = max(ranks, key=lambda r: r["waiting"]), s["waited_for"][0]
    unready = sum(r["waiting_for_tasks"] * r["workers"] for r in ranks) / len(s["workers"])
    moved, count = (sum(m[key] for m in s["messages"]) / max(s["steps"], 1) for key in ("bytes", "messages"))
    cause = f"Workers wait for another machine {waiting:.0%} of the time, the workers of rank {worst['rank']} most"
    cause += f" ({worst['waiting']:.0%}); of all that they wait for, longest for {longest['tile']}"
    cause += f" (rank {longest['rank']} for rank {longest['for_rank']}). {unready / waiting:.0%} of that time it was"
    cause += f" not computed yet, else in transit: {moved / 1e6:,.2f} MB in {count:,.0f} messages a step."
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
    """Tasks are shorter than GOOD times the overhead, which takes much time; or workers wait for submission."""
    mean, overhead = s["mean_task_s"], s["overhead_per_task_s"]
    starved = s["submission"] >= SUBMITTING and _share(s, "idle") >= IDLE
    serial = _path_bound(s) and _share(s, "idle") > 2 * _share(s, "overhead")  # longer tasks would not help
    # If other processes take the cores, their time looks like overhead; unless the plan expects short tasks, too.
    theirs = busy_machine(s) and not _too_fine(s)
    if not starved and (serial or theirs or mean >= GOOD * overhead or _share(s, "overhead") < OVERHEAD):
        return None
    cause = f"A task lasts {_us(mean)} on average, and the runtime needs {_us(overhead)} of a worker for each: "
    cause += f"{_share(s, 'overhead'):.0%} of the workers' time."
    if starved:
        cause += f" Tasks are used up as fast as they are submitted, which takes {s['submission']:.0%} of the run."
    return Finding("short-tasks", cause, f"Fewer, larger tasks: {_coarser(s)}, and `fusion: true` if it is off.")


def serial_chain(s: Summary) -> Finding | None:
    """Workers are idle while tiles are added one after the other."""
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
    """Workers are idle because there are fewer independent tasks than workers."""
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
    """An operator takes much of the time and is far below the roofline."""
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
    """Workers are idle although there are enough independent tasks."""
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
    load, causes = s.get("load") or {}, list[str]()
    if is_busy(load.get("others")):
        busy = f"{load['others']:.1f} of the {load['cores']} cores"
        causes.append(f"other processes kept {busy} busy while the steps ran")
    shares = [p["cpu_share"] for p in s["peaks"].values() if p.get("cpu_share") is not None]
    if shares and min(shares) < 1 - BUSY:
        causes.append(
            f"the threads that measured the peak had a core for {min(shares):.0%} of the time (processor time over "
            "wall time)"
        )
    if not causes:
        return None
    text = "; ".join(causes)
    return Finding(
        "busy-machine",
        f"The machine was busy: {text}. Tasks took longer than they would alone; all times are of this run only.",
        "Measure again when nothing else runs before comparing these times with others.",
    )


# In this order: each rule explains idle time that later rules would misread.
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
# Rules that explain the same idle time: only the first one counts.
EXCLUSIVE = {"other-ranks", "short-tasks", "serial-chain", "few-tiles", "imbalance"}


# Advice without a config: for tasks in Python, in a block under nt.profile.
IN_BLOCKS = {
    "other-ranks": "Give ranks equal work, and more of it between two exchanges.",
    "short-tasks": "Fewer, larger tasks: larger tiles, or lists of tiles as arguments.",
    "serial-chain": "Let tasks that add to one tile use mode REDUX, or cut the sum into fewer parts.",
    "few-tiles": "Cut the arrays finer, so that more tasks can run at once.",
    "imbalance": "Give tasks that others wait for a priority, `NAME.options(priority=1)(...)`, or another scheduler.",
}


DOUBT = "Only if a profile on a quiet machine shows the same: "


def report(summary: Summary) -> list[dict[str, str]]:
    """Return the findings for summary.json, with one explanation of the idle time; or that there is none.

    Advice for larger tiles is left out beside advice for smaller ones. Advice says if it rests on times that other
    processes have made longer."""
    result, idle_explained = [], ""
    for finding in findings(summary):
        if finding.rule in EXCLUSIVE:
            if idle_explained:
                continue
            idle_explained = finding.rule
        if finding.rule == "low-roofline" and idle_explained == "few-tiles":
            continue
        if not summary["tiles"]:
            finding = replace(finding, advice=IN_BLOCKS.get(finding.rule, finding.advice))
        if _doubtful(finding.rule, summary):
            finding = replace(finding, advice=DOUBT + finding.advice)
        result.append(finding.to_dict())
    if not result:
        busy = f"Workers compute {_share(summary, 'working'):.0%} of the time and no operator stands out."
        result.append(Finding("none", busy, "This profile shows nothing to change.").to_dict())
    return result


def _doubtful(rule: str, s: Summary) -> bool:
    """Return whether other processes may cause a finding: they used cores in the run or as the peak was measured."""
    if rule == "busy-machine" or (rule == "short-tasks" and _too_fine(s)):
        return False
    busy = is_busy((s.get("load") or {}).get("others"))
    return busy or (rule == "low-roofline" and busy_machine(s) is not None)


def _share(s: Summary, name: str) -> float:
    return float(sum(w[name] for w in s["workers"]) / max(len(s["workers"]), 1))


def _path_bound(s: Summary) -> bool:
    """Return whether more workers would not have made the run faster."""
    return bool(s["parallelism"] < 1.25 * len(s["workers"]) or s["critical_path"]["share_of_run"] > 0.8)


def _top(path: Mapping[str, Any]) -> str:
    top = max(path["operators"], key=lambda row: row["seconds"])
    return f"{top['operator']} ({top['phase']})".replace(" ()", "")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def _too_fine(s: Summary) -> list[tuple[str, Any]]:
    """Return the axes whose tiles are too small by the plan as well."""
    return [(name, a) for name, a in s["tiles"].items() if a.get("good", a["tile"]) > a["tile"]]


def _coarser(s: Summary) -> str:
    """Return larger tiles: those that the plan finds good, else twice the tile of the two axes with most tiles.

    The batch keeps a tile for each worker."""
    if good := _too_fine(s):
        return " and ".join(f"`tiles.{name}: {a['good']}` (now {a['tile']})" for name, a in good)
    workers = len(s.get("workers", ()))
    divisible = (a for a in s["tiles"].items() if a[1]["tiles"] > (workers if a[0] == "batch" else 1))
    cut = sorted(divisible, key=lambda a: -a[1]["tiles"])
    if not cut:
        batch = s["tiles"].get("batch")
        twice = f" (`train.batch: {2 * batch['size']}`, `tiles.batch: {2 * batch['tile']}`)" if batch else ""
        return "a larger batch" + twice
    return " or ".join(f"`tiles.{n}: {min(2 * a['tile'], a['size'])}` (now {a['tile']})" for n, a in cut[:2])


def _finer(s: Summary) -> str:
    """Return smaller tiles: of the batch first, which needs no sums, then of the axes with fewest tiles."""
    order = {"batch": 0, "heads": 1, "ffn": 2, "vocab": 3, "embed": 4, "seq": 5}
    cut = [(name, a) for name, a in s["tiles"].items() if a["tile"] > 1]
    cut.sort(key=lambda item: (item[1]["tiles"] * 2 if item[0] == "batch" else 4 * item[1]["tiles"], order[item[0]]))
    if not cut:
        return "use a larger batch, or fewer workers (`runtime.cpus`)"
    return " or ".join(f"`tiles.{n}: {-(-a['tile'] // 2)}` (now {a['tile']})" for n, a in cut[:2])
