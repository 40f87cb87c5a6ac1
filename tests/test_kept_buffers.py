"""Buffers of main memory that are kept for later tiles of the same size; the CUDA build alone uses them."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE.parent / "nntile_py" / "execution" / "csrc"


def test_random_buffers(tmp_path: Path) -> None:
    """A buffer goes to a tile of its size; the oldest are freed first, and no more than must be."""
    flags = ["-std=c++20", "-O1", "-fsanitize=undefined", "-Wall", "-Wextra", "-Werror", f"-I{SOURCES}"]
    program = tmp_path / "program"
    subprocess.run(["g++", *flags, HERE / "kept_buffers_program.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
