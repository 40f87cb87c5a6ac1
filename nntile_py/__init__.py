"""Training transformers as tiled tasks on StarPU."""

import ast
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nntile_py.system.version import VERSION

if TYPE_CHECKING:  # all that is found here, and where it lies: see _homes
    # isort: off
    from nntile_py import models as models, tasks as tasks, testing as testing, tiles as tiles
    from nntile_py.errors import (
        ConfigError as ConfigError, NNTileError as NNTileError, NotFinite as NotFinite, TaskError as TaskError,
    )  # fmt: skip
    from nntile_py.execution.array import (
        Array as Array, Tiles as Tiles, array as array, empty as empty, zeros as zeros,
    )  # fmt: skip
    from nntile_py.execution.python_task import Submitted as Submitted, task as task
    from nntile_py.execution.runtime import Runtime as Runtime
    from nntile_py.graph.params import (
        ONES as ONES, ZEROS as ZEROS, Batch as Batch, Constant as Constant, Joined as Joined, Normal as Normal,
        Part as Part, Traced as Traced,
    )  # fmt: skip
    from nntile_py.graph.fusion import Fusion as Fusion
    from nntile_py.graph.graph import Graph as Graph
    from nntile_py.tasks.adamw import AdamW as AdamW
    from nntile_py.tasks.sgd import SGD as SGD
    from nntile_py.inference.encoder import Encoder as Encoder
    from nntile_py.models.base import Model as Model, ModelConfig as ModelConfig
    from nntile_py.profiling.block import profile as profile
    from nntile_py.tasks.mask import Mask as Mask
    from nntile_py.data.collators import (
        CausalCollator as CausalCollator, LabelledCollator as LabelledCollator, MaskedCollator as MaskedCollator,
    )  # fmt: skip
    from nntile_py.training.step_handle import Pending as Pending, StepResult as StepResult
    from nntile_py.training.trainer import Trainer as Trainer

__version__ = VERSION


def _homes() -> dict[str, str]:
    """{name: the module that has it}, read from the imports above."""
    (block,) = (node for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.If))
    lines = [line for line in block.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in lines for alias in line.names}


def _has_cuda() -> bool:
    """Whether the extension was compiled for CUDA. Where it was not, it finds ATen's libraries by itself."""
    info: dict[str, str] = json.loads((Path(__file__).parent / "_build_info.json").read_text())
    return bool(info["cuda"])


_HOMES = _homes()
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imported at first use: `nntile --help` or a wrong config should not wait for what they do not need."""
    if name == "_core":
        if _has_cuda():
            import_module("torch")  # first: it loads CUDA's libraries from where its wheels keep them
        return import_module("nntile_py._core")
    if name not in _HOMES:
        raise AttributeError(f"module 'nntile_py' has no attribute {name!r}")
    home = _HOMES[name]
    return import_module(f"{home}.{name}") if home == __name__ else getattr(import_module(home), name)
