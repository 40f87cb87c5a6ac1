"""Every script and notebook in examples/ runs, in a process of its own, with small sizes."""

import json
import sys
from pathlib import Path

import forks
import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
LONG = "sweep_tiles", "fine_tune"  # the documentation's examples do the same
SMALL = {  # what is not named here is small as it stands
    "cholesky": "--size 300 --tile 64",
    "fine_tune": "--steps 2",
    "image_models": "--steps 3",
    "own_model": "--steps 3",
    "sweep_tiles": "--repeats 1",
    "train_gpt2": "--steps 2",
}


def test_small_sizes_are_of_examples() -> None:
    assert set(SMALL) <= {script.stem for script in SCRIPTS}


@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=[pytest.mark.long] * (s.stem in LONG), id=s.stem) for s in SCRIPTS]
)
def test_example(script: Path, tmp_path: Path) -> None:
    """What it writes goes to the folder in which it is started."""
    done = forks.run(
        [sys.executable, str(script), *SMALL.get(script.stem, "").split()], cwd=tmp_path, text=True,
        capture_output=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()


NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebook(notebook: Path, tmp_path: Path) -> None:
    """Its cells, one after the other, as a script."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "outputs are not kept in the repository"
    code = "import matplotlib\nmatplotlib.use('Agg')\n" + "\n".join("".join(cell["source"]) for cell in cells)
    done = forks.run(
        [sys.executable, "-c", code], cwd=tmp_path, text=True, capture_output=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "many small tiles:" in done.stdout
