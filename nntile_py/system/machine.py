"""Describes the machine on which a measurement runs: processor, GPUs, versions, commit."""

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
from nntile_py.system.units import counted


def gpus() -> str:
    """Return this machine's GPUs, such as "4 NVIDIA H200", or "" without GPUs.

    The names come from nvidia-smi, so CUDA is not initialised.
    """
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    names = [] if done.returncode else done.stdout.strip().splitlines()
    return ", ".join(f"{count} {name}" for name, count in Counter(names).items())


def _commit() -> str | None:
    """Return the commit of these sources: from the file that `make bundle` writes, or from git. None if unknown."""
    here = Path(__file__).resolve().parents[1]
    if (written := here / "_commit.txt").exists():
        return written.read_text().strip()
    if not shutil.which("git"):
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def processor() -> str:
    """Return the name of the CPU's model."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        model = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if "model name" in x), model)
    return model


def devices(cuda: bool) -> str:
    """Return the names of this machine's GPUs (with `cuda`) and of its CPU, for people."""
    return "; ".join(filter(None, (gpus() if cuda else "", processor())))


def cache_bytes(cuda: bool) -> int:
    """Return the size, in bytes, of the GPU's L2 cache (`cuda`) or of the CPU's last-level cache.

    If the CPU's size is unknown, return 32 MiB.
    """
    if cuda:
        import torch

        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes, default=32 << 20)


def machine() -> dict[str, Any]:
    """Return this machine's processor, cores, GPUs, torch version, commit and today's date, without importing torch."""
    return {
        "processor": processor(), "cores": cores(), "gpus": gpus(), "torch": version("torch"),
        "commit": _commit(), "date": date.today().isoformat(),
    }  # fmt: skip


def described(where: dict[str, Any]) -> str:
    """Return the result of machine() as one line: 2 NVIDIA H200, AMD EPYC 9654, 16 cores, torch 2.13.0."""
    gpus = [where["gpus"]] if where["gpus"] else []
    return ", ".join([*gpus, where["processor"], counted(where["cores"], "core"), f"torch {where['torch']}"])
