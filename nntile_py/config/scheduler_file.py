"""Reads scheduler files (key `scheduler`), merges them into a config, and applies --set to a parsed YAML."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nntile_py.config.sections import AUTO_TILES, RuntimeSection, SchedulerFile
from nntile_py.errors import ConfigError
from nntile_py.graph.fusion import every_rule
from nntile_py.schema import (
    assignment,
    read_yaml,
    validated,
)
from nntile_py.system import launcher
from nntile_py.system.folders import installed
from nntile_py.yaml_text import one_line

SCHEDULER_CONFIGS = installed("scheduler_configs")


def load_scheduler(name: str) -> dict[str, Any]:
    """Return the checked keys and values of a scheduler file. `name`: a name in scheduler_configs/, or a path."""
    if not isinstance(name, str):
        raise ConfigError(f"scheduler: got {name!r}; allowed: a name in scheduler_configs/ or the path of a YAML file")
    path = Path(os.path.expanduser(name)) if is_path(name) else SCHEDULER_CONFIGS / f"{name}.yaml"
    if not os.path.isfile(path):
        names = sorted(p.stem for p in SCHEDULER_CONFIGS.glob("*.yaml"))
        raise ConfigError(f"scheduler: no such file: {path}; allowed: the path of a YAML file, or {', '.join(names)}")
    try:
        return validated(SchedulerFile, read_yaml(path, "scheduler", SchedulerFile)).model_dump(exclude_unset=True)
    except ConfigError as error:
        raise ConfigError(f"scheduler {path}: {error}") from None


def runtime_options(config: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of nntile_py.Runtime from a scheduler file or a dict of its keys.

    The value 'all' of `cpus` becomes None; 'all' of `cuda` becomes the number of GPUs.

    Args:
        config: A name in scheduler_configs/, the path of a file, or a dict of keys.
    """
    if isinstance(config, Mapping):
        options = validated(SchedulerFile, dict(config)).model_dump(exclude_unset=True)
    else:
        options = load_scheduler(str(config))
    options.pop("accumulate", None)
    if options.get("cpus") == "all":
        options["cpus"] = None
    if options.get("cuda") == "all":
        import torch  # here: reading a config needs no torch

        options["cuda"] = torch.cuda.device_count()
    return options


def check_machine(runtime: RuntimeSection) -> None:
    """Raise ConfigError if this machine lacks the workers of `runtime`, before any work that takes time.

    With several ranks, Runtime checks the GPUs, after the ranks have shared them out."""
    from nntile_py.execution.starpu_settings import check_devices, cpu_workers  # here: most configs need no StarPU

    options = runtime_options(runtime.model_dump())
    cpu_workers(options["cpus"], options["cuda"])
    if launcher.started()[1] == 1:
        check_devices(options["cuda"])


def apply_scheduler(tree: dict[str, Any], wins: bool, overrides: Iterable[str]) -> None:
    """Merge the scheduler file that a YAML names into its section `runtime` and its key `accumulate`.

    `wins`: whether the file's values take precedence over the YAML's. `overrides` (--set) always take precedence.
    """
    keys = load_scheduler(tree["scheduler"])
    runtime = tree.get("runtime", {})
    if not isinstance(runtime, dict):
        return  # the validation reports it
    if (policy := keys.pop("accumulate", None)) is not None and (wins or "accumulate" not in tree):
        tree["accumulate"] = policy
    tree["runtime"] = runtime | keys if wins else keys | runtime
    if wins:
        for item in overrides:
            if item.startswith(("runtime.", "accumulate")):
                override(tree, item)


def override(tree: dict[str, Any], item: str) -> None:
    """Set a key of the parsed YAML `tree` from the argument of --set, such as "train.steps=100"."""
    key, value = assignment(item)
    names = key.split(".")
    for name in names[:-1]:
        inner = tree.get(name)
        if isinstance(inner, bool) and name == "fusion":
            inner = every_rule(inner)
        if inner is None or (name == "tiles" and inner == AUTO_TILES):
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {item}: {name} is {one_line(inner)}, not a section")
        tree[name] = inner
        tree = inner
    tree[names[-1]] = value


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))
