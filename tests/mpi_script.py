"""What tests/test_mpi.py has mpirun start: trains small models and tells what came out, or fails in some way."""

import hashlib
import json
import os
import sys
import time
from typing import Any

import numpy as np

import nntile_py as nt
from nntile_py.models.base import Model

BATCH, SEQ, VOCAB = 6, 12, 67
SIZES: dict[str, Any] = {"layers": 2, "embed": 24, "heads": 3, "ffn": 50, "vocab": VOCAB, "positions": 16}
MODELS: dict[str, Model] = {
    "gpt2": nt.models.GPT2(nt.models.GPT2Config(**SIZES, dropout=0.1)),
    "bert": nt.models.BERT(nt.models.BERTConfig(**SIZES)),
}
TILES = {"uncut": {}, "even": {"batch": 3, "embed": 8}, "ragged": {"batch": 2, "embed": 7, "ffn": 30, "vocab": 20}}
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("gpt2", "even", "chain", {}),
    ("gpt2", "ragged", "chain", {"grad_accumulation": 2}),
    ("bert", "uncut", "chain", {}),
    ("bert", "ragged", "chain", {"optimizer": nt.SGD(lr=0.1, momentum=0.9)}),
    ("gpt2", "ragged", "tree", {}),
    ("gpt2", "ragged", "commute", {}),
    ("bert", "ragged", "redux", {}),
]


def inputs(step: int, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    ids = rng.integers(0, VOCAB, (rows, SEQ))
    return {"input_ids": ids, "labels": np.where(rng.random(ids.shape) < 0.5, ids, -100)}


def trained(model: str, tiles: str, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    made = MODELS[model].changed()
    trainer = nt.Trainer(
        made, BATCH, SEQ, TILES[tiles], accumulate=policy, **{"clip_grad_norm": 1.0, "seed": 3} | options
    )
    rows = BATCH * options.get("grad_accumulation", 1)
    losses = [trainer.step(inputs(step, rows)) for step in range(3)]
    held_out, logits = trainer.evaluate(inputs(9, BATCH), return_logits=True)
    losses.append(trainer.step(inputs(3, rows)))
    weights = trainer.state_dict()
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    trainer.close()
    return {"losses": [*losses, held_out], "logits": float(np.abs(logits).sum(dtype=float)), "weights": digest}


def main(what: str, out: str, window: str = "", shard: str = "") -> None:
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
    model = MODELS["gpt2"]
    with nt.Runtime(cpus=1, mpi=True, window=int(window) if window else None, shard_weights=bool(shard)):
        if what == "train":
            found = {" ".join(case[:3]): trained(*case) for case in CASES}
            with open(f"{out}.{rank}", "w") as file:
                json.dump(found, file)
            return
        if what == "other plan" and rank:
            nt.Trainer(model, BATCH, SEQ, TILES["ragged"])
        trainer = nt.Trainer(model, BATCH, SEQ, TILES["even"])
        for step in range(10**9):
            trainer.step(inputs(step, BATCH) if what != "other data" else inputs(step + rank, BATCH))
            if what == "exception" and step == 3 and rank == 1:
                raise ArithmeticError("on purpose")
            if what == "run" and step == 3:
                with open(f"{out}.{rank}", "w") as file:
                    file.write(str(os.getpid()))
                time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
