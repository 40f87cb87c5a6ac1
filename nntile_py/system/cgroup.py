"""What of the machine this process may have: less than all of it in a container or in a batch system's job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def machine_memory(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of main memory: the machine's, or the least limit of a cgroup above this process (cgroups(7))."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version_1 = bool(controllers)
            top, name = (root / "memory", "memory.limit_in_bytes") if version_1 else (root, "memory.max")
            own = top / path.lstrip("/")
            # In a container the path may be the host's, and the top its own cgroup.
            for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
                with suppress(OSError, ValueError):  # "max": none
                    found.append(int((folder / name).read_text()))
    return min(found)


def free_memory() -> int:
    """Bytes of main memory that this process may still take."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")
    own = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return max(min(free, machine_memory() - own), 0)


def within_machine(limit: int | None) -> int:
    """Bytes of main memory under a limit, if there is one, that may be more than there is."""
    there = machine_memory()
    return min(limit or there, there)
