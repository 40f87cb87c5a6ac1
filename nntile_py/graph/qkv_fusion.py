"""Queries, keys and values of one input as one product (fusion.qkv); before the gradients, which then come packed too.

Algebraic fusion of Table II in Ivanov et al. 2021 ("Data movement is all you need").
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nntile_py.graph.graph import Graph
from nntile_py.graph.params import packed
from nntile_py.graph.rewriter import Uses
from nntile_py.tasks.attention import Attention
from nntile_py.tasks.attention_operands import Operands
from nntile_py.tasks.contract import Contract
from nntile_py.tasks.elementwise import BiasAdd, Transpose, Unpack
from nntile_py.tasks.op import Op, Tensor

AXIS = "qkv"
Chains = Mapping[tuple[Tensor, ...], Sequence[Sequence[Op]]]  # by what they make: queries, keys, values


def pack_projections(graph: Graph, outputs: Iterable[Tensor] = (), count: int = 3) -> Graph:
    """Replace the products of each attention's queries, keys and values by one where they are alike. In place.

    count: 2, the queries and keys alone.

    Alike: the same input, weights and biases of equal axes and sizes, read by nothing but these products (or those of
    several attentions, each of which has them all), and none of `outputs`.
    """
    asked = set(outputs)
    uses = Uses(graph)
    maker, readers = uses.maker, uses.readers
    replaced: dict[Op, list[Op]] = {}  # by the first of those that go
    gone: set[Op] = set()
    renamed: dict[str, Tensor | None] = {}  # what takes the place of a parameter in the graph's names, if anything
    packed = [tuple(some[:count]) for some in graph.projections]
    found = {qkv: [_chain(tensor, maker, readers) for tensor in qkv] for qkv in packed}
    free = {qkv: chains for qkv, chains in found.items() if not asked & {op.output for ops in chains for op in ops}}
    made_of: dict[tuple[Tensor, ...], Tensor] = {}  # the packed parameter by those that it took the place of
    for qkv, chains in _packable({qkv: chains for qkv, chains in free.items() if _alike(chains)}, readers).items():
        made, out = _packed_chain(graph, chains, renamed, made_of)
        attention = readers[qkv[0]][0]
        if isinstance(attention, Attention):
            parts = [part if index < 0 else (part, index) for part, index in attention.operands.parts]
            attention.operands = Operands(*[(out, k) for k in range(count)], *parts[count:])
            attention.inputs = [*attention.operands.tensors, *attention.data]
        else:
            unpack = Unpack(out, qkv, AXIS)
            unpack.name = f"{attention.name.rpartition('.')[0]}.{unpack.kind}".lstrip(".")
            made.append(unpack)
        replaced[chains[0][0]] = made
        gone.update(op for chain in chains for op in chain)
    graph.ops = [new for op in graph.ops for new in replaced.get(op, [] if op in gone else [op])]
    now = [(name, renamed.get(name, tensor)) for name, tensor in graph.tensors.items()]
    graph.tensors = {tensor.name if name in renamed else name: tensor for name, tensor in now if tensor}
    return graph


def _chain(tensor: Tensor, maker: dict[Tensor, Op], readers: dict[Tensor, list[Op]]) -> list[Op]:
    """The operators that make it from its product on, [Contract, BiasAdd, Transpose]; none if others read between."""
    chain: list[Op] = []
    while (op := maker.get(tensor)) and isinstance(op, Contract | BiasAdd | Transpose) and len(readers[tensor]) == 1:
        chain.insert(0, op)
        if isinstance(op, Contract):
            return chain
        tensor = op.inputs[0]
    return []


def _alike(chains: Sequence[Sequence[Op]]) -> bool:
    """Whether the chains differ in their parameters alone, and those in nothing but name and values."""
    first = chains[0]
    if not first or "heads" not in first[-1].output.axes:
        return False

    def shape(chain: Sequence[Op]) -> list[object]:
        return [(op.kind, op.output.sizes, [(t.axes, t.shape, t.kind) for t in op.inputs[1:]]) for op in chain]

    params = [t for chain in chains for op in chain for t in op.inputs[1:]]
    return (
        all(shape(chain) == shape(first) and chain[0].inputs[0] is first[0].inputs[0] for chain in chains)
        and all(t.kind == "param" for t in params)
        and len(set(params)) == len(params)
    )


def _packable(found: Chains, readers: Mapping[Tensor, Sequence[Op]]) -> Chains:
    """Those whose parameters nothing reads but such chains, each with the same others beside it: layers may share."""
    ops = {op for chains in found.values() for chain in chains for op in chain}
    beside: dict[Tensor, set[tuple[Tensor, ...]]] = {}
    for chains in found.values():
        for params in _params(chains):
            for one in params:
                beside.setdefault(one, set()).add(params)

    def whole(chains: Sequence[Sequence[Op]]) -> bool:
        params = [one for params in _params(chains) for one in params]
        return all(len(beside[one]) == 1 and ops.issuperset(readers[one]) for one in params)

    left = {qkv: chains for qkv, chains in found.items() if whole(chains)}
    return left if len(left) == len(found) else _packable(left, readers)


def _params(chains: Sequence[Sequence[Op]]) -> list[tuple[Tensor, ...]]:
    """The parameters that become one, of each operator that has some."""
    return [tuple(op.inputs[1] for op in ops) for ops in zip(*chains, strict=True) if len(ops[0].inputs) > 1]


def _packed_chain(
    graph: Graph,
    chains: Sequence[Sequence[Op]],
    renamed: dict[str, Tensor | None],
    made_of: dict[tuple[Tensor, ...], Tensor],
) -> tuple[list[Op], Tensor]:
    """One chain in the place of several: its output has the axis qkv before heads, or first once it is transposed."""
    for params in _params(chains):
        if params not in made_of:
            made_of[params] = _pack_param(graph, params, renamed)
    made: list[Op] = []
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
            new = BiasAdd(source, made_of[tuple(op.inputs[1] for op in ops)], out)
        else:
            new = Contract(source, made_of[tuple(op.inputs[1] for op in ops)], out)
        new.name = one.name
        made.append(new)
    return made, out


def _pack_param(graph: Graph, tensors: Sequence[Tensor], renamed: dict[str, Tensor | None]) -> Tensor:
    """The parameter that takes the place of several; the graph forgets those."""
    params = [graph.params.pop(tensor) for tensor in tensors]
    first = tensors[0]
    place = first.axes.index("heads")
    weights = list(dict.fromkeys(source.weight for param in params for source in param.sources))
    name = weights[0] if len(weights) == 1 else "+".join(t.name for t in tensors)
    axes = [*first.axes[:place], AXIS, *first.axes[place:]]
    tensor = Tensor(name, axes, [*first.shape[:place], len(tensors), *first.shape[place:]], first.dtype, "param")
    # In the place of the first one: the order of parameters is that of gradients and updates.
    renamed.update({first.name: tensor} | dict.fromkeys((t.name for t in tensors[1:]), None))
    graph.params[tensor] = packed(params, tensor, AXIS)
    return tensor
