"""Python files that a run's saved config names: their code runs only if the user names them too."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nntile_py.config.scheduler_file import override
from nntile_py.models.registry import check_code
from nntile_py.schema import assignment

# {(section, key) that may name code in a user's Python file: what the code is}
CODE = {
    ("model", "type"): "the model is a class",
    ("optimizer", "schedule"): "the schedule is a function",
    ("logging", "callback"): "the callback is a function",
}


def check_code_of_run(tree: dict[str, Any], where: Path, overrides: Iterable[str]) -> None:
    """Raise ConfigError if a run's saved config names a Python file that `overrides` do not name."""
    named = {assignment(item)[0] for item in overrides}
    for (name, key), what in CODE.items():
        section = tree.get(name)
        value = section.get(key) if isinstance(section, dict) else None
        if not {name, f"{name}.{key}"} & named:
            check_code(value, where, f"--set {name}.{key}={value}, if you trust this file", what)


def check_saved_overrides(saved: Iterable[str], where: Path, overrides: Iterable[str]) -> None:
    """Raise ConfigError if a run's saved `--set` options name a Python file that `overrides` do not name."""
    tree: dict[str, Any] = {}
    for item in saved:
        override(tree, item)
    check_code_of_run(tree, where, overrides)
