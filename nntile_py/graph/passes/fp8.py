"""Matrix products in 8 bits (precision: fp8)."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.passes.epilogue import rebuilt
from nntile_py.schema import Names, Settings, only
from nntile_py.tasks.band import ALL
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.cross_entropy import CrossEntropy
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tasks.quantize import Quantize
from nntile_py.tiles.dtypes import UNIT

# An 8-bit product needs a weight whose rows and columns are at least LEAST, and multiples of UNIT. Smaller products,
# such as those of adapters, gain nothing.
LEAST = 64


class FP8(Settings):
    """Options of `precision: fp8`. Products of layers have 8-bit operands and sum in fp32; all other operators, the
    products with the vocabulary, and the weights' fp32 master copies are as with `precision: bf16`."""

    section: ClassVar = "fp8"

    gradients: Annotated[
        Literal["e4m3", "e5m2"],
        *only("e4m3 or e5m2", lambda v: v if v in ("e4m3", "e5m2") else None, enum=["e4m3", "e5m2"]),
    ] = "e4m3"
    """The dtype of gradients in products: e4m3 has one more bit of precision, e5m2 a wider range."""
    scales: Annotated[
        Literal["tile", "row"],
        *only("tile or row", lambda v: v if v in ("tile", "row") else None, enum=["tile", "row"]),
    ] = "tile"
    """`tile`: each tile of an operand has one scale. `row`: each row of the left operand and each column of the right
    operand has a scale; products run in 8 bits on Hopper GPUs with cuBLAS 12.9 or later, else in bf16."""
    exclude: Names = ()
    """Patterns of names of products that stay in bf16, such as `h0.*` for the first layer of GPT-2. A pattern that
    matches no product is refused with a list of all names."""

    @staticmethod
    def of(value: FP8 | Mapping[str, Any] | None) -> FP8:
        """Return the options for a value that a user gave: {option: value}, or None for the default ones."""
        if value is None or isinstance(value, FP8):
            return value or FP8()
        if not isinstance(value, Mapping):
            raise ConfigError(f"fp8: got {value!r}; allowed: a mapping of {', '.join(FP8.model_fields)}")
        return FP8(**{str(name): option for name, option in value.items()})


def quantize_products(graph: Graph, options: FP8) -> None:
    """Let the products of layers read quantised operands, in place.

    Each operand gets a Quantize right after the operator that computes it. All products that read the operand share
    this Quantize.

    Raises:
        ConfigError: no product of a training step fits, or a pattern of `exclude` matches none.
    """
    products = _products(graph, options)
    maker = {out: op for op in graph.ops for out in op.outputs}
    quantised: dict[Tensor, dict[tuple[str, ...], tuple[Tensor, int]]] = {}  # {x: {axes: 8-bit tensor, its rows}}
    first_reader: dict[Tensor, Contract] = {}

    def operand(op: Contract, x: Tensor, rows: Sequence[str]) -> Tensor:
        axes = (*rows, *op.k)
        first_reader.setdefault(x, op)
        known = quantised.setdefault(x, {})
        if axes not in known:
            is_gradient = x in maker and maker[x].phase == "backward"
            dtype = options.gradients if is_gradient else "e4m3"
            shape, scaled = [x.size(axis) for axis in axes], len(rows) if options.scales == "row" else 0
            known[axes] = Tensor(f"{x.name}.{dtype}", axes, shape, dtype, scaled=scaled), len(rows)
        return known[axes][0]

    changed: dict[Op, Op] = {}
    for op in products:
        changed[op] = rebuilt(op, op.output, a=operand(op, op.a, op.m), b=operand(op, op.b, op.n))
        changed[op].name, changed[op].phase = op.name, op.phase
    before: dict[Op, list[Op]] = {}  # {operator: quantisations that run before it}
    after: dict[Op, list[Op]] = {}
    for x, outs in quantised.items():
        made = Quantize(x, [out for out, _ in outs.values()], [rows for _, rows in outs.values()])
        neighbour = maker.get(x, first_reader[x])
        made.name, made.phase = f"{first_reader[x].name.rpartition('.')[0]}.Quantize", neighbour.phase
        (after if x in maker else before).setdefault(neighbour, []).append(made)
    graph.ops = [
        one for op in graph.ops for one in (*before.get(op, ()), changed.get(op, op), *after.get(op, ()))
    ]  # fmt: skip


def _products(graph: Graph, options: FP8) -> list[Contract]:
    """Return the products to compute in 8 bits. Raises ConfigError, see quantize_products."""
    classes = {"vocab", *graph.class_axes}
    fitting = [op for op in graph.ops if isinstance(op, Contract) and _fits(op, graph.dtype, classes)]
    excluded = _matching(fitting, options.exclude)
    if not any(op.phase == "backward" for op in graph.ops):  # a forward pass may lack products of the training step
        return [op for op in fitting if op not in excluded]
    if not fitting:
        need = f"a model with weights whose rows and columns are multiples of {UNIT} and at least {LEAST}"
        raise ConfigError(f"precision: got fp8, and no product of the model fits; allowed: {need}")
    for pattern in options.exclude:
        if not _matching(fitting, [pattern]):
            known = ", ".join(dict.fromkeys(op.name for op in fitting if op.phase == "forward"))
            raise ConfigError(f"fp8.exclude: {pattern!r} matches no product; allowed: patterns of {known}")
    return [op for op in fitting if op not in excluded]


def class_axes(graph: Graph) -> frozenset[str]:
    """Return the axes of the logits of a graph's cross-entropies."""
    return frozenset(op.classes for op in graph.ops if isinstance(op, CrossEntropy))


def _matching(ops: Iterable[Contract], patterns: Sequence[str]) -> set[Contract]:
    return {op for op in ops if any(fnmatch.fnmatchcase(op.name, pattern) for pattern in patterns)}


def _fits(op: Contract, dtype: str, classes: set[str]) -> bool:
    """Return whether a product belongs to a layer, and its weight has sizes that fit (LEAST, UNIT).

    Any number of tokens is allowed.

    classes: axes of logits. Products with such an axis stay in bf16.
    """
    sizes = {**op.a.sizes, **op.b.sizes}
    weight = next((x for x in (op.a, op.b) if x.kind == "param"), op.output)
    extents = [math.prod(sizes[axis] for axis in axes) for axes in (op.m, op.n, op.k) if {*axes} & {*weight.axes}]
    return (
        not op.batch
        and all(x.band == ALL for x in (op.a, op.b, op.output))
        and op.a.dtype == op.b.dtype == dtype
        and classes.isdisjoint(sizes)
        and all(extent >= LEAST and extent % UNIT == 0 for extent in extents)
    )
