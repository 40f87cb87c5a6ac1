"""Rules on a profile's figures. Each rule detects one limit of a run's speed and advises which config key to change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nntile_py.system.load import BUSY, is_busy
from nntile_py.system.units import counted
from nntile_py.tiles.placement import GOOD

# Thresholds of the rules. A rule applies if the share reaches the threshold; for LOW, if the share is below it.
IDLE = 0.15  # idle share of the workers' time
MOVING = 0.10  # share of the workers' time spent waiting for data, or for another rank
OVERHEAD = 0.05  # the runtime's share of the workers' time
SUBMITTING = 0.8  # share of the run in which the main thread submits tasks
SERIAL = 0.5  # share of the critical path in tasks that add to one tile one after the other
LOW, LARGE = 0.3, 0.15  # of an operator: share of the roofline that it reaches, share of the tasks' time
DOUBT = "Only if a profile on a quiet machine shows the same: "

_PRIORITIES = ("dmdas", "dmdasd", "prio", "heteroprio", "pheft")  # schedulers that know priorities

Summary = Mapping[str, Any]
Finding = tuple[str, str] | None  # (cause with figures, advice); None: the rule does not apply


def other_ranks(s: Summary) -> Finding:
    """Workers are idle mostly because their inputs must come from another rank."""
    ranks, waiting = s.get("ranks"), sum(w.get("waiting", 0.0) for w in s["workers"]) / max(len(s["workers"]), 1)
    if not ranks or waiting < MOVING or waiting < 0.5 * _share(s, "idle"):
        return None
    worst, longest = max(ranks, key=lambda r: r["waiting"]), s["waited_for"][0]
    unready = sum(r["waiting_for_tasks"] * r["workers"] for r in ranks) / len(s["workers"])
    moved, count = (sum(m[key] for m in s["messages"]) / max(s["steps"], 1) for key in ("bytes", "messages"))
    cause = f"Workers wait for another rank {waiting:.0%} of the time, the workers of rank {worst['rank']} most"
    cause += f" ({worst['waiting']:.0%}). The longest wait is for {longest['tile']}"
    cause += f" (rank {longest['rank']} waits for rank {longest['for_rank']}). For {unready / waiting:.0%} of the"
    cause += " waiting time the tile was not computed yet, for the rest it was in transit:"
    cause += f" {moved / 1e6:,.2f} MB in {count:,.0f} messages a step."
    batch, inference = s["tiles"].get("batch"), _settings(s).get("inference")
    now = f" (now {batch['tiles']} in all)" if batch else ""
    between = "in a pass" if inference else "between two updates"
    larger = "a larger `train.batch`" + ("" if inference else " or `train.grad_accumulation`")
    if unready >= 0.5 * waiting:
        advice = f"Give ranks equal work: two or more tiles of the batch for each, as many for all{now}; and compute"
        advice += f" more {between}: {larger}."
    else:
        advice = f"Send less often: {larger}; let a rank compute while it sends:"
        advice += f" two or more tiles of the batch for each{now}; or a faster network, or cores not shared."
    return cause, advice


def short_tasks(s: Summary) -> Finding:
    """Tasks are too short: below GOOD times the runtime's overhead for a task, or faster than their submission."""
    mean, overhead = s["mean_task_s"], s["overhead_per_task_s"]
    starved = s["submission"] >= SUBMITTING and _share(s, "idle") >= IDLE
    serial = _path_bound(s) and _share(s, "idle") > 2 * _share(s, "overhead")  # longer tasks would not help
    # Time that other processes take looks like overhead. On a busy machine, the rule applies only if the plan, too,
    # finds the tiles too small.
    disturbed = busy_machine(s) and not _too_fine(s)
    if not starved and (serial or disturbed or mean >= GOOD * overhead or _share(s, "overhead") < OVERHEAD):
        return None
    cause = f"A task lasts {_us(mean)} on average, and the runtime needs {_us(overhead)} of a worker for each: "
    cause += f"{_share(s, 'overhead'):.0%} of the workers' time."
    if starved:
        cause += f" Tasks end as fast as they are submitted, which takes {s['submission']:.0%} of the run."
    fusion = "" if _settings(s).get("fused") else ", and `fusion: true`"
    return cause, f"Fewer, larger tasks: {_coarser(s)}{fusion}."


