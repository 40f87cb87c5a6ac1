"""The training loop of `nntile train`: text in, steps through the runtime, metrics, weights and a sample out."""

import errno
import json
import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from tokenizers import Tokenizer

from nntile_py.config.run import CLASSIFICATION, RunConfig, runtime_options
from nntile_py.config.sections import Optimizer
from nntile_py.config.spec import build_model, step_spec
from nntile_py.errors import ConfigError, NNTileError, NotFinite
from nntile_py.execution.runtime import Runtime
from nntile_py.models.base import Model
from nntile_py.system.folders import read, replace_file
from nntile_py.tokenizer import CLS, END_OF_TEXT, PAD, SEP, number_of
from nntile_py.training import checkpoint
from nntile_py.training.batches import SPECIAL, Batches, objective
from nntile_py.training.confusion import FILES, Confusion
from nntile_py.training.data import load_corpus
from nntile_py.training.labelled import LabelledBatches, LabelledCorpus, load_labelled
from nntile_py.training.pending import Pending
from nntile_py.training.resume import check_same, data_facts, flat, newest
from nntile_py.training.run_folder import GENERATION, Metrics, RunFolder, check_alone, check_replaced
from nntile_py.training.sample import AnyCorpus, sampled
from nntile_py.training.saver import Saver, told
from nntile_py.training.together import Giver, Silent, agree, told_by_first
from nntile_py.training.trainer import STEPS_IN_FLIGHT, Trainer

SKIPS = 10  # steps in a row that are skipped: no later one will be better
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
RETRY = 10.0  # seconds between two attempts to save what a full disk has no room for


def train(
    config: RunConfig, out: Path, console: Console, *, resume: Path | None = None, replaces: bool = False,
    rescue: Path | None = None, again: str = "nntile train CONFIG",
) -> int:  # fmt: skip
    """Train as `config` says; leaves config, tokenizer, metrics, checkpoints and weights in the folder `out`.

    resume: a run's folder, or a checkpoint, to go on from. replaces: an earlier run in `out` goes when this one has its
    first checkpoint. rescue: where the last checkpoint goes if `out` has no room. again: the command that this is.

    Returns the exit status: 0, or after SIGINT or SIGTERM 130 or 143, with what was trained saved.
    Raises NNTileError, without writing weights, when the loss or the gradient is no longer a finite number."""
    # Refuses what cannot be trained and what the machine lacks, before any work.
    aim = objective(config)
    runtime = Runtime(**runtime_options(config.runtime.model_dump()), mpi=True)
    ranks = runtime.ranks
    leads = not ranks or ranks.rank == 0  # writes and shows everything; the others compute and read alone
    if ranks:  # what mpirun shows each rank looks like a terminal
        console = Console(quiet=not leads, force_terminal=False)
    tell = partial(_say, console)
    if config.short_warmup:
        tell(f"note: {config.short_warmup}")
    if leads:
        check_alone(out)
        if replaces and out.exists():
            check_replaced(out)
    there = checkpoint.found(out)
    resumed = newest(resume, tell) if resume else None
    tell(f"reading {config.data.source}")
    corpus = load_labelled(config) if aim == CLASSIFICATION else load_corpus(config, SPECIAL[aim])
    data = data_facts(config, corpus)
    if ranks:
        ranks.same("the config", flat(config.model_dump(mode="json", by_alias=True)))
        ranks.same("the data", data)
        ranks.same("the checkpoint", {"folder": str(resumed.folder), "step": resumed.step} if resumed else {})
        tell(f"{ranks.size} ranks, each with {runtime.cpus} CPU worker{'s' * (runtime.cpus > 1)}")
        if (tiles := len(step_spec(config).tiling.parts("batch", config.train.batch))) < ranks.size:
            tell(f"note: the batch has {tiles} tile{'s' * (tiles > 1)}: smaller tiles.batch gives all ranks work")
    tell(f"{corpus.told()}; writing to {out}")
    if resumed:
        differs = check_same(resumed, config, data)
        tell(f"going on after step {resumed.step}, from {resumed.folder}" + (f"; {differs}" if differs else ""))
    with runtime, _signals() as stop:
        trainer = build_trainer(config, resumed.model(config) if resumed else None)
        if ranks:
            runtime.forget(trainer)  # at the end no rank wants all weights: the first has written them
            trainer.model.weights = {}  # they are in tiles
        if resumed:
            resumed.restore(trainer)
        batches = (
            LabelledBatches(config, corpus) if isinstance(corpus, LabelledCorpus) else Batches(config, corpus, aim)
        )
        if batches.about:
            tell(batches.about)
        if not leads:
            return _follow(config, corpus, batches, trainer, stop)
        folder = RunFolder(out, replaces, new=not (resume or replaces))  # now: what is refused leaves nothing behind
        if resume and checkpoint.found(out) != there:
            raise ConfigError(f"--resume: another process has trained into {out} meanwhile; allowed: to begin again")
        for path in checkpoint.set_aside(folder.path, resumed.step) if resumed else ():
            tell(f"a later checkpoint of this run is now {path.name}")
        replace_file(folder.path / "config.yaml", config.to_yaml())
        replace_file(folder.path / checkpoint.TOKENIZER, corpus.tokenizer.to_str(pretty=True))
        facts = {"config": config.model_dump(mode="json", by_alias=True), "data": data}
        saver = Saver(config.checkpoint, trainer, folder, _files(trainer, corpus.tokenizer, config), facts, tell)
        if resumed and checkpoint.folder_of(folder.path, resumed.step).is_dir():
            saver.newest = resumed.step
        metrics = Metrics(folder.path, trainer.steps, tell)
        known = not resumed or any("held_out_loss_before" in line for line in metrics.lines)
        try:
            with Display(console, config, trainer) as display:
                first, last = _steps(config, batches, trainer, metrics, display, saver, stop)
            saver.finish()
        except BaseException:
            saver.abandon()
            metrics.close()
            folder.close()
            if folder.path != folder.out:
                tell(f"no checkpoint was made: the earlier run in {out} stays, this one's metrics are in {folder.path}")
            raise
        try:
            if not trainer.steps:  # weights that nobody trained take no run's place
                saver.close()
                agree(stop)
                tell(f"stopped by {stop[0]} before the first step: nothing is saved")
                return 128 + signal.Signals[stop[0]].value
            saved = _save(saver, metrics, config, rescue, stop, tell)
            saver.close()
        finally:
            metrics.close()
            saver.folder.close()
        measured = f"{last['held_out_loss']:.4f} at the last measurement" if last else "not measured since"
        begun = "before the first step" if known else f"after step {resumed.step if resumed else 0}"
        tell(f"held-out loss {first:.4f} {begun}, {measured}")
        if display.skipped:
            tell(f"{display.skipped} steps were skipped (train.skip_above_norm)")
        tell(f"weights saved in {saved / checkpoint.MODEL}")
        if last and "confusion" in last and isinstance(corpus, LabelledCorpus):
            _show_confusion(Confusion(corpus.names, last["confusion"]), saved, tell)
        elif sample := sampled(config, corpus, batches, trainer, stop):
            tell(sample)
    if stop:
        more = f"; {again} --resume goes on" if trainer.steps < config.train.steps else ""
        done = f"after step {trainer.steps} of {config.train.steps}"
        tell(f"stopped by {stop[0]} {done}; what was trained is saved{more}")
        return 128 + signal.Signals[stop[0]].value
    return 0


