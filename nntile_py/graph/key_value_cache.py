"""A cache of keys and values in pages, for generation: a forward pass with the cache computes only new tokens.

A model's code does not mention the cache. If the graph has a cache, `attention` with a causal mask uses it, and
`position_input` and `rotary_input` take positions from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nntile_py.errors import ConfigError
from nntile_py.graph.graph import Graph
from nntile_py.tasks.attention_operands import Operands
from nntile_py.tasks.cached_attention import PAGES, CachedAttention, PageParts, TokenPlaces, cached_attention
from nntile_py.tasks.contract import Contract, linear
from nntile_py.tasks.gather import gather
from nntile_py.tasks.mask import Mask
from nntile_py.tasks.op import Op, Tensor, accumulation_dtype
from nntile_py.tasks.sample import SETTINGS, Sample, Unite, unite
from nntile_py.tasks.top_logprobs import MOST_RANKED, TopLogProbs

IDS = "input_ids"  # the input with a causal model's tokens
TOKENS = "next_tokens"  # the output of a pass: for each row, the tokens drawn for the last RING positions
# Outputs of a pass with log-probabilities: the values and the tokens of TopLogProbs, for drawn tokens and for prompts.
LOGPROBS, RANKED = "logprobs", "ranked_tokens"
PROMPT_LOGPROBS, PROMPT_RANKED = "prompt_logprobs", "prompt_ranked_tokens"
TARGETS = "prompt_targets"  # the input with the token after each token of a prompt; -1: none
RING = 4  # passes whose tokens are copied together; a copy after each pass would delay the GPU


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a cache.

    Attributes:
        length: Positions of the longest sequence.
        pages: Number of pages, including page 0 of each part, which no sequence uses.
        slots: Positions of a page.
        parts: How the axis page is cut, and which rows use which part; None: the axis is not cut.
    """

    length: int
    pages: int
    slots: int = 64
    parts: PageParts | None = None

    @property
    def entries(self) -> int:
        """Number of entries of a page table's row."""
        return PAGES + -(-self.length // self.slots)

    @property
    def part_count(self) -> int:
        """Number of parts of the cache."""
        return -(-self.pages // self.parts.pages) if self.parts else 1

    @property
    def most_pages(self) -> int:
        """Largest number of pages of a sequence."""
        return (self.parts.pages if self.parts else self.pages) - 1


@dataclass(frozen=True)
class Sampling:
    """How a pass chooses the next token of each row.

    Attributes:
        greedy: Take the largest logit. The pass has no inputs of settings and draws.
        penalised: Apply the repetition penalty to the tokens of the history.
        tokens: Number of tokens that may be drawn; None: all of the vocabulary.
        logprobs: Compute log-probabilities of the drawn tokens: the outputs LOGPROBS and RANKED.
        prompts: Compute log-probabilities of the prompts' tokens: the outputs PROMPT_LOGPROBS and PROMPT_RANKED.
    """

    greedy: bool = False
    penalised: bool = False
    tokens: int | None = None
    logprobs: bool = False
    prompts: bool = False


@dataclass
class KeyValueCache:
    """The cache of a graph: pages with keys and values (tensors of the kind `cache`), and inputs that describe a pass.

    Attributes:
        rows: Number of sequences of a pass.
        seq: Largest number of new tokens of a row.
        table: int64 [rows, entry], the page table, see CachedAttention.
    """

    graph: Graph
    shape: CacheShape
    rows: int
    seq: int
    table: Tensor = field(init=False)
    _places: dict[int, TokenPlaces] = field(default_factory=dict)
    _layers: int = 0

    def __post_init__(self) -> None:
        self.table = self._input("page_table", {"entry": self.shape.entries})

    def _input(self, name: str, sizes: Mapping[str, int], dtype: str = "int64") -> Tensor:
        return self.graph.input(name, {"batch": self.rows, **sizes}, dtype)

    def _token_places(self, below: int) -> TokenPlaces:
        if below not in self._places:
            temp = self.graph.temp
            positions = temp("positions", ["batch", "seq"], [self.rows, self.seq], "int64")
            last = temp("last", ["batch", "last"], [self.rows, 1], "int64")
            self._places[below] = TokenPlaces(self.table, positions, last, below)
            self.graph.add(self._places[below])
        return self._places[below]

    def positions(self, below: int) -> Tensor:
        """Return the position of each new token, int64 [batch, seq], less than `below`."""
        return self._token_places(below).outputs[0]

    def attend(self, operands: Operands, mask: Mask, scale: float | None) -> Tensor:
        """Return attention of the new tokens to the cached and the new tokens, with q's axes.

        Raises:
            ConfigError: The mask is not causal, or depends on inputs, such as a padding mask.
        """
        if not mask.causal or mask.inputs:
            need = "attention with a causal mask without padding, such as that of GPT-2 and Llama"
            raise ConfigError(f"generation: got {mask} in {'.'.join(self.graph._scope)}; allowed: {need}")
        k, v = operands.parts[1][0], operands.parts[2][0]
        heads = "kv_heads" if "kv_heads" in k.axes else "heads"
        pools = []
        for name, tensor in (("keys", k), ("values", v)):
            sizes = {"page": self.shape.pages, heads: tensor.size(heads), "slot": self.shape.slots}
            sizes["head_dim"] = tensor.size("head_dim")
            pool = f"layer{self._layers}.{name}"
            pools.append(self.graph.named(pool, list(sizes), list(sizes.values()), "cache", tensor.dtype))
        self._layers += 1
        return cached_attention(self.graph, operands, self.table, pools, scale, mask.window, self.shape.parts)

    def last_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of each row's last new token, [batch, ..., vocab] with uncut rows.

        If the logits are a product of hidden states and a weight, only the logits of these last tokens are computed.
        """
        if logits.axes[:2] != ("batch", "seq") or len(logits.axes) != 3:
            raise ConfigError(f"generation: got logits {logits}; allowed: the axes batch, seq, vocab")
        if self.seq > 1:
            last = self._token_places(self.shape.length).outputs[1]
            producer = next(op for op in self.graph.ops if logits in op.outputs)
            inputs = producer.inputs
            if isinstance(producer, Contract) and inputs[0].axes[:2] == ("batch", "seq") and len(inputs) == 2:
                x = gather(self.graph, inputs[0], last)
                logits = linear(self.graph, x, inputs[1], ["batch", "last", logits.axes[2]])
            else:
                logits = gather(self.graph, logits, last)
        return self._united(logits)

    def _united(self, logits: Tensor) -> Tensor:
        return unite(self.graph, logits) if self.graph.cuts.cut(logits.axes[-1], logits.shape[-1]) else logits

    def sampled(self, logits: Tensor, sampling: Sampling, advances: bool) -> dict[str, Tensor]:
        """Add a Sample of the logits [batch, seq, vocab], and return the outputs of the pass by name.

        Args:
            advances: The Sample also prepares the next pass, with the drawn tokens as new tokens.
        """
        settings = draws = history = ids = None
        g, places, last = self.graph, {"draw": self.shape.length + 1}, self.last_logits(logits)
        if not sampling.greedy:
            settings = self._input("settings", {"setting": len(SETTINGS)}, "fp32")
            draws = self._input("draws", places, "fp32")
        if sampling.penalised:
            history = self._input("history", places)
        if advances:
            ids = g.tensors[IDS]
        drawn = self._input(TOKENS, {"ring": RING})
        changed = [drawn, *([self.table, *([history] if history else []), ids] if ids else [])]
        after = [_after(g, t) for t in changed if t]
        g.add(Sample(last, self.table, drawn, settings, draws, history, ids, sampling.tokens, after))
        outputs = {TOKENS: drawn}
        if sampling.logprobs:
            table = after[1] if advances else self.table
            outputs |= self._ranked((LOGPROBS, RANKED), last, after[0], table, sampling.tokens, advances)
        if sampling.prompts:
            targets = self._input(TARGETS, {"seq": self.seq})
            names = PROMPT_LOGPROBS, PROMPT_RANKED
            outputs |= self._ranked(names, self._united(logits), targets, None, sampling.tokens)
        return outputs

    def _ranked(
        self, names: tuple[str, str], logits: Tensor, chosen: Tensor, table: Tensor | None, tokens: int | None,
        advanced: bool = False,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Add a TopLogProbs, and return its outputs by name. The arguments are those of TopLogProbs."""
        sizes = {chosen.axes[1]: chosen.shape[1], "rank": 1 + min(MOST_RANKED, tokens or logits.shape[-1])}
        dtypes = accumulation_dtype(logits.dtype), "int64"
        values, ids = (self._input(name, sizes, dtype) for name, dtype in zip(names, dtypes, strict=True))
        after = [_after(self.graph, tensor) for tensor in (values, ids)]
        self.graph.add(TopLogProbs(logits, chosen, values, ids, table, tokens, after, advanced=advanced))
        return {names[0]: values, names[1]: ids}


def _after(g: Graph, tensor: Tensor) -> Tensor:
    """Return a tensor on the same tiles, which stands for their contents after an operator in place."""
    return g.temp("after", tensor.axes, tensor.shape, tensor.dtype, storage=tensor)


def check_cached(graph: Graph) -> None:
    """Check that a forward pass with a cache computes each position from its own token and the cache alone.

    Raises:
        ConfigError: Another input has the axis seq, or an operator other than cached attention combines positions.
    """
    for name, declared in graph.inputs.items():
        if name not in (IDS, TARGETS, PROMPT_LOGPROBS, PROMPT_RANKED) and "seq" in declared.tensor.axes:
            need = f"{IDS}, and positions that nntile_py.models.parts.position_input or rotary_input declares"
            raise ConfigError(f"generation: the model has the input {name} for each token; allowed: {need}")
    for op in graph.ops:
        if not isinstance(op, CachedAttention) and _combines_positions(op):
            need = "operators that compute each token separately, and attention with a causal mask"
            raise ConfigError(f"generation: the operator {op.full_name} combines tokens; allowed: {need}")
    _check_early_reads(graph)


def _check_early_reads(graph: Graph) -> None:
    """Check two conditions of kernels that read the cache before earlier kernels have ended (see tasks/launch.py).

    Each pool of keys or values belongs to one attention, and no operator before the last attention changes the page
    table.
    """
    attends = [op for op in graph.ops if isinstance(op, CachedAttention)]
    pools = [pool for op in attends for pool in op.pools]
    assert len({*pools}) == len(pools), "two attentions share a pool of keys or values"
    before = graph.ops[: max(map(graph.ops.index, attends), default=0)]
    tables = {op.table for op in attends}
    written = {tensor for op in before for out in op.outputs for tensor in (out, out.storage)}
    assert not tables & written, "an operator before an attention changes the page table"


def _combines_positions(op: Op) -> bool:
    """Return True if an output at one position may depend on inputs at other positions."""
    read, written = ({axis for t in tensors for axis in t.axes} for tensors in (op.inputs, op.outputs))
    if {"key", "place", "row"} & (read | written):
        return True
    own = isinstance(op, Sample | TopLogProbs | Unite)
    own |= any(t.kind == "temp" and t.axes == ("batch", "last") for t in op.inputs)
    return "seq" in read and "seq" not in written and not own


def summed_last(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return {weight: order of axes} for fast products of few rows: the summed axes come last.

    Weights that other operators read too, such as a tied embedding, keep their order and are left out.
    """
    orders: dict[Tensor, tuple[str, ...]] = {}
    fixed: set[Tensor] = set()
    for op in graph.ops:
        for tensor in op.inputs:
            if tensor.kind != "param":
                continue
            if not isinstance(op, Contract) or tensor is not op.b or op.batch or len(tensor.axes) < 2:
                fixed.add(tensor)
                continue
            order = (*(axis for axis in tensor.axes if axis not in op.k), *(a for a in op.a.axes if a in op.k))
            if orders.setdefault(tensor, order) != order:
                fixed.add(tensor)
    return {tensor.name: order for tensor, order in orders.items() if tensor not in fixed and order != tensor.axes}