def serial_chain(s: Summary) -> Finding:
    """Workers are idle while tasks of the critical path add to one tile one after the other."""
    path = s["critical_path"]
    if _share(s, "idle") < IDLE or not _path_bound(s) or path["accumulation_share"] < SERIAL:
        return None
    return (
        f"{_idle(s)}; the critical path takes {path['share_of_run']:.0%} of the run, and "
        f"{path['accumulation_share']:.0%} of the path are tasks that add to one tile one after the other, most of "
        f"them {_top(path)}.",
        _other_order(_settings(s).get("accumulate", "chain")),
    )


def _other_order(accumulate: str) -> str:
    """Return advice against a chain of additions. accumulate: the policy of the run."""
    fewer = "ut the summed axis into fewer tiles."
    if accumulate in ("tree", "redux"):  # both overlap the additions already
        return f"C{fewer}"
    commute = " (or `commute`, which reorders but does not overlap them)" if accumulate == "chain" else ""
    return f"Add partial results in another order: `accumulate: tree` or `redux`{commute}; or c{fewer}"


def few_tiles(s: Summary) -> Finding:
    """Workers are idle because there are fewer independent tasks than workers."""
    if _share(s, "idle") < IDLE or not _path_bound(s):
        return None
    return (
        f"{_idle(s)}: the longest chain of dependent tasks takes {s['critical_path']['share_of_run']:.0%} of the run, "
        f"and all tasks together last only {s['parallelism']:.1f} times as long as this chain, for "
        f"{counted(len(s['workers']), 'worker')}. The chain is mostly {_top(s['critical_path'])}.",
        f"Cut finer, so that more tasks can run at once: {_finer(s)}.",
    )


def transfers(s: Summary) -> Finding:
    """Workers wait until the data of their tasks are transferred between memories."""
    waiting, moved = _share(s, "communicating"), sum(t["bytes"] for t in s["transfers"])
    if waiting < MOVING or not moved:
        return None
    worst, batch = max(s["transfers"], key=lambda t: t["bytes"]), s["tiles"].get("batch")
    ways = [*_placements(_settings(s)), *([f"give more memory ({_memory(s)})"] if _memory(s) else [])]
    ways += ["cut along batch, which moves activations least"] if not batch or batch["tile"] > 1 else []
    return (
        f"Workers wait for their data {waiting:.0%} of the time; {moved / 1e9:.2f} GB were moved, "
        f"most of it from {worst['from']} to {worst['to']}.",
        _listed(ways or [f"compute more for each byte with fewer, larger tasks: {_coarser(s)}"]) + ".",
    )


def _placements(settings: Mapping[str, Any]) -> list[str]:
    """Return how another placement of tasks on GPUs moves less, as a list of at most one text."""
    if settings.get("planned") or settings.get("gpus") == 0:
        return []
    planned = ["`runtime.placement: planned`"] if settings.get("plannable", True) else []
    by_data = ["`runtime.scheduler: dmdar`"] if settings.get("scheduler") != "dmdar" else []
    keys = ", or ".join(planned + by_data)
    return [f"place tasks where their data is ({keys})"] if keys else []


def allocation(s: Summary) -> Finding:
    """Workers wait until memory for their tiles is allocated."""
    waiting = _share(s, "communicating")
    if waiting < MOVING or any(t["bytes"] for t in s["transfers"]):
        return None
    return (
        f"Workers spend {waiting:.0%} of their time on allocating memory for their tiles.",
        f"Fewer, larger tiles of fewer different sizes: {_coarser(s)}"
        + (f"; or more memory ({_memory(s)})." if _memory(s) else "."),
    )


def low_roofline(s: Summary) -> Finding:
    """An operator takes much of the tasks' time and reaches only a small share of the roofline."""
    rows = [r for r in s["operators"] if r["share"] >= LARGE and r["roofline"] is not None and r["roofline"] < LOW]
    if not rows:
        return None
    row = max(rows, key=lambda r: r["share"] * (1 - r["roofline"]))
    seq, settings = s["tiles"].get("seq"), _settings(s)
    attention = "Attention" in row["operator"]
    if row["bound_by"] == "memory" and attention and seq and seq["tile"] < seq["size"]:
        fused = "it" if settings.get("attention", "vendor") == "vendor" else "`model.attention: vendor`"
        advice = f"It moves more than it computes: with `tiles.seq` uncut {fused} is one fused kernel"
    elif row["bound_by"] == "memory":
        keys = [] if settings.get("fused") else ["`fusion: true`"]
        keys += ["`model.attention: vendor`"] if attention and settings.get("attention", "vendor") != "vendor" else []
        advice = "It moves more than it computes" + (f": fuse it ({', '.join(keys)})" if keys else "")
    else:
        advice = "Its tiles are too small or too narrow for the kernel"
    about = "about " if row["estimated"] else ""
    return (
        f"{row['operator']} ({row['phase']}) takes {about}{row['share']:.0%} of the tasks' time at "
        f"{row['roofline']:.0%} of the roofline ({row['tflop_per_s'] * 1e3:.1f} Gflop/s, {row['gb_per_s']:.1f} GB/s).",
        f"{advice}; larger tiles help: {_coarser(s)}.",
    )


