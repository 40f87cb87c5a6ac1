"""Arguments of kernels: what a task carries of them, and the C++ that is made of their declarations."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nntile_py.tiles import Slot, TaskArgs, TaskList, Tile, W

ROOT = Path(__file__).resolve().parents[1]


class Inner(TaskArgs):
    key: int
    rate: Slot
    rest: tuple[int, ...]


class Outer(TaskArgs):
    first: int
    scale: float
    flag: bool
    pair: tuple[int, int]
    inner: Inner | None


def test_ints_and_floats_in_the_order_of_the_fields() -> None:
    inner = Inner(key=7, rate=Slot("lr"), rest=(8, 9))
    whole = Outer(first=1, scale=0.5, flag=True, pair=(3, 4), inner=inner)
    assert whole.packed == ((1, 1, 3, 4, 7, 8, 9), (0.5, Slot("lr")))
    assert repr(whole.packed[0]) == "(1, 1, 3, 4, 7, 8, 9)"  # a bool is an int in a program's hash
    assert Outer(1, 0.5, False, (3, 4), None).packed == ((1, 0, 3, 4), (0.5,))
    assert TaskArgs().packed == ((), ())


def test_a_task_has_the_arguments_of_its_class() -> None:
    tasks = TaskList()
    tasks.emit("k", [W(Tile("x", (0,), (2,), "fp32"))], Inner(7, Slot("lr"), ()))
    assert Inner.of(tasks.tasks[0]).key == 7 and tasks.tasks[0].ints == (7,)
    with pytest.raises(AssertionError, match="Inner"):
        Outer.of(tasks.tasks[0])
    with pytest.raises(AssertionError):
        assert Outer(1, 0.5, False, (3, 4, 5), None).packed  # type: ignore[arg-type]


REFUSED = ["dict[str, int]", "list[int]", "tuple[float, ...]", "int | None", "Inner | Slot"]


@pytest.mark.parametrize("annotation", REFUSED)
def test_other_types_are_refused(annotation: str) -> None:
    with pytest.raises(TypeError, match="argument of a kernel cannot be a"):
        type("Wrong", (TaskArgs,), {"__annotations__": {"x": annotation}})


def headers(root: Path, **files: str) -> subprocess.CompletedProcess[str]:
    (root / "tiles").mkdir(exist_ok=True)
    (root / "tasks").mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "tasks" / f"{name}.py").write_text(text)
    command = [sys.executable, str(ROOT / "scripts" / "args_headers.py"), str(root), str(root / "made")]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_header_for_each_file_is_touched_when_it_changes(tmp_path: Path) -> None:
    one = "class OneArgs(TaskArgs):\n    'Of one.'\n\n    n: int\n    x: Slot\n    rest: tuple[int, ...]\n"
    two = "class TwoArgs(TaskArgs):\n    on: bool\n    pair: tuple[int, int]\n    one: OneArgs | None\n"
    assert headers(tmp_path, one=one, two=two, three="x = 1\n").returncode == 0
    made = tmp_path / "made"
    assert sorted(path.name for path in made.iterdir()) == ["dtypes.h", "one_args.h", "two_args.h"]
    text = (made / "two_args.h").read_text()
    for part in (
        '#include "one_args.h"', "bool on;", "std::array<int64_t, 2> pair;", "std::optional<OneArgs> one;",
        "on(r.integer() != 0), pair(r.integers<2>()), one(r.group<OneArgs>())",
    ):  # fmt: skip
        assert part in text, part
    assert "n(r.integer()), x(r.real()), rest(r.rest())" in (made / "one_args.h").read_text()
    for path in made.iterdir():
        os.utime(path, (1, 1))
    assert headers(tmp_path, two=two.replace("on:", "off:"), three="x = 2\n").returncode == 0
    assert {path.name for path in made.iterdir() if path.stat().st_mtime > 1} == {"two_args.h"}
    (tmp_path / "tasks" / "two.py").unlink()
    assert headers(tmp_path).returncode == 0 and not (made / "two_args.h").exists()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("rest: tuple[int, ...]\n    n: int", "OneArgs.rest varies in length: only the last field with ints"),
        ("tail: Tail\n    n: int", "OneArgs.tail varies in length: only the last field with ints may, not n"),
        ("x: dict[str, int]", r"OneArgs.x: an argument of a kernel cannot be a dict\[str, int\]"),
        ("x: Missing", "OneArgs.x: there is no class of arguments Missing"),
        ("x: Floats | None", "OneArgs.x: an optional class needs an int field"),
    ],
)
def test_declarations_that_cpp_could_not_read_are_refused(tmp_path: Path, fields: str, why: str) -> None:
    others = "class Tail(TaskArgs):\n    rest: tuple[int, ...]\n\n\nclass Floats(TaskArgs):\n    x: float\n\n\n"
    ended = headers(tmp_path, one=f"{others}class OneArgs(TaskArgs):\n    {fields}\n")
    assert ended.returncode == 1 and re.search(why, ended.stderr), ended.stderr
