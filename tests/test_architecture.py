"""The shape of the package: rooms on floors, imports that go down only, no circles; each default written once."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nntile_py as nt
from nntile_py.config import run_config as config
from nntile_py.graph.step import StepSpec
from nntile_py.schema import Section
from nntile_py.tasks.optimizer import OPTIMIZERS
from nntile_py.tiles import AXES

ROOT = Path(__file__).parents[1]
# Rooms, from the roof to the ground: a room imports from floors below its own, never from its own floor or above.
FLOORS = (
    ("cli",),
    ("doctor", "measure"),
    ("profiling",),
    ("analysis", "testing", "training"),
    ("inference",),  # of whatever evaluates: a Trainer, which shows a sample with it
    ("checkpoint",),
    ("config",),
    ("data",),
    ("models",),  # of which one captures PyTorch modules
    ("capture",),  # uses Python tasks of the engine
    ("execution",),
    ("graph",),
    ("tasks",),
    ("tiles",),
    ("schema",),
    ("command_line", "extension", "runs", "typed", "yaml_text"),
    ("errors",),
    ("system",),
)
FLOOR = {room: -number for number, rooms in enumerate(FLOORS) for room in rooms}
TOPS = ("tasks", "tiles", "models")  # folders of the repository that install inside the package
FACE = "nntile_py"  # names that users take
EXTENSIONS = ("nntile_py._core", "nntile_py._mpi")  # the compiled runtime

Arrows = dict[tuple[str, str], int]  # (importing module, imported module): the line


def modules(root: Path) -> dict[str, Path]:
    """Every module by the name under which it is imported."""
    found = {}
    for top, prefix in (("nntile_py", ()), *((top, (top,)) for top in TOPS)):
        for path in (root / top).rglob("*.py"):
            parts = [*prefix, *path.relative_to(root / top).with_suffix("").parts]
            found[".".join([FACE, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = path
    return found


def imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    """What a module imports, in functions and for type checkers too: dotted names, with the line."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((one.name, node.lineno) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{one.name}", node.lineno) for one in node.names)


def arrows(root: Path) -> Arrows:
    """All imports between the package's own modules; a name of a module stands for the module."""
    known = modules(root)
    found: Arrows = {}
    for name, path in known.items():
        for target, line in imports(name, path):
            while target not in (*known, *EXTENSIONS) and "." in target:
                target = target.rpartition(".")[0]
            if target in (*known, *EXTENSIONS) and target != name:
                found.setdefault((name, target), line)
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def upward(found: Arrows) -> list[str]:
    """The imports that do not go down."""
    return [
        f"{a}, line {line}, imports {b}"
        for (a, b), line in found.items()
        if b == FACE or (a != FACE and b not in EXTENSIONS and room(a) != room(b) and FLOOR[room(a)] <= FLOOR[room(b)])
    ]


def circle(found: Arrows) -> list[str]:
    """Modules that import each other in a loop, the first again at the end; none: empty."""
    below: dict[str, list[str]] = {}
    for a, b in found:
        below.setdefault(a, []).append(b)
    done: set[str] = set()

    def search(way: list[str]) -> list[str]:
        for after in below.get(way[-1], []):
            if after in way:
                return [*way[way.index(after) :], after]
            if after not in done and (loop := search([*way, after])):
                return loop
        done.add(way[-1])
        return []

    return next((loop for start in below if start not in done and (loop := search([start]))), [])


@functools.cache
def here() -> Arrows:
    return arrows(ROOT)


