"""Generates documentation of a run's keys from RunConfig: a commented YAML, a JSON schema, pages of docs/reference."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, NoneType
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic.fields import FieldInfo

from nntile_py.config.optimizer_section import optimizer_section
from nntile_py.config.run_config import DEFAULT_MODEL, RunConfig, of_model, resolve
from nntile_py.config.sections import SchedulerFile
from nntile_py.errors import ConfigError
from nntile_py.models.base import Model, ModelConfig
from nntile_py.models.registry import find, known, resolved
from nntile_py.schema import Rule, assignment, keys, read_yaml, section_of, words
from nntile_py.system.folders import installed
from nntile_py.tasks.optimizer import OPTIMIZERS
from nntile_py.yaml_text import dump

_WIDTH = 100  # longest line of a YAML comment, in characters
_HEAD = """\
{path}: written by `nntile init`. `nntile train {path}` trains this model.
A line such as "#key: value" shows a key's default; remove the # to change the value. On the command line:
  nntile train {path} --set train.steps=100

Editors with the YAML language server (in VS Code the extension "YAML" of Red Hat) complete and check the keys. Run
  nntile config --schema --model {model} > nntile.schema.json
and put this line at the top of the file, without the quotes:
  "# yaml-language-server: $schema=nntile.schema.json\""""


def meaning(field: FieldInfo) -> str:
    """Return a key's documentation as one line: the key's text, or the docstring of the section that the key holds."""
    inner = section_of(field)
    return " ".join((field.description or (inner and inner.__doc__) or "").split())


def _allowed(field: FieldInfo) -> str:
    """Return the allowed values of a key in words, with null if null is allowed."""
    return words(field) + (", or null" if NoneType in get_args(field.annotation) else "")


def _yaml(value: Any) -> str:
    """Return a value as one line of YAML."""
    text = dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})


# -- a commented YAML


def initial(path: str, model: str, sets: Iterable[str] = ()) -> str:
    """Return a commented YAML that trains a model of this type, for `nntile init`.

    Args:
        path: The file that the YAML will be written to; comments name it.
        model: The type of the model. Sizes and other values come from experiments/MODEL_tiny.yaml.
        sets: Settings that override these values, such as "train.steps=100".

    Raises:
        ConfigError: The type is not trained on text, or a value is not allowed."""
    cls, sets = find(model), list(sets)
    if cls.objective is None:
        types = ", ".join([*(name for name, other in known().items() if other.objective), "my_file.py:MyModel"])
        raise ConfigError(f"--model: {model} is not trained on text; allowed: {types}")
    tree = _example(cls, model, {assignment(item)[0] for item in sets})
    given = {*_leaves(tree), *(assignment(item)[0] for item in sets)}
    values = resolve(tree, sets, "nntile init").model_dump(mode="json", by_alias=True)
    head = [f"# {line}".rstrip() for line in _HEAD.format(path=path, model=resolved(model)).splitlines()]
    return "\n".join([*head, *_lines(of_model(cls.Config, values["optimizer"]["name"]), values, given), ""])


def _example(cls: type[Model], model: str, sets: set[str]) -> dict[str, Any]:
    """Return the content of experiments/MODEL_tiny.yaml as a dict.

    For a model without such a file, return gpt2_tiny.yaml, with only those keys of `model` that the model has.

    Args:
        sets: The keys that --set sets. If `model.from` is one of them, the model's sizes and the tokenizer are left
            out. If `data.source` is one of them, `sample.prompt` is left out.
    """
    path = installed("experiments") / f"{model}_tiny.yaml"
    own = not path.is_file()
    tree = read_yaml(installed("experiments") / "gpt2_tiny.yaml" if own else path, "nntile init", RunConfig)
    if own:
        tree["model"] = {key: value for key, value in tree["model"].items() if key in cls.Config.model_fields}
    if "model.from" in sets:  # sizes and tokenizer come from the folder
        tree["model"] = {}
        del tree["tokenizer"]
    if "data.source" in sets:  # the file's prompt continues sources in Python
        tree.get("sample", {}).pop("prompt", None)
    tree["model"]["type"] = model
    return tree


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def _lines(cls: type[BaseModel], values: dict[str, Any], given: set[str], prefix: str = "") -> Iterator[str]:
    """Yield the lines of a commented YAML: comment and value of each key. Keys not in `given` are commented out."""
    indent = "  " * prefix.count(".")
    for own, field in cls.model_fields.items():
        name = field.alias or own
        key, inner, value = prefix + name, section_of(field), values[name]
        if not prefix:
            yield ""
        section = inner is not None and isinstance(value, dict)
        text = meaning(field) + (f" [{_allowed(field)}]" if not section and _is_choice(_json_leaf(field)) else "")
        yield from textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if inner and section:
            yield f"{indent}{name}:"
            yield from _lines(inner, value, given, f"{key}.")
        else:
            active = any(f"{key}.".startswith(f"{other}.") or other.startswith(f"{key}.") for other in given)
            yield f"{indent}{'' if active else '#'}{name}: {_yaml(value)}"
            if inner and value is not None:  # the value is a word, such as `auto`; a section is also allowed
                yield from _alternative(inner, indent)


