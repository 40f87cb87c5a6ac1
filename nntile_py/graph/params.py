"""Declarations of a model: parameters with their initialisation and checkpoint weights, inputs with their ranges."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from nntile_py.errors import ConfigError, MissingWeight
from nntile_py.graph.initializers import Init
from nntile_py.tasks.op import Tensor, permutation
from nntile_py.typed import typed_fields

Array = np.ndarray[Any, Any]
FP16_END = 65520.0  # fp16 rounds numbers of at least this size to infinity
Weights = Mapping[str, Array]
Derived = Callable[[Mapping[str, Array]], Array]  # computes an input from the other inputs of a step


@dataclass(frozen=True)
class Source:
    """A checkpoint weight, or a part of one, whose values fill a parameter or a part of a parameter.

    Attributes:
        weight: name of the weight in the checkpoint.
        shape: shape of the weight.
        view: shape to which the weight is reshaped: a dimension for each axis of the parameter.
        index: selects the parameter's values in the reshaped weight; empty: all values.
        at: the part of the parameter that these values fill; empty: the whole parameter.
    """

    weight: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    index: tuple[slice | int, ...] = ()
    at: tuple[slice | int, ...] = ()

    def check(self, weights: Weights) -> None:
        """Raise ConfigError if the weight is missing, has another shape, or holds no floating-point numbers."""
        self.check_shape(np.shape(weights[self.weight]) if self.weight in weights else None)
        if (dtype := np.asarray(weights[self.weight]).dtype) not in (np.float16, np.float32, np.float64):
            raise ConfigError(f"model: weight {self.weight} is {dtype}; allowed: float16, float32, float64")

    def check_shape(self, shape: tuple[int, ...] | None) -> None:
        """Raise ConfigError if a checkpoint's weight has another shape, or is missing (None)."""
        if shape is None:
            raise MissingWeight(f"model: weight {self.weight} is missing")
        if shape != self.shape:
            raise ConfigError(f"model: weight {self.weight} has shape {shape}, expected {self.shape}")

    def take(self, weights: Weights) -> Array:
        """Return the weight's values for the part `at` of the parameter; raises ConfigError as `check` does."""
        self.check(weights)
        return np.asarray(weights[self.weight]).reshape(self.view)[self.index]

    def put(self, weights: dict[str, Array], value: Array) -> None:
        """Copy the part `at` of a parameter's `value` into the weight. Create the weight if it is missing."""
        if self.weight not in weights:
            weights[self.weight] = np.zeros(self.shape, value.dtype)
        weights[self.weight].reshape(self.view)[self.index] = value[self.at]


@typed_fields
@dataclass(frozen=True)
class Part:
    """Argument `sources` of Graph.param: the parameter is one of `of` equal parts of a checkpoint weight along `axis`.

    number: index of the part, from 0.
    """

    weight: str
    number: int
    of: int
    axis: str


@typed_fields
@dataclass(frozen=True)
class Joined:
    """Argument `sources` of Graph.param: entry k of the parameter along `axis` is checkpoint weight number k."""

    axis: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Param:
    """A declared parameter.

    Attributes:
        sources: the weights of a checkpoint that hold its values.
        order: the declared order of the axes, if a layout search has given the tensor another one; else empty.
    """

    tensor: Tensor
    init: Init
    sources: tuple[Source, ...]
    order: tuple[str, ...] = ()

    def on(self, tensor: Tensor) -> Param:
        """Return a copy of this parameter that uses `tensor`, which has the same axes in another order."""
        return replace(self, tensor=tensor, order=self.order or self.tensor.axes)

    def value(self, weights: Weights) -> Array:
        """Return the parameter's value, read from a checkpoint's weights, in the tensor's order of axes."""
        parts = [source.take(weights) for source in self.sources]
        value, order = parts[0], self.order or self.tensor.axes
        if len(parts) > 1 or self.sources[0].at:
            value = np.empty([self.tensor.size(axis) for axis in order], parts[0].dtype)
            for source, part in zip(self.sources, parts, strict=True):
                value[source.at] = part

        if order == self.tensor.axes:
            return value
        return np.ascontiguousarray(value.transpose(permutation(order, self.tensor.axes)))

    def weight(self, weights: Weights) -> Array:
        """Return `value(weights)`; raises ConfigError if a number is too large for an fp16 tensor."""
        value = self.value(weights)
        if self.tensor.dtype == "fp16" and value.size and (most := float(np.abs(value).max())) >= FP16_END:
            names = ", ".join(source.weight for source in self.sources)
            raise ConfigError(f"precision: {names} holds {most:g}, and fp16 ends at 65504; allowed here: bf16, fp32")
        return value

    def declared(self, value: Array) -> Array:
        """Return `value`, which has the tensor's order of axes, with its axes in the declared order."""
        return value.transpose(permutation(self.tensor.axes, self.order or self.tensor.axes))

    def put(self, weights: dict[str, Array], value: Array) -> None:
        """Copy the parameter's value, or its gradient, into the checkpoint weights that hold the parameter."""
        for source in self.sources:
            source.put(weights, self.declared(value))


