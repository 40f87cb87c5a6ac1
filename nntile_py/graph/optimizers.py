"""What a user chooses to train with; the operators that do it are in tasks/optimizer.py."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Literal, get_args

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param
from nntile_py.tasks import optimizer as ops
from nntile_py.tasks.op import Tensor, accumulation_dtype
from nntile_py.typed import typed_fields

# What makes a parameter of a dtype the fp32 one that is trained: the name of that state, its dtype; see split.
MOST_SCALE = 3e38  # of a loss: a task is given it in fp32
MASTERS = {"bf16": ("low_bits", "int16"), "fp16": ("master", "fp32")}
Decay = Literal["all", "matrices"]  # the weights that weight decay acts on: see _decay


@typed_fields
@dataclass(frozen=True)
class AdamW:
    """AdamW as torch.optim.AdamW: decoupled weight decay, on every parameter or on matrices alone."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay: Decay = "all"

    def __post_init__(self) -> None:
        _check(self)

    def build(self, g: Graph, of: Param, grad: Tensor, clip: Tensor) -> None:
        param = of.tensor
        m, v = (_state(g, param, name) for name in ("m", "v"))
        options = {"betas": self.betas, "eps": self.eps, "weight_decay": _decay(self, of)}
        g.add(ops.AdamW(param, grad, m, v, clip, master=_master(g, param), **options))  # type: ignore[arg-type]

    def slots(self, step: int) -> dict[str, float]:
        """Scalars of step 1, 2, ..."""
        return {f"beta{k + 1}_correction": 1 - beta**step for k, beta in enumerate(self.betas)}


@typed_fields
@dataclass(frozen=True)
class SGD:
    """SGD as torch.optim.SGD with momentum, no dampening; weight decay on every parameter or on matrices alone."""

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: Decay = "all"

    def __post_init__(self) -> None:
        _check(self)

    def build(self, g: Graph, of: Param, grad: Tensor, clip: Tensor) -> None:
        param = of.tensor
        m = _state(g, param, "m") if self.momentum else None
        options = {"momentum": self.momentum, "weight_decay": _decay(self, of)}
        g.add(ops.SGD(param, grad, m, clip, master=_master(g, param), **options))

    def slots(self, step: int) -> dict[str, float]:
        return {}


def _state(g: Graph, param: Tensor, name: str, dtype: str | None = None) -> Tensor:
    return g.named(f"{param.name}.{name}", param.axes, param.shape, "state", dtype or accumulation_dtype(param.dtype))


def _master(g: Graph, param: Tensor) -> Tensor | None:
    """Of bf16 what the parameter lacks of the fp32 one: 2 bytes, where a copy in fp32, as fp16 has it, takes 4."""
    return _state(g, param, *MASTERS[param.dtype]) if param.dtype in MASTERS else None


def _decay(optimizer: AdamW | SGD, of: Param) -> float:
    """Of this parameter. `matrices`: those with two or more axes in the checkpoint, as nanoGPT has it; here a bias of
    attention has two, heads and head_dim."""
    whole = optimizer.decay == "all" or all(len(source.shape) > 1 for source in of.sources)
    return optimizer.weight_decay if whole else 0.0


def _check(optimizer: AdamW | SGD) -> None:
    if optimizer.decay not in get_args(Decay):
        raise ConfigError(f"optimizer.decay: {optimizer.decay!r} is not allowed; use {' or '.join(get_args(Decay))}")
    for name, value in vars(optimizer).items():
        if name == "decay":
            continue
        top = 1 if name in ("betas", "momentum") else float("inf")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < top:
                raise ConfigError(f"optimizer.{name}: {value!r} is not allowed; use a number of 0 or more, below {top}")
        # Numbers of NumPy too are Real; programs are made of Python's.
        plain = tuple(map(float, value)) if isinstance(value, tuple) else float(value)
        object.__setattr__(optimizer, name, plain)


Optimizer = AdamW | SGD
