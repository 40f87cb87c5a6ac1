"""PyTorch's fastest BERT: `torch_packed`, `torch_padded` and `ddp` of `nntile bench step`.

torch_packed: Tokens without padding, sequence after sequence, and flash attention with the sequences' offsets. All
    layers use one graph, compiled for the batch's sizes. Logits are computed for masked tokens only. Indices are
    computed before the measurement, as by a data loader.
torch_padded: The same model on padded arrays, with scaled_dot_product_attention and, if needed, a mask of the keys.
ddp: Packed if train.pack is on, else padded; each rank has its share of the sequences.

Training uses the config's dropout. A forward pass (`--inference`) computes hidden states with weights of the config's
precision; on a GPU kernel by kernel or as a CUDA graph, whichever is faster. On CPUs, where PyTorch has no
variable-length attention, the attention of packed sequences is computed sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig
from nntile_py.graph.bin_packing import bins_of
from nntile_py.graph.padding import MASK
from nntile_py.measure.contestants import world_size
from nntile_py.measure.torch_peers import CapturedCall, Step, replicated, torch_device, torch_dtype, trained
from nntile_py.measure.workload_inputs import Array
from nntile_py.models.bert_parts import LayerNames
from nntile_py.system.clock import clocked
from nntile_py.tasks.cross_entropy import IGNORED

VOCAB_STEP = 64  # the embedding table gets unused rows up to a multiple of this: tensor cores need aligned operands
NEVER = -1e4  # bias of the embedding table's unused rows: makes their probability 0
TURNS, PASSES = 3, 20  # measurements of kernel-by-kernel and graph launches; passes in a measurement


# -- batches


class Sequences(NamedTuple):
    """Bounds of the sequences for attention: offsets of packed sequences, or the mask of padded ones."""

    mask: torch.Tensor | None  # [rows, 1, 1, seq]; None: packed, or no padding
    offsets: torch.Tensor | None  # int32 [sequences + 1], as flash attention needs them; None: padded
    lengths: tuple[int, ...]
    longest: int


class TorchBatch(NamedTuple):
    """A batch on the device: token ids [tokens], or padded [rows, seq]; `places`: indices of masked tokens."""

    ids: torch.Tensor
    positions: torch.Tensor
    sequences: Sequences
    places: torch.Tensor | None
    labels: torch.Tensor | None
    scale: float  # factor of the sum of the losses


def batch_of(
    arrays: Mapping[str, Array], mine: Array, *, packed: bool, device: torch.device, world: int = 1
) -> TorchBatch:
    """Return a rank's batch.

    Args:
        mine: indices of the rank's sequences.
        world: number of ranks, over which losses are averaged.
    """
    ids, seq = arrays["input_ids"][mine], arrays["input_ids"].shape[1]
    real = arrays[MASK][mine] != 0 if MASK in arrays else np.ones(ids.shape, bool)
    positions, lengths = np.arange(seq), real.sum(1)
    labels = arrays["labels"][mine] if "labels" in arrays else None
    if packed:
        positions = np.broadcast_to(positions, ids.shape)[real]
        ids, labels = ids[real], None if labels is None else labels[real]
        ends = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        sequences = Sequences(None, _on(ends, device), tuple(lengths.tolist()), int(lengths.max()))
    else:
        mask = None if real.all() else _on(real[:, None, None], device)
        sequences = Sequences(mask, None, (), seq)
    places = counted = None
    if labels is not None:
        flat = labels.reshape(-1)
        places, counted = np.flatnonzero(flat != IGNORED), flat[flat != IGNORED]
    total = max(int((arrays["labels"] != IGNORED).sum()), 1) if labels is not None else world
    return TorchBatch(
        _on(ids, device), _on(positions, device), sequences, _on(places, device), _on(counted, device), world / total
    )


def _on(value: Array | None, device: torch.device) -> Any:
    return None if value is None else torch.from_numpy(np.ascontiguousarray(value)).to(device)


def shares(config: RunConfig, arrays: Mapping[str, Array], world: int) -> list[Array]:
    """Return the indices of each rank's sequences.

    With train.pack, ranks get about equal work, as in nntile_py's bins; else equally many sequences.
    """
    rows = len(arrays["input_ids"])
    if not config.train.pack or MASK not in arrays:
        return np.array_split(np.arange(rows), world)
    bins = replace(bins_of(step_spec(config)), count=world, capacity=rows * config.train.seq, tokens=0)
    of = np.array([place.bin for place in bins.places(arrays[MASK].sum(1).tolist())])
    return [np.flatnonzero(of == rank) for rank in range(world)]


# -- the model


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, of: Sequences, dropout: float) -> torch.Tensor:
    """Return attention of q, k, v [tokens, heads, head_dim], or padded [rows, seq, heads, head_dim], in their shape."""
    if of.offsets is None:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, of.mask, dropout).transpose(1, 2)
    if q.device.type == "cpu":
        parts = zip(*(tensor.transpose(0, 1).split(of.lengths, 1) for tensor in (q, k, v)), strict=True)
        outputs = [F.scaled_dot_product_attention(a, b, c, None, dropout) for a, b, c in parts]
        return torch.cat(outputs, 1).transpose(0, 1)
    sizes = of.offsets, of.offsets, of.longest, of.longest
    if dropout:  # varlen_attn has no dropout
        return cast(torch.Tensor, torch.ops.aten._flash_attention_forward(q, k, v, *sizes, dropout, False, False)[0])
    from torch.nn.attention.varlen import varlen_attn  # takes a second: only where needed

    return cast(torch.Tensor, varlen_attn(q, k, v, *sizes))


class TorchBERTLayer(nn.Module):
    """Attention and feed-forward block. Modules have the names of LayerNames; `qkv` replaces query, key and value."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.heads, self.kind, self.dropouts = c.heads, c.activation, (c.dropout, c.attention_dropout)
        self.qkv, self.attended = nn.Linear(c.embed, 3 * c.embed), nn.Linear(c.embed, c.embed)
        self.wide, self.narrow = nn.Linear(c.embed, c.ffn), nn.Linear(c.ffn, c.embed)
        self.attended_norm, self.narrow_norm = (nn.LayerNorm(c.embed, c.layer_norm_eps) for _ in range(2))

    def forward(self, x: torch.Tensor, of: Sequences) -> torch.Tensor:
        hidden, attention = self.dropouts if self.training else (0.0, 0.0)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        y = self.attended(attend(q, k, v, of, attention).flatten(-2))
        x = self.attended_norm(x + F.dropout(y, hidden))
        y = self.narrow(activated(self.wide(x), self.kind))
        return cast(torch.Tensor, self.narrow_norm(x + F.dropout(y, hidden)))