def sources_of(name: str, axes: Mapping[str, int], sources: str | Part | Joined | Source | None) -> tuple[Source, ...]:
    """Return the checkpoint weights, or parts of weights, that fill a parameter with these axes; see Graph.param."""
    sizes = list(axes.values())
    if isinstance(sources, Source):
        return (sources,)
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
        full = {axis: size * (sources.of if axis == sources.axis else 1) for axis, size in axes.items()}
        view = (*sizes[:at], sources.of, *sizes[at:])
        return (Source(sources.weight, _merged(full), view, (*_everywhere(at), sources.number)),)
    if sources is not None and not isinstance(sources, str):
        raise ConfigError(f"parameter {name}: got sources {sources!r}; allowed: a text, nt.Part or nt.Joined")
    return (Source(sources or name, _merged(axes), tuple(sizes)),)


def cover(sources: Sequence[Source]) -> bool:
    """Return whether the sources of one weight together take each of its values exactly once.

    The caller has checked that no two sources have both the same view and the same index.
    """
    first = sources[0]
    cut = [axis for axis, at in enumerate(first.index) if isinstance(at, int)]
    alike = len({(s.view, tuple(isinstance(at, int) for at in s.index)) for s in sources}) == 1
    if alike and (cut or not first.index):  # parts of equal size
        return len(sources) == math.prod(first.view[axis] for axis in cut)
    taken = np.zeros(first.shape, np.int8)
    for source in sources:
        taken.reshape(source.view)[source.index] += 1
    return bool((taken == 1).all())


def stacked(params: Sequence[Param], tensor: Tensor, axis: str) -> Param:
    """Return one parameter that stacks parameters of equal axes: its entry k along the new `axis` is params[k]."""
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
    """Return the shape of a checkpoint weight with these axes; head_dim and the axis before it are one dimension."""
    shape: list[int] = []
    for axis, size in axes.items():
        if axis == "head_dim" and shape:
            shape[-1] *= size
        else:
            shape.append(size)
    return tuple(shape)


