"""Captures a PyTorch module by torch.export, and sorts its operators: computed once, on the host, or in tasks."""

from __future__ import annotations

import io
import operator
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Node

from nntile_py.errors import ConfigError

Inputs = Mapping[str, torch.Tensor]
Array = np.ndarray[Any, Any]

CONSTANT, HOST, TASKS = "constant", "host", "tasks"
TRUE_GRADIENTS = ("transformers.models.bloom.modeling_bloom",)  # modules whose autograd.Functions have true gradients
IGNORED = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_assert_async")


def name_of(node: Node) -> str:
    """Return the ATen name of a call without its overload, such as `add`; empty for other nodes."""
    if node.op != "call_function":
        return ""
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, _, name = node.target._schema.name.partition("::")
        return name if namespace == "aten" else f"{namespace}::{name}"
    return getattr(node.target, "__name__", str(node.target))


def args_of(node: Node) -> tuple[Any, ...]:
    """Return a call's arguments: nodes, numbers, texts, lists."""
    return node.args


def shape_of(node: Node) -> tuple[int, ...]:
    return tuple(int(size) for size in node.meta["val"].shape)


@dataclass
class CapturedModule:
    """The operators of a module for inputs of fixed sizes.

    Attributes:
        where: for each node that has a value: CONSTANT, HOST (depends on inputs alone) or TASKS (on parameters).
        weights: {node: name of the parameter or of the statistics}.
        statistics: names of the buffers that training changes, such as the running means of batch norm.
        updates: {node of statistics: node of their new value}.
        given: {name: node} of the inputs.
        constants: values of the constant nodes.
        outputs: {name: node}.
        loss: the node of the loss; None: the module has no loss.
        whole: {name of a parameter: shape}.
        parts: {node: WeightPart} of parameters that are parts of a weight.
    """

    graph: torch.fx.Graph
    where: dict[Node, str] = field(default_factory=dict)
    weights: dict[Node, str] = field(default_factory=dict)
    statistics: Collection[str] = ()
    updates: dict[Node, Node] = field(default_factory=dict)
    given: dict[str, Node] = field(default_factory=dict)
    constants: dict[Node, Any] = field(default_factory=dict)
    outputs: dict[str, Node] = field(default_factory=dict)
    loss: Node | None = None
    whole: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: dict[Node, Any] = field(default_factory=dict)

    @property
    def calls(self) -> list[Node]:
        """The nodes that run as tasks and on which the loss or an output depends, in order."""
        needed: dict[Node, None] = {}
        todo = [node for node in (*self.outputs.values(), self.loss, *self.updates.values()) if node is not None]
        while todo:
            node = todo.pop()
            if self.where.get(node) == TASKS and node not in needed:
                needed[node] = None
                todo += node.all_input_nodes
        return [node for node in self.graph.nodes if node in needed and node not in self.weights]

    def _host_steps(self, node: Node) -> list[Node]:
        """Return the HOST nodes from which the value of a HOST node is computed, in order; the node itself is last."""
        order = [one for one in self.graph.nodes if self.where.get(one) == HOST]
        needed = {node}
        for one in reversed(order):
            if one in needed:
                needed.update(one.all_input_nodes)
        return [one for one in order if one in needed]

    def inputs_of(self, node: Node) -> set[str]:
        """Return the names of the inputs on which a HOST node depends."""
        steps = self._host_steps(node)
        return {name for name, given in self.given.items() if given in steps}

    def on_host(self, node: Node) -> Callable[[Mapping[str, Array]], Any]:
        """Return the function that computes the value of a HOST node from the inputs of a pass."""
        steps, names = self._host_steps(node), {given: name for name, given in self.given.items()}

        def compute(arrays: Mapping[str, Array]) -> Any:
            values: dict[Node, Any] = {}
            for one in steps:
                if one in names:
                    values[one] = torch.as_tensor(np.ascontiguousarray(arrays[names[one]]))
                    values[one] = values[one].to(one.meta["val"].dtype)
                else:
                    values[one] = _run(one, lambda arg: values.get(arg, self.constants.get(arg)))
            return values[node]

        return compute


def _run(node: Node, value: Callable[[Node], Any]) -> Any:
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
    assert callable(node.target)
    with torch.no_grad():
        return node.target(*args, **kwargs)


