"""Read and check a sweep's YAML; list the points that the sweep measures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nntile_py.config.run_config import RunConfig, load
from nntile_py.errors import ConfigError
from nntile_py.measure.contestants import BERT_PEERS, check_peer
from nntile_py.measure.sweep_spec import VARIANT, Measure, Sweep
from nntile_py.schema import assignment, read_yaml, validated
from nntile_py.yaml_text import one_line

_POINTS = ("grid", "list", "random")
_OF_NODES = ("gpus_per_node", "network", "gpus_per_nic", "strong")  # keys of `measure` that need `nodes`


@dataclass(frozen=True)
class Point:
    """One configuration to measure.

    Attributes:
        id: Hash of the config and the measurement.
        sets: Keys of the grid or list with their values, and the name of the variant.
        error: The reason for which the config is refused; None: it is accepted.
    """

    id: str
    sets: dict[str, Any]
    config: RunConfig | None
    measure: Measure
    error: str | None = None

    @property
    def process(self) -> Any:
        """Return a key that is equal for points that may share a process."""
        return self.config and self.config.runtime, self.measure.contestant


def load_sweep(path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """Read and check a sweep's YAML. overrides: KEY=VALUE, for the config."""
    tree = read_yaml(path, "SWEEP", Sweep)
    if tree.keys() & RunConfig.model_fields and not tree.keys() & {"config", *_POINTS}:
        raise ConfigError(f"{path}: this is a run's config, not a sweep's YAML; did you mean --auto?")
    return check_sweep(tree, path, overrides)


def check_sweep(tree: Mapping[str, Any], path: Path, overrides: Iterable[str] = ()) -> Sweep:
    """Check the mapping that was read from the YAML `path`; return the sweep.

    overrides: KEY=VALUE, for the config; config=FILE replaces the config."""
    try:
        sweep: Sweep = validated(Sweep, dict(tree))
        for item in overrides:
            key, value = assignment(item)
            head = key.partition(".")[0]
            if key == "config":
                sweep = sweep.model_copy(update={"config": str(value)})
                continue
            if head in {field.alias or name for name, field in Sweep.model_fields.items()}:
                raise ConfigError(f"--set {item}: {head} is part of the sweep's file; change it there")
            for other, where in sweep.varied().items():
                if key == other or key.startswith(f"{other}."):
                    need = "allowed: other keys, or a change there"
                    raise ConfigError(f"--set {item}: `{where}` of the sweep's file sets {other}; {need}")
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"--set {key}: {error}; allowed: numbers, texts, lists, mappings") from None
            sweep.set_[key] = value
        sweep.check_names()
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    beside = path.parent / sweep.config
    return sweep.model_copy(update={"config": str(beside if beside.is_file() else sweep.config)})


def points(sweep: Sweep) -> list[Point]:
    """Return all points, each once; a refused point has an error.

    Raises:
        ConfigError: all points with the same value of a key are refused.
    """
    by_id: dict[str, Point] = {}
    for sets in sweep.settings():
        config, error = None, None
        try:
            every = {**(sweep.variants or {}).get(sets.get(VARIANT, ""), {}), **sets}
            every.pop(VARIANT, None)
            own = {key.removeprefix("measure."): v for key, v in every.items() if key.startswith("measure.")}
            measure: Measure = validated(Measure, sweep.measure.model_dump() | own, "measure.")
            rest = sweep.set_ | {key: value for key, value in every.items() if not key.startswith("measure.")}
            config = load(sweep.config, overrides_of(rest))
            if config.runtime.nodes and (measure.how == "operators" or measure.contestant != "nntile"):
                need = "null, where measure.how is operators or measure.contestant another than nntile"
                raise ConfigError(f"runtime.nodes: got {config.runtime.nodes}; allowed: {need}")
            for peer in [*measure.peers, *({measure.contestant} & {*BERT_PEERS})]:
                check_peer(config, peer, measure.work)
        except ConfigError as refused:
            measure, error = sweep.measure, str(refused)
        what = [config.model_dump(by_alias=True) if config else sets, _set(measure)]
        what += [{VARIANT: sets[VARIANT]}] if VARIANT in sets else []  # two variants may give the same config
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        by_id.setdefault(name, Point(name, sets, config, measure, error))
    result = list(by_id.values())
    if all(point.error for point in result):
        _check_base(sweep)
    for point in result:
        at_fault = []
        for key, value in point.sets.items():
            alike = [p.error for p in result if p is point or (key in p.sets and p.sets[key] == value)]
            if all(alike):
                at_fault.append((f"{alike[0]}", key, value))
        if at_fault:  # preferred: a key that its error names
            message, key, value = min(at_fault, key=lambda of: of[1] not in of[0])
            raise ConfigError(f"{key} = {one_line(value)}: {message}")
    return result


def _set(measure: Measure) -> dict[str, Any]:
    """Return the keys of `measure` that a point's id depends on.

    The id leaves out newer keys without a value. So rows that were written before these keys existed keep their ids.
    """
    new = {key for key in ("peers", "gpu_memory") if not getattr(measure, key)}
    return measure.model_dump(exclude=new | (set() if measure.nodes else {"nodes", *_OF_NODES}))


def _check_base(sweep: Sweep) -> None:
    """Raise a ConfigError if `config` or `set`, which all points share, is the reason that all points are refused."""
    try:
        load(sweep.config, overrides_of(sweep.set_))
    except ConfigError as error:
        try:
            load(sweep.config)
        except ConfigError:
            raise ConfigError(f"config: {error}") from None
        raise ConfigError(f"set: {error}") from None


def overrides_of(sets: Mapping[str, Any]) -> list[str]:
    """Return keys and values as KEY=VALUE."""
    return [f"{key}={json.dumps(value)}" for key, value in sets.items()]
