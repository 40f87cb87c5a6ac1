"""One contestant of `nntile bench step`: makes the model, then times as many steps as each line of stdin asks for."""

from __future__ import annotations

import ctypes
import json
import math
import os
import resource
import statistics
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.errors import NNTileError
from nntile_py.execution import memory
from nntile_py.measure.common import (
    CLIP,
    GPU_BETAS,
    GPU_LR,
    LR,
    RESERVE,
    WEIGHT_DECAY,
    Step,
    batch,
    limit_memory,
    shape,
    weights,
)
from nntile_py.measure.peer_process import PARENT, RANKED, lead
from nntile_py.system.clock import clocked

PASS_TURNS = 15  # times that a turn of forward passes takes the median of: one is short, and the first is disturbed


def reference_model(o: dict[str, Any]) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    make: Any = transformers.GPT2Config  # its stub lacks the arguments of all models
    config = make(
        n_layer=o["layers"], n_embd=o["embed"], n_head=o["heads"], n_positions=o["seq"], vocab_size=o["vocab"],
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa", use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def ours_on_gpu(o: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    import torch

    from nntile_py.execution.runtime import Runtime
    from nntile_py.models.gpt2 import GPT2
    from nntile_py.tasks.adamw import AdamW
    from nntile_py.training.repeated_steps import same_steps
    from nntile_py.training.trainer import Trainer

    values = {name: value.cpu().numpy() for name, value in weights(o)}
    torch.cuda.empty_cache()
    for device in range(o["cuda"]):
        limit_memory(o, device)
    room = max(int(o["cuda_memory"] * 2**30) - RESERVE, RESERVE // 2) if o["cuda_memory"] else None
    runtime = Runtime(
        cpus=0, cuda=o["cuda"], scheduler=o["scheduler"], window=o["window"], cuda_memory=room,
        placement=o["placement"],
    )  # fmt: skip
    runtime.__enter__()
    trainer = Trainer(
        GPT2(shape(o), values), o["batch"], o["seq"], o["tiles"], precision=o["dtype"],
        optimizer=AdamW(lr=GPU_LR, weight_decay=WEIGHT_DECAY, betas=GPU_BETAS), clip_grad_norm=CLIP,
        accumulate=o["accumulate"], fusion=o["fusion"], shift_labels=False,
    )  # fmt: skip
    values.clear()
    ids = batch(o)
    return same_steps(trainer, ids, ids), {"tasks": trainer.tasks_per_step, "flop": trainer.flop_per_step}


def ours(o: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    from nntile_py.execution.runtime import Runtime
    from nntile_py.models.gpt2 import GPT2
    from nntile_py.tasks.adamw import AdamW
    from nntile_py.training.repeated_steps import same_steps
    from nntile_py.training.trainer import Trainer

    model = GPT2.from_hf(reference_model(o), attention=o["attention"])
    runtime = Runtime(cpus=o["cpus"], scheduler=o["scheduler"], placement=o.get("placement"), window=o.get("window"))
    runtime.__enter__()  # for as long as the process lives
    trainer = Trainer(
        model, o["batch"], o["seq"], o["tiles"], optimizer=AdamW(lr=LR, weight_decay=WEIGHT_DECAY),
        clip_grad_norm=CLIP, accumulate=o["accumulate"], fusion=o["fusion"],
    )  # fmt: skip
    ids = batch(o)
    return same_steps(trainer, ids, ids), {"tasks": trainer.tasks_per_step, "flop": trainer.flop_per_step}


def torch_side(o: dict[str, Any], compiled: bool) -> tuple[Step, dict[str, Any]]:
    import torch

    torch.set_num_threads(o["cpus"])
    model = reference_model(o)
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=WEIGHT_DECAY, fused=True)
    forward = torch.compile(model) if compiled else model
    ids = torch.from_numpy(batch(o))

    def run(n: int) -> list[float]:
        losses = []
        for _ in range(n):
            loss = forward(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return losses

    return run, {}


def main(name: str, options: str, *place: str) -> int:
    """`place`: rank and port, of a contestant with several processes; without them it is led here."""
    o = json.loads(options)
    with_parent()
    if name in RANKED and not place:
        return lead(name, o)
    try:
        serve(name, o, *map(int, place))
    except Exception as error:
        if not isinstance(error, NNTileError):  # whose text says all
            traceback.print_exc()
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        print(json.dumps({"error": text[:400]}), flush=True)
        return 1
    return 0


def with_parent() -> None:
    """End with the process that started this one; be the first to go where main memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
        if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):  # it has gone meanwhile
            os._exit(1)
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")


def serve(name: str, o: dict[str, Any], *place: int) -> None:
    if "config" in o:
        from nntile_py.measure.config_peer import contestant

        run, facts = contestant(name, o, *place)
    elif name == "nntile":
        run, facts = ours_on_gpu(o) if o["cuda"] else ours(o)
    elif name in RANKED:
        from nntile_py.measure.peers import peer

        run, facts = peer(name, o, *place)
    elif o["cuda"]:
        from nntile_py.measure.torch_gpt2 import torch_on_gpu

        run, facts = torch_on_gpu(o, name == "torch_compile")
    else:
        run, facts = torch_side(o, name == "torch_compile")
    asked = o.get("losses", 0)
    losses = run(max(3, asked))
    if not all(map(math.isfinite, losses)):
        raise NNTileError(f"the losses of the first steps are {', '.join(f'{loss:.4g}' for loss in losses)}")
    if asked:
        facts["losses"] = losses[:asked]
    print(json.dumps({"first_loss": losses[0], "third_loss": losses[2], **facts}), flush=True)
    turns = PASS_TURNS if o.get("inference") else 1
    for line in sys.stdin:
        seconds = statistics.median(clocked(run, turns, int(line))) * int(line)
        host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        peak = memory.gpu_peak() / 2**20 if o["cuda"] else host
        print(json.dumps({"seconds": seconds, "peak_mib": peak, "host_mib": host}), flush=True)


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # at once: what failed may wait for others that never come