def imbalance(s: Summary) -> Finding:
    """Workers are idle although there are enough independent tasks."""
    if _share(s, "idle") < IDLE:
        return None
    worst = max(s["workers"], key=lambda w: w["idle"])
    return (
        f"{_idle(s)} ({worst['name']}: {worst['idle']:.0%}) although there is work for {s['parallelism']:.1f} of them "
        "at once.",
        f"Try {_schedulers(_settings(s))}"
        + (", or a larger `runtime.window`" if "window" in _settings(s).get("limits", ()) else "")
        + "; on a machine that others use, measure again.",
    )


def _schedulers(settings: Mapping[str, Any]) -> str:
    """Return another way to schedule tasks than that of the run."""
    if settings.get("planned"):
        return "`runtime.placement: scheduler`, which chooses workers during the run"
    if settings.get("scheduler") in _PRIORITIES:
        return "another scheduler, such as `runtime.scheduler: lws`, whose workers take tasks from each other"
    key = "`runtime.scheduler: dmdas`" if settings.get("gpus") else "`scheduler: cpu_dmdas`"
    return f"another scheduler, such as {key}, which knows priorities"


def busy_machine(s: Summary) -> Finding:
    """Other processes took processor time from the run, or from the measurement of the peak flop/s."""
    load, again = s.get("load") or {}, "Measure again when nothing else runs before comparing "
    shares = [p["cpu_share"] for p in s["peaks"].values() if p.get("cpu_share") is not None]
    had = f"had a core for {min(shares):.0%} of the time (processor time over wall time)" if shares else ""
    disturbed = bool(shares) and min(shares) < 1 - BUSY
    if is_busy(load.get("others")):
        busy = f"other processes kept {load['others']:.1f} of the {load['cores']} cores busy while the steps ran"
        busy += f"; the threads that measured the peak {had}" * disturbed
        cause = f"The machine was busy: {busy}. Tasks took longer than on a quiet machine."
        return cause, f"{again}these times with others."
    if disturbed:
        cause = f"The measurement of the peak was disturbed: its threads {had}. The measured peak may be too low,"
        cause += " and shares of the roofline too high. Times of tasks do not depend on it."
        return cause, f"{again}shares of the roofline."
    return None


@dataclass(frozen=True)
class Diagnosis:
    """A rule with its name.

    Attributes:
        check: returns the rule's finding for a summary.
        explains_idle: the rule explains idle time. If several such rules apply, only the first is reported.
        in_block: advice that replaces the rule's own for a block under nt.profile, which has no config to change.
    """

    rule: str
    check: Callable[[Summary], Finding]
    explains_idle: bool = False
    in_block: str = ""


# The order matters: each rule explains idle time that later rules would misread. Rules on the runtime come before rules
# on kernels.
RULES = (
    Diagnosis("busy-machine", busy_machine),
    Diagnosis("other-ranks", other_ranks, True, "Give ranks equal work, and more of it between two exchanges."),
    Diagnosis("short-tasks", short_tasks, True,
              "Fewer, larger tasks: larger tiles, or lists of tiles as arguments."),
    Diagnosis("serial-chain", serial_chain, True,
              "Let tasks that add to one tile use mode REDUX, or cut the sum into fewer parts."),
    Diagnosis("few-tiles", few_tiles, True, "Cut the arrays finer, so that more tasks can run at once."),
    Diagnosis("transfers", transfers, False, "Use larger tiles, or the scheduler dmdar, which knows where data is."),
    Diagnosis("allocation", allocation, False, "Use fewer, larger arrays of fewer different sizes."),
    Diagnosis("imbalance", imbalance, True,
              "Give a priority to tasks that other tasks wait for, `NAME.options(priority=1)(...)`, or try another "
              "scheduler."),
    Diagnosis("low-roofline", low_roofline, False, "Larger tiles help, or a faster kernel."),
)  # fmt: skip


