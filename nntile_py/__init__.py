"""nntile_py trains transformers: tensors are cut into tiles, and StarPU schedules the tasks on them.

Begin with a runtime, a model and a trainer:

    import nntile_py as nt

    model = nt.models.from_hf("my_bert")  # a folder of transformers; nt.models.GPT2(...) makes a new model
    with nt.Runtime(cpus=2):
        trainer = nt.Trainer(model, batch=8, seq=64, optimizer=nt.AdamW(lr=1e-3))
        loss = trainer.step({"input_ids": input_ids, "labels": labels})

help(nt.Trainer), help(nt.Runtime) and help(nt.models) describe them. nt.Encoder computes vectors of texts, nt.profile
records what workers do, nt.task and nt.array run your own tiled algorithms, and nt.testing tests your own operators.
On the command line, `nntile --help` lists the commands.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from nntile_py.system.version import VERSION

if TYPE_CHECKING:
    # isort: off
    from nntile_py import models as models, tasks as tasks, testing as testing, tiles as tiles
    from nntile_py.capture.torch_model import from_torch as from_torch, to_torch as to_torch
    from nntile_py.errors import (
        ConfigError as ConfigError, NNTileError as NNTileError, NotFinite as NotFinite, TaskError as TaskError,
    )  # fmt: skip
    from nntile_py.execution.array import (
        Array as Array, Tiles as Tiles, array as array, empty as empty, zeros as zeros,
    )  # fmt: skip
    from nntile_py.execution.python_task import Submitted as Submitted, task as task
    from nntile_py.execution.runtime import Runtime as Runtime
    from nntile_py.execution.starpupy_handles import starpu_array as starpu_array, starpu_handle as starpu_handle
    from nntile_py.graph.initializers import (
        ONES as ONES, ZEROS as ZEROS, Constant as Constant, Normal as Normal,
    )  # fmt: skip
    from nntile_py.graph.params import Batch as Batch, Joined as Joined, Part as Part, Traced as Traced
    from nntile_py.graph.fusion import Fusion as Fusion
    from nntile_py.graph.passes.fp8 import FP8 as FP8
    from nntile_py.graph.graph import Graph as Graph
    from nntile_py.tasks.adamw import AdamW as AdamW
    from nntile_py.tasks.lion import Lion as Lion
    from nntile_py.tasks.muon import Muon as Muon
    from nntile_py.tasks.sgd import SGD as SGD
    from nntile_py.inference.encoder import Encoder as Encoder
    from nntile_py.inference.generated_text import GeneratedPart as GeneratedPart, GeneratedText as GeneratedText
    from nntile_py.inference.generator import Generator as Generator
    from nntile_py.models.adapters import load_adapter as load_adapter, save_adapter as save_adapter
    from nntile_py.models.base import Model as Model
    from nntile_py.models.model_config import ModelConfig as ModelConfig
    from nntile_py.profiling.block import profile as profile
    from nntile_py.tasks.mask import Mask as Mask
    from nntile_py.data.collators import (
        CausalCollator as CausalCollator, LabelledCollator as LabelledCollator, MaskedCollator as MaskedCollator,
    )  # fmt: skip
    from nntile_py.training.step_handle import Pending as Pending, StepResult as StepResult
    from nntile_py.training.trainer import Trainer as Trainer

__version__ = VERSION
_PACKAGES = ("models", "tasks", "testing", "tiles")
# {module: names of the Python interface that it defines}. The imports above repeat this for type checkers.
_NAMES = {
    "capture.torch_model": ("from_torch", "to_torch"),
    "data.collators": ("CausalCollator", "LabelledCollator", "MaskedCollator"),
    "errors": ("ConfigError", "NNTileError", "NotFinite", "TaskError"),
    "execution.array": ("Array", "Tiles", "array", "empty", "zeros"),
    "execution.python_task": ("Submitted", "task"),
    "execution.runtime": ("Runtime",),
    "execution.starpupy_handles": ("starpu_array", "starpu_handle"),
    "graph.fusion": ("Fusion",),
    "graph.passes.fp8": ("FP8",),
    "graph.graph": ("Graph",),
    "graph.initializers": ("ONES", "ZEROS", "Constant", "Normal"),
    "graph.params": ("Batch", "Joined", "Part", "Traced"),
    "inference.encoder": ("Encoder",),
    "inference.generated_text": ("GeneratedPart", "GeneratedText"),
    "inference.generator": ("Generator",),
    "models.adapters": ("load_adapter", "save_adapter"),
    "models.base": ("Model",),
    "models.model_config": ("ModelConfig",),
    "profiling.block": ("profile",),
    "tasks.adamw": ("AdamW",),
    "tasks.lion": ("Lion",),
    "tasks.mask": ("Mask",),
    "tasks.muon": ("Muon",),
    "tasks.sgd": ("SGD",),
    "training.step_handle": ("Pending", "StepResult"),
    "training.trainer": ("Trainer",),
}
HOMES = {name: f"nntile_py.{module}" for module, names in _NAMES.items() for name in names}
__all__ = [*HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    """Import a name of the interface at its first use, so that `nntile --help` and config errors need no torch."""
    if name == "_core":
        return import_module("nntile_py.extension").load_core()
    if name in _PACKAGES:
        return import_module(f"nntile_py.{name}")
    if name not in HOMES:
        raise AttributeError(f"module 'nntile_py' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
