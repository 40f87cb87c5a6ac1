"""Compilers and cache folders that do not do as they should."""

import errno
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nntile_py as nt
from nntile_py.errors import say_once
from nntile_py.tasks.scalar import native

SOURCE = 'extern "C" int nntile_made() { return 1; }'
Script = Callable[[str], None]


def forget() -> None:
    for cached in (native.command, native.why_not, native.address, native._version, say_once):
        cached.cache_clear()


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Return an empty cache folder for libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield tmp_path / "nntile_py" / "kernels"
    forget()


@pytest.fixture
def compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Have a script be the compiler."""

    def be(text: str) -> None:
        path = tmp_path / "compiler"
        path.write_text(text)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    return be


@pytest.mark.parametrize("damage", [b"", b"x", b"\0" * 20000, 4097, -1])
def test_a_damaged_library_is_made_anew(cache: Path, damage: bytes | int) -> None:
    """A truncated library is compiled again; loading it would end the process."""
    assert native.address(SOURCE)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(whole[:damage] if isinstance(damage, int) else damage)
    forget()
    assert native.address(SOURCE) and kept.read_bytes() == whole and [*cache.iterdir()] == [kept]


def test_a_library_under_the_name_of_another_is_made_anew(cache: Path) -> None:
    """A library under another kernel's name is not used; its function takes other arguments."""
    other = SOURCE.replace("1", "2")
    assert native.address(SOURCE) and native.address(other)
    own, wrong = native.path_of(SOURCE), native.path_of(other)
    whole = own.read_bytes()
    own.unlink()
    own.write_bytes(wrong.read_bytes())
    forget()
    assert native.address(SOURCE) and own.read_bytes() == whole


def test_a_library_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.address(SOURCE)
    forget()
    monkeypatch.setattr(native, "_compiled", None)
    assert native.address(SOURCE)


def test_a_cache_that_cannot_be_written(cache: Path) -> None:
    """Libraries are compiled for this process only, and one line says so."""
    cache.parent.mkdir()
    cache.touch()
    with pytest.warns(UserWarning, match=r"^fusion: kernels are compiled at each start, as .*kernels cannot") as told:
        assert native.address(SOURCE) and native.address(SOURCE + "// another")
    assert len(told) == 1


@pytest.mark.parametrize("where", ["folder", "file"])
def test_a_library_that_another_could_have_written(cache: Path, where: str) -> None:
    """A library of another user is not loaded, as loading executes its code."""
    assert native.address(SOURCE)
    (kept,) = cache.iterdir()
    (cache if where == "folder" else kept).chmod(0o777)
    before = kept.stat().st_ino
    with pytest.raises(OSError, match="belongs to another user, or all may write to it"):
        native._loaded(kept)
    forget()
    if where == "file":
        assert native.address(SOURCE) and kept.stat().st_ino != before
    else:
        with pytest.warns(UserWarning, match="kernels are compiled at each start"):
            assert native.address(SOURCE)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("#!/bin/sh\nprintf '\\377\\376 garbage'; exit 1", "compiler failed on a generated kernel: .* garbage"),
        ("#!/bin/sh\necho; echo a.cpp: error: this; echo that; exit 1", "kernel: a.cpp: error: this$"),
        (
            "#!/bin/sh\necho 'ld: final link failed: No space left on device'; echo 'collect2: error: ld: 1'; exit 1",
            "kernel: ld: final link failed: No space left on device$",
        ),
        ("#!/bin/sh\nexit 0", "compiler failed on a generated kernel: exit status 0, and no library"),
        ('#!/bin/sh\nwhile [ "$1" != -o ]; do shift || exit 0; done; echo no > "$2"', "compiled or loaded: .*short"),
        ("no script", r"compiler does not run \(.*Exec format error.*; see CXX"),
        ("#!/bin/sh\nsleep 50", r"compiler did not end in 0.3 s; see CXX"),
    ],
)
def test_compilers_that_fail(compiler: Script, script: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each failure, without delay, even if a child of a compiler wrapper keeps running."""
    monkeypatch.setattr(native, "VERSION_SECONDS", 0.3 if "sleep" in script else 20.0)
    compiler(script)
    start = time.monotonic()
    with pytest.raises(native.NoCompiler, match=why) as told:
        native.address(SOURCE)
    assert "\n" not in str(told.value) and time.monotonic() - start < 20
    assert native.why_not()


def test_what_a_compiler_says_needs_no_room(compiler: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TMPDIR may be full."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    compiler("#!/bin/sh\necho a.s: No space left on device; exit 1")
    with pytest.raises(native.NoCompiler, match=r"kernel: a\.s: No space left on device"):
        native.address(SOURCE)


def test_names_of_compilers(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "')
    assert "CXX is 'g++ \"' (No closing quotation); allowed:" in (native.why_not() or "")
    for name in ("", " ", "c++ -DX=" + os.fsdecode(b"\xff")):
        monkeypatch.setenv("CXX", name)
        forget()
        assert native.why_not() is None


def test_no_folder_for_starpu(python: Callable[..., Any], tmp_path: Path) -> None:
    """StarPU would abort with a list of addresses. Another folder helps."""
    (tmp_path / "file").touch()
    code = "import nntile_py as nt\ntry:\n    nt.Runtime(cpus=1).__enter__()\nexcept nt.ConfigError as e:\n    print(e)"
    failed = python(code, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert failed.returncode == 0 and not failed.stderr, failed.stderr
    assert failed.stdout == (
        f"StarPU cannot keep its performance models in {tmp_path / 'file'}: Not a directory; allowed: XDG_CACHE_HOME, "
        "or STARPU_PERF_MODEL_DIR, with a folder that can be written\n"
    )
    models = {"XDG_CACHE_HOME": str(tmp_path / "file"), "STARPU_PERF_MODEL_DIR": str(tmp_path)}
    other = python("import nntile_py as nt\nwith nt.Runtime(cpus=1): print('runs')", **models)
    assert other.stdout == "runs\n", other.stderr


def test_an_empty_folder_that_starpu_cannot_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from nntile_py.execution import starpu_settings

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("STARPU_PERF_MODEL_DIR", raising=False)
    starpu_settings.create_model_folder()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as of a file system that is read only
    with pytest.raises(nt.ConfigError, match="it cannot be written; allowed: XDG_CACHE_HOME, or STARPU_PERF_MODEL_DIR"):
        starpu_settings.create_model_folder()
    (tmp_path / ".starpu" / "sampling" / "bus" / "here.config").touch()
    starpu_settings.create_model_folder()
