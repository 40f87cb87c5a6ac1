"""What a model declares: parameters with start values and places in a checkpoint, inputs with their ranges."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from nntile_py.errors import ConfigError, MissingWeight
from nntile_py.tasks.op import Tensor, permutation
from nntile_py.typed import typed_fields

Array = np.ndarray[Any, Any]
FP16_END = 65520.0  # what is rounded to infinity, from here on
Weights = Mapping[str, Array]
Derived = Callable[[Mapping[str, Array]], Array]  # a step's arrays -> another one


def _check_number(what: str, value: Any, least: float = -math.inf) -> None:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        allowed = "a number" if least else f"a number of at least {least}"
        raise ConfigError(f"{what}({value!r}) is not allowed; use {allowed}")


@dataclass(frozen=True)
class Normal:
    """Start values drawn from a normal distribution of mean 0."""

    std: float

    def __post_init__(self) -> None:
        _check_number("Normal", self.std, 0)


@dataclass(frozen=True)
class Constant:
    """Start values that are all the same."""

    value: float

    def __post_init__(self) -> None:
        _check_number("Constant", self.value)


Init = Normal | Constant
ZEROS = Constant(0.0)
ONES = Constant(1.0)


@dataclass(frozen=True)
class Source:
    """Where a parameter, or a part of it, lies in a checkpoint: in `weight`, whose shape there is `shape`.

    view: that shape with each of the parameter's axes apart; view[index] belongs to parameter[at].
    """

    weight: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    index: tuple[slice | int, ...] = ()
    at: tuple[slice | int, ...] = ()

    def check(self, weights: Weights) -> None:
        """Raises ConfigError where the weight is missing, of another shape, or of no floating-point numbers."""
        if self.weight not in weights:
            raise MissingWeight(f"model: weight {self.weight} is missing")
        if (shape := np.shape(weights[self.weight])) != self.shape:
            raise ConfigError(f"model: weight {self.weight} has shape {shape}, expected {self.shape}")
        if (dtype := np.asarray(weights[self.weight]).dtype) not in (np.float16, np.float32, np.float64):
            raise ConfigError(f"model: weight {self.weight} is {dtype}; allowed: float16, float32, float64")

    def take(self, weights: Weights) -> Array:
        """The values of parameter[at]; ConfigError as of `check`."""
        self.check(weights)
        return np.asarray(weights[self.weight]).reshape(self.view)[self.index]

    def put(self, weights: dict[str, Array], value: Array) -> None:
        """Write a whole parameter's part into its weight, which is made if it is not there."""
        if self.weight not in weights:
            weights[self.weight] = np.zeros(self.shape, value.dtype)
        weights[self.weight].reshape(self.view)[self.index] = value[self.at]


@typed_fields
@dataclass(frozen=True)
class Part:
    """In a parameter's `sources`: part `number` of the `of` equal ones that a weight has along an axis."""

    weight: str
    number: int
    of: int
    axis: str


@typed_fields
@dataclass(frozen=True)
class Joined:
    """In a parameter's `sources`: entry k of one of its axes is weight number k."""

    axis: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Param:
    """A declared parameter; `sources` cover it. order: of its axes there, none: as the tensor has them, which a search
    of layouts may turn."""

    tensor: Tensor
    init: Init
    sources: tuple[Source, ...]
    order: tuple[str, ...] = ()

    def on(self, tensor: Tensor) -> Param:
        """The same as a tensor with these axes in another order."""
        return replace(self, tensor=tensor, order=self.order or self.tensor.axes)

    def value(self, weights: Weights) -> Array:
        """The parameter, out of a checkpoint's weights."""
        parts = [source.take(weights) for source in self.sources]
        whole, order = parts[0], self.order or self.tensor.axes
        if len(parts) > 1 or self.sources[0].at:
            whole = np.empty([self.tensor.size(axis) for axis in order], parts[0].dtype)
            for source, part in zip(self.sources, parts, strict=True):
                whole[source.at] = part
        turned = order != self.tensor.axes
        return np.ascontiguousarray(whole.transpose(permutation(order, self.tensor.axes))) if turned else whole

    def weight(self, weights: Weights) -> Array:
        """The same of what is computed with; raises ConfigError for numbers that fp16 does not have."""
        value = self.value(weights)
        if self.tensor.dtype == "fp16" and value.size and (most := float(np.abs(value).max())) >= FP16_END:
            names = ", ".join(source.weight for source in self.sources)
            raise ConfigError(f"precision: {names} holds {most:g}, and fp16 ends at 65504; allowed here: bf16, fp32")
        return value

    def declared(self, value: Array) -> Array:
        """The tensor's value in the order that `sources` have."""
        return value.transpose(permutation(self.tensor.axes, self.order or self.tensor.axes))

    def put(self, weights: dict[str, Array], value: Array) -> None:
        """The parameter's value, or its gradient, into a checkpoint's weights."""
        for source in self.sources:
            source.put(weights, self.declared(value))


