"""The logical graph: operators on tensors with named axes, and their gradients as operators of the same graph."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.initializers import Init
from nntile_py.graph.params import Array, Derived, Input, Joined, Param, Part, Source, cover, sources_of
from nntile_py.system.units import counted
from nntile_py.tasks.elementwise import Rename, add
from nntile_py.tasks.op import CONTRACTION, AttentionCache, Op, Tensor
from nntile_py.tiles import Tiling
from nntile_py.typed import typed

INPUT_DTYPES = ("int64", "fp32", "fp64", "bf16", "fp16")


class Graph:
    """Operators in the order in which they run. Pure data, without StarPU.

    Args:
        dtype: dtype of parameters and activations: fp32, fp64, bf16 or fp16. With bf16 and fp16, statistics of norms,
            gradients of parameters and moments of optimizers are fp32; passes/precision.py has the exceptions.
        training: False: the graph has no dropout.
        cuts: tiling with which the graph will be lowered. If it cuts sequences, attention with dropout uses another
            operator.
    """

    @typed
    def __init__(self, dtype: str = "fp32", *, training: bool = True, cuts: Tiling | None = None) -> None:
        self.dtype, self.training, self.cuts = dtype, training, cuts or Tiling()
        self.live: frozenset[str] = frozenset()  # axes along which a step fills only a part of each tile (packing)
        self.filled = 1.0  # upper bound on the share of a tile that a step fills (packing)
        # Packing: for each axis, the input with the positions in the padded batch. Dropout draws its random numbers by
        # these positions.
        self.row_numbers: dict[str, Tensor] = {}
        self.class_axes: frozenset[str] = frozenset()  # axes of logits: the classes of a cross-entropy of the trace
        self.params: dict[Tensor, Param] = {}
        self.grads: dict[Tensor, Tensor] = {}  # {parameter: gradient}, filled by `backward`
        self.inputs: dict[str, Input] = {}
        self.projections: list[list[Tensor]] = []  # queries, keys, values of each attention
        self.ops: list[Op] = []
        self.tensors: dict[str, Tensor] = {}  # inputs and parameters, by name
        self.kept: dict[tuple[str, str], Tensor] = {}  # other persistent tensors, by kind and name
        self._sources: dict[str, list[Source]] = {}  # for each checkpoint weight: the parts that parameters declare
        self.cache: AttentionCache | None = None  # of a generation: keys and values of earlier passes
        self._scope: list[str] = []
        self._phase = "forward"
        self._dropouts = 0

    def __repr__(self) -> str:
        sizes = f"{counted(len(self.ops), 'operator')}, {counted(len(self.params), 'parameter')}"
        return f"<Graph in {self.dtype}: {sizes}>"

    # -- building

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Context manager that prefixes the names of the operators added inside the block with `name`."""
        self._scope.append(name)
        yield
        self._scope.pop()

    def named(
        self, name: str, axes: Sequence[str], shape: Sequence[int], kind: str, dtype: str | None = None
    ) -> Tensor:
        """Create and return a persistent tensor, which the host can access by its name."""
        tensor = Tensor(name, axes, shape, dtype or self.dtype, kind)
        if kind in ("input", "param"):
            self.tensors[name] = tensor
        else:
            self.kept[kind, name] = tensor
        return tensor

    @property
    def loss(self) -> Tensor | None:
        """The tensor to which operators add their losses; None if no operator has added a loss."""
        return self.kept.get(("scalar", "loss"))

    @typed
    def param(
        self, name: str, axes: Mapping[str, int], init: Init, sources: str | Part | Joined | Source | None = None
    ) -> Tensor:
        """Declare a parameter of the model.

        Args:
            axes: {axis: size}.
            init: start values.
            sources: the checkpoint weights that hold the parameter: the name of a weight (default: `name`), a Part of a
                weight, or Joined weights. A weight has one dimension for each axis of the parameter, except that
                head_dim and the axis before it share one dimension. A Source states the weight's shape itself.

        Raises:
            ConfigError: the name was declared before, or the sources do not fit.
        """
        self._check_declared("parameter", name, axes)
        if not isinstance(init, Init):
            raise ConfigError(f"parameter {name}: got start values {init!r}; allowed: nt.Normal, nt.Constant")
        tensor = self.named(name, list(axes), list(axes.values()), "param")
        param = Param(tensor, init, sources_of(name, axes, sources))
        for source in param.sources:
            self._check_source(name, source)
        self.params[tensor] = param
        return tensor

    def _check_declared(self, what: str, name: str, axes: Mapping[str, int]) -> None:
        """Raise ConfigError if the name or the axes of a declaration are not allowed."""
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{what}: got the name {name!r}; allowed: a text")
        if name in self.tensors:
            raise ConfigError(f"{what} {name}: declared twice; allowed: another name, or the existing tensor")
        if not isinstance(axes, Mapping) or not axes:
            raise ConfigError(f"{what} {name}: got axes {axes!r}; allowed: {{axis: size}}")
        for axis, size in axes.items():
            integer = isinstance(size, int | np.integer) and not isinstance(size, bool)
            if not isinstance(axis, str) or not integer or size < 1:
                need = "a text and a positive integer"
                raise ConfigError(f"{what} {name}: got axis {axis!r} of size {size!r}; allowed: {need}")

    def _check_source(self, name: str, source: Source) -> None:
        """Raise ConfigError if parameters disagree about a weight's shape, or if two of them hold the same part."""
        parts = self._sources.setdefault(source.weight, [])
        for other in parts:
            if other.shape != source.shape:
                shapes = f"{other.shape} in one parameter, {source.shape} here"
                raise ConfigError(f"parameter {name}: weight {source.weight} has shape {shapes}")
            if (other.view, other.index) == (source.view, source.index):
                need = "use one parameter for both"
                raise ConfigError(f"parameter {name}: {source.weight} belongs to another parameter; {need}")
        parts.append(source)

    @typed
    def input(
        self,
        name: str,
        axes: Mapping[str, int],
        dtype: str | None = "int64",
        *,
        below: int | None = None,
        ignored: int | None = None,
        default: Array | float | Derived | None = None,
        shifted: bool = False,
        scale: str | None = None,
        max_count: int | None = None,
        weight: float = 1.0,
        each: int = 1,
        hint: str = "",
    ) -> Tensor:
        """Declare an array that each step passes. dtype None: the graph's dtype. See Input for the other options."""
        self._check_declared("input", name, axes)
        if dtype not in (None, *INPUT_DTYPES):
            raise ConfigError(f"input {name}: got dtype {dtype!r}; allowed: None or {', '.join(INPUT_DTYPES)}")
        if shifted and (list(axes)[1:2] != ["seq"] or ignored is None):
            raise ConfigError(f"input {name}: shifted needs the axes batch, seq and a value of `ignored`")
        tensor = self.named(name, list(axes), list(axes.values()), "input", dtype)
        self.inputs[name] = Input(tensor, below, ignored, default, shifted, scale, max_count, weight, each, hint)
        return tensor

    def temp(self, name: str, axes: Sequence[str], shape: Sequence[int], dtype: str, **options: Any) -> Tensor:
        """Return a new temporary tensor, named within the current scope."""
        return Tensor(".".join([*self._scope, name]), axes, shape, dtype, **options)

    def add(self, op: Op) -> Op:
        """Append an operator to the graph and return the operator."""
        op.name = op.name or ".".join([*self._scope, op.kind])
        op.phase = self._phase
        if self._phase == "forward":
            _check_sizes(op)
            for out in op.outputs:
                out.requires_grad = any(t.requires_grad for t in op.inputs)
        self.ops.append(op)
        return op

    def dropout_key(self) -> int:
        """Return the number of the next dropout, 1, 2, ... in the order of the trace, as key of its random numbers."""
        self._dropouts += 1
        return self._dropouts

    # -- gradients

    @typed
    def backward(self, loss: Tensor) -> dict[Tensor, Tensor]:
        """Add the operators that compute the gradient of the loss for each parameter.

        Backpropagation starts at every operator that adds to the loss. The gradients are persistent tensors, so the
        host can read them.

        Returns:
            {parameter: gradient}

        Raises:
            ValueError: an operator reads a tensor whose tiles another tensor has already overwritten. For example, a
                second loss reads the logits after the first loss has replaced them by their gradient.
        """
        self._phase = "backward"
        grads: dict[Tensor, Tensor] = {}
        parts: dict[Tensor, list[Tensor]] = {}  # contributions to the gradient of each parameter
        for op in reversed(self.ops[:]):
            if op.output.storage is not loss.storage and not any(out in grads for out in op.outputs):
                continue
            self._scope.append(op.name.rpartition(".")[0] or "model")
            contributions = op.gradient(self, *(grads.get(out) for out in op.outputs))
            if not isinstance(contributions, Sequence):
                need = "allowed: a list, an entry for each input"
                raise ValueError(f"{type(op).__name__}.gradient: returns {contributions!r}; {need}")
            for tensor, grad in zip(op.inputs, contributions, strict=False):
                if grad is None or not tensor.requires_grad:
                    continue
                known = grads.get(tensor)
                if tensor.kind == "param":
                    parts.setdefault(tensor, []).append(grad)
                else:
                    grads[tensor] = add(self, known, grad) if known else grad
            self._scope.pop()
        self._sum_parts(parts)
        self._phase = "forward"
        self._check_in_place()
        for name, param in self.tensors.items():
            if param in parts:
                grad = parts[param][0].storage
                assert grad.axes == param.axes, (grad, param)
                grad.name, grad.kind = f"{name}.grad", "grad"
                self.grads[param] = grad
        return self.grads

    def _sum_parts(self, parts: Mapping[Tensor, list[Tensor]]) -> None:
        """Sum the contributions to each parameter's gradient.

        If all operators that compute contributions can add to existing tiles, all of them add to the tiles of the first
        contribution. Otherwise each contribution keeps its own tiles, and additional operators sum the contributions.
        """
        uses = Counter(part for some in parts.values() for part in some)
        sums = {tensor for op in self.ops for tensor in op.sums if uses[tensor] == 1}
        for param, (first, *others) in parts.items():
            if sums.issuperset([first, *others]):
                for part in others:
                    part.storage = first
            elif others:
                with self.scope(param.name):
                    parts[param][0] = functools.reduce(functools.partial(add, self), others, first)

    def sizes(self) -> dict[str, int]:
        """Return {axis: size}; the largest size of an axis if tensors differ."""
        sizes: dict[str, int] = {}
        for tensor in (t for op in self.ops for t in (*op.inputs, *op.outputs)):
            for axis, size in tensor.sizes.items():
                sizes[axis] = max(size, sizes.get(axis, 0))
        return sizes

    def check_end(self, loss: Tensor | None, outputs: Mapping[str, Tensor]) -> None:
        """Check the loss and the outputs that a trace returned.

        Raises:
            ConfigError: the loss or an output is not allowed, or the parameters do not cover each value of a checkpoint
                weight exactly once, so the weight could not be saved.
        """
        if (loss and loss.storage) is not self.loss or not (loss or outputs):
            raise ConfigError(f"the loss is {loss}; allowed: what a loss, such as cross_entropy, returned here")
        last, written = self._check_in_place()
        known = {*self.tensors.values(), *self.kept.values(), *(t for op in self.ops for t in op.outputs)}
        for name, tensor in outputs.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                raise ConfigError(f"output {name!r}: got {tensor!r}; allowed: {{name: tensor}}")
            if tensor not in known:
                raise ConfigError(f"output {name}: got {tensor}; allowed: a tensor that this trace has made")
            if last.get(tensor, 0) != written.get(tensor.storage, 0):
                raise ConfigError(f"output {name}: a later tensor overwrites {tensor}; allowed: the later tensor")
        for weight, sources in self._sources.items():
            if not cover(sources):
                names = ", ".join(p.tensor.name for p in self.params.values() if any(s in sources for s in p.sources))
                raise ConfigError(
                    f"weight {weight}: a part of it belongs to no parameter or to two; allowed: one for each part."
                    f" Those declared: {names}"
                )

    def _check_in_place(self) -> tuple[dict[Tensor, int], dict[Tensor, int]]:
        """Check that no operator reads a tensor after another operator has overwritten the tensor's tiles in place.

        Returns:
            For each tensor, the number of writes to its storage up to the write that computed the tensor. For each
            storage, the number of writes in the whole graph.

        Raises:
            ValueError: an operator reads an overwritten tensor.
        """
        written: dict[Tensor, int] = {}  # number of writes to each storage so far
        seen: dict[Tensor, int] = {}  # {tensor: the storage's number when the tensor was computed}
        for op in self.ops:
            for t in op.inputs:
                if seen.setdefault(t, 0) != written.get(t.storage, 0):
                    raise ValueError(f"{op.name}: {t} is read after another tensor overwrote it")
            for t in op.outputs:
                if isinstance(op, Rename):
                    seen[t] = seen[op.inputs[0]]
                else:
                    seen[t] = written[t.storage] = written.get(t.storage, 0) + 1
        return seen, written

    def prune_operators(self, outputs: Iterable[Tensor]) -> set[Tensor]:
        """Remove all operators that `outputs` do not need. Returns the storages of all tensors that they need."""
        needed, ops = {one.storage for one in outputs}, []
        for op in reversed(self.ops):
            if any(out.storage in needed for out in op.outputs):
                needed.update(one.storage for one in op.inputs)
                ops.append(op)
        self.ops = ops[::-1]
        return needed

    def prune(self, outputs: Iterable[Tensor]) -> None:
        """Remove all operators, inputs and parameters that `outputs` do not need."""
        needed = self.prune_operators(outputs)
        self.tensors = {name: one for name, one in self.tensors.items() if one in needed}
        self.inputs = {name: one for name, one in self.inputs.items() if name in self.tensors}
        self.params = {one: param for one, param in self.params.items() if one in needed}
        self.kept = {key: one for key, one in self.kept.items() if one in needed}

    def computed(self, op: Op, cuts: Tiling) -> float:
        """Return an operator's flop for reports.

        Tiles outside a mask's band, and room in bins that no step can fill, do not count.
        """
        return op.flop() * op.filled(cuts) * self.filled

    def flop(self, cuts: Tiling | None = None) -> float:
        """Return the graph's flop in contractions and attention only, as is customary.

        cuts: tiling, which decides how many tiles lie outside a mask's band; None: the graph's tiling.
        """
        counted = (op.products() * op.filled(cuts or self.cuts) for op in self.ops if op.category is CONTRACTION)
        return sum(counted) * self.filled


def _check_sizes(op: Op) -> None:
    """Raise ValueError if an axis has different sizes in an operator's tensors: their tiles would not match."""
    seen: dict[str, Tensor] = {}
    for tensor in [] if op.independent else [*op.inputs, *op.outputs]:
        for axis, size in tensor.sizes.items():
            if (first := seen.setdefault(axis, tensor)).size(axis) != size:
                raise ValueError(f"{op.kind}: {axis} has different sizes in {first} and {tensor}")
