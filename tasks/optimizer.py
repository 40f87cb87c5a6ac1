"""Gradient norm and clipping; the base class and registry of optimizers; the operator that applies an optimizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.schema import NonNegative, Settings
from nntile_py.system.parallel import blocks, in_parallel
from nntile_py.tiles import RW, R, Slot, TaskArgs, Tile, W

from .matrix_axes import MatrixAxes
from .op import NORMALIZATION, Array, GraphLike, Lowering, Op, Tensor
from .param_group import Groups

FAN_IN = 8  # partial sums added by one task
LARGEST = float(np.finfo(np.float32).max)
INVERSE_SCALE = "inverse_loss_scale"  # slot with 1 / loss scale
MOST_SCALE = 3e38  # largest loss scale: tasks get the scale in fp32
# For each low-precision dtype: name and dtype of the state that, with the parameter, gives the fp32 master weight.
MASTERS = {"bf16": ("low_bits", "int16"), "fp16": ("master", "fp32")}
Ends = Mapping[Hashable, int]  # for the key of a gradient's tile: a number that is equal for tiles on the same device
Node = Tile | Sequence["Node"]  # node of a tree of sums: the tile of a gradient (a leaf), or a sequence of nodes


class ClipArgs(TaskArgs):
    max_norm: float  # 0: no clipping
    skip_above: float  # steps with a larger norm change nothing; 0: no step is skipped


class ScaledClipArgs(TaskArgs):
    clip: ClipArgs
    inverse: Slot  # 1 / loss scale


class GradNorm(Op):
    """norm = sqrt(sum of squares of all gradients), fp64 [1]; clip = min(1, max_norm / (norm + 1e-6)), fp64 [1].

    Optimizers multiply gradients by clip, as torch.nn.utils.clip_grad_norm_ does. Without max_norm, clip is 1. If norm
    is above `skip_above` or NaN, clip is -1: optimizers then change nothing. The sums form a tree of fixed shape, so
    the result does not depend on the order in which tasks run.

    Args:
        ends: {key of a gradient's tile: a number that is equal for tiles on the same device}. Tiles with equal numbers
            are added first.
        scaled: True if the gradients are of a loss multiplied by a loss scale. The slot `inverse_loss_scale` is
            1 / loss scale. norm is then the norm of the unscaled gradients, clip is multiplied by the slot, and clip is
            -1 if norm is not finite (Micikevicius et al. 2018, 3.2).
    """

    category = NORMALIZATION
    independent = True

    def __init__(
        self, grads: Sequence[Tensor], norm: Tensor, clip: Tensor, max_norm: float | None, ends: Ends | None = None,
        *, skip_above: float | None = None, scaled: bool = False,
    ) -> None:  # fmt: skip
        for key, value in (("clip_grad_norm", max_norm), ("skip_above_norm", skip_above)):
            if value is not None and (not isinstance(value, Real) or not 0 < float(value) < math.inf):
                raise ValueError(f"{key}: got {value}; allowed: a positive number, or none")
        super().__init__(grads, [norm, clip])
        self.max_norm, self.scaled = max_norm, scaled
        self.skip_above = (skip_above or LARGEST) if scaled else skip_above
        self.ends = ends or {}

    def flop(self) -> float:
        return 2.0 * sum(t.numel for t in self.inputs)

    def lower(self, lowering: Lowering) -> None:
        near: dict[int, list[Tile]] = {}
        for grad in self.inputs:
            for tile in (lowering.tile(grad, index) for index in lowering.indices(grad)):
                near.setdefault(self.ends.get(tile.key, 0), []).append(tile)
        tops = [_nested(tiles, 1)[0] for _, tiles in sorted(near.items())]
        numbers = itertools.count()
        sums = [self._sum(lowering, node, numbers) for node in _nested(tops, FAN_IN)]
        norm, clip = (lowering.tile(t, {"one": 0}) for t in self.outputs)
        accesses, args = [W(norm), W(clip), *map(R, sums)], ClipArgs(self.max_norm or 0.0, self.skip_above or 0.0)
        if self.scaled:
            lowering.emit("clip_scaled", accesses, ScaledClipArgs(args, Slot(INVERSE_SCALE)))
        else:
            lowering.emit("clip", accesses, args)

    def _sum(self, lowering: Lowering, node: Node, numbers: Iterator[int]) -> Tile:
        """Append tasks that sum the squares of all gradients below a node. Return the tile with the sum.

        Tasks of the last gradients are appended first, as a backward pass computes the last gradients first.
        """
        below = [] if isinstance(node, Tile) else [self._sum(lowering, one, numbers) for one in reversed(node)]
        total = Tile(f"{self.name}.sum", (next(numbers),), (1,), "fp64")
        if isinstance(node, Tile):
            lowering.emit("sum_squares", [W(total), R(node)])
        else:
            lowering.emit("add_scalars", [W(total), *map(R, reversed(below))])
        return total

    def reference(self, *inputs: Array, inverse: float = 1.0) -> tuple[Array, ...]:
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in inputs)) * inverse
        clip = inverse * (1.0 if self.max_norm is None else min(1.0, self.max_norm / (norm + 1e-6)))
        if self.skip_above is not None and not norm <= self.skip_above:
            clip = -1.0
        return np.array([norm]), np.array([clip])


def _nested(nodes: Sequence[Node], most: int) -> Sequence[Node]:
    """Arrange nodes as trees: return at most `most` roots. Each new node has at most FAN_IN nodes directly below it."""
    while len(nodes) > most:
        nodes = [nodes[first : first + FAN_IN] for first in range(0, len(nodes), FAN_IN)]
    return nodes


def split(value: Array, dtype: str = "bf16") -> tuple[Array, Array]:
    """Split fp32 values into a bf16 or fp16 parameter and the state of MASTERS that completes it; inverse: `joined`.

    For bf16: the values rounded (halves away from zero), and the lower 16 bits of the fp32 values as int16. For fp16:
    the values rounded, and all fp32 values, because fp16 has fewer bits of exponent than fp32.
    """
    if dtype == "fp16":
        value = value.astype(np.float32)
        with np.errstate(over="ignore"):  # infinity without a warning, as on a GPU
            return value.astype(np.float16), value
    value = np.asarray(value, np.float32, order="C")
    near, low_bits = np.empty_like(value), np.empty(value.shape, np.int16)

    def one(part: slice) -> None:
        values, rounded, low = (array.reshape(-1)[part] for array in (value, near, low_bits))
        low[:] = values.view(np.int32)
        np.subtract(values.view(np.int32), low, out=rounded.view(np.int32))
        if (nan := np.isnan(values)).any():  # rounding turns some NaN into numbers
            rounded[nan], low[nan] = np.nan, 0

    in_parallel(one, blocks(value.size))
    return near, low_bits


def joined(param: Array, master: Array) -> Array:
    """Return the fp32 values from which `split` made the parameter and its master, bit for bit."""
    if np.asarray(master).dtype.kind == "f":
        return np.asarray(master, np.float32)
    return (np.asarray(param, np.float32).view(np.int32) + np.asarray(master, np.int32)).view(np.float32)


class Optimizer(Settings):
    """Settings, states and kernel of an optimizer. Each subclass has a file in this folder, such as adamw.py.

    A subclass declares its settings as fields, which are also keys of the section `optimizer` of a YAML file. It
    defines `flop`, `states`, `args` and `reference`, and `slots` if its kernel has scalars that change every step. The
    kernel has the name of the class in lower case. The kernel's tiles are param, states..., grad, clip, and for a
    parameter in bf16 or fp16 the master.

    Raises:
        ConfigError: a setting is out of range.
    """

    section: ClassVar = "optimizer"

    lr: NonNegative = 1e-3
    """Learning rate, after the warm-up."""
    weight_decay: NonNegative = 0.0
    """Weight decay, applied as by the class of the same name in torch.optim."""
    decay: Literal["all", "matrices"] = "all"
    """Weights to which weight decay applies: `all`, as in torch.optim, or only `matrices`, the weights with two or more
    axes in the checkpoint, without biases and gains of norms."""
    groups: Groups = ()
    """Weights with settings of their own. Each section has patterns of names (`match: ["*.bias", "*ln*"]`) and some of
    the keys `lr_scale`, `lr` and `weight_decay`. The first section with a matching pattern applies to a weight."""

    flop: ClassVar[float]  # floating point operations per element of a parameter
    colour: ClassVar[str] = ""  # colour in Gantt charts; empty: the chart picks an unused colour
    reads_first: ClassVar[bool] = False  # True: the kernel's tiles begin with grad and clip

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        super().__pydantic_init_subclass__(**options)
        if cls.__bases__ == (Optimizer,):
            OPTIMIZERS[cls.__name__.lower()] = cls

    @model_validator(mode="after")
    def _rates_of_groups(self) -> Self:
        if not self.lr and any(group.lr for group in self.groups):
            raise ConfigError("optimizer.groups: got lr with optimizer.lr = 0; allowed: lr_scale")
        return self

    @property
    def method(self) -> type[Optimizer]:
        """The class in OPTIMIZERS to which this object belongs: its own class or a base class."""
        return next(cls for cls in type(self).__mro__ if cls in OPTIMIZERS.values())

    @property
    def settings(self) -> dict[str, Any]:
        """{name: value} of the optimizer's fields, as in a YAML file."""
        return self.model_dump(include={*self.method.model_fields})

    def changed(self, **fields: Any) -> Optimizer:
        """Return a copy of this optimizer's settings with new values for some fields."""
        return self.method(**{**self.settings, **fields})

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the tensors that the optimizer keeps from step to step; each has the parameter's shape."""
        raise NotImplementedError

    def slots(self, step: int) -> dict[str, float]:
        """Return {slot: value} for one step, without the learning rate `lr`. Steps are numbered from 1."""
        return {}

    def args(self, lr: Slot, weight_decay: float) -> TaskArgs:
        """Return the kernel's arguments for a parameter with this learning rate and weight decay."""
        raise NotImplementedError

    @property
    def patterns(self) -> dict[str, Sequence[str]]:
        """{config key: patterns of names of weights}, without `groups`. Each pattern must match at least one weight."""
        return {}

    def of_param(self, weights: Sequence[str], param: Tensor, axes: MatrixAxes | None) -> tuple[Optimizer, float]:
        """Return the optimizer that updates a parameter, and the factor of its learning rate.

        Args:
            weights: names in the checkpoint of the weights that the parameter holds.
            axes: the parameter's axes as matrices; None: the parameter holds no matrices.
        """
        return self, 1.0

    def add_update(
        self, g: GraphLike, param: Tensor, grad: Tensor, states: Sequence[Tensor], clip: Tensor,
        axes: MatrixAxes | None, **how: Any,
    ) -> None:  # fmt: skip
        """Add the operators that update a parameter to a graph; `how`: keyword arguments of Update."""
        g.add(Update(self, param, grad, states, clip, **how))

    def reference(
        self, p: Array, grad: Array, states: Sequence[Array], weight_decay: float, lr: float, step: int
    ) -> tuple[Array, ...]:
        """Return (parameter, *states) after one step, computed in float64. Tests compare the kernel with it."""
        raise NotImplementedError


OPTIMIZERS: dict[str, type[Optimizer]] = {}  # key: the optimizer's name in a YAML file


class UpdateOp(Op):
    """Base class of operators that change a parameter. `lr_scale`: factor of the parameter's learning rate."""

    lr_scale: float

    @property
    def lr_slot(self) -> Slot:
        """The slot with the learning rate of this parameter: `lr_scale` times the learning rate of the step."""
        return Slot("lr" if self.lr_scale == 1 else f"lr*{self.lr_scale!r}")


class Update(UpdateOp):
    """One step of an optimizer for one parameter. The parameter, its states and its master change in place.

    The gradient is multiplied by clip. If clip is below 0 (see GradNorm), nothing changes. With a `master` (see
    `split`), param is bf16 or fp16, and the optimizer computes with the fp32 values that param and master represent.
    """

    def __init__(
        self, optimizer: Optimizer, param: Tensor, grad: Tensor, states: Sequence[Tensor], clip: Tensor,
        *, weight_decay: float | None = None, lr_scale: float = 1.0, master: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.optimizer, self.lr_scale, self.master = optimizer, lr_scale, [master] if master else []
        super().__init__([param, grad, *states, clip, *self.master], in_place([param, *states, *self.master]))
        self.weight_decay = optimizer.weight_decay if weight_decay is None else weight_decay

    @property
    def kind(self) -> str:
        return self.optimizer.method.__name__

    def flop(self) -> float:
        return self.optimizer.flop * self.output.numel

    def lower(self, lowering: Lowering) -> None:
        param, grad, *others = self.inputs
        count = len(self.optimizer.states)
        states, clip = others[:count], others[count]
        kernel, args = self.kind.lower(), self.optimizer.args(self.lr_slot, self.weight_decay)
        for index in lowering.indices(param):
            changed = [RW(lowering.tile(t, index)) for t in (param, *states)]
            master = [RW(lowering.tile(t, index)) for t in self.master]
            read = [R(lowering.tile(grad, index)), R(lowering.tile(clip, {"one": 0}))]
            tiles = [*read, *changed] if self.optimizer.reads_first else [*changed, *read]
            lowering.emit(kernel, [*tiles, *master], args)

    def reference(self, *inputs: Array, lr: float = 1e-3, step: int = 1) -> tuple[Array, ...]:
        param, grad, *others = inputs
        count = len(self.optimizer.states)
        states, clip, master = others[:count], others[count], others[count + 1 :]
        if clip[0] < 0:
            return param, *states, *master
        whole = joined(param, master[0]).astype(np.float64) if master else param
        of_param = self.weight_decay, lr * self.lr_scale
        whole, *states = self.optimizer.reference(whole, grad * clip[0], states, *of_param, step)
        whole, *master = split(whole, self.output.dtype) if master else [whole]
        return whole, *states, *master


def in_place(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return output tensors that share the tiles of these tensors."""
    return [Tensor(f"{t.name}.new", t.axes, t.shape, t.dtype, storage=t) for t in tensors]
