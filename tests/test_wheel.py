"""The wheel of "make wheel": installed in an empty virtual environment, it trains on a machine without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nntile_py import extension
from nntile_py.errors import ExtensionError, NNTileError
from nntile_py.system.folders import build_info

ROOT = Path(__file__).parents[1]
TINY = """
model: {type: gpt2, embed: 16, heads: 2, layers: 1}
data: {source: text.txt}
tokenizer: {vocab_size: 260}
train: {batch: 2, seq: 16, steps: 2, eval_every: 2, eval_batches: 1}
"""
TEXT = "\n".join(f"Line {n} says that the square of {n} is {n * n}." for n in range(400))
pytestmark = pytest.mark.timeout(600)  # with a CUDA torch, the wheel's CPU extension is compiled here
V3 = extension.VARIANTS["_avx2"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A virtual environment with the wheel; its other packages are those of this Python."""
    folder = tmp_path_factory.mktemp("wheel")
    # Compiled for this machine's CPU only: the objects of "make setup" serve.
    made = subprocess.run(
        [ROOT / "scripts" / "wheel.sh", "--dist", folder, os.environ.get("NNTILE_ARCH", "native")],
        capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # As plain folders: .pth files in them, such as that of this clone's editable installation, are not read.
    (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", folder / "env" / "bin" / "python"]
    subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", "--ignore-installed", wheel], check=True)
    yield folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the environment; no other program is on the PATH."""
    bin_ = folder / "env" / "bin"
    env = {"PATH": str(bin_), "HOME": str(folder), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [bin_ / command[0], *command[1:]], cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.long
def test_a_wheel_trains_without_a_compiler(installed: Path) -> None:
    assert shutil.which("c++", path=str(installed / "env" / "bin")) is None
    (installed / "text.txt").write_text(TEXT)
    (installed / "tiny.yaml").write_text(TINY)
    where = run(installed, "python", "-c", "from nntile_py import _core; print(_core.__file__)")
    assert where.returncode == 0, where.stderr
    assert where.stdout.startswith(str(installed / "env")) and "/nntile_py/_" in where.stdout
    trained = run(installed, "nntile", "train", "tiny.yaml", "--out", "runs/tiny")
    assert trained.returncode == 0, trained.stderr
    assert "there is no C++ compiler" in trained.stderr  # the kernels that would be compiled have substitutes
    assert (installed / "runs" / "tiny" / "model.safetensors").exists()
    libraries = run(installed, "python", "-c", "from nntile_py import _core; print(open('/proc/self/maps').read())")
    for name in ("libstarpu-1.4.so", "libhwloc.so", "libfxt.so"):
        (path,) = {line.split()[-1] for line in libraries.stdout.splitlines() if name in line}
        assert path.startswith(str(installed / "env")), path


@pytest.mark.long
def test_a_wheel_holds_licences_and_names_its_torch(installed: Path) -> None:
    (wheel,) = installed.glob("*.whl")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.split("-")[2:4] == [python, python] and wheel.name.endswith("_x86_64.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        torch = build_info()["torch"].split("+")[0]
        assert f"Requires-Dist: torch=={torch}\n" in archive.read(metadata).decode()
    for licence in ("StarPU-COPYING.LGPL.txt", "README.txt"):
        assert f"nntile_py/starpu/licenses/{licence}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any("libstarpumpi" in name or "/csrc/" in name for name in names)


@pytest.mark.long
def test_doctor_finds_the_parts_of_a_wheel(installed: Path) -> None:
    report = run(installed, "nntile", "doctor").stdout
    assert re.search(rf"^ok +extension +{re.escape(str(installed))}/env/.*/_avx", report, re.MULTILINE), report
    assert re.search(rf"^ok +StarPU +1\.4\.\d+ in {re.escape(str(installed))}/env/", report, re.MULTILINE), report


@pytest.mark.long
def test_another_torch_gets_one_message(installed: Path) -> None:
    (info,) = (installed / "env" / "lib").glob("python*/site-packages/nntile_py/_build_info.json")
    text = info.read_text()
    info.write_text(text.replace(f'"torch": "{build_info()["torch"]}"', '"torch": "2.9.1+cpu"'))
    try:
        failed = run(installed, "nntile", "train", "tiny.yaml", "--out", "runs/other")
    finally:
        info.write_text(text)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    (line,) = (line for line in failed.stderr.splitlines() if not line.startswith("fusion: "))
    assert line.startswith("error: ") and "compiled for torch 2.9.1" in line and "pip install torch==2.9.1" in line


@pytest.mark.parametrize("other", ["2.12.0+cpu", "2.13.1", "2.9.0"])
def test_check_torch_refuses_other_versions(other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension.metadata, "version", lambda name: other)
    extension.check_torch(other.split("+")[0] + "+cu130")  # whatever the kind of build
    with pytest.raises(ImportError, match=f"the installed torch is {re.escape(other)}:"):
        extension.check_torch("2.13.0+cpu")


def test_torch_is_imported_first_if_its_libraries_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install -e .` builds the extension beside a torch whose folder is then removed."""
    imported: list[str] = []

    def importing(name: str) -> str:
        imported.append(name)
        if name == "nntile_py._core" and "torch" not in imported:
            raise ImportError("libc10.so: cannot open shared object file: No such file or directory")
        if name == "nntile_py._core" and message:
            raise ImportError(message)
        return name

    monkeypatch.setattr(extension, "import_module", importing)
    monkeypatch.setattr(extension, "build_info", dict)
    message = ""
    assert extension.load_core() == "nntile_py._core"  # type: ignore[comparison-overlap]
    assert imported == ["nntile_py._core", "torch", "nntile_py._core"]
    message = "undefined symbol"
    with pytest.raises(ImportError, match="undefined symbol"):
        extension.load_core()


def test_the_cpu_decides_which_extension_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    for name in extension.VARIANTS:
        (tmp_path / name).mkdir()
    assert extension.variant({*V3, *extension.VARIANTS["_avx512"], "sse2"}) == "_avx512"
    assert extension.variant({*V3, "avx512f"}) == "_avx2"
    with pytest.raises(ExtensionError, match=r"with AVX2 \(x86-64-v3: .*lacks avx2, fma: compile") as raised:
        extension.variant(V3 - {"fma", "avx2"})
    assert isinstance(raised.value, NNTileError)
