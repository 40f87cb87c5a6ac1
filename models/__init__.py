"""Models, one file each: plain Python that calls operators on tensors with named axes. `from_hf` loads a checkpoint."""

from typing import Any

from nntile_py.models.base import Model
from nntile_py.models.model_config import ModelConfig
from nntile_py.models.registry import find, from_hf, known

__all__ = ["Model", "ModelConfig", "find", "from_hf"]


def _classes() -> dict[str, type]:
    """Return the model classes of this folder and their config classes by class name: GPT2, GPT2Config, ..."""
    return {cls.__name__: cls for model in known().values() for cls in (model, model.Config)}


def __getattr__(name: str) -> Any:
    if not name.startswith("_") and name in (classes := _classes()):
        return classes[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_classes()])
