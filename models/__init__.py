"""Models: plain texts of layers over named axes, one file each; `from_hf` reads any of them."""

from typing import Any

from nntile_py.models.base import Model, ModelConfig
from nntile_py.models.registry import find, from_hf

__all__ = ["Model", "ModelConfig", "find", "from_hf"]


def __getattr__(name: str) -> Any:
    """GPT2, GPT2Config, ...: the models of this folder and their configs, found by their class names."""
    if not name.startswith("_"):
        from nntile_py.models.registry import known

        for cls in known().values():
            for one in (cls, cls.Config):
                if one.__name__ == name:
                    return one
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
