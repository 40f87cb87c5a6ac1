"""Where a figure was measured."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections import Counter
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nntile_py.system.load import cores


def gpus() -> str:
    """Such as 4 NVIDIA H200; empty if there are none. Asked from outside: CUDA is not started here."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [] if told.returncode else told.stdout.strip().splitlines()
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _commit() -> str | None:
    """Of these sources: as `make bundle` noted it, or their repository's; whatever folder the command runs in."""
    here = Path(__file__).resolve().parents[1]
    if (noted := here / "_commit.txt").exists():
        return noted.read_text().strip()
    if not shutil.which("git"):
        return None
    asked = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or None


def processor() -> str:
    """Its model."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x), model)
    return model


def cache_bytes(cuda: bool) -> int:
    """Return the size of a device's largest cache: a GPU's second level or the CPU's last; 32 MiB if unknown."""
    if cuda:
        import torch

        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    found = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            found.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(found, default=32 << 20)


def machine() -> dict[str, Any]:
    """Where a figure was measured: processor, cores, GPUs, versions, commit, date."""
    return {
        "processor": processor(), "cores": cores(), "gpus": gpus(), "torch": version("torch"),  # importing it takes 1 s
        "commit": _commit(), "date": date.today().isoformat(),
    }  # fmt: skip


def described(where: dict[str, Any]) -> str:
    """What machine() found, in a line: 2 NVIDIA H200, AMD EPYC 9654, 16 cores, torch 2.13.0."""
    gpus = [where["gpus"]] if where["gpus"] else []
    return ", ".join([*gpus, where["processor"], f"{where['cores']} cores", f"torch {where['torch']}"])
