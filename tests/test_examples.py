"""Every script in examples/ runs, in a process of its own, with the small sizes that it has for NNTILE_SMALL."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_there_are_examples() -> None:
    assert "cholesky.py" in [script.name for script in SCRIPTS]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example(script: Path, tmp_path: Path) -> None:
    """What it writes goes to the folder in which it is started."""
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=os.environ | {"NNTILE_SMALL": "1"}, capture_output=True,
        text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() and "NNTILE_SMALL" in script.read_text(encoding="utf-8")
