"""The script that tests/test_mpi.py starts by mpirun: trains small models and prints results, or fails on purpose."""

import hashlib
import json
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import nntile_py as nt
from nntile_py.analysis.simulate import rank_programs, simulate
from nntile_py.execution import gpu_assignment
from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime, joined
from nntile_py.graph import step as step_spec
from nntile_py.graph.layout_search import search
from nntile_py.graph.step import StepSpec
from nntile_py.graph.timings import KEYS, Timing, Timings
from nntile_py.models.base import Model
from nntile_py.tiles import TaskList, Tiling, device_model
from nntile_py.tiles.rank_tasks import SEND, MessageTask

BATCH, SEQ, VOCAB = 6, 12, 67
SIZES: dict[str, Any] = {"layers": 1, "embed": 24, "heads": 3, "ffn": 50, "vocab": VOCAB, "positions": 16}
WIDE = SIZES | {"embed": 64, "ffn": 96, "heads": 2}  # layers have products in 8 bits
MODELS: dict[str, Model] = {
    "gpt2": nt.models.GPT2(nt.models.GPT2Config(**SIZES, dropout=0.1)),
    "bert": nt.models.BERT(nt.models.BERTConfig(**SIZES)),
    "sentences": nt.models.BERT(nt.models.BERTConfig(**SIZES, head="sentence_embedding")),
    "wide gpt2": nt.models.GPT2(nt.models.GPT2Config(**WIDE, dropout=0.1)),
    "wide bert": nt.models.BERT(nt.models.BERTConfig(**WIDE)),
}
TILES = {"uncut": {}, "even": {"batch": 3, "embed": 8}, "ragged": {"batch": 2, "embed": 7, "ffn": 30, "vocab": 20},
         "rows": {"batch": 1}, "parts": {"batch": 2, "embed": 32, "ffn": 40}}  # fmt: skip
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gpt2", "even", "chain", {}),
    ("gpt2", "ragged", "chain", {"grad_accumulation": 2}),
    ("bert", "uncut", "chain", {}),
    ("bert", "ragged", "chain", {"optimizer": nt.SGD(lr=0.1, momentum=0.9)}),
    ("gpt2", "ragged", "chain", {"optimizer": nt.Muon(lr=0.01)}),
    ("bert", "even", "tree", {"optimizer": nt.Lion(lr=0.001, groups=[{"match": ["*.bias"], "lr_scale": 2.0}])}),
    ("gpt2", "rows", "chain", {"grad_accumulation": 2}),
    ("bert", "rows", "chain", {"fusion": {"found": False}}),
    ("gpt2", "rows", "tree", {"grad_accumulation": 2}),
    ("gpt2", "ragged", "commute", {}),
    ("bert", "rows", "redux", {"grad_accumulation": 2}),
    ("sentences", "ragged", "chain", {}),
    ("wide gpt2", "parts", "chain", {"precision": "fp8"}),
    ("wide bert", "parts", "chain", {"precision": "fp8", "pack": True, "fp8": {"scales": "row"}}),
]
# CPU workers compute in 8 bits, with fp32 tiles in the place of bf16 tiles.
step_spec.PRECISIONS["fp8"], step_spec.TILE_DTYPE["fp8"] = ("CPU", "CUDA"), "fp32"


def inputs(model: str, step: int, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (rows, SEQ))
    if model == "sentences":
        return {"input_ids": ids, "attention_mask": (np.arange(SEQ) < rng.integers(3, SEQ, (rows, 1))).astype(np.int64)}
    return {"input_ids": ids, "labels": np.where(rng.random(ids.shape) < 0.5, ids, -100)}