def activated(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if kind == "gelu_new" else "none")


class TorchBERT(nn.Module):
    """BERT of a config's sizes. Calling the model returns the loss of masked tokens; `hidden` returns hidden states."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.config = c
        self.words = nn.Embedding(-(-c.vocab // VOCAB_STEP) * VOCAB_STEP, c.embed)
        self.positions, self.kinds = nn.Embedding(c.positions, c.embed), nn.Embedding(c.kinds, c.embed)
        self.norm = nn.LayerNorm(c.embed, c.layer_norm_eps)
        self.layers = nn.ModuleList(TorchBERTLayer(c) for _ in range(c.layers))
        if c.head == "masked_lm":
            self.dense, self.head_norm = nn.Linear(c.embed, c.embed), nn.LayerNorm(c.embed, c.layer_norm_eps)
            self.bias = nn.Parameter(torch.zeros(self.words.num_embeddings))
        # The module is an argument of the compiled functions, so that all layers use one graph. With fullgraph=True,
        # code that cannot be compiled is an error, not run eagerly.
        parts: list[Callable[..., Any]] = [TorchBERTLayer.forward, TorchBERT.embedded, TorchBERT.loss]
        self.run = {part: torch.compile(part, dynamic=False, fullgraph=True) for part in parts}

    def embedded(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the embeddings; all tokens have the first token type, as in nntile_py."""
        x = self.norm(self.words(ids) + self.positions(positions) + self.kinds.weight[0])
        return F.dropout(x, self.config.dropout, self.training)

    def hidden(self, batch: TorchBatch) -> torch.Tensor:
        x: torch.Tensor = self.run[TorchBERT.embedded](self, batch.ids, batch.positions)
        for layer in self.layers:
            x = self.run[TorchBERTLayer.forward](layer, x, batch.sequences)
        return x

    def loss(self, x: torch.Tensor, places: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        y = self.dense(x.reshape(-1, x.shape[-1])[places])
        logits = F.linear(self.head_norm(activated(y, self.config.activation)), self.words.weight, self.bias)
        return F.cross_entropy(logits.float(), labels, reduction="sum") * scale

    def forward(self, batch: TorchBatch) -> torch.Tensor:
        x = self.hidden(batch)
        return cast(torch.Tensor, self.run[TorchBERT.loss](self, x, batch.places, batch.labels, batch.scale))

    @torch.no_grad()
    def load(self, weights: Mapping[str, Array]) -> None:
        """Copy weights into the model; their names are those of transformers. Raises KeyError for a missing weight."""

        def copy(module: nn.Module, *names: str) -> None:
            for own, value in module.named_parameters():
                value.copy_(torch.cat([torch.from_numpy(weights[f"{name}.{own}"]) for name in names]))

        base, head = "bert.embeddings", "cls.predictions"
        self.words.weight.zero_()[: self.config.vocab] = torch.from_numpy(weights[f"{base}.word_embeddings.weight"])
        copy(self.positions, f"{base}.position_embeddings")
        copy(self.kinds, f"{base}.token_type_embeddings")
        copy(self.norm, f"{base}.LayerNorm")
        for number, layer in enumerate(self.layers):
            at = {own: f"bert.encoder.layer.{number}.{name}" for own, name in LayerNames()._asdict().items()}
            copy(layer.get_submodule("qkv"), *(at.pop(own) for own in ("query", "key", "value")))
            for own, name in at.items():
                copy(layer.get_submodule(own), name)
        if self.config.head == "masked_lm":
            copy(self.dense, f"{head}.transform.dense")
            copy(self.head_norm, f"{head}.transform.LayerNorm")
            self.bias.fill_(NEVER)[: self.config.vocab] = torch.from_numpy(weights[f"{head}.bias"])


def loaded(config: RunConfig, device: torch.device) -> TorchBERT:
    """Return the PyTorch model with the initial weights that nntile_py's model has."""
    with device:
        model = TorchBERT(config.model)
    model.load(build_model(config).weights)
    return model


# -- contestants


def torch_bert(config: RunConfig, arrays: Mapping[str, Array], name: str, work: str) -> tuple[Step, dict[str, Any]]:
    """Return a function that runs steps of `torch_packed` or `torch_padded`, and facts about it for the result.

    check_peer must accept the config.
    """
    device = torch_device(config)
    model = loaded(config, device)
    batch = batch_of(arrays, np.arange(len(arrays["input_ids"])), packed=name == "torch_packed", device=device)
    if work == "train":
        return trained(config, model.train(), model, [batch]), {}
    return passes(model.to(torch_dtype(config.precision)).eval(), batch)


def passes(model: TorchBERT, batch: TorchBatch) -> tuple[Step, dict[str, Any]]:
    """Return a function that runs forward passes kernel by kernel or as a CUDA graph, whichever is faster.

    On a GPU, the dict says in `captured` whether the graph is used.
    """
    call, facts = torch.inference_mode()(lambda: model.hidden(batch)), dict[str, Any]()
    on_gpu = batch.ids.device.type == "cuda"

    def repeated(call: Callable[[], Any]) -> Step:
        def run(n: int) -> list[float]:
            for _ in range(n):
                call()
            if on_gpu:
                torch.cuda.synchronize()
            return n * [0.0]

        return run

    if on_gpu:
        graph = CapturedCall(call, warm_up=call)
        launched, replayed = (min(clocked(repeated(way), TURNS, PASSES)) for way in (call, graph))
        facts["captured"] = replayed < launched
        call = graph if facts["captured"] else call
    return repeated(call), facts


def ranked_bert(config: RunConfig, arrays: Mapping[str, Array], rank: int, device: torch.device) -> Step:
    """Return a function that runs a rank's training steps by DDP. The rank must have joined the process group."""
    world = world_size(config)
    mine = shares(config, arrays, world)[rank]
    batch = batch_of(arrays, mine, packed=config.train.pack, device=device, world=world)
    model = replicated(loaded(config, device).train(), device)
    return trained(config, model, model, [batch])
