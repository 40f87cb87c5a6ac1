"""Any PyTorch module as a model: its operators on named axes, cut into tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nntile_py.capture import attention_calls, fallback, losses, pointwise_calls, products, views  # noqa: F401
from nntile_py.capture.axis_names import axis_names
from nntile_py.capture.builder import GraphBuilder
from nntile_py.capture.export import TASKS, CapturedModule, args_of, capture, shape_of, sort, state_of
from nntile_py.capture.fallback import AtenFallback
from nntile_py.capture.losses import loss_call, plain_cross_entropy, scalar_loss
from nntile_py.capture.rewrites import rewrite
from nntile_py.capture.rules import AxisFinder
from nntile_py.errors import ConfigError
from nntile_py.graph.freeze import spread
from nntile_py.graph.graph import Graph
from nntile_py.graph.initial_weights import initial_adapters
from nntile_py.graph.lora import LoRA, merged
from nntile_py.graph.params import Batch, Param, Traced
from nntile_py.schema import validated
from nntile_py.tasks.formula import ONE
from nntile_py.typed import typed

Example = Mapping[str, torch.Tensor]
Loss = Callable[[Any, Example], torch.Tensor]
# {attribute of a transformers config: name of the axes of that size}; the first attribute with a size names it.
CONFIG_SIZES = {
    "vocab_size": "vocab", "hidden_size": "embed", "n_embd": "embed", "d_model": "embed", "dim": "embed",
    "intermediate_size": "ffn", "n_inner": "ffn", "d_ff": "ffn", "ffn_dim": "ffn", "hidden_dim": "ffn",
}  # fmt: skip


class _WithLoss(torch.nn.Module):
    """A module whose outputs include a loss that the function `loss` computes.

    own: names of the inputs that the original module takes. output: name of the original output if it is a tensor.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss, own: set[str], output: str) -> None:
        super().__init__()
        self.original, self.loss, self.own, self.output = module, loss, own, output

    def forward(self, **inputs: torch.Tensor) -> dict[str, Any]:
        out = self.original(**{name: value for name, value in inputs.items() if name in self.own})
        loss = self.loss(out, inputs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"shape {[*loss.shape]}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(f"loss: the function returned {given}; allowed: a tensor of one number")
        if isinstance(out, tuple | list) and not hasattr(out, "_fields"):
            out = {f"output{k}": value for k, value in enumerate(out)}
        return {"loss": loss, **({self.output: out} if isinstance(out, torch.Tensor) else dict(out))}


class TorchModel:
    """A model that is captured from a PyTorch module. See from_torch."""

    def __init__(
        self, module: torch.nn.Module, example: Example, loss: Loss | None = None, output: str = "output",
        lora: LoRA | None = None,
    ) -> None:  # fmt: skip
        self.module, self.loss, self._output, self.lora = module, loss, output, lora
        self.example = dict(example)
        self._captured: dict[tuple[int, int, bool], tuple[CapturedModule, AxisFinder, dict[Any, str]]] = {}
        self._weights: dict[str, Any] | None = None
        self.fallbacks: list[str] = []

    def __repr__(self) -> str:
        return f"TorchModel({type(self.module).__name__})"

    @property
    def weights(self) -> Mapping[str, Any]:
        """{name: numpy array}. The first access copies the module's weights."""
        if self._weights is None:
            self._weights = {
                name: value.detach().to(_wide(value.dtype)).cpu().numpy().copy()
                for name, value in state_of(self.module).items()
            }
            if self.lora:
                self._weights |= initial_adapters(self.params(), seed=0)
        return self._weights

    @weights.setter
    def weights(self, weights: Mapping[str, Any]) -> None:
        self._weights = dict(weights)

    @property
    def captured_sizes(self) -> tuple[int, int] | None:
        """The rows and positions of a batch for which the module is captured already; None: not captured yet."""
        return next(((batch, seq) for batch, seq, _ in self._captured), None)

    def params(self) -> list[Param]:
        """Return the parameters that the module's loss or outputs depend on."""
        graph = Graph()
        self.trace(graph, Batch(*self.sizes))
        return list(graph.params.values())

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows and positions of the example: `nt.Trainer(model, *model.sizes)`."""
        first = next(iter(self.example.values()))
        return first.shape[0], next((x.shape[1] for x in self.example.values() if _is_tokens(x)), 1)

    def inputs(self, batch: int, seq: int) -> dict[str, torch.Tensor]:
        """Return the example's tensors with `batch` rows, and `seq` positions where the example has tokens."""
        rows, positions = self.sizes
        result = {}
        for name, x in self.example.items():
            shape = [batch if k == 0 and n == rows else n for k, n in enumerate(x.shape)]
            if _is_tokens(x) and x.shape[1] == positions:
                shape[1] = seq
            index = [torch.arange(n) % x.shape[k] for k, n in enumerate(shape)]
            result[name] = x[torch.meshgrid(*index, indexing="ij")].contiguous()
        return result

    def captured(self, batch: int, seq: int, training: bool) -> tuple[CapturedModule, AxisFinder, dict[Any, str]]:
        """Return the module's operators, its axes and their names for a batch."""
        key = batch, seq, training
        if key not in self._captured:
            module = self.module
            if self.loss:
                own = {name for name in self.example if name in _arguments(module)}
                module = _WithLoss(module, self.loss, own, self._output)
            before = self.module.training
            self.module.train(training)
            try:
                found = capture(module, self.inputs(batch, seq), type(self.module).__name__)
            finally:
                self.module.train(before)
            rewrite(found)
            sort(found)
            find = AxisFinder(found, AtenFallback())
            self._propose(found, find, seq)
            find.run()
            self._captured[key] = found, find, axis_names(find, self._config_sizes())
        return self._captured[key]

    def _propose(self, found: CapturedModule, find: AxisFinder, seq: int) -> None:
        for name, node in found.given.items():
            dims, x = find.of(node), self.example[name]
            find.propose(dims[0], "batch")
            if _is_tokens(x) and len(dims) > 1 and shape_of(node)[1] == seq:
                find.propose(dims[1], "seq")

    def _config_sizes(self) -> dict[int, str]:
        config = getattr(self.module, "config", None)
        sizes: dict[int, str] = {}
        for attribute, name in CONFIG_SIZES.items():
            size = getattr(config, attribute, None)
            if isinstance(size, int) and size > 1:
                sizes.setdefault(size, name)
        return sizes

    def trace(self, g: Graph, batch: Batch) -> Traced:
        """Add the module's operators to the graph."""
        if batch.packed:
            need = "train.pack: false, and no command that packs, as encode, and eval of masked models"
            raise ConfigError(f"model: a captured PyTorch module does not pack sequences; allowed: {need}")
        if batch.cached:
            need = "generation by transformers, which reads the folder of a run"
            raise ConfigError(f"model: a captured PyTorch module has no cache of keys and values; allowed: {need}")
        found, find, names = self.captured(batch.size, batch.seq, g.training)
        made = GraphBuilder(found, find, names, g)
        made.prefix = "original." if self.loss else ""
        loss = loss_call(found)
        if loss is not None and plain_cross_entropy(found, loss):
            logits, labels = args_of(loss)[:2]
            made.labels = {labels: shape_of(logits)[1]}
        for name, node in found.given.items():
            made.declare(name, node)
        attention_calls.share_heads(found, g.cuts)
        made.run()
        self.fallbacks = [call.label for call in made.fallbacks]
        total = None
        if loss is not None:
            value = made.value(loss)
            total = value.tensor if value.tensor is g.loss else scalar_loss(g, value.tensor, batch.size)
        outputs = {}
        for name, node in found.outputs.items():
            if found.where[node] == TASKS:
                value = made.ordered(made.value(node))
                if value.tensor.kind == "temp" and value.tensor.axes != (ONE,):
                    outputs[name] = value.tensor
        if g.training and total is None:
            need = "nt.from_torch(module, example, loss) with loss(output, inputs), or an output with `loss`"
            raise ConfigError(f"model: the output of {type(self.module).__name__} has no loss; allowed: {need}")
        if self.lora:
            self.lora.adapt(g)
        else:
            self._freeze(g)
        return Traced(total, outputs)

    def _freeze(self, g: Graph) -> None:
        """Do not train weights whose `requires_grad` is false in the module."""
        frozen = {name for name, value in self.module.named_parameters() if not value.requires_grad}
        if not frozen:
            return
        for tensor, param in g.params.items():
            tensor.requires_grad &= not any(source.weight in frozen for source in param.sources)
        if g.training and not any(tensor.requires_grad for tensor in g.params):
            need = "a module with a parameter whose requires_grad is true"
            raise ConfigError(f"model: all weights of {type(self.module).__name__} are frozen; allowed: {need}")
        spread(g)

    def to_torch(self) -> torch.nn.Module:
        """Copy the weights into the module, with adapters added to them, and return the module."""
        weights = merged(self.lora, self.params(), self.weights) if self.lora else self.weights
        with torch.no_grad():
            for name, value in state_of(self.module).items():
                if name in weights:
                    value.copy_(torch.from_numpy(np.array(weights[name])))
        return self.module


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _arguments(module: torch.nn.Module) -> set[str]:
    return set(inspect.signature(module.forward).parameters)


def _is_tokens(x: torch.Tensor) -> bool:
    return x.dim() >= 2 and not x.dtype.is_floating_point


@typed
def from_torch(
    module: torch.nn.Module, example: Mapping[str, Any], loss: Loss | None = None, *,
    lora: Mapping[str, Any] | None = None,
) -> TorchModel:  # fmt: skip
    """Return a model with the operators and weights of a PyTorch module, for nt.Trainer.

    torch.export captures the module when a Trainer is created, again for each size of the batch. Dimensions that
    operators force to be equal are one axis; `tiles` cuts axes by name.

    Args:
        module: The module. Its forward takes the names of `example`.
        example: {name: tensor or array} of a batch. The first dimension of each tensor is the batch; the second
            dimension of a tensor of integers is seq.
        loss: loss(output, inputs), for a module whose output has no `loss`. `inputs` are all tensors of `example`; only
            those that the module's forward has by name are passed to it.
        lora: Train adapters of low rank instead of the weights: {"targets": names of linear layers, "rank": ...}, the
            keys of `model.lora` in a YAML.

    Raises:
        ConfigError: An argument is not allowed. If torch.export cannot capture the module, the Trainer raises it.
    """
    if not example:
        raise ConfigError("example: is empty; allowed: {name: tensor} with the inputs of a batch")
    tensors: dict[str, torch.Tensor] = {}
    for name, value in example.items():
        try:
            tensors[name] = torch.as_tensor(value)
        except Exception as error:
            raise ConfigError(f"example: {name!r} is {type(value).__name__}; allowed: a tensor or an array") from error
        if not isinstance(name, str) or not tensors[name].dim() or not tensors[name].numel():
            raise ConfigError(f"example: {name!r} of shape {[*tensors[name].shape]}; allowed: a text, and [batch, ...]")
    if meta := [name for name, value in module.named_parameters() if value.is_meta]:
        raise ConfigError(f"module: {meta[0]} is on meta, without values; allowed: a module with weights")
    model = TorchModel(module, tensors, loss, lora=None if lora is None else validated(LoRA, dict(lora), "lora."))
    _ = model.weights  # copies the module's weights as they are now
    return model


@typed
def to_torch(model: TorchModel) -> torch.nn.Module:
    """Copy a captured model's weights into its module, and return the module. Close the model's Trainer first."""
    return model.to_torch()
