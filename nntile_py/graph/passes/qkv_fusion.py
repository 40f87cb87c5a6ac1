"""Pass that merges the projections to queries, keys and values into one product (fusion.qkv).

Algebraic fusion of Table II in Ivanov et al. 2021 ("Data movement is all you need"). The pass runs before the gradients
are added, so the products that compute the gradients are merged too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import stacked
from nntile_py.graph.passes.rewriter import Rewriter
from nntile_py.tasks.attention import Attention
from nntile_py.tasks.attention_operands import Operands
from nntile_py.tasks.cached_attention import CachedAttention
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import BiasAdd, Transpose, Unpack
from nntile_py.tasks.op import Op, Tensor

AXIS = "qkv"
Chain = Sequence[Op]  # the operators of one projection: Contract, BiasAdd, Transpose
Chains = Mapping[tuple[Tensor, ...], Sequence[Chain]]  # {(queries, keys, values): their chains} for each attention


def merge_projections(graph: Graph, outputs: Iterable[Tensor] = (), count: int = 3) -> Graph:
    """Merge the products of each attention's queries, keys and values into one product, in place.

    In attention to another sequence, whose queries have an input of their own, keys and values merge (section IV-D of
    the paper). Products merge if they read the same input, and if their weights and biases have equal axes and sizes.
    No other operator may read these weights, except the same products of further attentions.

    Args:
        outputs: the model's outputs; a projection that computes an output does not merge.
        count: 3, or 2 to merge queries and keys only.
    """
    asked = set(outputs)
    rewriter = Rewriter(graph)
    maker, readers = rewriter.maker, rewriter.readers
    replaced: dict[Op, list[Op]] = {}  # {the first of several replaced operators: the new operators}
    removed: set[Op] = set()
    renamed: dict[str, Tensor | None] = {}  # {name of a removed parameter: the new parameter in its place, or None}

    def alike(some: Sequence[Tensor]) -> bool:
        chains = [_chain(tensor, maker, readers) for tensor in some]
        return _alike(chains) and not asked & {op.output for ops in chains for op in ops}

    candidates = ([some[:count], some[1:]] if count == 3 else [some[:count]] for some in graph.projections)
    wanted = [tuple(first) for of in candidates if (first := next(filter(alike, of), None))]
    every = {some: [_chain(tensor, maker, readers) for tensor in some] for some in wanted}
    merged_params: dict[tuple[Tensor, ...], Tensor] = {}  # {the replaced parameters: the new parameter}
    for merged, chains in _mergeable(every, readers).items():
        new_ops, out = _merged_chain(graph, chains, renamed, merged_params)
        attention = readers[merged[0]][0]
        if isinstance(attention, Attention | CachedAttention):
            q, k, v = (
                (out, merged.index(part)) if part in merged else part if index < 0 else (part, index)
                for part, index in attention.operands.parts
            )
            attention.operands = Operands(q, k, v)
            attention.inputs = [*attention.operands.tensors, *attention.data]
        else:
            unpack = Unpack(out, merged, AXIS)
            unpack.name = f"{attention.name.rpartition('.')[0]}.{unpack.kind}".lstrip(".")
            new_ops.append(unpack)
        replaced[chains[0][0]] = new_ops
        removed.update(op for chain in chains for op in chain)
    graph.ops = [new for op in graph.ops for new in replaced.get(op, [] if op in removed else [op])]
    now = [(name, renamed.get(name, tensor)) for name, tensor in graph.tensors.items()]
    graph.tensors = {tensor.name if name in renamed else name: tensor for name, tensor in now if tensor}
    return graph


def _chain(tensor: Tensor, maker: dict[Tensor, Op], readers: dict[Tensor, list[Op]]) -> list[Op]:
    """Return the operators of the projection that computes `tensor`, in order.

    Empty: `tensor` is not computed by a projection, or another operator reads a result of the chain.
    """
    chain: list[Op] = []
    while (op := maker.get(tensor)) and isinstance(op, Contract | BiasAdd | Transpose) and len(readers[tensor]) == 1:
        chain.insert(0, op)
        if isinstance(op, Contract):
            return chain
        tensor = op.inputs[0]
    return []


def _alike(chains: Sequence[Chain]) -> bool:
    """Return whether chains are equal except for the names and values of their parameters."""
    first = chains[0]
    if not first or "heads" not in first[-1].output.axes:
        return False

    def shape(chain: Chain) -> list[object]:
        def param(t: Tensor) -> object:
            return t.axes, t.shape, t.kind, t.requires_grad

        return [(op.kind, op.output.sizes, [param(t) for t in op.inputs[1:]]) for op in chain]

    params = [t for chain in chains for op in chain for t in op.inputs[1:]]
    return (
        all(shape(chain) == shape(first) and chain[0].inputs[0] is first[0].inputs[0] for chain in chains)
        and all(t.kind == "param" for t in params)
        and len(set(params)) == len(params)
    )


def _mergeable(every: Chains, readers: Mapping[Tensor, Sequence[Op]]) -> Chains:
    """Return the chains whose parameters can merge.

    A parameter can merge if no other operators than the chains read it. In layers that share weights, several chains
    read the same parameter. The parameter must then merge with the same other parameters in all these chains.
    """
    ops = {op for chains in every.values() for chain in chains for op in chain}
    beside: dict[Tensor, set[tuple[Tensor, ...]]] = {}
    for chains in every.values():
        for params in _params(chains):
            for one in params:
                beside.setdefault(one, set()).add(params)

    def closed(chains: Sequence[Chain]) -> bool:
        params = [one for params in _params(chains) for one in params]
        return all(len(beside[one]) == 1 and ops.issuperset(readers[one]) for one in params)

    left = {qkv: chains for qkv, chains in every.items() if closed(chains)}
    return left if len(left) == len(every) else _mergeable(left, readers)


def _params(chains: Sequence[Chain]) -> list[tuple[Tensor, ...]]:
    """Return, for each step of equal chains that has a parameter, the parameters of all chains, to merge into one."""
    return [tuple(op.inputs[1] for op in ops) for ops in zip(*chains, strict=True) if len(ops[0].inputs) > 1]


def _merged_chain(
    graph: Graph,
    chains: Sequence[Chain],
    renamed: dict[str, Tensor | None],
    merged_params: dict[tuple[Tensor, ...], Tensor],
) -> tuple[list[Op], Tensor]:
    """Return one chain of operators that replaces several chains, and the output of the new chain.

    The output has the axis qkv before heads; after a transposition qkv is the first axis.

    Args:
        renamed, merged_params: records of replaced parameters, which this function extends.
    """
    for params in _params(chains):
        if params not in merged_params:
            merged_params[params] = _merge_params(graph, params, renamed)
    new_ops: list[Op] = []
    out = chains[0][0].inputs[0]
    for ops in zip(*chains, strict=True):
        one, source = ops[0], out
        y = one.output
        place = 0 if isinstance(one, Transpose) else y.axes.index("heads")
        axes = [*y.axes[:place], AXIS, *y.axes[place:]]
        shape = [*y.shape[:place], len(ops), *y.shape[place:]]
        out = Tensor(y.name, axes, shape, y.dtype)
        out.requires_grad = y.requires_grad
        new: Op
        if isinstance(one, Transpose):
            new = Transpose(source, out)
        elif isinstance(one, BiasAdd):
            new = BiasAdd(source, merged_params[tuple(op.inputs[1] for op in ops)], out)
        else:
            new = Contract(source, merged_params[tuple(op.inputs[1] for op in ops)], out)
        new.name = one.name
        new_ops.append(new)
    return new_ops, out


def _merge_params(graph: Graph, tensors: Sequence[Tensor], renamed: dict[str, Tensor | None]) -> Tensor:
    """Replace parameters of a graph by one parameter with the further axis qkv, and return its tensor."""
    params = [graph.params.pop(tensor) for tensor in tensors]
    first = tensors[0]
    place = first.axes.index("heads")
    weights = list(dict.fromkeys(source.weight for param in params for source in param.sources))
    name = weights[0] if len(weights) == 1 else "+".join(t.name for t in tensors)
    axes = [*first.axes[:place], AXIS, *first.axes[place:]]
    tensor = Tensor(name, axes, [*first.shape[:place], len(tensors), *first.shape[place:]], first.dtype, "param")
    tensor.requires_grad = first.requires_grad
    # The new parameter takes the place of the first replaced parameter, because gradients and updates have the order of
    # the parameters.
    renamed.update({first.name: tensor} | dict.fromkeys((t.name for t in tensors[1:]), None))
    graph.params[tensor] = stacked(params, tensor, AXIS)
    return tensor