def sources_of(name: str, axes: Mapping[str, int], sources: str | Part | Joined | None) -> tuple[Source, ...]:
    """The sources of a parameter with these axes; see Graph.param."""
    sizes = list(axes.values())
    if isinstance(sources, Joined):
        if sources.axis not in axes or len(sources.weights) != axes[sources.axis]:
            raise ConfigError(f"parameter {name}: {sources} does not fill an axis of {', '.join(axes)}")
        at = list(axes).index(sources.axis)
        rest = {axis: size for axis, size in axes.items() if axis != sources.axis}
        return tuple(
            Source(weight, _merged(rest), tuple(rest.values()), at=(*_everywhere(at), number))
            for number, weight in enumerate(sources.weights)
        )
    if isinstance(sources, Part):
        whole_numbers = isinstance(sources.number, int) and isinstance(sources.of, int)
        if sources.axis not in axes or not whole_numbers or not 0 <= sources.number < sources.of:
            raise ConfigError(f"parameter {name}: {sources} is no part along one of its axes, {', '.join(axes)}")
        at = list(axes).index(sources.axis)
        whole = {axis: size * (sources.of if axis == sources.axis else 1) for axis, size in axes.items()}
        view = (*sizes[:at], sources.of, *sizes[at:])
        return (Source(sources.weight, _merged(whole), view, (*_everywhere(at), sources.number)),)
    if sources is not None and not isinstance(sources, str):
        raise ConfigError(f"parameter {name}: sources {sources!r} are not allowed; use a text, nt.Part or nt.Joined")
    return (Source(sources or name, _merged(axes), tuple(sizes)),)


def cover(sources: Sequence[Source]) -> bool:
    """Whether these sources, all of one weight, take each of its values once. They differ in view or index."""
    first = sources[0]
    cut = [axis for axis, at in enumerate(first.index) if isinstance(at, int)]
    if len({(s.view, tuple(isinstance(at, int) for at in s.index)) for s in sources}) == 1:  # equal parts
        return len(sources) == math.prod(first.view[axis] for axis in cut)
    taken = np.zeros(first.shape, np.int8)
    for source in sources:
        taken.reshape(source.view)[source.index] += 1
    return bool((taken == 1).all())


def packed(params: Sequence[Param], tensor: Tensor, axis: str) -> Param:
    """Parameters of equal axes as one with a further axis that numbers them."""
    place = tensor.axes.index(axis)
    sources = []
    for number, param in enumerate(params):
        for source in param.sources:
            rest = source.at or _everywhere(len(param.tensor.axes))
            sources.append(replace(source, at=(*rest[:place], number, *rest[place:])))
    return Param(tensor, params[0].init, tuple(sources))


def _everywhere(axes: int) -> tuple[slice, ...]:
    return (slice(None),) * axes


