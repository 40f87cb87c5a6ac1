"""Operators, one family per file: NAME.py has the operators, NAME.cpp their CPU kernels.

NAME_triton.py and NAME_cuda.cpp have the CUDA kernels.

This package exports the public classes and functions of the operators' files: `from nntile_py.tasks import linear`.
`from nntile_py.tasks import *` imports only the names for model files: Mask, rotary_table, and the functions that take
a graph `g` and return a Tensor.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

__all__: list[str] = []
for _module in iter_modules(__path__):
    # Not exported: modules that authors of models do not need.
    if _module.name in ("interpret", "launch") or _module.name.endswith("_triton") or _module.ispkg:
        continue
    _found = import_module(f"{__name__}.{_module.name}")
    for _name, _value in vars(_found).items():
        if not _name.startswith("_") and getattr(_value, "__module__", "") == _found.__name__:
            globals()[_name] = _value
            _kinds = getattr(_value, "__annotations__", {})
            if _name in ("Mask", "rotary_table") or ([*_kinds][:1] == ["g"] and _kinds["return"] == "Tensor"):
                __all__.append(_name)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
