"""Where a user's machine keeps what is made or measured once."""

import os
import tempfile
from pathlib import Path


def cache_folder() -> Path:
    """What was measured of this machine, and StarPU as `make setup` builds it."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # nobody's home
        home = Path(tempfile.gettempdir())
    return home / "nntile_py"