def _alternative(section: type[BaseModel], indent: str) -> Iterator[str]:
    """Yield comments on a section's keys, for a YAML that has a word such as `auto` instead of the section."""
    yield f"{indent}# Or a section with the keys:"
    for own, field in section.model_fields.items():
        text = f"{field.alias or own}: {meaning(field)}"
        yield from textwrap.wrap(text, _WIDTH, initial_indent=f"{indent}# * ", subsequent_indent=f"{indent}#   ")


# -- a JSON schema


def schema(model: str | None = None) -> dict[str, Any]:
    """Return a JSON schema of a run's YAML, for one type of model, or for all types if `model` is None."""
    types = [model] if model else [*known()]
    run = _json(RunConfig)
    choices = [_json_model(find(name).Config, name) for name in types]
    if not model:
        choices.append({"type": "object", "properties": {"type": {"pattern": r"\.py:"}}, "required": ["type"]})
    methods = [_json(optimizer_section(name)) | {"type": ["object", "null"]} for name in OPTIMIZERS]
    sections = {"model": choices[0] if model else {"anyOf": choices}, "optimizer": {"anyOf": methods}}
    for name, section in sections.items():
        run["properties"][name] = {"description": meaning(RunConfig.model_fields[name])} | section
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A run of nntile_py"} | run


def _json_model(config: type[ModelConfig], name: str) -> dict[str, Any]:
    """Return the JSON schema of the section `model`. It requires the model's sizes unless the key `from` is given."""
    section = _json(config)
    if name in known():
        section["properties"]["type"] |= {"const": name}
    sizes = [*(["type"] if name != DEFAULT_MODEL else []), *section.pop("required", [])]
    return section | {"anyOf": [{"required": ["from"]}, {"required": sizes}]}


def _json(cls: type[BaseModel]) -> dict[str, Any]:
    properties, required = {}, []
    for own, field in cls.model_fields.items():
        name, inner = field.alias or own, section_of(field)
        leaf = _json_leaf(field)
        if inner:
            section = _json(inner) | {"type": ["object", "null"]}  # YAML reads a section of only comments as null
            choice = [rule.json for rule in field.metadata if isinstance(rule, Rule)]
            leaf = {"anyOf": [section, *choice]} if choice else section
        elif not field.is_required():
            leaf |= {"default": _default(field)}
        properties[name] = {"description": meaning(field)} | leaf
        if field.is_required():
            required.append(name)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _json_leaf(field: FieldInfo) -> dict[str, Any]:
    try:
        return TypeAdapter(field.rebuild_annotation()).json_schema()
    except PydanticInvalidForJsonSchema:  # a user's model may have fields of any type
        return {}


def _is_choice(leaf: dict[str, Any]) -> bool:
    """Return True if a key's JSON schema restricts the values themselves: by a list of names, or by a pattern."""
    if "anyOf" in leaf:
        return any(map(_is_choice, leaf["anyOf"]))
    return not leaf.keys().isdisjoint({"enum", "const", "pattern"})


# -- pages of docs/reference

_INTRODUCTION = """\
# Keys of a run's YAML

<!-- Written by scripts/reference.py from nntile_py/config/ and models/; change the texts there. -->

All keys of the YAML for `nntile train`, `plan`, `profile`, `graph` and other commands. `nntile init` writes a YAML with
these texts as comments. `nntile config CONFIG` prints a YAML with all defaults filled in. `--set KEY=VALUE` overrides a
key, in each command. This page writes a section and a key with a dot between them: `train.steps: 100` is

```yaml
train:
  steps: 100
```

A wrong key or value ends every command with exit status 2 and one message that names the key and what is allowed.
"""
_MODELS = """\
# Keys of a model

<!-- Written by scripts/reference.py from models/; change the texts there. -->

The keys of the section `model` of a [run's YAML](config.md). Their names and defaults depend on `model.type`. A
[model of your own](../write-a-model.md) has the fields of its `Config` as keys.
"""


