"""Time of a training step of PyTorch modules: captured by nntile_py, and by PyTorch itself, eager and compiled.

    python experiments/captured.py [--models opt-125m vit-base ...] [--rounds 3] [--sides ours eager compile]

Each measurement is a process of its own; the sides take turns. A step is forward, backward and AdamW in fp32 on all
cores. Prints the median of the rounds for each side, and nntile_py's time over the faster of PyTorch's.
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
from typing import Any

SIDES = "ours", "eager", "compile"
WARM, STEPS = 2, 5
Run = tuple[Callable[[], float], Callable[[], None]]  # a step, and the end


def text(name: str, config: Any, rows: int, seq: int, target: int | None = None) -> Any:
    """Return a model with random weights and a batch."""
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


def mixer() -> Any:
    """An MLP-mixer (Tolstikhin et al. 2021), S/16."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, patches: int, width: int) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches))
            self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
            y: torch.Tensor = x + self.channels(self.second(x))
            return y

    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 512, 16, 16)
            self.blocks = nn.ModuleList(Block(196, 512) for _ in range(8))
            self.norm, self.head = nn.LayerNorm(512), nn.Linear(512, 1000)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x = self.patches(pixels).flatten(2).transpose(1, 2)
            for block in self.blocks:
                x = block(x)
            y: torch.Tensor = self.head(self.norm(x).mean(1))
            return y

    def loss(output: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, inputs["labels"])

    return Mixer(), {"pixels": torch.randn(8, 3, 224, 224), "labels": torch.randint(0, 1000, (8,))}, loss


def unet() -> Any:
    """A U-Net (Ronneberger et al. 2015) with group norms, three levels."""
    import torch
    from torch import nn

    class Double(nn.Module):
        def __init__(self, inner: int, outer: int) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 3, padding=1)
            self.na, self.nb = nn.GroupNorm(8, outer), nn.GroupNorm(8, outer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.silu(self.na(self.a(x)))
            return nn.functional.silu(self.nb(self.b(x)))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([Double(3, 32), Double(32, 64), Double(64, 128)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)])
            self.join, self.head = nn.ModuleList([Double(128, 64), Double(64, 32)]), nn.Conv2d(32, 2, 1)

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            x, skips = pixels, []
            for number, layer in enumerate(self.down):
                x = layer(nn.functional.max_pool2d(x, 2) if number else x)
                skips.append(x)
            for up, join, skip in zip(self.up, self.join, skips[1::-1], strict=True):
                x = join(torch.cat([skip, up(x)], 1))
            y: torch.Tensor = self.head(x)
            return y

    def loss(output: torch.Tensor, inputs: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(output, inputs["labels"])

    return UNet(), {"pixels": torch.randn(4, 3, 96, 96), "labels": torch.randint(0, 2, (4, 96, 96))}, loss


def models() -> dict[str, Callable[[], Any]]:
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
        "u-net": unet,
        "mlp-mixer": mixer,
    }


def measure(name: str, side: str, cores: int) -> dict[str, Any]:
    """Return the milliseconds of each step and the loss of the last."""
    import torch

    torch.manual_seed(0)
    began = time.perf_counter()
    module, example, loss = models()[name]()
    step, close = (ours if side == "ours" else torchs)(module, example, loss, side, cores)
    value = step()
    start, times = time.perf_counter() - began, []
    for _ in range(WARM + STEPS - 1):
        began = time.perf_counter()
        value = step()
        times.append(1e3 * (time.perf_counter() - began))
    close()
    return {"times": times[WARM - 1 :], "loss": value, "start": start}


def ours(module: Any, example: Any, loss: Any, side: str, cores: int) -> Run:
    import nntile_py as nt

    model = nt.from_torch(module.train(), example, loss)
    runtime = nt.Runtime(cpus=cores)
    runtime.start()
    rows = model.sizes[0]
    tiles = {"batch": -(-rows // cores)} if rows > 1 else json.loads(os.environ.get("TILES", "{}"))
    trainer = nt.Trainer(model, *model.sizes, tiles, optimizer=nt.AdamW(lr=1e-4))
    arrays = {key: value.numpy() for key, value in example.items()}
    return lambda: trainer.step(arrays), runtime.stop


def torchs(module: Any, example: Any, loss: Any, side: str, cores: int) -> Run:
    import torch

    torch.set_num_threads(cores)
    optimizer = torch.optim.AdamW(module.train().parameters(), lr=1e-4, fused=True)

    def forward(inputs: Any) -> Any:
        if loss is None:
            return module(**inputs).loss
        return loss(module(pixels=inputs["pixels"]), inputs)

    run = torch.compile(forward) if side == "compile" else forward

    def step() -> float:
        optimizer.zero_grad()
        value = run(example)
        value.backward()
        optimizer.step()
        return float(value.detach())

    return step, lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--sides", nargs="+", default=SIDES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one, options.cores)))
        return
    head = " | ".join(f"{side} ms" for side in options.sides)
    print(f"| model | {head} | ratio (least, most) | loss | start s |")
    for name in options.models or models():
        times: dict[str, list[float]] = {side: [] for side in options.sides}
        losses, starts = {}, {}
        for _ in range(options.rounds):
            for side in options.sides:
                command = [sys.executable, __file__, "--one", name, side, "--cores", str(options.cores)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    print(f"{name} {side}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
                    continue
                result = json.loads(done.stdout.strip().splitlines()[-1])
                times[side].append(statistics.median(result["times"]))
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
