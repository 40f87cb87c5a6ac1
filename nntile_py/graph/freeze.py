"""Frozen weights: parameters of a graph that a training step leaves as they are."""

from __future__ import annotations

from collections.abc import Sequence

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.graph.params import Param
from nntile_py.tasks.param_group import check_match, matches


def freeze(graph: Graph, patterns: Sequence[str]) -> None:
    """Mark the parameters whose weights match a pattern as frozen, without a gradient. To be called before `backward`.

    Args:
        patterns: Patterns of names of weights in checkpoints, as in ParamGroup.match.

    Raises:
        ConfigError: A pattern matches no weight, all weights match, or a parameter joins weights of which only some
            match.
    """
    if not patterns:
        return
    names = list(dict.fromkeys(source.weight for param in graph.params.values() for source in param.sources))
    check_match("freeze", patterns, names)
    if all(matches(name, patterns) for name in names):
        raise ConfigError("freeze: all weights match; allowed: patterns that leave a weight to train")
    for tensor, param in graph.params.items():
        tensor.requires_grad &= not _frozen(param, patterns)
    spread(graph)


def spread(graph: Graph) -> None:
    """Mark the outputs of an operator as needing no gradient if none of the operator's inputs needs a gradient."""
    for op in graph.ops:
        for out in op.outputs:
            out.requires_grad &= any(one.requires_grad for one in op.inputs)


def counts(params: Sequence[Param]) -> tuple[int, int]:
    """Return (number of values of the trained parameters, number of values of all parameters)."""
    tensors = [param.tensor for param in params]
    return sum(one.numel for one in tensors if one.requires_grad), sum(one.numel for one in tensors)


def _frozen(param: Param, patterns: Sequence[str]) -> bool:
    found = {source.weight: matches(source.weight, patterns) for source in param.sources}
    if len({*found.values()}) > 1:
        both = ", ".join(f"{name} ({'frozen' if frozen else 'trained'})" for name, frozen in found.items())
        raise ConfigError(f"freeze: {both} are one parameter here; allowed: patterns that match all of them or none")
    return any(found.values())
