"""Training steps and evaluations of a model, submitted to the running StarPU."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nntile_py import _core
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution import memory
from nntile_py.execution.program import Program, Store, programs
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.optimizers import REST, SGD, AdamW, Optimizer
from nntile_py.graph.step import PRECISIONS, Evaluation, Step, build_evaluation, build_step
from nntile_py.models.gpt2 import GPT2
from nntile_py.tasks.cross_entropy import IGNORED
from nntile_py.tasks.op import Lowering, Tensor
from nntile_py.tasks.optimizer import joined, split
from nntile_py.tiles import TaskList, Tiling

STEPS_IN_FLIGHT = 2
IntArray = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepResult:
    """Of one step: its number from 1, mean cross-entropy, norm of the gradient before clipping."""

    step: int
    loss: float
    grad_norm: float


class Pending:
    """A step that was submitted; `result()` waits for it."""

    def __init__(self, step: int, fetch: _core.Fetch) -> None:
        self.step, self._fetch = step, fetch

    def done(self) -> bool:
        return bool(self._fetch.done())

    def result(self) -> StepResult:
        """Raises TaskError if a task failed."""
        loss, norm = self._fetch.wait()
        return StepResult(self.step, loss, norm)


class Trainer:
    """Trains a model in tiles on the running Runtime.

    batch, seq: of one micro-batch; grad_accumulation: micro-batches a step. tiles: {axis: size} over batch, seq,
    embed, heads, ffn, vocab. dtype: fp32; on CPU workers alone fp64; on CUDA workers tf32 (fp32 tiles,
    contractions rounded to tf32) and bf16 (fp32 accumulation and moments, weights trained in fp32: bf16
    and what rounding left; gradients in fp32 where several tasks add to them, in bf16 where one task makes them).
    accumulate: chain (deterministic), commute, redux or tree. fusion: True, False or {bias, activation, reshape, qkv,
    residual_norm: bool}. attention: vendor, merge, flash or naive
    instead of the model's own. shift_labels: labels have the positions of the inputs and are shifted here, as
    transformers does; False: labels[b, s] is the target of position s. Raises ConfigError for values out of range.
    """

    def __init__(
        self,
        model: GPT2,
        batch: int,
        seq: int,
        tiles: Mapping[str, int] | None = None,
        dtype: str = "fp32",
        optimizer: Optimizer | None = None,
        clip_grad_norm: float | None = None,
        accumulate: str = "chain",
        fusion: bool | Mapping[str, bool] | Fusion = True,
        *,
        attention: str | None = None,
        grad_accumulation: int = 1,
        seed: int = 0,
        shift_labels: bool = True,
    ) -> None:
        if Runtime.current is None:
            raise TaskError("Trainer: no runtime is running; use it inside `with nntile_py.Runtime(...):`")
        if not isinstance(model, GPT2):
            raise ConfigError(f"model: {type(model).__name__} is not allowed; use nt.models.GPT2, which has from_hf()")
        if dtype not in PRECISIONS:
            raise ConfigError(f"dtype: {dtype!r} is not allowed; use one of {', '.join(PRECISIONS)}")
        if dtype in ("bf16", "tf32") and not _core.cuda_workers():
            raise ConfigError(f"dtype: {dtype} needs CUDA workers, this runtime has none; use fp32, or cuda=1 or more")
        if dtype == "fp64" and _core.cuda_workers():
            raise ConfigError("dtype: fp64 is for CPU workers alone; use fp32, tf32 or bf16, or cuda=0")
        if seq > model.config.positions:
            raise ConfigError(f"seq: {seq} is longer than the model's {model.config.positions} positions")
        for name, value in (("batch", batch), ("seq", seq), ("grad_accumulation", grad_accumulation)):
            if value < 1:
                raise ConfigError(f"{name}: {value} is not allowed; use a positive integer")
        if optimizer is not None and not isinstance(optimizer, AdamW | SGD):
            raise ConfigError(f"optimizer: {optimizer!r} is not allowed; use nt.AdamW(...) or nt.SGD(...)")
        self.model, self.batch, self.seq, self.dtype = model, batch, seq, dtype
        self._check_alone(Runtime.current)
        self.optimizer = optimizer or AdamW()
        self.grad_accumulation, self.seed, self.shift_labels = grad_accumulation, seed, shift_labels
        self._policy, self._fusion, self._tiling = accumulate, Fusion.of(fusion), Tiling(tiles)
        self._form = model if attention is None else model.with_attention(attention)
        self.steps = 0
        self._pending: deque[Pending] = deque()
        self._evaluations: dict[bool, tuple[Evaluation, Program]] = {}

        try:
            built = build_step(
                self._form, batch, seq, self._tiling, dtype=dtype, optimizer=self.optimizer,
                clip_grad_norm=clip_grad_norm, policy=accumulate, fusion=self._fusion,
                grad_accumulation=grad_accumulation,
            )  # fmt: skip
        except ValueError as error:
            raise ConfigError(str(error)) from None
        memory.check_step(built, Runtime.current)
        _core.advise(f"the largest tensors are {built.largest()}")
        self._built, self._store = built, Store()
        self._first, *more, self._update = programs(
            [low.tasks for low in built.lists], self._store, tf32=dtype == "tf32"
        )
        self._more = more[0] if more else None
        self._write_weights()
        written = set(self._rests().values())
        for tensor in built.update_graph.tensors.values():
            if tensor.kind == "state" and tensor not in written:
                self._store.zero(built.update, tensor)
        self._store.write(built.first, built.graph.tensors["positions"], np.arange(seq))
        self._runtime = Runtime.current
        self._runtime.at_exit(self)

    # -- what a step costs

    @property
    def tokens_per_step(self) -> int:
        return self.grad_accumulation * self.batch * self.seq

    @property
    def flop_per_step(self) -> int:
        """Floating point operations of the contractions and attentions of a step."""
        return int(self.grad_accumulation * self._built.flop)

    @property
    def tasks_per_step(self) -> int:
        more = self._more.tasks if self._more else 0
        return self._first.tasks + (self.grad_accumulation - 1) * more + self._update.tasks

    @property
    def built(self) -> Step:
        """Graphs and task lists of a step."""
        return self._built

    @property
    def update_list(self) -> TaskList:
        """The tasks that end a step."""
        return self._update.list

    @staticmethod
    def memory_bytes() -> int:
        """Bytes that tiles take now, in main memory; with CUDA workers the most that the fullest GPU has held."""
        return memory.gpu_peak() if _core.cuda_workers() else int(_core.memory_used())

    # -- training

    def submit(self, input_ids: IntArray, labels: IntArray, lr: float | None = None) -> Pending:
        """Submit one step and return at once; at most two are in flight.

        input_ids, labels: ints [grad_accumulation * batch, seq]; a label of -100 is left out of the mean. lr: of this
        step, default the optimizer's.
        """
        ids, targets = self._check(input_ids, labels, self.grad_accumulation * self.batch)
        if lr is not None:
            replace(self.optimizer, lr=lr)  # refuses what an optimizer's rate may not be
        if not self.steps:
            self._check_alone(self._runtime)
        while len(self._pending) >= STEPS_IN_FLIGHT:
            self._pending.popleft().result()
        self.steps += 1
        counted = int((targets >= 0).sum())
        slots = {
            "lr": self.optimizer.lr if lr is None else lr,
            "loss_scale": 1.0 / max(counted, 1),
            **self.optimizer.slots(self.steps),
        }
        for micro in range(self.grad_accumulation):
            rows = slice(micro * self.batch, (micro + 1) * self.batch)
            slots["dropout_seed"] = self._dropout_seed(micro)
            program, low = (self._first, self._built.first)
            if micro and self._more and self._built.more:
                program, low = self._more, self._built.more
            self._write_inputs(low, self._built.graph.tensors, ids[rows], targets[rows])
            program.run(slots)
        self._update.run(slots)
        scalars = [("loss", (0,)), ("grad_norm", (0,))]
        pending = Pending(self.steps, _core.Fetch([self._store.handles[key] for key in scalars]))
        self._pending.append(pending)
        return pending

    def step(self, input_ids: IntArray, labels: IntArray, lr: float | None = None) -> float:
        """One training step; returns the mean cross-entropy before the update."""
        return self.submit(input_ids, labels, lr).result().loss

    def evaluate(self, input_ids: IntArray, labels: IntArray, *, return_logits: bool = False) -> Any:
        """Mean cross-entropy of [batch, seq] ints without dropout, or (loss, logits [batch, seq, vocab])."""
        if Runtime.current is not self._runtime:
            raise TaskError("evaluate: the runtime of this Trainer has stopped; make a Trainer of another")
        ids, targets = self._check(input_ids, labels, self.batch)
        if return_logits not in self._evaluations:
            built = build_evaluation(
                self._form, self.batch, self.seq, self._tiling, dtype=self.dtype, policy=self._policy,
                fusion=self._fusion, keep_logits=return_logits,
            )  # fmt: skip
            (program,) = programs([built.forward.tasks], self._store, tf32=self.dtype == "tf32")
            self._evaluations[return_logits] = (built, program)
        built, program = self._evaluations[return_logits]
        self._write_inputs(built.forward, built.graph.tensors, ids, targets)
        program.run({"loss_scale": 1.0 / max(int((targets >= 0).sum()), 1)})
        (loss,) = _core.Fetch([self._store.handles["loss", (0,)]]).wait()
        if not return_logits:
            return loss
        return loss, self._store.read(built.forward, built.logits)

    # -- weights and gradients

    def gradients(self) -> dict[str, np.ndarray[Any, Any]]:
        """{name in transformers: gradient} of the last step, before clipping."""
        if not self.steps:
            raise TaskError("gradients: no step has been made yet")
        return self._read({b.tensor: grad for b in self._built.bindings if (grad := self._built.grads.get(b.tensor))})

    def state_dict(self) -> dict[str, np.ndarray[Any, Any]]:
        """{name in transformers: weight}, tied weights once; also kept in the model."""
        rests = self._rests()
        self.model.weights = self._read({b.tensor: b.tensor for b in self._built.bindings}, rests)
        return dict(self.model.weights)

    def close(self) -> None:
        """Bring the weights back into the model and let go of the trainer; the runtime does so before it stops."""
        if self.steps:
            self.state_dict()
        self._runtime.forget(self)

    # -- inside

    def _check_alone(self, runtime: Runtime) -> None:
        """Of two that train one model each would lose what the other has learnt."""
        if any(user is not self and user.model is self.model and user.steps for user in runtime.users):
            raise ConfigError("model: another Trainer trains it; use close() of that one first, or a model of its own")

    def _dropout_seed(self, micro: int) -> float:
        """Another one for each seed, step and micro-batch; 48 bits, which a float argument holds exactly."""
        key = f"{self.seed} {self.steps} {micro}".encode()
        return float(int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big"))

    def _read(
        self, tensors: Mapping[Tensor, Tensor], rests: Mapping[Tensor, Tensor] | None = None
    ) -> dict[str, np.ndarray[Any, Any]]:
        result: dict[str, np.ndarray[Any, Any]] = {}
        for binding in self._built.bindings:
            if binding.tensor in tensors:
                value = self._store.read(self._built.first, tensors[binding.tensor])
                if rest := (rests or {}).get(binding.tensor):
                    value = joined(value, self._store.read(self._built.update, rest))
                binding.put(result, value, self.model.weights[binding.name].shape)
        return result

    def _rests(self) -> dict[Tensor, Tensor]:
        """What each bf16 parameter lacks of the fp32 one; empty for other dtypes."""
        states = self._built.update_graph.tensors
        pairs = ((b.tensor, states.get(f"{b.tensor.name}.{REST}")) for b in self._built.bindings)
        return {param: rest for param, rest in pairs if rest}

    def _write_weights(self) -> None:
        rests = self._rests()
        for binding in self._built.bindings:
            value = binding.take(self.model.weights)
            if binding.tensor in rests:
                value, rest = split(value)
                self._store.write(self._built.update, rests[binding.tensor], rest)
            self._store.write(self._built.first, binding.tensor, value)

    def _write_inputs(self, low: Lowering, tensors: Mapping[str, Tensor], ids: IntArray, labels: IntArray) -> None:
        self._store.write(low, tensors["input_ids"], ids)
        self._store.write(low, tensors["labels"], labels)

    def _check(self, input_ids: IntArray, labels: IntArray, rows: int) -> tuple[IntArray, IntArray]:
        """Inputs of the right shape and range, and the targets of each position."""
        ids, labels = np.asarray(input_ids), np.asarray(labels)
        if labels.dtype.kind == "u":
            labels = labels.astype(np.int64)
        for name, value in (("input_ids", ids), ("labels", labels)):
            if value.shape != (rows, self.seq) or value.dtype.kind not in "iu":
                raise ValueError(
                    f"{name}: {value.dtype} {value.shape} is not allowed; expected ints {(rows, self.seq)}"
                )
        vocab = self.model.config.vocab
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"input_ids: ids go from {ids.min()} to {ids.max()}; allowed are 0 to {vocab - 1}")
        kept = labels[labels != IGNORED]
        if kept.size and (kept.min() < 0 or kept.max() >= vocab):
            raise ValueError(
                f"labels: go from {kept.min()} to {kept.max()}; allowed are 0 to {vocab - 1} and {IGNORED}"
            )
        if self.shift_labels:
            shifted = np.full_like(labels, IGNORED)
            shifted[:, :-1] = labels[:, 1:]
            labels = shifted
        return ids.astype(np.int64), labels.astype(np.int64)
