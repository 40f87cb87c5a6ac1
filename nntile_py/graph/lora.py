"""LoRA: products of frozen weights get trained products of low rank beside them (Hu et al. 2021, eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import numpy as np

from nntile_py.errors import ConfigError
from nntile_py.graph.freeze import spread
from nntile_py.graph.graph import Graph
from nntile_py.graph.initializers import ZEROS, Uniform
from nntile_py.graph.packed_inputs import number_rows
from nntile_py.graph.params import Array, Param, Part, Weights
from nntile_py.schema import BelowOne, Names, Section, integer, number
from nntile_py.tasks.contract import Contract, contract
from nntile_py.tasks.elementwise import Add, BiasAdd, dropout
from nntile_py.tasks.op import Op, Tensor
from nntile_py.tasks.param_group import matches

A, B = "lora_A.weight", "lora_B.weight"
AXIS = "rank"


class LoRA(Section):
    """Adapters of low rank: y = W x becomes W x + alpha / rank * B A x, and W is not trained."""

    targets: Names
    """Modules that get adapters: names such as `q_proj`, or patterns of whole names with *, ? and [...]."""
    rank: Annotated[int, *integer(1, 2**16)] = 8
    """Rows of A and columns of B."""
    alpha: Annotated[float, *number(above=0, most=1e6)] = 16.0
    """The adapter's product is multiplied by alpha / rank."""
    dropout: BelowOne = 0.0
    """Probability with which an element of the adapter's input is zero in training."""
    modules_to_save: Names = ()
    """Modules that are trained too, such as a classifier's head; names or patterns as in `targets`."""

    def adapt(self, g: Graph) -> None:
        """Add the adapters to a model's forward graph; see `adapt`."""
        adapt(g, self)

    def chosen(self, weight: str, patterns: Sequence[str]) -> bool:
        """Return whether `patterns` name the module of a weight."""
        module = module_of(weight)
        return any(module.endswith(f".{one}") for one in patterns) or matches(module, patterns)


def module_of(weight: str) -> str:
    """Return the name of the module that holds a weight of a checkpoint."""
    return weight.rpartition(".")[0]


def is_adapter(weight: str) -> bool:
    """Return whether the name of a weight is that of an adapter."""
    return weight.endswith((f".{A}", f".{B}"))


def adapt(g: Graph, lora: LoRA) -> None:
    """Add adapters to a model's forward graph. Weights other than adapters and `modules_to_save` are frozen.

    Raises:
        ConfigError: A target names no weight, or a weight that more than products read.
    """
    if not lora.targets:
        raise ConfigError("model.lora.targets: got []; allowed: at least one module")
    params = [*g.params.values()]
    names = list(dict.fromkeys(source.weight for param in params for source in param.sources))
    others = {x for op in g.ops for x in op.inputs if not _is_factor(op, x)}
    products = [param.sources[0].weight for param in params if param.tensor not in others]
    matrices = [name for name in names if name.endswith(".weight")]  # a pattern that matches only biases is no target
    for key, fitting, known in (("targets", products, matrices), ("modules_to_save", names, names)):
        for pattern in getattr(lora, key):
            if not any(lora.chosen(name, [pattern]) for name in known):
                some = dict.fromkeys(module_of(name).rpartition(".")[2] for name in fitting if name.endswith(".weight"))
                allowed = f"modules such as {', '.join(some)}"
                raise ConfigError(f"model.lora.{key}: {pattern!r} names no module; allowed: {allowed}")
    targets = {
        param.tensor: param for param in params
        if lora.chosen(param.sources[0].weight, lora.targets) and param.sources[0].weight.endswith(".weight")
    }  # fmt: skip
    _check_products(g, targets)
    old, g.ops = g.ops, []
    made, done, readers = _Adapters(g, lora), set[Op](), dict[Tensor, list[Op]]()
    for op in old:
        for x in op.inputs:
            readers.setdefault(x, []).append(op)
    for op in old:
        if (weight := next((one for one in op.inputs if one in targets), None)) is not None:
            assert isinstance(op, Contract)
            biased = _bias_of(op.output, readers)
            made.add(op, weight, targets[weight], biased)
            done |= {biased} if biased else set()
        elif op not in done:
            g.ops.append(op)
    for param in params:
        weights = [source.weight for source in param.sources]
        param.tensor.requires_grad = any(lora.chosen(name, lora.modules_to_save) for name in weights)
    spread(g)


def adapted(params: Iterable[Param]) -> dict[str, bool]:
    """Return {adapted weight: whether the product sums over its first dimension, as in GPT-2's Conv1D}."""
    tensors = {source.weight: param.tensor for param in params for source in param.sources}
    summed = {name.removesuffix(f".{A}"): tensor.axes for name, tensor in tensors.items() if name.endswith(f".{A}")}
    return {f"{module}.weight": tensors[f"{module}.weight"].axes[0] in axes for module, axes in summed.items()}


