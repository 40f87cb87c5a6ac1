"""The Trainer: training steps and evaluations of a model on the running Runtime."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nntile_py import _core
from nntile_py.checkpoint.resume import load_trainer
from nntile_py.checkpoint.state import write_first_state
from nntile_py.checkpoint.writer import save_trainer
from nntile_py.errors import ConfigError, TaskError
from nntile_py.execution import memory
from nntile_py.execution.cuda_graph import TrainingProgram
from nntile_py.execution.forward_program import label_counts, mean_slots
from nntile_py.execution.runtime import Runtime, in_turns
from nntile_py.graph.bin_packing import Bins, bins_of
from nntile_py.graph.built_step import Step
from nntile_py.graph.freeze import counts
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.params import Traceable
from nntile_py.graph.passes.fp8 import FP8
from nntile_py.graph.recompute_rule import AUTO, RECOMPUTE
from nntile_py.graph.step import StepSpec, check_precision
from nntile_py.graph.step_inputs import StepInputs
from nntile_py.schema import NonNegative, checked_value
from nntile_py.system.interrupts import uninterrupted
from nntile_py.system.units import counted
from nntile_py.tasks.adamw import AdamW
from nntile_py.tasks.op import Tensor
from nntile_py.tasks.optimizer import INVERSE_SCALE, Optimizer
from nntile_py.tiles import TaskList, Tiling
from nntile_py.tiles.eviction import Offloaded
from nntile_py.training.inputs import Inputs, IntArray, as_step_inputs, dropout_seed
from nntile_py.training.nan_check import NanCheck
from nntile_py.training.programs import Programs, StepPrograms
from nntile_py.training.step_handle import STEPS_IN_FLIGHT, Pending, StepsInFlight
from nntile_py.training.trainer_weights import TrainerWeights
from nntile_py.typed import plain, typed


class Trainer(TrainerWeights):
    """Trains a model in tiles on the running Runtime. Calls from several threads take turns.

    Args:
        model: A model of nt.models, or an object of your own with `trace(graph, batch)` and `weights`.
        batch: Number of sequences in one forward and backward pass.
        seq: Number of tokens in a sequence.
        tiles: {axis: tile size} for any of the axes batch, seq, embed, heads, ffn, vocab. An axis left out is not cut.
        precision: `fp32`; `fp64` on CPU workers; `tf32`, `bf16`, `fp16` and `fp8` on CUDA workers. With tf32, tiles are
            fp32, and products round them to tf32. With bf16, tiles are bf16; accumulation, moments and master weights
            (bf16 plus low bits) are fp32, and so is a gradient to which several tasks add. fp16 is like bf16, but each
            master weight is a separate fp32 tensor, and the loss is scaled. fp8 is like bf16, but products of layers
            have 8-bit operands.
        optimizer: nt.AdamW(...), nt.SGD(...), nt.Muon(...) or nt.Lion(...). Default: nt.AdamW().
        clip_grad_norm: Upper bound on the norm of all gradients together; larger gradients are scaled down.
        skip_above_norm: A step whose gradient norm is larger or not finite changes no weights and no optimizer
            averages. The step is still counted.
        accumulate: How tasks add their partial sums to a tile: chain (deterministic), commute, redux or tree.
        fusion: True (all), False (none), or a dict: bias, activation, reshape, qkv, residual_norm and found are True or
            False each; exclude is a list of names of groups that are not fused.
        attention: Attention backend instead of the model's own: vendor, merge, flash or naive.
        grad_accumulation: Number of forward and backward passes whose gradients are averaged into one step.
        seed: Seed of dropout.
        shift_labels: True: a causal model's labels are at the positions of the inputs, as in transformers, and the
            trainer shifts them. False: labels[b, s] is the target of position s.
        pack: Pack sequences of up to `seq` tokens into bins instead of padding them. Each tile of the batch is a bin,
            and kernels compute only its filled part. Inputs are padded arrays with their attention_mask, or lists of
            arrays of unequal lengths. `tiles` must not cut seq.
        loss_scale: Factor by which the first step's loss is multiplied, so that small gradients do not round to zero. A
            step whose gradients overflow changes nothing and halves the factor. 2000 steps in a row without an
            overflow double it. Default: 65536 for fp16, else the loss is not scaled.
        freeze: Patterns of names of weights in checkpoints, such as `*.wte.*`. These weights are not trained: they have
            no gradient and no optimizer state.
        recompute: Operators whose results the backward pass computes again. Their results are not kept in memory.
            none; attention: the attention of each layer; layer: all operators of each layer; auto: the fastest of
            these by estimate in the runtime's memory; or a list of patterns of operators' names, such as `*.mlp.*`.
            Losses and gradients have the same bits as with none.
        offload: Kinds of tensors that leave a GPU for main memory between uses: weights, gradients, optimizer,
            activations. Tiles that one of the next 32 tasks uses stay. Without GPUs this has no effect.
        fp8: nt.FP8(...) or {option: value}: options of 8-bit products, and products that stay in bf16.
        captured: On one GPU: run steps as CUDA graphs, with the same bits. Default: if tasks are short by estimate.
        check_finite: Check all values that tasks write. A loss or norm that is not finite then raises NotFinite, which
            names the operator that wrote the first such value. Slow: for debugging.

    Raises:
        ConfigError: A value is out of range.
    """

    @typed
    def __init__(
        self,
        model: Traceable,
        batch: int,
        seq: int,
        tiles: Mapping[str, int] | None = None,
        precision: str = "fp32",
        optimizer: Optimizer | None = None,
        clip_grad_norm: float | None = None,
        accumulate: str = "chain",
        fusion: bool | Mapping[str, Any] | Fusion = True,
        *,
        attention: str | None = None,
        grad_accumulation: int = 1,
        seed: int = 0,
        shift_labels: bool = True,
        skip_above_norm: float | None = None,
        pack: bool = False,
        check_finite: bool = False,
        loss_scale: float | None = None,
        freeze: Sequence[str] = (),
        recompute: str | Sequence[str] = "none",
        offload: Sequence[Offloaded] = (),
        fp8: FP8 | Mapping[str, Any] | None = None,
        captured: bool | None = None,
    ) -> None:
        if attention is not None and not hasattr(model, "changed"):
            need = f"None, as {type(model).__name__} is no nt.Model and chooses its attention itself"
            raise ConfigError(f"attention: got {attention!r}; allowed: {need}")
        chosen = model if attention is None else model.changed(attention=attention)  # type: ignore[attr-defined]
        spec = StepSpec(
            chosen, batch, seq, Tiling(tiles), precision, optimizer or AdamW(), clip_grad_norm, accumulate,
            Fusion.of(fusion), grad_accumulation, skip_above_norm, pack=pack, loss_scale=loss_scale,
            freeze=freeze, recompute=recompute, offload=offload, fp8=FP8.of(fp8),
            captured=captured,
        )  # fmt: skip
        self._start(model, spec, seed, shift_labels, check_finite)

    @classmethod
    def of_spec(cls, spec: StepSpec, *, seed: int = 0, check_finite: bool = False) -> Trainer:
        """Return a Trainer whose training step is described by a StepSpec."""
        self = cls.__new__(cls)
        self._start(spec.model, spec, seed, True, check_finite)
        return self

    @in_turns
    def _start(self, model: Any, spec: StepSpec, seed: int, shift_labels: bool, check_finite: bool) -> None:
        if (runtime := Runtime.current) is None:
            raise TaskError("Trainer: no runtime is running; use it inside `with nntile_py.Runtime(...):`")
        check_precision("precision", spec.precision, bool(_core.cuda_workers()))
        if runtime.ranks:
            spec = replace(spec, ranks=runtime.ranks.size)
            if spec.recompute == AUTO:
                need = ", ".join((*RECOMPUTE, "a list of patterns"))
                raise ConfigError(f"recompute: got {AUTO!r}; allowed on several ranks, whose memory differs: {need}")
            if check_finite:
                need = "False, as each sees only its own tasks"
                raise ConfigError(f"check_finite (debug.nonfinite): got True; allowed on several ranks: {need}")
        if spec.recompute == AUTO:
            spec = replace(spec, recompute=replace(spec, room=memory.room(runtime)).chosen_recompute)
        self.model, self.seed, self.shift_labels, self._runtime = model, plain(seed), plain(shift_labels), runtime
        self.nan_check = NanCheck(plain(check_finite), (STEPS_IN_FLIGHT + 1) * (spec.grad_accumulation + 1))
        self.batch, self.seq, self.precision = spec.batch, spec.seq, spec.precision
        self.optimizer, self.grad_accumulation = spec.optimizer, spec.grad_accumulation
        self._check_alone()
        self.steps, self._in_flight, self._scaled = 0, StepsInFlight(spec), None
        self._unlabelled = False  # True after the warning about a step all of whose labels are ignored
        self._programs = Programs(spec, runtime, self.nan_check.enabled)
        self._store, self.spec = self._programs.store, self._programs.spec
        self._built = self._programs.of(spec.given).built
        write_first_state(model, self._built, self._store, self._check_equal)
        runtime.at_exit(self)

    def __repr__(self) -> str:
        tiles = ", ".join(f"{axis}: {size}" for axis, size in self.spec.tiling.tiles.items()) or "uncut"
        size = f"batch={self.batch}, seq={self.seq}, precision={self.precision!r}"
        return f"<Trainer of {type(self.model).__name__}: {size}, tiles {{{tiles}}}, {counted(self.steps, 'step')}>"

    # -- what a step costs

    @property
    def tokens_per_step(self) -> int:
        return self.grad_accumulation * self.batch * self.seq

    @property
    def parameters(self) -> tuple[int, int]:
        """The number of values of all parameters that are trained, and of all parameters."""
        return counts(self._built.params)

    @property
    def flop_per_step(self) -> int:
        """Floating point operations of all matrix products and attention in a training step."""
        return int(self.grad_accumulation * self._built.flop)

    @property
    def tasks_per_step(self) -> int:
        programs = self._programs.of(self.spec.given)
        more = programs.more.program.tasks if programs.more else 0
        first, update = programs.first.program.tasks, programs.update.program.tasks
        return first + (self.grad_accumulation - 1) * more + update

    @property
    def built(self) -> Step:
        """Graphs and task lists of a training step."""
        return self._built

    @property
    def outputs(self) -> Mapping[str, Tensor]:
        """{name: Tensor} of the model's outputs: axes and dtypes. `evaluate` can return the outputs' values."""
        return self._programs.evaluation(self._programs.of(self.spec.given), keep=True).outputs

    @property
    def update_list(self) -> TaskList:
        """The task list that updates the weights at the end of a step."""
        return self._programs.of(self.spec.given).update.program.list

    @staticmethod
    def memory_bytes() -> int:
        """Return the bytes of tiles now in main memory; with CUDA workers, this process's peak on its fullest GPU."""
        return memory.gpu_peak() if _core.cuda_workers() else int(_core.memory_used())

    # -- training

    @typed
    @in_turns
    def submit(self, inputs: Inputs, labels: IntArray | None = None, lr: float | None = None) -> Pending:
        """Submit one training step and return its handle at once; `result()` of the handle waits for the step.

        At most two steps are in flight. With a scaled loss, only one: its gradient norm decides the next step's factor.
        After a KeyboardInterrupt, `steps` tells whether the step counts; if not, the weights have not changed. A second
        Ctrl-C while the update is submitted ends the process at once.

        Args:
            inputs: Dict of arrays with grad_accumulation * batch rows, named as in transformers; or only input_ids.
            labels: Integers; the mean loss leaves out labels of -100.
            lr: Learning rate of this step. Default: the optimizer's.

        Raises:
            ValueError: An input is missing, unknown, or has the wrong shape, dtype or values.
            NotFinite: The `result()` of an earlier step would raise NotFinite, and the user has not called it.
        """
        self._check_running("submit")
        filled = self.filled(inputs, labels)
        arrays, programs = self._programs.check(filled.arrays, self.grad_accumulation * self.spec.rows, self._shifts)
        rate = self.optimizer.lr if lr is None else checked_value("optimizer.lr", NonNegative, lr)
        if not self.steps:
            self._check_alone()
        self._in_flight.settle()
        step = self.steps + 1
        declared, scale = programs.built.graph.inputs, self._in_flight.factor
        counts = label_counts(declared, arrays, filled.arrays)
        if counts and not any(counts.values()) and not self._unlabelled:
            message = f"step {step}: no label counts, all are -100; the loss and the gradients are zero"
            warnings.warn(message, stacklevel=3)
            self._unlabelled = True
        slots = programs.built.learning_rates(rate) | self.optimizer.slots(step)
        slots |= mean_slots(declared, counts, scale or 1.0) | ({INVERSE_SCALE: 1 / scale} if scale else {})
        self._check_equal(f"the input of step {step}", {**arrays, **slots, "seed": self.seed})
        self._scaled = None  # the passes overwrite the gradients of the last step
        self._submit_passes(step, programs, arrays, filled, slots)
        return self._submit_update(step, programs, filled, slots, scale)

    def _submit_passes(
        self, step: int, programs: StepPrograms, arrays: Mapping[str, IntArray], filled: StepInputs,
        slots: dict[str, float],
    ) -> None:  # fmt: skip
        """Submit the forward and backward passes of a step. They change no weights and no optimizer averages."""
        for micro in range(self.grad_accumulation):
            slots |= {**filled.live[micro], "dropout_seed": dropout_seed(self.seed, step, micro)}
            program, lowering = programs.of_pass(micro)
            for name, value in arrays.items():
                one = programs.built.graph.inputs[name]
                self._store.write_input(lowering, one.tensor, one.part(value, micro, self.spec.rows))
            self._run(program, slots, f"pass {micro + 1} of step {step}")

    def _submit_update(
        self, step: int, programs: StepPrograms, filled: StepInputs, slots: dict[str, float], scale: float | None
    ) -> Pending:
        """Submit the update of a step and count the step. An interrupt comes before both or after both."""
        built, tokens = programs.built, filled.tokens(self.tokens_per_step)
        flop = built.packed_flop(filled) if self.spec.pack else self.flop_per_step * tokens / self.tokens_per_step
        with uninterrupted(self._runtime.end_process):
            self.steps, self._scaled = step, scale or 1.0
            self._run(programs.update, slots, f"the update of step {step}")
            fetch = self._store.fetch("loss", "grad_norm")
            pending = Pending(step, fetch, tokens, flop, self.nan_check, self.spec.skip_above_norm, scale)
            self._in_flight.add(pending)
        return pending

    @typed
    def step(self, inputs: Inputs, labels: IntArray | None = None, lr: float | None = None) -> float:
        """Train one step, wait for its end, and return the mean loss before the update. Arguments: see `submit`."""
        return self.submit(inputs, labels, lr).result().loss

    @typed
    @in_turns
    def evaluate(
        self,
        inputs: Inputs,
        labels: IntArray | None = None,
        *,
        return_logits: bool = False,
        return_outputs: bool = False,
    ) -> Any:
        """Run one forward pass of `batch` rows without dropout and return the loss.

        Args:
            inputs: As of `submit`.
            labels: As of `submit`; with return_logits or return_outputs they may be left out.
            return_logits: Return also the logits.
            return_outputs: Return also all outputs of the model.

        Returns:
            The mean loss, (loss, logits) or (loss, {name: array}). The loss is nan if all labels are ignored.
        """
        self._check_running("evaluate")
        keep = return_logits or return_outputs
        filled = self.filled(inputs, labels, 1)
        arrays, programs = self._programs.check(filled.arrays, self.spec.rows, self._shifts, keep)
        program = self._programs.evaluation(programs, keep)
        if return_logits and not return_outputs and "logits" not in program.outputs:
            got = f"True, and the outputs are {', '.join(program.outputs)}"
            raise ValueError(f"return_logits: got {got}; allowed: return_outputs")
        program.write(arrays)  # skips the inputs of dropout, which an evaluation lacks
        counts = label_counts(program.inputs, arrays, filled.arrays)
        self._check_equal("the input of an evaluation", {**arrays, **counts})
        program.run(mean_slots(program.inputs, counts) | dict(filled.live[0]))
        self.nan_check.ran(program.served.program, "an evaluation")
        loss = program.loss()
        if not any(counts.values()):
            loss = float("nan")  # the mean of nothing, as in PyTorch
        elif not math.isfinite(loss):
            self.nan_check.end(f"the loss of an evaluation is {loss}")
        if not keep:
            return loss
        outputs = {name: program.read(name) for name in program.outputs}
        if self.spec.pack:
            axes = {name: tensor.axes for name, tensor in program.outputs.items()}
            outputs = {name: self._bins.unpacked(value, filled.places, axes[name]) for name, value in outputs.items()}
        return loss, outputs if return_outputs else outputs["logits"]

    # -- checkpoints

    @typed
    @in_turns
    def save(self, folder: str | Path) -> None:
        """Write a checkpoint: the model as transformers' from_pretrained reads it, the optimizer's averages, the step.

        The folder appears only when it is complete. It replaces an earlier checkpoint of that name.

        Raises:
            OSError: The disk does not take the files.
            NNTileError: A weight has values that are not finite.
        """
        save_trainer(self, Path(folder), self._runtime.ranks)

    @classmethod
    @typed
    def load(cls, folder: str | Path, model: Any = None, *, trust_code: bool = False, **options: Any) -> Trainer:
        """Return a saved trainer with its model, ready for the next step.

        Args:
            folder: The checkpoint.
            model: A model to read the weights into. Default: a new model of the saved type and sizes.
            trust_code: Run the Python file that the checkpoint names, if the saved model is a class of a user's own
                file that this process has not imported.
            options: Arguments of Trainer that replace the saved ones.

        Raises:
            ConfigError: The checkpoint does not fit.
            NNTileError: The checkpoint is damaged.
        """
        trainer: Trainer = load_trainer(cls, Path(folder), model, trust_code, options)
        return trainer

    # -- inside

    def filled(self, inputs: Inputs, labels: IntArray | None = None, passes: int | None = None) -> StepInputs:
        """Return a step's inputs as StepInputs, packed if the trainer packs. `submit` and `evaluate` accept these.

        passes: Number of forward and backward passes. Default: `grad_accumulation`."""
        passes = passes or self.grad_accumulation

        def pack(arrays: Mapping[str, Any]) -> StepInputs:
            return self._bins.fill(arrays, passes, self.batch, shift=self.shift_labels)

        return as_step_inputs(inputs, labels, passes, pack if self.spec.pack else None)

    @cached_property
    def _bins(self) -> Bins:
        return bins_of(self.spec)

    @property
    def _shifts(self) -> bool:
        """True if labels must still be shifted. Packed batches arrive shifted."""
        return self.shift_labels and not self.spec.pack

    def _check_running(self, method: str) -> None:
        if Runtime.current is not self._runtime:
            need = "create a Trainer on a running Runtime"
            raise TaskError(f"{method}: the Runtime of this Trainer has stopped; {need}")

    def _run(self, program: TrainingProgram, slots: dict[str, float], what: str) -> None:
        program.run(slots)
        self.nan_check.ran(program.program, what)