def _merged(axes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that a checkpoint has: heads and their width are one dimension there."""
    shape: list[int] = []
    for axis, size in axes.items():
        if axis == "head_dim" and shape:
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@dataclass(frozen=True)
class Input:
    """A declared input: what a step's arrays have to be.

    below: integers go from 0 to below - 1. ignored: one that is allowed besides, and is not counted. default: taken
    where a step gives none: an array of the whole shape, one number, or a function that makes it of the inputs
    declared before. shifted: the value of a position is what the user gives for the next one, as labels of a causal
    model. scale: a slot of the program, 1 / (values that count, in all micro-batches of a step). most: how many values
    of a row may count, if not all; who makes another input of them refuses more, random ones have so many.
    """

    tensor: Tensor
    below: int | None = None
    ignored: int | None = None
    default: Array | float | Derived | None = None
    shifted: bool = False
    scale: str | None = None
    most: int | None = None

    @property
    def batched(self) -> bool:
        """Whether a step gives other rows of it to each micro-batch."""
        return self.tensor.axes[0] == "batch"

    def shape(self, rows: int) -> tuple[int, ...]:
        """Of a step's array, for `rows` rows of the batch."""
        return (rows, *self.tensor.shape[1:]) if self.batched else tuple(self.tensor.shape)

    def checked(self, value: Any, rows: int, shape: tuple[int, ...] | None = None) -> Array:
        """The value as an array of the shape of `rows` of the batch, or of another; raises ValueError naming what is
        allowed."""
        name, tensor, shape = self.tensor.name, self.tensor, shape or self.shape(rows)
        whole, kinds = ("ints", "iub") if tensor.dtype == "int64" else ("numbers", "iuf")
        try:
            array = np.asarray(value)
        except Exception as error:  # lists of unequal lengths; what a tensor of another library raises: any of many
            told = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}: is no array ({told}); expected {whole} {shape}") from error
        if array.shape != shape or array.dtype.kind not in kinds:
            raise ValueError(f"{name}: {array.dtype} {array.shape} is not allowed; expected {whole} {shape}")
        if whole == "numbers":
            return array
        array = array.astype(np.int64)
        if self.below is not None:
            counted = array if self.ignored is None else array[array != self.ignored]
            if counted.size and (counted.min() < 0 or counted.max() >= self.below):
                also = "" if self.ignored is None else f" and {self.ignored}"
                found = f"{counted.min()} to {counted.max()}"
                raise ValueError(f"{name}: values go from {found}; allowed are 0 to {self.below - 1}{also}")
        return array

    def filled(self, rows: int, given: Mapping[str, Array] | None = None) -> Array | None:
        """The default as an array, if there is one; one that is made of other inputs only where those are given."""
        if callable(self.default):
            return None if given is None else self.default(given)
        if self.default is None:
            return None
        return np.broadcast_to(np.asarray(self.default), self.shape(rows))

    def shift(self, array: Array) -> Array:
        """Values of a causal model: position s holds what was given for s + 1, the last position nothing."""
        assert self.ignored is not None
        result = np.full_like(array, self.ignored)
        result[:, :-1] = array[:, 1:]
        return result

    def counted(self, array: Array) -> int:
        """How many values count towards a mean."""
        return int(array.size if self.ignored is None else (array != self.ignored).sum())


@typed_fields
@dataclass
class Batch:
    """What a model is traced for: sequences of one pass, their length, and which optional inputs a step will have.

    `optional` is filled by the trace: the names that it asked for, each with the value that means nothing. packed:
    length of the longest sequence, where each row of the batch is a bin of `seq` positions that holds several of them
    one behind the other.
    """

    size: int
    seq: int
    given: frozenset[str] = frozenset()
    optional: dict[str, float] = field(default_factory=dict)
    packed: int | None = None

    @property
    def length(self) -> int:
        """Of the longest sequence."""
        return self.packed or self.seq

    def has(self, name: str, *, neutral: float) -> bool:
        """Whether steps have the optional input `name`; an array of nothing but `neutral` is as good as none."""
        self.optional[name] = neutral
        return name in self.given


class Traced(NamedTuple):
    """What a trace ends in: the loss, and what an evaluation may return. Without a loss nothing can be trained."""

    loss: Tensor | None
    outputs: dict[str, Tensor]


class Traceable(Protocol):
    """What the engine knows of a model."""

    weights: Any  # {name: array}

    def trace(self, g: Any, batch: Batch) -> Traced: ...


def trace(model: Traceable, graph: Any, batch: Batch) -> Traced:
    """The model's trace on a new graph. Whatever goes wrong in a user's model is a ConfigError that names the place."""
    cls = type(model)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    here = f"model {cls.__name__}" + (f" ({file})" if file else "")
    try:
        made = model.trace(graph, batch)
    except (Exception, SystemExit) as error:
        if cls.__module__.startswith("nntile_py."):  # says itself what is wrong, or is wrong
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f"line {lines[-1]}: " if lines else ""
        told = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{here}: {line}{told}") from error
    whole = isinstance(made, Traced) and isinstance(made.loss, Tensor | None)
    if not whole or not isinstance(made.outputs, Mapping):
        raise ConfigError(
            f"{here}: trace() returned {type(made).__name__};"
            " allowed: nt.Traced(loss, outputs), a tensor and a dict of tensors"
        )
    try:
        graph.check_end(made.loss, made.outputs)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{here}: {error}") from error
    return made


def numel(params: Sequence[Param]) -> int:
    """Words of all parameters."""
    return sum(math.prod(param.tensor.shape) for param in params)
