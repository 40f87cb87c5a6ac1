"""The main memory that this process may use, with the limits of containers and batch systems."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def machine_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of main memory that this process may use.

    This is the machine's memory, or a smaller limit of the process's cgroups, see cgroups(7).
    """
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version_1 = bool(controllers)
            top, name = (root / "memory", "memory.limit_in_bytes") if version_1 else (root, "memory.max")
            own = top / path.lstrip("/")
            # In a container, `path` may be a path on the host, while `top` is already the container's own cgroup.
            for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
                with suppress(OSError, ValueError):  # the file has "max" if there is no limit
                    found.append(int((folder / name).read_text()))
    return min(found)


def free_memory() -> int:
    """Return the bytes of main memory that this process may still allocate, within its cgroups' limits."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return max(min(free, machine_memory() - own), 0)


def within_machine(limit: int | None, machine: int | None = None) -> int:
    """Return the smaller of `limit` and the memory of the machine, in bytes.

    Args:
        limit: None: no limit.
        machine: Memory of the machine. None: the memory that this process may use.
    """
    total = machine_memory() if machine is None else machine
    return min(limit or total, total)