def _follow(
    config: RunConfig, corpus: AnyCorpus, batches: Batches | LabelledBatches, trainer: Trainer, stop: list[str]
) -> int:
    """What a rank does that is not the first: the same steps, and whatever all ranks do together.

    It ends well even where a signal has ended the run: mpirun would end the first rank before that has told of it."""
    silent, giver = Silent(), Giver(trainer, config.checkpoint.async_)
    _, last = _steps(config, batches, trainer, silent, silent, giver, stop)
    giver.finish()
    if not (last and "confusion" in last):
        sampled(config, corpus, batches, trainer, stop)
    return 0


def _save(
    saver: Saver, metrics: Metrics, config: RunConfig, rescue: Path | None, stop: list[str], tell: Callable[[str], None]
) -> Path:
    """The last checkpoint, and its weights as those of the run; the folder that has them.

    What can be mended, such as a full disk, is waited for, or `rescue` takes its place."""
    waits, asked, step = False, len(stop), None
    while True:
        try:
            step = saver.now()
            saver.folder.publish(step)
            return saver.folder.out
        except (OSError, ConfigError) as error:
            if rescue:
                tell(f"not saved ({told(error)}): saving in {rescue} instead")
                where, rescue = rescue, None
                try:
                    elsewhere = RunFolder(where, new=True)
                    replace_file(elsewhere.path / "config.yaml", config.to_yaml())
                    metrics.move(elsewhere.path)
                    saver.folder.close()
                    saver.folder = elsewhere
                    continue
                except (OSError, NNTileError) as other:
                    tell(f"nor there ({told(other)})")
            if step is not None and not (isinstance(error, OSError) and error.errno in NO_ROOM):
                there = checkpoint.folder_of(saver.folder.path, step)
                raise NNTileError(f"{told(error)}; what was trained is in {there}") from None
            if not waits:
                tell(f"not saved ({told(error)}): trying again every {RETRY:g} s; Ctrl-C gives up what was trained")
            waits = True
            end = time.monotonic() + RETRY
            while time.monotonic() < end:
                time.sleep(0.1)
                if len(stop) > asked:
                    tell(f"stopped by {stop[-1]}; nothing more is saved")
                    raise SystemExit(128 + signal.Signals[stop[-1]].value) from None