def trained(model: str, tiles: str, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    made = MODELS[model].changed()
    trainer = nt.Trainer(
        made, BATCH, SEQ, TILES[tiles], accumulate=policy, **{"clip_grad_norm": 1.0, "seed": 3} | options
    )
    rows = BATCH * options.get("grad_accumulation", 1)
    losses = [trainer.step(inputs(model, step, rows)) for step in range(2)]
    Runtime.watched = []
    losses.append(trainer.step(inputs(model, 2, rows)))
    watched, Runtime.watched = [one for _, one in Runtime.watched], None
    held_out, logits = trainer.evaluate(inputs(model, 9, BATCH), return_logits=True)
    losses.append(trainer.step(inputs(model, 3, rows)))
    weights = trainer.state_dict()
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    built = trainer.built
    trainer.close()
    more = [built.more.tasks] * (trainer.grad_accumulation - 1) if built.more else []
    lists = [built.first.tasks, *more, built.update.tasks]
    return {
        "losses": [*losses, held_out], "logits": float(np.abs(logits).sum(dtype=float)), "weights": digest,
        "sent": sum(map(sent_bytes, watched)), "dtypes": sorted(set[str]().union(*map(sent_dtypes, watched))),
        "planned": planned(lists, nt.Runtime.current.ranks),
    }  # fmt: skip


def database(spec: StepSpec, seed: int) -> Timings:
    """Return random times of all operators of a step; transpositions are short, so that layouts use many of them."""
    timings = Timings(dict.fromkeys(KEYS, "drawn"), Path("drawn.jsonl"))
    while missing := search(spec.graphs.graph, timings, spec.cuts).missing:
        for operator, layout in missing:
            drawn = random.Random(f"{operator} {layout} {seed}").random()
            seconds = 1e-3 * drawn if operator.startswith("Transpose") else 1 + drawn
            timings.known.setdefault(operator, {})[layout, None] = Timing(operator, layout, seconds)
    return timings


def sent_bytes(tasks: TaskList) -> int:
    return sum(one.size for one in tasks.tasks if isinstance(one, MessageTask) and one.kernel == SEND)


def sent_dtypes(tasks: TaskList) -> set[str]:
    sent = (one for one in tasks.tasks if isinstance(one, MessageTask) and one.kernel == SEND)
    return {one.accesses[0].tile.dtype for one in sent}


def planned(lists: list[TaskList], ranks: Ranks | None) -> list[int]:
    """Return, on rank 0, the bytes that each rank sends in a step, planned and simulated without the other ranks."""
    if not ranks:
        return [0]
    if ranks.rank:
        return []
    speed = device_model.rank(ranks.cores)
    nodes = rank_programs(lists, ranks.size, speed, nt.Runtime.current.shard_weights)
    first = simulate(nodes, 1, speed, device_model.network(speed.link_s))
    found = [
        sum(t.size for one in own for t in one if isinstance(t, MessageTask) and t.kernel == SEND) for own in nodes
    ]
    assert sum(one.between for one in first) == found[0]
    return found


def profiled(trainer: nt.Trainer, out: str) -> dict[str, Any]:
    """A full profile of two steps, on the first rank: how far tasks began before others on any rank had ended that they
    wait for, and how well clocks are known; and a block under nt.profile."""
    from nntile_py.profiling import recorder

    trainer.step(inputs("gpt2", 0, BATCH))
    with recorder.watched() as found:
        for step in (1, 2):
            trainer.step(inputs("gpt2", step, BATCH))
    trace = found.trace(trainer.update_list)
    early = [int(trace.end[b] - trace.start[task]) for task, before in enumerate(trace.before) for b in before]
    across = [(b, t) for t, before in enumerate(trace.before) for b in before if trace.rank[b] != trace.rank[t]]
    own = sum(not isinstance(task, MessageTask) for tasks in found.programs for task in tasks.tasks)
    with nt.profile(f"{out}-block") as block:
        trainer.step(inputs("gpt2", 3, BATCH))
    return {
        "tasks": [int((trace.rank == rank).sum()) for rank in range(trace.ranks)], "early": max(early) * 1e-9,
        "own": own, "across": len(across), "messages": len(trace.messages),
        "clock": trace.clock, "steps": sorted({int(step) for step in trace.step}), "light": trace.light,
        "block": block.summary["tasks"],
    }  # fmt: skip


def saved(trainer: nt.Trainer, out: str) -> dict[str, Any]:
    """Write a checkpoint, count this rank's tiles before and after, and try a checkpoint that cannot be written."""
    for step in (1, 2):
        trainer.step(inputs("gpt2", step, BATCH))
    before = len(trainer._store.handles)
    trainer.save(f"{out}-checkpoint")
    pieces = len(trainer.live().own_pieces)
    found = {"before": before, "after": len(trainer._store.handles), "pieces": pieces, "error": ""}
    try:
        trainer.save("/proc/none")
    except (nt.NNTileError, OSError) as error:
        found["error"] = str(error)
    return found | {"loss": trainer.step(inputs("gpt2", 3, BATCH))}


def grown(trainer: nt.Trainer, out: str) -> dict[str, Any]:
    """KiB of this process, three times: after a tenth of the steps, half of them and all."""
    found, steps = [], int(os.environ["STEPS"])
    for step in range(1, steps + 1):
        trainer.step(inputs("gpt2", step % 50, BATCH))
        if step in (steps // 10, steps // 2, steps):
            found.append(int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0]))
    return {"kib": found}


def took(count: int, of: int) -> str:
    """The GPUs that this rank sees afterwards, and how many ranks share them, on a machine that has `of`."""
    gpu_assignment.seen = lambda: [str(k) for k in range(of)]
    ranks = joined(True, None)
    assert ranks
    for _ in range(2):
        ranks.take_gpus(count)
    return f"{os.environ[gpu_assignment.VISIBLE]} {ranks.sharers}"


def main(what: str, out: str, window: str = "", shard: str = "", placement: str = "") -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    model = MODELS["gpt2"]
    if what in ("stopped", "late") and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP if what == "stopped" else signal.SIGCONT)
        time.sleep(600)
    if what == "gpus":
        Path(f"{out}.{rank}").write_text(took(int(window), int(shard)))
        return
    options: dict[str, Any] = {"window": int(window) if window else None, "shard_weights": bool(shard)}
    if placement:  # of each rank's part on its workers, as on several GPUs
        options |= {"placement": placement, "cpus": 2}
    with nt.Runtime(**{"cpus": 1} | options, mpi=True):
        if what == "train":
            found = {" ".join(case[:3]): trained(*case) for case in CASES}
            with open(f"{out}.{rank}", "w") as file:
                json.dump(found, file)
            return
        if what == "other plan" and rank:
            nt.Trainer(model, BATCH, SEQ, TILES["ragged"])
        if what == "other compiler":
            os.environ |= {"CXX": "no-such-compiler"} if rank else {}
            nt.Trainer(model, BATCH, SEQ, TILES["rows"])
        if what == "other database":
            spec = StepSpec(model, BATCH, SEQ, Tiling(TILES["even"]))
            nt.Trainer.of_spec(replace(spec, timings=database(spec, rank)))
        trainer = nt.Trainer(model, BATCH, SEQ, TILES["even"])
        if what in ("profile", "save", "grow"):
            found = {"profile": profiled, "save": saved, "grow": grown}[what](trainer, out)
            with open(f"{out}.{rank}", "w") as file:
                json.dump(found, file)
            return
        for step in range(10**9):
            trainer.step(inputs("gpt2", step, BATCH) if what != "other data" else inputs("gpt2", step + rank, BATCH))
            if what == "exception" and step == 3 and rank == 1:
                raise ArithmeticError("on purpose")
            if what == "run" and step == 3:
                with open(f"{out}.{rank}", "w") as file:
                    file.write(str(os.getpid()))
                time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
