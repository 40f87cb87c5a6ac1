"""Packed BERT beside PyTorch in its strongest form on one GPU: forward passes and training steps, as a table.

    python experiments/bert_table.py [--rows 'infer/*,base/*'] [--rounds 5] >rows.jsonl
    python experiments/bert_table.py --list
    python experiments/bert_table.py --rows '' --done rows.jsonl more.jsonl

Rows are infer/BATCHxLONGEST and MODEL/LONGESTxBATCH/ALPHA/DROPOUT, the dropout in attention too. A row is one call of
`nntile bench step`: ours and PyTorch's in processes of their own, one started after the other, then timed in turns. Its
line of JSON is printed as soon as it is there; at the end a Markdown table of all, with those of --done, which are not
measured again: a run that was cut off goes on so, and those of two GPUs become one table. Two at once need cores of
their own, as StarPU binds its threads:

    CUDA_VISIBLE_DEVICES=0 taskset -c 0-7 python experiments/bert_table.py --rows 'infer/*' >a.jsonl &
    CUDA_VISIBLE_DEVICES=1 taskset -c 8-15 python experiments/bert_table.py --rows '*/*/*' >b.jsonl

Most of a row's time is its start, in which both sides compile: on the same machine the second time is quicker.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nntile_py import cli
from nntile_py.measure.commands import of_config, parse_peers
from nntile_py.measure.peer_process import measure_step
from nntile_py.system.load import cores
from nntile_py.system.machine import described

ALPHA = 0.6
INFERENCE = [(batch, seq) for batch in (1, 8, 16) for seq in (64, 128, 256, 512, 1024)]
TRAINING = [("base", 128, 256), ("base", 512, 64), ("large", 128, 256), ("large", 512, 32)]
COLUMNS = (
    "row", "peer", "ours, ms", "peer, ms", "ratio of ms", "ours, tokens/s", "peer, tokens/s", "ratio of tokens/s",
    "ours, GiB", "peer, GiB",
)  # fmt: skip
STARTED = time.monotonic()


def every_row() -> dict[str, dict[str, Any]]:
    """Of each row its config and settings, alpha, and whether it is a forward pass."""
    found: dict[str, dict[str, Any]] = {}
    for batch, seq in INFERENCE:
        sets = ["model.head=none", f"train.batch={batch}", f"train.seq={seq}"]
        found[f"infer/{batch}x{seq}"] = {"config": "bert_base", "sets": sets, "alpha": ALPHA, "inference": True}
    steps = [(row, alpha, 0.1) for alpha in (ALPHA, 1.0) for row in TRAINING]
    for (model, seq, batch), alpha, dropout in [*steps, (("base", 512, 64), ALPHA, 0.0)]:
        sets = [f"train.seq={seq}", f"train.batch={batch}", f"model.dropout={dropout}"]
        sets += ["model.attention=segments", f"model.attention_dropout={dropout}"] if dropout else []
        name = f"{model}/{seq}x{batch}/{alpha}/{dropout:g}"
        found[name] = {"config": f"bert_{model}", "sets": sets, "alpha": alpha, "inference": False}
    return found


def measured(name: str, row: dict[str, Any], o: argparse.Namespace) -> dict[str, Any]:
    """What `nntile bench step` measures of a row."""
    peers = parse_peers(o.peer if row["alpha"] < 1 or not o.padded else f"{o.peer},{o.padded}")
    path = str(Path(__file__).with_name(f"{row['config']}.yaml"))
    sets = [*row["sets"], "train.pack=true", *o.sets]
    options = of_config(path, sets, peers, row["alpha"], inference=row["inference"])
    options |= {"cpus": cores(), "cuda_memory": 0.0, "time_limit": o.time_limit}
    steps = o.passes if row["inference"] else o.steps
    return measure_step(options, ["nntile", *peers], o.rounds, steps, lambda what: tell(f"{name}: {what}"))


def tell(what: str) -> None:
    print(f"{time.monotonic() - STARTED:5.0f} s  {what}", file=sys.stderr, flush=True)


# -- the table


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for name, result in rows.items():
        lines += [f"| {name} | {' | '.join(cells(result, peer))} |" for peer in result.get("ratios", ())]
    failed = [f"{name}, {side}: {told}" for name, result in rows.items() for side, told in errors(result).items()]
    where = {f"{described(one)}, {one['date']}, {one['commit']}, {one['rounds']} rounds" for one in rows.values()}
    return "\n".join([*lines, "", "In brackets the least and the greatest of the rounds.", *sorted(where), *failed])


def cells(result: dict[str, Any], peer: str) -> list[str]:
    """Of ours beside one peer."""
    sides, times = [result[name] for name in ("nntile", peer)], result["ratios"][peer]
    rates = {"median": 1 / times["median"], "min": 1 / times["max"], "max": 1 / times["min"]}
    return [
        peer, *(among(side["seconds"], 1e3, 3) for side in sides), among(times),
        *(f"{side['tokens_per_s']:,.0f}" for side in sides), among(rates),
        *(f"{side['peak_mib'] / 1024:.1f}" for side in sides),
    ]  # fmt: skip


def among(spread: dict[str, float], scale: float = 1, digits: int = 2) -> str:
    middle, least, most = (f"{spread[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{middle} ({least} to {most})"


def errors(result: dict[str, Any]) -> dict[str, str]:
    return {name: of["error"] for name, of in result.items() if isinstance(of, dict) and "error" in of}


def read(files: list[Path]) -> dict[str, dict[str, Any]]:
    """Rows of earlier runs that no side failed in."""
    found = {}
    for line in (line for file in files for line in file.read_text(errors="replace").splitlines()):
        if line.startswith('{"row"'):
            try:
                result = json.loads(line)
            except json.JSONDecodeError:  # of a run that was killed as it wrote, or on a full disk
                tell(f"--done: a line that was cut off is left out: {line[:40]} ...")
                continue
            found |= {} if errors(result) else {result["row"]: result}
    return found


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: at least 1")
    return value


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names, also with * and ?, with commas between")
    parser.add_argument("--list", action="store_true", help="print the names of the rows that --rows takes")
    parser.add_argument("--done", type=Path, nargs="+", default=[], metavar="FILE", help="output of earlier runs")
    parser.add_argument("--peer", default="torch_packed", help="as of nntile bench step")
    parser.add_argument("--padded", default="torch_compile", help="besides, where alpha is 1; torch_padded is faster")
    parser.add_argument("--rounds", type=count, default=5, help="turns of each side")
    parser.add_argument("--steps", type=count, default=10, help="in a turn")
    parser.add_argument("--passes", type=count, default=10, help="forward passes in flight together")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds of a side's start, and of a turn")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    o = parser.parse_args(arguments)
    wanted, every = [item for item in o.rows.split(",") if item], every_row()
    for item in wanted:
        if not any(fnmatch(name, item) for name in every):
            parser.error(f"--rows: no row is called {item!r}; --list prints those that there are")
    chosen = {name: row for name, row in every.items() if any(fnmatch(name, item) for item in wanted)}
    if o.list:
        print(*chosen, sep="\n")
        return
    rows = read(o.done)
    for name in [name for name in chosen if name not in rows]:
        rows[name] = {"row": name} | measured(name, chosen[name], o)
        print(json.dumps(rows[name]), flush=True)
        tell(f"{name}: measured, {len(chosen.keys() & rows.keys())} of {len(chosen)}")
    print(table({name: rows[name] for name in every if name in rows}))


if __name__ == "__main__":
    try:
        cli.main(main)
    except KeyboardInterrupt:
        tell("interrupted; with --done and this output it goes on")
        sys.exit(130)
