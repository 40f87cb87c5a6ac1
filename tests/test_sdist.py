"""An sdist has all files that a build needs, whatever the machine that makes it: MANIFEST.in against git's list."""

import subprocess
from pathlib import Path

import pytest
from setuptools.command.egg_info import FileList

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".ci/", ".git", "experiments/results/")  # of no use outside the repository


@pytest.mark.filterwarnings("ignore")
def test_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files of the repository are in the sdist, the CUDA sources too; files that a build leaves behind are not."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git repository")
    tracked = {file for file in listed.stdout.split() if not file.startswith(LEFT_OUT)}
    monkeypatch.chdir(ROOT)
    manifest = FileList()
    for line in Path("MANIFEST.in").read_text().splitlines():
        if line and not line.startswith("#"):
            manifest.process_template_line(line)
    by_setuptools = {"LICENSE", "setup.py", "pyproject.toml", "MANIFEST.in"}
    assert any(file.endswith("_cuda.cpp") for file in tracked)
    assert tracked - {*manifest.files} <= by_setuptools
    added = {file for file in manifest.files if Path(file).suffix not in (".py", ".md")} - tracked
    assert not {Path(file).suffix for file in added} & {".so", ".pyc", ".o"}
    assert "nntile_py/_build_info.json" not in added
