"""Training transformers as tiled tasks on StarPU."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nntile_py import _core as _core  # type: ignore[attr-defined]  # compiled: mypy does not see it
    from nntile_py import models, tasks, testing, tiles
    from nntile_py.errors import ConfigError, NNTileError, TaskError
    from nntile_py.execution.python_task import Array, array, task
    from nntile_py.execution.runtime import Runtime
    from nntile_py.graph.fusion import Fusion
    from nntile_py.graph.optimizers import SGD, AdamW
    from nntile_py.training.collators import CausalCollator, MaskedCollator
    from nntile_py.training.trainer import Pending, StepResult, Trainer

__version__ = "0.1.0"

# Imported at first use: torch takes seconds, and `nntile --help` or a wrong config should not wait for it.
_HOME = {
    "SGD": "graph.optimizers", "AdamW": "graph.optimizers", "Array": "execution.python_task", "ConfigError": "errors",
    "Fusion": "graph.fusion", "NNTileError": "errors", "Pending": "training.trainer", "Runtime": "execution.runtime",
    "StepResult": "training.trainer", "TaskError": "errors", "Trainer": "training.trainer",
    "CausalCollator": "training.collators", "MaskedCollator": "training.collators",
    "array": "execution.python_task", "task": "execution.python_task",
}  # fmt: skip
_MODULES = ("models", "tasks", "testing", "tiles")

__all__ = [
    "SGD", "AdamW", "Array", "CausalCollator", "ConfigError", "Fusion", "MaskedCollator", "NNTileError", "Pending",
    "Runtime", "StepResult", "TaskError", "Trainer", "array", "models", "task", "tasks", "testing", "tiles",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"nntile_py.{name}")
    if name == "_core":
        import_module("torch")  # first: it loads CUDA's libraries from where its wheels keep them
        return import_module("nntile_py._core")
    if name in _HOME:
        return getattr(import_module(f"nntile_py.{_HOME[name]}"), name)
    raise AttributeError(f"module 'nntile_py' has no attribute {name!r}")