def capture(module: torch.nn.Module, example: Inputs, kind: str) -> CapturedModule:
    """Return the operators of a module in its mode (training or evaluation), for inputs of the example's sizes.

    Args:
        module: The module.
        example: A batch.
        kind: Name of the module's class, for errors.

    Raises:
        ConfigError: torch.export cannot capture the module: the message has the line of the user's code. Or gradients
            or buffers of the captured module would differ from PyTorch's.
    """
    given = {name: value.clone() for name, value in example.items()}  # a tensor given twice would be one input
    custom: list[str] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: custom.extend(_custom_gradients(output)))
    try:
        # On an error torch.export prints the graph so far to stderr, hundreds of lines.
        with torch.enable_grad(), _without_caches(module), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about its code
            exported = torch.export.export(module, (), given, strict=False)
            _inline_no_grad(exported.graph_module)
            if any(name_of(node).endswith("_") and name_of(node)[0] != "_" for node in exported.graph.nodes):
                exported = exported.run_decompositions({})  # replaces operators that change their arguments
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"model: torch.export cannot capture {kind}: {_reason(error)}") from error
    finally:
        hook.remove()
    hooked = [f"the hook of {name}" for name, value in module.named_parameters() if value._backward_hooks]
    for name in (*custom, *hooked):
        need = "gradients by PyTorch's own operators (y + (f(y) - y).detach() has the gradient of y), without hooks"
        raise ConfigError(f"model: {name} in {kind} changes gradients by its own code; allowed: {need}")
    result = CapturedModule(exported.graph, statistics=statistics_of(module).keys())
    _read_inputs(result, exported)
    _join_tied(result, module)
    _read_outputs(result, exported)
    _check_buffers(result, exported)
    return result


def _check_buffers(result: CapturedModule, exported: Any) -> None:
    """Raise ConfigError if the loss depends on a buffer or parameter that the forward pass changes."""
    changed = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION}
    targets = {spec.target for spec in exported.graph_signature.output_specs if spec.kind in changed}
    targets -= {*result.statistics}
    places = {spec.target: spec.arg.name for spec in exported.graph_signature.input_specs if spec.target in targets}
    nodes = {node.name: node for node in result.graph.nodes if node.op == "placeholder"}
    ends = {*result.outputs.values(), result.loss}
    for name, place in places.items():
        todo, seen = [nodes[place]], set[Node]()
        while todo:
            node = todo.pop()
            if node in ends:
                need = "buffers that do not change, and running statistics of batch norm"
                raise ConfigError(
                    f"model: the forward pass changes {name}, and the results depend on it; allowed: {need}"
                )
            seen.add(node)
            todo += [one for one in node.users if one not in seen]


def _custom_gradients(output: Any) -> list[str]:
    """Return the names of the torch.autograd.Functions that an output was computed by, and whose gradients may differ.

    A Function may have any code as its gradient. Those of TRUE_GRADIENTS and of torch.library are left out.
    """
    tensors = [x for x in torch.utils._pytree.tree_leaves(output) if isinstance(x, torch.Tensor)]
    todo, seen = [x.grad_fn for x in tensors if x.grad_fn], set[Any]()
    while todo:
        function = todo.pop()
        if function not in seen:
            seen.add(function)
            todo += [one for one, _ in function.next_functions if one]
    own: list[Any] = [type(one) for one in seen if isinstance(one, torch.autograd.function.BackwardCFunction)]
    own = [one for one in own if getattr(getattr(one, "_forward_cls", None), "__module__", "") not in TRUE_GRADIENTS]
    # Operators of torch.library (GeneratedBackwardFor...) stay whole calls in the graph, with their gradients.
    names = [one.__name__.removesuffix("Backward") for one in own]
    return [name for name in names if not name.startswith("GeneratedBackwardFor")]


def _inline_no_grad(module: Any) -> None:
    """Put the operators of the regions under torch.no_grad into the module's graph; their results are detached."""
    graph = module.graph
    for node in [*graph.nodes]:
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        enabled, body, *operands = node.args
        region = getattr(module, body.target)
        _inline_no_grad(region)
        places = [one for one in region.graph.nodes if one.op == "placeholder"]
        with graph.inserting_before(node):
            results = graph.graph_copy(region.graph, dict(zip(places, operands, strict=True)))
            for user in [*node.users]:
                result = results[user.args[1]]
                if not enabled:
                    detached = graph.call_function(torch.ops.aten.detach.default, (result,))
                    detached.meta, result = dict(result.meta), detached
                user.replace_all_uses_with(result)
                graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)
    module.recompile()


