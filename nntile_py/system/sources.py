"""Compare a clone's C++ sources with the sources of its compiled extension. setup.py imports this file."""

import hashlib
import json
import os
from pathlib import Path

REBUILD = "python setup.py -q build_ext --inplace"
FOLDERS = ("tasks", "nntile_py/execution/csrc", "nntile_py/execution/csrc/mpi")
_SUFFIXES = (".cpp", ".h")


def fingerprint(root: Path) -> str:
    """Return a hash over names and contents of the C++ sources of the clone `root`."""
    total = hashlib.sha256()
    for folder in FOLDERS:
        for name in sorted(entry.name for entry in _sources(root / folder)):
            content = (root / folder / name).read_bytes()
            total.update(f"{folder}/{name}\0{len(content)}\0".encode() + content)
    return total.hexdigest()


def changed_sources(root: Path) -> str:
    """Return a message if the C++ sources of a clone differ from the sources of its extension; "" if they are equal.

    Files are read only if the modification time of a source or of its folder is later than the build's start, which is
    the modification time of _build_info.json. A folder's time shows that files were removed or renamed. The message is
    also "" if `root` is no clone, or if _build_info.json has no hash of the sources, as after an old build.
    """
    info = root / "nntile_py" / "_build_info.json"
    try:
        if not (root / "setup.py").is_file() or not _touched(root, info.stat().st_mtime_ns):
            return ""
        built = json.loads(info.read_text()).get("sources")
        if built in (None, fingerprint(root)):
            return ""
    except (OSError, ValueError):
        return ""
    return f"the C++ sources in {root} have changed since the extension was compiled; results may be wrong"


def _sources(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if entry.name.endswith(_SUFFIXES)]


def _touched(root: Path, start: int) -> bool:
    """Return True if a source, or a folder of sources, was modified at or after the time `start` in nanoseconds."""
    for folder in FOLDERS:
        if (root / folder).stat().st_mtime_ns >= start:
            return True
        if any(entry.stat().st_mtime_ns >= start for entry in _sources(root / folder)):
            return True
    return False