def merged(lora: LoRA, params: Iterable[Param], weights: Weights) -> dict[str, Array]:
    """Return weights without adapters: each adapted weight is W + alpha / rank * B A (Hu et al. 2021, section 4.1).

    Raises:
        ConfigError: a sum is not finite.
    """
    result = {name: value for name, value in weights.items() if not is_adapter(name)}
    for name, transposed in adapted(params).items():
        a, b = (weights[f"{module_of(name)}.{part}"].astype(np.float64) for part in (A, B))
        product, of = lora.alpha / lora.rank * (b @ a), result[name]
        with np.errstate(over="ignore"):
            result[name] = (of + (product.T if transposed else product)).astype(of.dtype)
        if not np.isfinite(result[name]).all():
            raise ConfigError(f"model: {name} with its adapter is not finite in {of.dtype}; allowed: a smaller alpha")
    return result


def _is_factor(op: Op, x: Tensor) -> bool:
    """Return whether x is the matrix of a product: the second factor, without batch axes."""
    return isinstance(op, Contract) and op.b is x and not op.batch


def _check_products(g: Graph, targets: dict[Tensor, Param]) -> None:
    for op in g.ops:
        for tensor in op.inputs:
            if tensor in targets and not _is_factor(op, tensor):
                name = targets[tensor].sources[0].weight
                raise ConfigError(f"model.lora.targets: {name} is read by {op.kind}; allowed: weights of products only")


def _bias_of(x: Tensor, readers: dict[Tensor, list[Op]]) -> BiasAdd | None:
    """Return the BiasAdd that adds a bias to x. None: no BiasAdd reads x, or other operators read x too."""
    match readers.get(x):
        case [BiasAdd() as only] if only.inputs[0] is x:
            return only
    return None


class _Adapters:
    """Adds adapters to a graph. Parameters that are parts of one weight, such as q and k of c_attn, share A."""

    def __init__(self, g: Graph, lora: LoRA) -> None:
        self._g, self._lora = g, lora
        self._a: dict[str, Tensor] = {}
        self._b: dict[Tensor, Tensor] = {}
        self._z: dict[tuple[str, Tensor], Tensor] = {}  # {(weight, x): A x}

    def add(self, op: Contract, weight: Tensor, param: Param, biased: BiasAdd | None) -> None:
        """Add x W + bias + scale * (x A) B in place of the product `op` = x W and the addition `biased` of a bias.

        The result replaces the output of `biased`, or of `op` without a bias. The bias is added before the adapter, so
        that fusion finds the bias behind the product.
        """
        g, out, name = self._g, (biased or op).output, param.sources[0].weight
        scope = op.name.rpartition(".")[0]
        with g.scope(scope) if scope else g.scope("lora"):
            plain = g.temp("product", op.output.axes, op.output.shape, op.output.dtype)
            self._append(Contract(op.a, weight, plain, scale=op.scale), op.name)
            if biased:
                product, plain = plain, g.temp("biased", out.axes, out.shape, out.dtype)
                self._append(BiasAdd(product, biased.inputs[1], plain), biased.name)
            if (name, op.a) not in self._z:
                if self._lora.dropout:
                    number_rows(g, op.a)
                x = dropout(g, op.a, self._lora.dropout)
                self._z[name, op.a] = contract(g, x, self._of_a(op, name), [*self._rows(op), AXIS])
            z = self._z[name, op.a]
            scale = self._lora.alpha / self._lora.rank * op.scale
            low = contract(g, z, self._of_b(op, weight, param), out.axes, scale=scale)
            self._append(Add(plain, low, out), "")

    def _append(self, op: Op, name: str) -> None:
        if name:
            op.name = name
        self._g.add(op)

    def _rows(self, op: Contract) -> list[str]:
        return [axis for axis in op.a.axes if axis in op.m]

    def _of_a(self, op: Contract, weight: str) -> Tensor:
        if weight not in self._a:
            summed = {axis: op.a.size(axis) for axis in op.a.axes if axis in op.k}
            bound = 1 / math.sqrt(math.prod(summed.values()))
            axes = {AXIS: self._lora.rank, **summed}
            self._a[weight] = self._g.param(f"{module_of(weight)}.{A}", axes, Uniform(bound))
        return self._a[weight]

    def _of_b(self, op: Contract, weight: Tensor, param: Param) -> Tensor:
        if weight not in self._b:
            axes = {**{axis: weight.size(axis) for axis in weight.axes if axis in op.n}, AXIS: self._lora.rank}
            source, name = param.sources[0], f"{module_of(param.sources[0].weight)}.{B}"
            where: Any = None
            part = next(((k, at) for k, at in enumerate(source.index) if isinstance(at, int)), None)
            if part:  # such as queries, a third of c_attn
                where = Part(name, part[1], source.view[part[0]], next(iter(axes)))
                name = f"{weight.name}.{B}"
            self._b[weight] = self._g.param(name, axes, ZEROS, where)
        return self._b[weight]