def report(summary: Summary) -> list[dict[str, str]]:
    """Return the findings for summary.json: rule, cause and advice of each. At most one finding explains idle time.

    If no rule applies, the only entry has the rule `none`. Advice for larger tiles is left out beside advice for
    smaller tiles. Advice begins with DOUBT if other processes may have caused the finding.
    """
    result, idle_explained = [], ""
    for diagnosis in RULES:
        rule, finding = diagnosis.rule, diagnosis.check(summary)
        opposite = (idle_explained, rule) == ("few-tiles", "low-roofline")  # their advice: smaller, larger tiles
        if not finding or opposite or (diagnosis.explains_idle and idle_explained):
            continue
        idle_explained = rule if diagnosis.explains_idle else idle_explained
        cause, advice = finding
        advice = advice if summary["tiles"] else diagnosis.in_block or advice
        result.append({"rule": rule, "cause": cause, "advice": DOUBT * _doubtful(rule, summary) + advice})
    if not result:
        cause = f"Workers compute {_share(summary, 'working'):.0%} of the time and no operator stands out."
        result.append({"rule": "none", "cause": cause, "advice": "This profile shows nothing to change."})
    return result


def _doubtful(rule: str, s: Summary) -> bool:
    """Return whether other processes may have caused a finding.

    Other processes are a possible cause if they used cores during the run or, for low-roofline, during the measurement
    of the peak. If the plan finds the tiles too small, other processes are no cause of short-tasks.
    """
    if rule == "busy-machine" or (rule == "short-tasks" and _too_fine(s)):
        return False
    busy = is_busy((s.get("load") or {}).get("others"))
    return busy or (rule == "low-roofline" and busy_machine(s) is not None)


def _settings(s: Summary) -> Mapping[str, Any]:
    """Return recorder.settings of the profiled config; {} for a block under nt.profile."""
    return s.get("settings") or {}


def _memory(s: Summary) -> str:
    """Return the keys of the memory limits that the config sets, as text; "" if it sets none."""
    return " or ".join(f"`runtime.{key}`" for key in _settings(s).get("limits", ()) if key.endswith("memory"))


def _listed(ways: list[str]) -> str:
    """Return ways to change a config as one sentence without its full stop."""
    text = ", or ".join(filter(None, (", ".join(ways[:-1]), ways[-1])))
    return text[0].upper() + text[1:]


def _share(s: Summary, name: str) -> float:
    return float(sum(w[name] for w in s["workers"]) / max(len(s["workers"]), 1))


def _idle(s: Summary) -> str:
    return f"Workers are idle {_share(s, 'idle'):.0%} of the time"


def _path_bound(s: Summary) -> bool:
    """Return whether the critical path limits the run, so that more workers would not help."""
    return bool(s["parallelism"] < 1.25 * len(s["workers"]) or s["critical_path"]["share_of_run"] > 0.8)


def _top(path: Mapping[str, Any]) -> str:
    top = max(path["operators"], key=lambda row: row["seconds"])
    return f"{top['operator']} ({top['phase']})".replace(" ()", "")


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def _too_fine(s: Summary) -> list[tuple[str, Any]]:
    """Return (name, sizes) of the axes whose tile is smaller than the tile that the plan finds good."""
    return [(name, a) for name, a in s["tiles"].items() if a.get("good", a["tile"]) > a["tile"]]


def _coarser(s: Summary) -> str:
    """Return advice on larger tiles as text: the tiles that the plan finds good.

    If no tile is too small for the plan: twice the tile of the two axes that have most tiles. The batch is named only
    if it has more tiles than there are workers.
    """
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
    """Return advice on smaller tiles as text: half the tile of two axes.

    Axes with few tiles come first. The batch is preferred, because cutting it adds no partial sums.
    """
    order, settings = {"batch": 0, "heads": 1, "ffn": 2, "vocab": 3, "embed": 4, "seq": 5}, _settings(s)
    fixed = "seq" if settings.get("pack") else ""  # bins of packed sequences are not cut
    cut = [(name, a) for name, a in s["tiles"].items() if a["tile"] > 1 and name != fixed]
    cut.sort(key=lambda item: (item[1]["tiles"] * 2 if item[0] == "batch" else 4 * item[1]["tiles"], order[item[0]]))
    if not cut:
        workers = f", or fewer workers (`runtime.{'cuda' if settings.get('gpus') else 'cpus'}`)"
        return "use a larger batch" + workers * (len(s.get("workers", ())) > 1)
    return " or ".join(f"`tiles.{n}: {-(-a['tile'] // 2)}` (now {a['tile']})" for n, a in cut[:2])
