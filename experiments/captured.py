"""Time of a training step of PyTorch modules: captured by nntile_py, and by PyTorch itself, eager and compiled.

    python experiments/captured.py [--models opt-125m vit-base ...] [--rounds 3] [--sides ours eager compile] [--gpu]

Each measurement is a process of its own and runs five steps in a row; the sides take turns. A step is forward, backward
and AdamW, in fp32 on all cores, or with --gpu in bf16 on one GPU (PyTorch's by autocast). nntile_py's steps read their
batch from NumPy arrays, PyTorch's from tensors on the device. Prints the median of the rounds for each side, and
nntile_py's time over the faster of PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

SIDES = "ours", "eager", "compile"
WARM, STEPS = 2, 5
Step = Callable[[], Callable[[], float]]  # starts a step; its result waits for the loss
Run = tuple[Step, Callable[[], None]]  # starts a step; ends the run


def text(name: str, config: Any, rows: int, seq: int, target: int | None = None) -> Any:
    """Return a model with random weights, a batch, and None: the model itself computes the loss."""
    import torch
    import transformers

    config.use_cache = False
    for key in ("attention_dropout", "hidden_dropout", "dropout", "dropout_rate", "activation_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    model = getattr(transformers, name)(config)
    ids, labels = (torch.randint(5, config.vocab_size, (rows, n)) for n in (seq, target or seq))
    return model, {"input_ids": ids, "labels": labels}, None


def picture(name: str, config: Any, rows: int) -> Any:
    import torch
    import transformers

    model = getattr(transformers, name)(config)
    batch = {"pixel_values": torch.randn(rows, 3, 224, 224), "labels": torch.randint(0, config.num_labels, (rows,))}
    return model, batch, None


def models() -> dict[str, Callable[[], Any]]:
    import modules
    import transformers as hf

    qwen = {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    t5: Any = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0}
    return {
        "resnet-50": lambda: picture("ResNetForImageClassification", hf.ResNetConfig(num_labels=1000), 8),
        "vit-base": lambda: picture("ViTForImageClassification", hf.ViTConfig(num_labels=1000), 4),
        "t5-small": lambda: text("T5ForConditionalGeneration", hf.T5Config(**t5), 4, 128, 64),
        "qwen2.5-0.5b": lambda: text("Qwen2ForCausalLM", hf.Qwen2Config(vocab_size=151936, **qwen), 1, 128),
        "opt-125m": lambda: text("OPTForCausalLM", hf.OPTConfig(), 4, 128),
        "modernbert": lambda: text("ModernBertForMaskedLM", hf.ModernBertConfig(), 4, 128),
        "u-net": modules.u_net,
        "mlp-mixer": modules.mlp_mixer,
    }


def on_gpu() -> dict[str, Callable[[], Any]]:
    import modules

    return {"gpt2-124m": modules.gpt2, "qwen2.5-1.5b": modules.qwen, "vit-large": modules.vit_large}


def measure(name: str, side: str, cores: int, gpu: bool) -> dict[str, Any]:
    """Return the mean milliseconds of STEPS steps, the loss of the last, and the seconds to the end of the first."""
    import torch

    torch.manual_seed(0)
    began = time.perf_counter()
    module, example, loss = (on_gpu() if gpu else models())[name]()
    step, close = (ours if side == "ours" else torchs)(module, example, loss, side, 0 if gpu else cores)
    step()()
    start = time.perf_counter() - began
    for count in (WARM, STEPS):
        began = time.perf_counter()
        losses = [step() for _ in range(count)]
        value = losses[-1]()
        taken = time.perf_counter() - began
    close()
    return {"ms": 1e3 * taken / STEPS, "loss": value, "start": start}


def ours(module: Any, example: Any, loss: Any, side: str, cores: int) -> Run:
    import nntile_py as nt

    model = nt.from_torch(module.train(), example, loss)
    runtime = nt.Runtime(cpus=cores, cuda=int(not cores))
    runtime.start()
    rows = model.sizes[0]
    tiles = {"batch": -(-rows // cores)} if rows > 1 and cores else {}
    precision = "fp32" if cores else "bf16"
    trainer = nt.Trainer(model, *model.sizes, tiles, precision, nt.AdamW(lr=1e-4, weight_decay=0.01))
    arrays = {key: value.numpy() for key, value in example.items()}
    return lambda: partial(loss_of, trainer.submit(arrays)), runtime.stop


def loss_of(pending: Any) -> float:
    return float(pending.result().loss)


def torchs(module: Any, example: Any, loss: Any, side: str, cores: int) -> Run:
    import torch

    device = "cpu" if cores else "cuda"
    torch.set_num_threads(cores or 1)
    module, batch = module.to(device).train(), {key: value.to(device) for key, value in example.items()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def forward(inputs: Any) -> Any:
        if loss is None:
            return module(**inputs).loss
        return loss(module(**{key: value for key, value in inputs.items() if key != "labels"}), inputs)

    run = torch.compile(forward) if side == "compile" else forward

    def step() -> Callable[[], float]:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=not cores):
            value = run(batch)
        value.backward()
        optimizer.step()
        return value.detach().item  # type: ignore[no-any-return]

    return step, lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.cores, options.gpu)))
        return
    head = " | ".join(f"{side} ms" for side in options.sides)
    print(f"| model | {head} | ratio (least, most) | loss | start s |")
    for name in options.models or (on_gpu() if options.gpu else models()):
        times: dict[str, list[float]] = {side: [] for side in options.sides}
        losses, starts = {}, {}
        for _ in range(options.rounds):
            for side in options.sides:
                command = [sys.executable, __file__, "--one", name, side, "--cores", str(options.cores)]
                command += ["--gpu"] * options.gpu
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{name} {side}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                    continue
                result = json.loads(done.stdout.strip().splitlines()[-1])
                times[side].append(result["ms"])
                losses[side], starts[side] = result["loss"], result["start"]
        medians = {side: statistics.median(found) for side, found in times.items() if found}
        best = min((side for side in medians if side != "ours"), key=lambda side: medians[side], default=None)
        ratio = "-"
        if best and "ours" in medians:
            each = [a / b for a, b in zip(times["ours"], times[best], strict=False)]
            ratio = f"{medians['ours'] / medians[best]:.2f} ({min(each):.2f}, {max(each):.2f})"
        cells = [f"{medians[side]:.0f}" if side in medians else "failed" for side in options.sides]
        texts = [" ".join(f"{losses.get(side, float('nan')):.4f}" for side in options.sides)]
        texts.append(" ".join(f"{starts.get(side, float('nan')):.0f}" for side in options.sides))
        print(f"| {name} | " + " | ".join([*cells, ratio, *texts]) + " |", flush=True)


if __name__ == "__main__":
    main()
