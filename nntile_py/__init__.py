"""Training transformers as tiled tasks on StarPU."""

from nntile_py import models, tasks, tiles
from nntile_py.errors import ConfigError, NNTileError, TaskError
from nntile_py.optimizers import SGD, AdamW
from nntile_py.passes import Fusion
from nntile_py.runtime import Array, Runtime, array, task
from nntile_py.trainer import Pending, StepResult, Trainer

__version__ = "0.1.0"

__all__ = [
    "SGD", "AdamW", "Array", "ConfigError", "Fusion", "NNTileError", "Pending", "Runtime", "StepResult", "TaskError",
    "Trainer", "array", "models", "task", "tasks", "tiles",
]  # fmt: skip