def repeated(root: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Public class names and module names that stand in several modules, each with these modules."""
    classes: dict[str, list[str]] = {}
    names: dict[str, list[str]] = {}
    for module, path in modules(root).items():
        if path.stem not in ("__init__", "__main__"):
            names.setdefault(path.stem, []).append(module)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes.setdefault(node.name, []).append(module)
    several = [{name: where for name, where in each.items() if len(where) > 1} for each in (classes, names)]
    return several[0], several[1]


def test_each_name_is_used_once() -> None:
    """One name, one meaning: no public class name and no module name occurs twice."""
    classes, names = repeated(ROOT)
    assert names == {} and classes == {}


def test_repeated_names_are_reported(tmp_path: Path) -> None:
    for name in ("tasks/op.py", "tiles/op.py", "tiles/other.py", "models/base.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("class Op: ...\nclass _Own: ...\n" if "op" in name else "class Model: ...\n")
    classes, names = repeated(tmp_path)
    assert set(classes) == {"Op", "Model"} and set(names) == {"op"}


def test_every_room_has_a_floor() -> None:
    """A new room of the package says here where it stands."""
    rooms = {room(name) for name in modules(ROOT) if name != FACE}
    assert rooms == set(FLOOR)


def test_imports_go_down() -> None:
    assert upward(here()) == []


def test_no_circles() -> None:
    assert circle(here()) == []
    assert circle({(room(a), room(b)): 0 for a, b in here() if FACE not in (a, b) and room(a) != room(b)}) == []


def test_only_the_engine_and_what_runs_it_takes_the_extension() -> None:
    """Graphs, tilings, models and configs are plain data, made and tested without StarPU."""
    takes = {room(a) for a, b in here() if b in EXTENSIONS and a != FACE}
    assert "execution" in takes
    assert not [one for one in takes if FLOOR[one] < FLOOR["execution"] or one in ("models", "config", "analysis")]


@pytest.mark.parametrize(
    ("where", "text", "wrong"),
    [
        ("tiles/part.py", "def f():\n    from nntile_py.tasks.op import Op\n", "upward"),
        ("nntile_py/execution/part.py", "from ..models.base import Model\n", "upward"),
        ("tasks/part.py", "import nntile_py as nt\n", "upward"),
        ("tasks/op.py", "if TYPE_CHECKING:\n    from .other import X\n", "circle"),
        ("tasks/op.py", "from nntile_py.tiles import Tiling\n", "nothing"),
    ],
)
def test_what_is_wrong_is_found(tmp_path: Path, where: str, text: str, wrong: str) -> None:
    files = {
        "nntile_py/__init__.py": "from nntile_py import tasks\n", "nntile_py/execution/__init__.py": "",
        "tasks/__init__.py": "", "tasks/op.py": "", "tasks/other.py": "from nntile_py.tasks import op\n",
        "tiles/__init__.py": "class Tiling: ...\n", "models/__init__.py": "", "models/base.py": "class Model: ...\n",
    }  # fmt: skip
    for name, content in (files | {where: text}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    found = arrows(tmp_path)
    assert bool(upward(found)) == (wrong == "upward")
    loop = circle(found)
    assert bool(loop) == (wrong == "circle")
    assert not loop or all(pair in found for pair in pairwise(loop))


def defaults(of: type[Section]) -> dict[str, Any]:
    """Of a YAML's section."""
    return {name: field.get_default(call_default_factory=True) for name, field in of.model_fields.items()}


def keywords(function: Any) -> dict[str, Any]:
    """The defaults of a function's arguments."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items()}


def test_sections_are_those_of_python() -> None:
    """A section of the YAML with its defaults is what the class says that it becomes."""
    assert list(config.TilesSection.model_fields) == list(AXES)
    yaml, python = defaults(config.RuntimeSection), keywords(nt.Runtime)
    assert yaml.pop("cpus") == "all" and python.pop("cpus") is None  # the same: null is no number of workers in a YAML
    assert python.pop("mpi") is None  # no key: that `nntile train` is started by mpirun says it
    assert yaml == python


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_default_alike(name: str) -> None:
    """A YAML that gives only the name has the settings of Python's class; both default as torch.optim does."""
    import torch

    optimizer = OPTIMIZERS[name]
    section = config.read_optimizer({"name": name})
    assert isinstance(section, optimizer) and section.settings == optimizer().settings
    ours = optimizer().settings
    if name == "lion":  # torch.optim has none
        return
    theirs = keywords(getattr(torch.optim, optimizer.__name__))
    assert ours.pop("decay") == "all"  # what torch.optim does, without a word for it
    assert ours.pop("groups") == ()  # torch.optim takes them in place of the parameters
    if name == "muon":  # AdamW is another object there; None means "original"
        assert (ours.pop("adamw_lr"), ours.pop("adamw_match"), ours.pop("betas")) == (None, (), nt.AdamW().betas)
        assert ours.pop("adjust_lr_fn") == "original" and theirs["adjust_lr_fn"] is None
    assert {name: theirs[name] for name in ours} == ours


def test_steps_default_alike() -> None:
    """Trainer, StepSpec and the YAML, as far as each has the argument."""
    spec = {f.name: f.default for f in fields(StepSpec) if f.default is not MISSING}
    trainer, yaml = keywords(nt.Trainer), defaults(config.RunConfig)
    yaml |= defaults(config.TrainSection) | {"clip_grad_norm": defaults(config.OptimizerSection)["clip_grad_norm"]}
    for name, in_trainer, in_yaml in (
        ("precision", "precision", "precision"),
        ("accumulate", "accumulate", "accumulate"),
        ("clip_grad_norm", "clip_grad_norm", "clip_grad_norm"),
        ("grad_accumulation", "grad_accumulation", "grad_accumulation"),
    ):
        assert spec[name] == trainer[in_trainer] == yaml[in_yaml], name
    assert trainer["seed"] == yaml["seed"]
    assert nt.Fusion.of(trainer["fusion"]) == nt.Fusion() == yaml["fusion"]