def reference() -> str:
    """Return the page docs/reference/config.md."""
    model = "[Keys of a model](models.md) has the section's keys.", ""
    keys_of_run = tables(RunConfig, {"model": model, "optimizer": _optimizers()})
    schedulers = "## Scheduler files", "", " ".join((SchedulerFile.__doc__ or "").split()), ""
    return "\n".join([_INTRODUCTION, "## Keys outside of sections", "", *keys_of_run, *schedulers])


def tables(cls: type[BaseModel], contents: Mapping[str, Iterable[str]] = MappingProxyType({})) -> Iterator[str]:
    """Yield lines of Markdown with tables of a YAML's keys: keys outside of sections first, then each section.

    contents: {section: lines of Markdown that replace the table of its keys}.
    """
    plain = [(field.alias or name, field) for name, field in cls.model_fields.items() if not section_of(field)]
    yield from _table(_rows(plain))
    for name, field in cls.model_fields.items():
        if inner := section_of(field):
            key = field.alias or name
            yield from (f"## {key}", "", meaning(field), "")
            yield from contents[key] if key in contents else _table(_rows(keys(inner, f"{key}.")))


def model_reference() -> str:
    """Return the page docs/reference/models.md: keys of all models, keys of several models, each model's own keys."""
    rows = {kind: list(_rows(keys(cls.Config, "model."))) for kind, cls in known().items()}
    base = [f"`model.{field.alias or name}`" for name, field in ModelConfig.model_fields.items()]
    kinds_of: dict[Row, list[str]] = {}
    for kind, own in rows.items():
        for row in own:
            kinds_of.setdefault(row, []).append(kind)
    common = [row for row in rows[DEFAULT_MODEL] if row[0] in base or len(kinds_of[row]) == len(rows)]
    shared = [row for row, kinds in kinds_of.items() if row not in common and row[0] not in base and len(kinds) > 1]
    shared.sort(key=lambda row: (row[0], -len(kinds_of[row])))
    parts = [_MODELS, "## Keys of all models", "", *_table(common)]
    parts += [
        "## Keys of several models",
        "",
        *_table((row[0], _listed(kinds_of[row], [*rows]), *row[1:]) for row in shared),
    ]
    for kind, cls in known().items():
        has = ", ".join(row[0].replace("model.", "") for row in rows[kind] if row in shared)
        own = [row for row in rows[kind] if kinds_of[row] == [kind] and row not in common and row[0] not in base]
        parts += [f"## {kind}", "", " ".join((cls.__doc__ or "").split("\n\n")[0].split()), ""]
        parts += [f"Keys above: {has}.", "", *(_table(own) if own else ())]
    return "\n".join(parts)


def _listed(kinds: list[str], every: list[str]) -> str:
    """Return a list of types of models as text; "all but X" if one is missing."""
    others = [kind for kind in every if kind not in kinds]
    return f"all but {others[0]}" if len(others) == 1 else ", ".join(kinds)


def _optimizers() -> Iterator[str]:
    """Yield lines of Markdown: a table of the keys of all optimizers, then a table of each optimizer's own keys."""
    rows = {name: list(_rows(keys(optimizer_section(name), "optimizer."))) for name in OPTIMIZERS}
    first, *others = rows.values()
    common = [row for row in first if row[0] == "`optimizer.name`" or all(row in of for of in others)]
    names = ("`optimizer.name`", " or ".join(map(repr, OPTIMIZERS)))
    yield from _table([(*names, *row[2:]) if row[0] == names[0] else row for row in common])
    for name, method in OPTIMIZERS.items():
        yield from (f"### optimizer.name: {name}", "", " ".join((method.__doc__ or "").split("\n\n")[0].split()), "")
        yield from _table([row for row in rows[name] if row not in common and row[0] != names[0]])


Row = tuple[str, str, str, str]


def _rows(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[Row]:
    for key, field in fields:
        default = "required" if field.is_required() else f"`{_yaml(_default(field))}`"
        yield f"`{key}`", _allowed(field), default, meaning(field)


def _table(rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    """Yield a Markdown table with the columns key, value, default, meaning.

    If rows have five cells, the table has a column `models` after `key`.
    """
    for number, row in enumerate(rows):
        if not number:
            columns = ("key", *["models"] * (len(row) - 4), "value", "default", "meaning")
            yield from (f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