@dataclass(frozen=True)
class Input:
    """A declared input: the requirements on the array that a step passes.

    Attributes:
        below: integers must be 0 to below - 1; None: no limit.
        ignored: a further allowed integer, such as the label of padding. Values equal to `ignored` do not count in
            means.
        default: value if a step does not pass this input: an array of the full shape, a number, or a function of the
            inputs declared before. None: each step must pass the input.
        shifted: True: the program's position s holds the user's value of position s + 1, as for labels of a causal
            model.
        scale: name of the slot that holds 1 / (number of values of all micro-batches of a step that are not `ignored`).
        max_count: upper bound on the values per row that are not `ignored`. A collator must refuse a row with more;
            random inputs use exactly this many.
        weight: factor by which the value of the slot `scale`, and so the mean, is multiplied.
        each: number of consecutive rows of the batch that share an entry of the first axis, such as a question's
            choices.
        hint: end of the message about an array with another shape or dtype.
    """

    tensor: Tensor
    below: int | None = None
    ignored: int | None = None
    default: Array | float | Derived | None = None
    shifted: bool = False
    scale: str | None = None
    max_count: int | None = None
    weight: float = 1.0
    each: int = 1
    hint: str = ""

    @property
    def batched(self) -> bool:
        """True if the first axis follows the batch, so each micro-batch of a step gets other rows of the array."""
        return self.tensor.axes[0] == "batch" or self.each > 1

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a step's array for `rows` rows of the batch."""
        return (rows // self.each, *self.tensor.shape[1:]) if self.batched else tuple(self.tensor.shape)

    def part(self, array: Array, number: int, rows: int) -> Array:
        """Return the part of a step's array that micro-batch `number` reads; a micro-batch has `rows` rows."""
        size = rows // self.each
        return array[number * size : (number + 1) * size] if self.batched else array

    def checked(self, value: Any, rows: int, shape: tuple[int, ...] | None = None) -> Array:
        """Return a user's value for this input as an array. `shape`: the required shape; None: `self.shape(rows)`.

        Raises:
            ValueError: the value has another shape, dtype or range; the message says what is allowed.
        """
        name, tensor, shape = self.tensor.name, self.tensor, shape or self.shape(rows)
        noun, kinds = ("ints", "iub") if tensor.dtype == "int64" else ("numbers", "iuf")
        try:
            array = np.asarray(value)
        except Exception as error:  # lists of unequal lengths; a tensor of another library may raise any exception
            message = f"{type(error).__name__}: {error}"
            raise ValueError(f"{name}: is not an array ({message}); allowed: {noun} {shape}") from error
        if self.batched and len(shape) > 1 and array.shape[2:] == shape[1:] and array.size == math.prod(shape):
            array = array.reshape(shape)  # such as [questions, choices, seq]
        if array.shape != shape or array.dtype.kind not in kinds:
            raise ValueError(f"{name}: got {array.dtype} {array.shape}; allowed: {noun} {shape}{self.hint}")
        if noun == "numbers":
            return array
        array = array.astype(np.int64)
        if self.below is not None:
            counted = array if self.ignored is None else array[array != self.ignored]
            if counted.size and (counted.min() < 0 or counted.max() >= self.below):
                also = "" if self.ignored is None else f" and {self.ignored}"
                limits = f"{counted.min()} to {counted.max()}"
                raise ValueError(f"{name}: values go from {limits}; allowed: 0 to {self.below - 1}{also}")
        return array

    def filled(self, rows: int, given: Mapping[str, Array] | None = None) -> Array | None:
        """Return the default as an array, or None if there is no default.

        given: the other inputs, from which some defaults are computed. If `given` is None, such a default is None.
        """
        if callable(self.default):
            return None if given is None else self.default(given)
        if self.default is None:
            return None
        array, shape = np.asarray(self.default), self.shape(rows)
        if self.batched and array.shape == tuple(self.tensor.shape) and len(array) < shape[0]:
            # The default is that of one micro-batch.
            array = np.tile(array, (shape[0] // len(array), *[1] * (array.ndim - 1)))
        return np.broadcast_to(array, shape)

    def shift(self, array: Array) -> Array:
        """Return an array with the values of position s + 1 at position s, and `ignored` at the last position."""
        assert self.ignored is not None
        result = np.full_like(array, self.ignored)
        result[:, :-1] = array[:, 1:]
        return result

    def counted(self, array: Array) -> int:
        """Return the number of values of an array that count in a mean: all except `ignored`."""
        return int(array.size if self.ignored is None else (array != self.ignored).sum())


@typed_fields
@dataclass
class Batch:
    """The sizes of a batch, for which a model is traced, and its optional inputs.

    Attributes:
        size: rows of a forward and backward pass: sequences, or bins with several sequences each.
        seq: positions of a row.
        given: names of the optional inputs that a step passes.
        optional: optional inputs that the model asked for by `has`, each with its neutral value; the trace fills it.
        packed: largest allowed length of a sequence if rows are bins; None: each row is one sequence.
        cached: largest allowed length of a sequence if rows continue sequences of a cache; None: there is no cache.
    """

    size: int
    seq: int
    given: frozenset[str] = frozenset()
    optional: dict[str, float] = field(default_factory=dict)
    packed: int | None = None
    cached: int | None = None

    @property
    def length(self) -> int:
        """The largest allowed length of a sequence."""
        return self.packed or self.cached or self.seq

    def has(self, name: str, *, neutral: float) -> bool:
        """Return whether steps pass the optional input `name`. An array that holds only `neutral` has no effect."""
        self.optional[name] = neutral
        return name in self.given


class Traced(NamedTuple):
    """The result of a trace: the loss, and the outputs of an evaluation. A model without a loss cannot be trained."""

    loss: Tensor | None
    outputs: dict[str, Tensor]


class Traceable(Protocol):
    """The interface that a model must have for the engine."""

    weights: Any  # mapping of names to arrays

    def trace(self, g: Any, batch: Batch) -> Traced: ...


def trace(model: Traceable, graph: Any, batch: Batch) -> Traced:
    """Trace a model on a new graph. An error in a user's model becomes a ConfigError that names file and line."""
    cls = type(model)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    here = f"model {cls.__name__}" + (f" ({file})" if file else "")
    try:
        traced = model.trace(graph, batch)
    except (Exception, SystemExit) as error:
        if cls.__module__.startswith("nntile_py."):  # models of this package raise clear errors themselves
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f"line {lines[-1]}: " if lines else ""
        message = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{here}: {line}{message}") from error
    valid = isinstance(traced, Traced) and isinstance(traced.loss, Tensor | None)
    if not valid or not isinstance(traced.outputs, Mapping):
        raise ConfigError(
            f"{here}: trace() returned {type(traced).__name__};"
            " allowed: nt.Traced(loss, outputs), a tensor and a dict of tensors"
        )
    try:
        if lora := getattr(getattr(model, "config", None), "lora", None):
            lora.adapt(graph)
        graph.check_end(traced.loss, traced.outputs)
    except (ConfigError, ValueError) as error:
        raise ConfigError(f"{here}: {error}") from error
    return traced


def numel(params: Sequence[Param]) -> int:
    """Return the number of elements of all parameters."""
    return sum(math.prod(param.tensor.shape) for param in params)