@contextmanager
def _without_caches(module: torch.nn.Module) -> Iterator[None]:
    """Let modules of transformers return no keys and values for generation, which torch.export cannot capture."""
    configs = {id(config): config for one in module.modules() if (config := getattr(one, "config", None)) is not None}
    caching = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _reason(error: Exception) -> str:
    """Return the first lines of an error that say what failed and where in the user's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith(('File "', "Caused by: (")) and "/torch/" not in line]
    return " ".join([*lines[:1], *where[-1:]])[:600] or type(error).__name__


def statistics_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: buffer} of the running means and variances of a module's batch norms."""
    return {
        f"{prefix}.{name}".lstrip("."): value
        for prefix, one in module.named_modules() if isinstance(one, torch.nn.modules.batchnorm._NormBase)
        for name, value in one.named_buffers(recurse=False) if value.is_floating_point()
    }  # fmt: skip


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a module's parameters and running statistics. The tensors share the module's memory."""
    return {name: value.detach() for name, value in module.named_parameters()} | statistics_of(module)


def _read_inputs(result: CapturedModule, exported: Any) -> None:
    nodes = {node.name: node for node in result.graph.nodes if node.op == "placeholder"}
    for spec in exported.graph_signature.input_specs:
        node = nodes[spec.arg.name] if hasattr(spec.arg, "name") else None
        if node is None:
            continue
        if spec.kind == InputKind.PARAMETER or spec.target in result.statistics:
            result.weights[node], result.where[node] = spec.target, TASKS
            result.whole[spec.target] = shape_of(node)
        elif spec.kind == InputKind.USER_INPUT:
            if isinstance(node.meta.get("val"), torch.Tensor):
                result.given[spec.arg.name], result.where[node] = node, HOST
        else:
            stored = exported.state_dict.get(spec.target)
            result.constants[node] = exported.constants[spec.target] if stored is None else stored
            result.where[node] = CONSTANT


def _join_tied(result: CapturedModule, module: torch.nn.Module) -> None:
    """Let all uses of a tied parameter, which has several names, use one node, named as by `named_parameters`."""
    names: dict[int, str] = {}
    for name, value in module.named_parameters():
        names[id(value)] = name
    canonical = {name: names[id(value)] for name, value in module.named_parameters(remove_duplicate=False)}
    first: dict[str, Node] = {}
    for node, name in result.weights.items():
        if name in result.statistics:
            continue
        result.weights[node] = canonical[name]
        result.whole[canonical[name]] = shape_of(node)
        if (same := first.setdefault(canonical[name], node)) is not node:
            node.replace_all_uses_with(same)


def sort(result: CapturedModule) -> None:
    """Decide for each call where it runs; compute the values of constant calls."""
    for node in result.graph.nodes:
        if node.op != "call_function" or name_of(node) in IGNORED:
            continue
        places = {result.where.get(one, CONSTANT) for one in node.all_input_nodes}
        place = TASKS if TASKS in places else HOST if HOST in places else CONSTANT
        if place != TASKS:
            check_draws(node)
        elif _shape_is_data(node):
            what = f"the shape of a result of {name_of(node)} depends on values: {line_of(node)}"
            raise ConfigError(f"model: {what}; allowed: results of fixed shapes, such as x * mask")
        result.where[node] = place
        if place == CONSTANT:
            result.constants[node] = _run(node, lambda arg: result.constants[arg])
    result.outputs = {name: node for name, node in result.outputs.items() if result.where.get(node) == TASKS}


def _shape_is_data(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def check_draws(node: Node) -> None:
    """Raise ConfigError if a call draws random numbers: when repeated or differentiated, it would draw others."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return
    name, args = name_of(node), args_of(node)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        off = not (args[5] and args[6])
    elif name == "scaled_dot_product_attention":
        off = not (args[4] if len(args) > 4 else node.kwargs.get("dropout_p", 0.0))
    else:
        off = name.endswith("dropout") and not (args[1] and args[2])
    if not off:
        need = "dropout of values that depend on weights. Set the call's probability to 0: often a key of the config"
        raise ConfigError(f"model: {name} draws random numbers: {line_of(node)}; allowed: {need}")


def line_of(node: Node) -> str:
    """Return the line of the user's module that made a call, for messages."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in trace if line.startswith("File ")]
    return files[-1] if files else f"node {node.name}"


def _read_outputs(result: CapturedModule, exported: Any) -> None:
    out = next(node for node in result.graph.nodes if node.op == "output")
    buffers = {name: node for node, name in result.weights.items() if name in result.statistics}
    for value, one in zip(args_of(out)[0], exported.graph_signature.output_specs, strict=True):
        if one.kind == OutputKind.BUFFER_MUTATION and one.target in buffers:
            result.updates[buffers[one.target]] = value
    user = [spec.kind == OutputKind.USER_OUTPUT for spec in exported.graph_signature.output_specs]
    leaves = [value for value, own in zip(args_of(out)[0], user, strict=True) if own]  # the others are changed buffers
    spec = exported.call_spec.out_spec
    tree = torch.utils._pytree.tree_unflatten(leaves, spec)
    if isinstance(tree, Mapping):
        named = {str(key): value for key, value in tree.items()}
    elif isinstance(tree, list | tuple):
        named = {f"output{k}": value for k, value in enumerate(tree)}
    else:
        named = {"output": tree}
    result.outputs = {name: node for name, node in named.items() if isinstance(node, Node)}
    if "loss" in result.outputs:
        result.loss = result.outputs.pop("loss")
    elif "output" in result.outputs and shape_of(result.outputs["output"]) == ():
        result.loss = result.outputs.pop("output")


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem
