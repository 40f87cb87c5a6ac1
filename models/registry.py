"""Finds a model's class by its type in a YAML: a model of this folder, or a class in a user's own file."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from nntile_py.errors import ConfigError, raised
from nntile_py.models.base import Model
from nntile_py.models.hf_config import OWN, named, read_raw
from nntile_py.models.model_config import ModelConfig, told
from nntile_py.models.torch_module import TorchModule, of_function
from nntile_py.schema import absolute, allowed

_TORCH_MODULE = "torch.nn.modules.module.Module"


def known() -> dict[str, type[Model]]:
    """Return {type in a YAML: model class} for the models of this folder."""
    found: dict[str, type[Model]] = {}
    for info in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f"{__package__}.{info.name}")
        found |= {cls.Config.model_fields["type"].default: cls for cls in _models_in(module)}
    return found


def find(name: Any) -> type[Model]:
    """Return the model class for `model.type` of a YAML: gpt2, my_file.py:MyModel, my_file.py:function...

    Raises:
        ConfigError: The type is unknown, or the file has no such model.
    """
    models = known()
    if isinstance(name, str) and name in models:
        return models[name]
    if (file := code_of(name)) is None:
        raise ConfigError(f"model.type: got {name!r}; {allowed(name, [*models, 'my_file.py:MyModel'])}")
    return _own(file, str(name).rpartition(":")[2])


def objective_of(config: ModelConfig) -> str | None:
    """Return what a model of this config is trained for on text: `causal`, `masked`; None: nothing."""
    return find(config.type).aim_of(config)


def code_of(name: Any) -> Path | None:
    """Return the Python file whose code `find` runs for a `model.type`; None for the models of this folder."""
    file, colon, _ = str(name).rpartition(":")
    return absolute(file) if colon and file.endswith(".py") else None


def check_code(name: Any, where: Path, need: str, what: str = "the model is a class") -> None:
    """Refuse a `model.type` in a saved file, which may be downloaded, if `find` would run code that is not loaded yet.

    Args:
        name: The `model.type`, or another key's my_file.py:name.
        where: The saved file.
        need: How a user allows the code to run.
        what: What the name stands for, for errors.

    Raises:
        ConfigError: The code is in a file that this process has not imported.
    """
    if (file := code_of(name)) is None:
        return
    loaded = (getattr(module, "__file__", None) or "" for module in [*sys.modules.values()])
    if not any(Path(path).name == file.name and absolute(path) == file for path in loaded):
        raise ConfigError(f"{where}: {what} in {file}, whose code would run; allowed: {need}")


def type_of(model: Any) -> str:
    """Return the value of the YAML key `model.type` for a model; for a user's own class /path/my_file.py:MyModel."""
    cls = type(model)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if cls.__module__.startswith("nntile_py.") or not file:
        return str(model.config.type)
    return f"{Path(file).resolve()}:{cls.__name__}"


def resolved(name: Any) -> Any:
    """Return a `model.type` my_file.py:MyModel with an absolute path, valid in any folder; other types unchanged."""
    file, colon, wanted = str(name).rpartition(":")
    return f"{absolute(file)}:{wanted}" if colon else name


def new(config: ModelConfig, seed: int = 0) -> Model:
    """Return a model with random weights for a config. An error in a user's own __init__ becomes a ConfigError."""
    cls = find(config.type)
    try:
        return cls(config, seed=seed)
    except Exception as error:
        raise told(cls, error) from error


def _own(path: Path, wanted: str) -> type[Model]:
    """Return the model class named `wanted` in a user's file. Raises ConfigError if it cannot be used."""
    here, need = f"model.type: {path}:{wanted}", "a subclass of nt.Model with a Config of nt.ModelConfig, or a function"
    need += " that returns a torch.nn.Module"
    module = imported(path, here, need)
    found = {cls.__name__: cls for cls in _models_in(module)}
    if wanted not in found:
        there = vars(module).get(wanted)
        if inspect.isfunction(there) or _is_torch_module(there):
            return of_function(there, f"{path}:{wanted}")
        lacks = "no such class in the file" if there is None else "no subclass of nt.Model"
        if inspect.isclass(there) and issubclass(there, Model):
            lacks = "its Config is missing, or is no subclass of nt.ModelConfig"
        raise ConfigError(f"{here}: {lacks}; allowed: {need}; in this file: {', '.join(found) or 'none'}")
    try:
        inspect.signature(found[wanted]).bind(None, None, seed=0, hf=None)
    except TypeError as error:
        need = "(self, config, weights=None, *, seed=0, hf=None)"
        raise ConfigError(f"{here}: its __init__ cannot be called ({error}); allowed: {need}, as of nt.Model") from None
    return found[wanted]


def imported(path: Path, here: str, need: str) -> Any:
    """Import a user's file and return it as a module. Runs the file's code.

    Args:
        path: The file.
        here: Key and value that name the file, for errors.
        need: What the file must have, for errors.

    Raises:
        ConfigError: There is no such file, or it raises an error.
    """
    if not os.path.isfile(path):
        raise ConfigError(f"{here}: no such file; allowed: the path of a Python file with {need}")
    try:
        return _loaded(path, path.stat().st_mtime_ns)
    except (Exception, SystemExit) as error:  # importing the user's file may raise anything
        raise ConfigError(f"{here}: the file raises {raised(error, str(path))}") from error


def function_of(name: str, key: str, need: str) -> Callable[..., Any]:
    """Return the function that my_file.py:function names. Runs the file's code.

    Args:
        name: The file and the function.
        key: The key whose value `name` is, for errors.
        need: What the function must take and return, for errors.

    Raises:
        ConfigError: There is no such function.
    """
    file, wanted = code_of(name), name.rpartition(":")[2]
    assert file
    function = vars(imported(file, f"{key}: {name}", need)).get(wanted)
    if not callable(function):
        raise ConfigError(f"{key}: {name}: no such function in the file; allowed: {need}")
    return function  # type: ignore[no-any-return]


@functools.cache
def _loaded(path: Path, changed: int) -> Any:
    """Import a user's file, again only if it has changed, so that its classes stay the same objects.

    `changed` is the file's modification time; it is only a key of the cache.
    """
    if str(path.parent) not in sys.path:  # as `python file.py` does: the file may import its neighbours
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"own model {path}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pydantic and dataclasses look up annotations in sys.modules
    spec.loader.exec_module(module)
    return module


def _models_in(module: Any) -> list[type[Model]]:
    """Return the model classes with a valid `Config` that a module defines itself, without imported classes."""
    return [
        cls
        for _, cls in inspect.getmembers(module, inspect.isclass)
        if issubclass(cls, Model) and cls.__module__ == module.__name__ and _has_config(cls)
    ]


def _is_torch_module(there: Any) -> bool:
    """Return whether an object of a file is a subclass of torch.nn.Module."""
    return inspect.isclass(there) and any(f"{one.__module__}.{one.__name__}" == _TORCH_MODULE for one in there.__mro__)


def _has_config(cls: type[Model]) -> bool:
    """Return whether a model class has a `Config` that is a subclass of ModelConfig."""
    made = getattr(cls, "Config", None)
    return inspect.isclass(made) and issubclass(made, ModelConfig)


def from_hf(source: Any, model_type: str | None = None, **fields: Any) -> Model:
    """Load a model of any known type from a transformers model or a folder of save_pretrained: see Model.from_hf.

    Args:
        source: A transformers model, or the folder.
        model_type: For a class of your own: my_file.py:MyModel, whose code then runs. Default: the folder names a
            model of nntile_py.
        fields: Fields of the config.
    """
    with named(source):
        cls = class_in(source, model_type)
    return cls.from_hf(source, **fields)


def class_in(source: Any, model_type: Any = None, saved: Any = None, *, torch_modules: bool = True) -> type[Model]:
    """Return the class of the model in a folder, or of a transformers model.

    Args:
        source: A transformers model, or the folder.
        model_type: `model.type` that the user names, also my_file.py:MyModel; None: the folder names it.
        saved: `model.type` of the folder's run; None: the folder's config.json names the type.
        torch_modules: Whether the caller can use a captured PyTorch module.

    Raises:
        ConfigError: The model is a class in a Python file that the user does not name, or its type is unknown.
    """
    if model_type is not None:
        return find(resolved(model_type))
    raw = read_raw(source)
    name = saved or (raw.get("type") if isinstance(source, str | Path) else None)
    if not isinstance(name, str) or not (name in known() or code_of(name)):
        return of_hf_type(raw.get("model_type"))
    if not torch_modules and _is_captured(name):
        need = "commands that train or evaluate it, such as `nntile eval`, or your own code of PyTorch"
        raise ConfigError(f"model: {name} is a captured PyTorch module, which generates no text; allowed: {need}")
    need = f"--set model.type={name} (in Python model_type={name!r}), if you trust this file"
    check_code(name, Path(source) / "config.json", need)
    return find(name)


def _is_captured(name: str) -> bool:
    """Return whether my_file.py:NAME is a function or a class of torch.nn.Module. The file's code does not run.

    Base classes that the file imports count as modules if they are `Module`, `nn.NAME` or `torch.nn.NAME`."""
    file, wanted = code_of(name), name.rpartition(":")[2]
    with suppress(OSError, SyntaxError, ValueError):
        body = ast.parse(file.read_bytes()).body if file else []
        own = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        classes = [wanted] if wanted in own else []  # with its base classes, which the loop appends
        for cls in classes:
            node = own.get(cls)
            if isinstance(node, ast.ClassDef):
                bases = (ast.unparse(base).partition("[")[0] for base in node.bases)
                classes += [base for base in bases if base not in classes]
            elif node is None and (cls.rpartition(".")[2] == "Module" or cls.startswith(("nn.", "torch.nn."))):
                return True
        return isinstance(own.get(wanted), ast.FunctionDef)
    return False


def check_type_of_folder(name: Any, raw: Mapping[str, Any], folder: Path) -> None:
    """Raise ConfigError if a folder's config.json is of another model of nntile_py than `model.type: name`."""
    models, theirs = known(), raw.get("model_type")
    own = isinstance(name, str) and name in models and models[name].fixed
    if own and theirs in [*models] and theirs != name:
        need = f"{theirs}, as in {folder}/config.json, or leave model.type out"
        raise ConfigError(f"model.type: got {name}; allowed: {need}")


def of_hf_type(name: Any) -> type[Model]:
    """Return the model class for transformers' model_type, such as "gpt2". Raises ConfigError if there is none."""

    def reads(cls: type[Model]) -> Any:
        return inspect.getattr_static(cls, "read_config")

    others = (TorchModule,)  # reads any model_type
    readable = {
        kind: cls for kind, cls in known().items() if reads(cls) is not reads(Model) and not issubclass(cls, others)
    }
    if name not in list(readable):
        raise ConfigError(f"model: got model_type {name!r}; allowed: the models in docs/fine-tune.md, {OWN}")
    return readable[name]