def _show_confusion(found: Confusion, folder: Path, tell: Callable[[str], None]) -> None:
    """The last measurement of a classifier, as a table and a picture."""
    told = found.told()
    two = f"F1 {told['f1']:.4f} of {found.names[1]}, " if "f1" in told else ""
    count = f"{found.counts.sum():,} held-out texts"
    tell(f"\n{count}: accuracy {told['accuracy']:.4f}, {two}F1 {told['f1_macro']:.4f} (mean of the classes)")
    tell(found.table())
    try:
        found.save(folder)
    except OSError as error:
        tell(f"no picture of it: {error.filename}: {error.strerror}")
    else:
        tell(f"drawn in {folder / FILES[0]}")


def _files(trainer: Trainer, tokenizer: Tokenizer, config: RunConfig) -> dict[str, str | bytes]:
    """What a checkpoint of a run holds beside the arrays: config.json as transformers has it, the tokenizer."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    ends = {"bos_token_id": CLS, "eos_token_id": SEP}
    saved = trainer.hf_config() | {
        key: number_of(tokenizer, token) if end is None else end for key, token in ends.items()
    }
    if (pad := number_of(tokenizer, PAD)) is not None:
        saved["pad_token_id"] = pad
    files: dict[str, str | bytes] = {
        checkpoint.CONFIG: json.dumps(saved, indent=2), checkpoint.TOKENIZER: tokenizer.to_str(pretty=True),
    }  # fmt: skip
    if config.model.from_ and (kept := Path(config.model.from_) / GENERATION).is_file():
        files[GENERATION] = read(kept)
    return files


def build_trainer(config: RunConfig, model: Model | None = None) -> Trainer:
    """The Trainer that `config` asks for; needs a running Runtime."""
    return Trainer.of_spec(
        step_spec(config, model or build_model(config)), seed=config.seed, check_finite=config.debug.nonfinite
    )


def learning_rate(optimizer: Optimizer, step: int, steps: int) -> float:
    """Of step 1 ... `steps`: a linear warm-up to lr, then constant or a cosine that reaches min_lr at the last step."""
    if step <= optimizer.warmup_steps:
        return optimizer.lr * step / optimizer.warmup_steps
    if optimizer.schedule == "constant":
        return optimizer.lr
    low = optimizer.min_lr or 0.0
    part = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
    return low + (optimizer.lr - low) * 0.5 * (1 + math.cos(math.pi * part))


class Display:
    """What a user sees of the steps: a line now and then, and on a terminal a live one below them."""

    def __init__(self, console: Console, config: RunConfig, trainer: Trainer) -> None:
        self._console, self._train, self._trainer = console, config.train, trainer
        self._times: deque[tuple[float, float]] = deque(maxlen=20)  # seconds, tokens
        self._held_out = ""
        self.skipped = 0  # steps
        columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(None), TextColumn("{task.fields[left]}")
        self._progress = Progress(*columns, expand=True)
        self._task = self._progress.add_task("", total=config.train.steps, left="")
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, line: dict[str, Any]) -> None:
        """Take in one line of the metrics."""
        step, steps = line["step"], self._train.steps
        self._times.append((line["step_time_s"], line["tokens_per_s"] * line["step_time_s"]))
        seconds, tokens = (sum(values) for values in zip(*self._times, strict=True))
        per_step, filled = seconds / len(self._times), tokens / len(self._times) / self._trainer.tokens_per_step
        if "held_out_loss" in line:
            self._held_out = f"held-out loss {line['held_out_loss']:.4f}  "
            if "accuracy" in line:
                self._held_out += f"accuracy {line['accuracy']:.3f}  F1 {line.get('f1', line['f1_macro']):.3f}  "
        left = round(per_step * (steps - step))
        left_text = f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"
        skipped = "skipped, its gradient norm is not below train.skip_above_norm: " if "skipped" in line else ""
        self.skipped += "skipped" in line
        learnt = f"{skipped}loss {line['loss']:.4f}  grad norm {line['grad_norm']:.3g}  lr {line['lr']:.2e}"
        speed = (
            f"{tokens / seconds:,.0f} tokens/s"
            f"  {filled * self._trainer.flop_per_step / per_step / 1e12:.3g} TFLOP/s"
            f"  memory {_size(self._trainer.memory_bytes())}"
        )
        if step == 1 or step % self._train.log_every == 0 or line.keys() & {"held_out_loss", "skipped"}:
            now = self._held_out if "held_out_loss" in line else ""
            # A terminal has the rest in the live lines, and may be 80 columns wide.
            rest = "" if self._console.is_terminal else f"  {speed}  {left_text}"
            _say(self._console, f"step {step}/{steps}  {now}{learnt}{rest}")
        self._progress.update(self._task, completed=step, left=left_text)
        self._live.update(Group(self._progress, Text(f"{self._held_out}{learnt}\n{speed}")))


def _steps(
    config: RunConfig, batches: Batches | LabelledBatches, trainer: Trainer, metrics: Metrics | Silent,
    display: Display | Silent, saver: Saver | Giver, stop: list[str],
) -> tuple[float, dict[str, Any] | None]:  # fmt: skip
    """All steps that are left, or those up to a signal: the held-out loss before the first, and what was last measured
    since."""
    how = config.train
    in_flight: deque[tuple[Pending, float]] = deque()
    known = (line["held_out_loss_before"] for line in metrics.lines if "held_out_loss_before" in line)
    before, last = told_by_first(next(known, math.nan)), None
    first = _measured(batches, trainer)["held_out_loss"] if math.isnan(before) else before
    skipped = 0  # in a row, up to now
    clock = time.perf_counter()
    for step in range(trainer.steps + 1, how.steps + 2):
        asked, due = agree(stop, step <= how.steps and saver.due(step))
        ends = step > how.steps or asked
        if not ends:
            lr = learning_rate(config.optimizer, step, how.steps)
            in_flight.append((trainer.submit(batches.training(step), lr=lr), lr))
        measures = not ends and (step % how.eval_every == 0 or step == how.steps)
        due = due and not ends
        while len(in_flight) >= (1 if ends or measures or (due and saver.needs_report) else STEPS_IN_FLIGHT):
            pending, lr = in_flight.popleft()
            done, line = pending.step, {"step": pending.step, "loss": math.nan, "lr": lr, "grad_norm": math.nan}
            with _ends_where_not_finite(metrics, line):
                result = pending.result()
                line |= {"loss": result.loss, "grad_norm": result.grad_norm}
                if not (result.skipped or (math.isfinite(result.loss) and math.isfinite(result.grad_norm))):
                    raise NotFinite(f"step {done}: the loss is {result.loss}, the gradient norm {result.grad_norm}")
                skipped = skipped + 1 if result.skipped else 0
                if skipped == SKIPS:
                    limit = f"gradient norms not below train.skip_above_norm = {how.skip_above_norm:g}"
                    raise NotFinite(f"steps {done - SKIPS + 1} to {done}: {limit}, the last {result.grad_norm:g}")
            took, clock = time.perf_counter() - clock, time.perf_counter()
            line |= {"tokens_per_s": pending.tokens / took, "step_time_s": took}
            if result.skipped:
                line["skipped"] = True
            if done == 1:
                line["held_out_loss_before"] = first
            if measures and not in_flight:
                with _ends_where_not_finite(metrics, line | {"held_out_loss": math.nan}):
                    last = _measured(batches, trainer, whole=step == how.steps)
                line |= last
                clock = time.perf_counter()
            metrics.write(line)
            saver.reported(done, good=not result.skipped)
            display.show(line)
        if ends:
            break
        if due:
            saver.begin(step)
    if skipped and asked:
        _measured(batches, trainer)  # raises if the weights are what is wrong
    return first, last


@contextmanager
def _ends_where_not_finite(metrics: Metrics | Silent, line: dict[str, Any]) -> Iterator[None]:
    """`line`: what the metrics get before the run ends."""
    try:
        yield
    except NotFinite as error:
        metrics.write(line)
        how = "try a smaller optimizer.lr, or optimizer.clip_grad_norm=1.0"
        look = "" if "first such value" in str(error) else "; debug.nonfinite=true tells where it came from"
        raise NotFinite(f"{error}; stopped, the weights are not written ({how}{look})") from None


def _measured(batches: Batches | LabelledBatches, trainer: Trainer, whole: bool = False) -> dict[str, Any]:
    found = batches.measure(trainer, whole)
    if not math.isfinite(loss := found["held_out_loss"]):
        raise NotFinite(f"after step {trainer.steps} the held-out loss is {loss}")
    return found


@contextmanager
def _signals() -> Iterator[list[str]]:
    """A list that SIGINT and SIGTERM put their name into; a second one acts as usual, at once."""
    stop: list[str] = []

    def ask(number: int, frame: FrameType | None) -> None:
        stop.append(signal.Signals(number).name)
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        restore()


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False, highlight=False)
