"""The command `nntile train`: read data, create the trainer, train, save checkpoints and weights, print a summary."""

import shlex
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.best import BEST
from nntile_py.checkpoint.model_files import companions_note, model_files, tokenizer_files
from nntile_py.checkpoint.resume import (
    ResumePoint,
    check_same_run,
    check_steps,
    data_facts,
    flattened,
    newest_checkpoint,
)
from nntile_py.checkpoint.run_folder import (
    METRICS,
    SAMPLE,
    Metrics,
    RunFolder,
    check_place,
    check_replaced,
    check_unlocked,
)
from nntile_py.checkpoint.writer import CheckpointWriter, TileSender, error_text, save_final
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig
from nntile_py.config.saved_code import CODE
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.config.schedules import check_rates
from nntile_py.data.confusion import FILES, Confusion
from nntile_py.data.dataset import Dataset
from nntile_py.data.entities import EntityScores
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.recompute_rule import AUTO
from nntile_py.graph.step import StepSpec
from nntile_py.models.registry import code_of
from nntile_py.runs import run_of
from nntile_py.system.folders import NO_ROOM, replace_file, same_content
from nntile_py.system.machine import devices
from nntile_py.training.collectives import NoOutput, agree
from nntile_py.training.curves import save_curve
from nntile_py.training.datasets import build_dataset, check_objective
from nntile_py.training.display import Display, say
from nntile_py.training.loggers import Loggers, check_packages
from nntile_py.training.loop import run_steps
from nntile_py.training.run_sample import missing_sample_reported, sample_text
from nntile_py.training.signals import exit_status, signals_of_run
from nntile_py.training.trainer import Trainer

Report = Callable[[str], None]
PATIENCE = 3.0  # seconds that a second Ctrl-C waits for a checkpoint that is being written


def train(
    config: RunConfig, spec: StepSpec, out: Path, console: Console, *, resume: Path | None = None,
    replaces: bool = False, rescue: Path | None = None, overrides: list[str] | None = None,
) -> int:  # fmt: skip
    """Train the model of `config`. Write config, tokenizer, metrics, checkpoints and weights into the folder `out`.

    Args:
        config: The run's config.
        spec: The training step that the config describes.
        out: The run's folder.
        console: Shows progress.
        resume: The folder of a run, or a checkpoint, from which to resume. None: a new run.
        replaces: Replace an earlier run in `out`, as soon as this run has its first checkpoint.
        rescue: Folder for the run if the disk of `out` is full at the start or at the end.
        overrides: The command's `--set` options. Checkpoints store them, and a resumed run applies them again.

    Returns:
        The exit status: 0; after SIGINT 130, after SIGTERM 143. All trained steps are saved, also after a signal.

    Raises:
        NNTileError: The loss or the gradient norm became nan or infinite. No weights are written.
    """
    # Before any work: check that the model can be trained, and that the machine has the workers.
    check_objective(config, spec)
    check_packages(config)
    check_rates(config.optimizer, config.train.steps)
    runtime = Runtime(**runtime_options(config.runtime.model_dump()), mpi=True)
    ranks = runtime.ranks
    is_rank_0 = not ranks or ranks.rank == 0  # rank 0 writes and shows everything; other ranks only compute and read
    if ranks:  # no live display: mpirun's pipes look like a terminal, but are none
        console = Console(quiet=not is_rank_0, force_terminal=False)
    report = partial(say, console)
    if config.short_warmup:
        report(f"note: {config.short_warmup}")
    if is_rank_0:
        _check_folders(out, rescue, replaces)

    # Data, and the checkpoint to resume from.
    checkpoints = checkpoint.checkpoints_in(out)
    point = newest_checkpoint(resume, report) if resume else None
    report(f"reading {config.data.name}")
    dataset = build_dataset(config, spec, report)
    data = data_facts(config, dataset)
    _check_ranks(config, spec, runtime, data, point, report)
    report(f"{dataset.describe()}; writing to {out}")
    if config.tokenizer.path is None and (count := dataset.tokenizer.get_vocab_size()) < config.tokenizer.size():
        report(f"note: the tokenizer has {count:,} tokens; tokenizer.vocab_size={count} saves unused rows of weights")
    if point:
        differences = check_same_run(point, config, data)
        if point.step >= config.train.steps and _publish_on_rank_0(point, out, ranks, report):
            report(f"all {point.step} steps are trained; weights saved in {out / checkpoint.MODEL}")
            return 0
        check_steps(point, config)
        report(f"going on after step {point.step}, from {point.folder}" + (f"; {differences}" if differences else ""))

    # Trainer, steps, weights.
    with missing_sample_reported(report), runtime, signals_of_run(runtime) as stop:
        trainer = _first_trainer(config, spec, runtime, point)
        if config.recompute == AUTO:
            report(f"recompute: {trainer.spec.recompute}, the fastest that fits into the memory")
        trained, every = trainer.parameters
        if trained < every:
            report(f"{trained:,} of {every:,} parameters are trained, the others are frozen")
        if lengths := dataset.describe_lengths():
            report(lengths)
        if not is_rank_0:
            return _train_on_other_rank(config, dataset, trainer, stop)
        facts = {"config": config.model_dump(mode="json", by_alias=True), "data": data, "overrides": overrides or []}
        run = _Run(config, out, dataset, facts, trainer, point, stop, console, report)
        if not _train_on_rank_0(run, partial(_run_folder, out, resume, replaces, checkpoints, report), rescue):
            return exit_status(stop)
    if stop:
        unfinished = trainer.steps < config.train.steps
        files = {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in CODE}
        code = "".join(f" --set {shlex.quote(f'{key}={name}')}" for key, name in files.items() if code_of(name))
        more = f"; to continue: nntile train --resume {shlex.quote(str(out))}{code}" if unfinished else ""
        done = f"after step {trainer.steps} of {config.train.steps}"
        report(f"stopped by {stop[0]} {done}; all trained steps are saved{more}")
    return exit_status(stop)


# -- before the first step


def _check_folders(out: Path, rescue: Path | None, replaces: bool) -> None:
    for option, folder in {"--out": out, "--rescue": rescue}.items():
        if folder:
            check_place(option, folder)
    check_unlocked(out)
    if replaces and out.exists():
        check_replaced(out)


def _publish_on_rank_0(point: ResumePoint, out: Path, ranks: Ranks | None, report: Report) -> bool:
    """Call _publish on rank 0, and return its result on all ranks. They raise NNTileError if it fails on rank 0."""
    published, failure = 0.0, None
    if not ranks or ranks.rank == 0:
        try:
            published = float(_publish(point, out, report))
        except (OSError, NNTileError) as error:
            published, failure = -1.0, error
    published = ranks.of_first(published) if ranks else published
    if failure:
        raise failure
    if published < 0:
        raise NNTileError(f"{out}: the first rank could not put the weights there")
    return published > 0


def _publish(point: ResumePoint, out: Path, report: Report) -> bool:
    """Copy the weights of a checkpoint into the run folder `out`, if the run ended before it did so.

    Return False if the run folder has the same or newer weights, or the checkpoint belongs to another run."""
    target, weights = out / checkpoint.MODEL, point.folder / checkpoint.MODEL
    if run_of(point.folder).resolve() != out.resolve() or same_content(target, weights):
        return False
    if target.exists() and target.stat().st_mtime > (point.folder / checkpoint.STATE).stat().st_mtime:
        return False
    folder = RunFolder(out, report=report)
    try:
        folder.publish(point.step)
    finally:
        folder.close()
    return True


def _check_ranks(
    config: RunConfig, spec: StepSpec, runtime: Runtime, data: dict[str, str], point: ResumePoint | None,
    report: Report,
) -> None:  # fmt: skip
    """Raise ConfigError if ranks differ in config, data or checkpoint; report the ranks' workers."""
    if not (ranks := runtime.ranks):
        return
    ranks.same("the config", flattened(config.model_dump(mode="json", by_alias=True)))
    ranks.same("the data", data)
    ranks.same("the checkpoint", {"folder": str(point.folder), "step": point.step} if point else {})
    workers = {"GPU": runtime.cuda, "CPU worker": runtime.cpus}
    each = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in workers.items() if count)
    shared = f", of which {ranks.sharers} ranks share one" if ranks.sharers > 1 else ""
    report(f"{ranks.size} ranks, each with {each}{shared}")
    if (tiles := len(spec.tiling.parts("batch", spec.batch))) < ranks.size:
        report(f"note: the batch has {tiles} tile{'s' * (tiles > 1)}: smaller tiles.batch gives all ranks work")


def build_trainer(config: RunConfig, spec: StepSpec | None = None) -> Trainer:
    """Return the Trainer of a config. Needs a running Runtime.

    spec: The training step and its model. Default: from the config, with the weights that `model.from` names."""
    spec = spec or step_spec(config, build_model(config))
    return Trainer.of_spec(spec, seed=config.seed, check_finite=config.debug.nonfinite)


def _first_trainer(config: RunConfig, spec: StepSpec, runtime: Runtime, point: ResumePoint | None) -> Trainer:
    """Return the trainer as it is before this process's first step.

    It starts from the checkpoint `point`, else from the weights that `model.from` names, else from `spec.model`."""
    if point or config.model.from_ is not None:
        spec = replace(spec, model=point.model(config) if point else build_model(config))
    trainer = build_trainer(config, spec)
    if runtime.ranks:
        runtime.forget(trainer)  # the runtime's end gathers no weights: rank 0 has written them by then
        trainer.model.weights = {}  # free this copy: the tiles hold the weights
    if point:
        point.restore(trainer)
    return trainer


@dataclass(frozen=True)
class _Run:
    """A run on rank 0, ready for its first step.

    Attributes:
        facts: Entries of each checkpoint's state.json: config, hashes of the data, `--set` options.
        point: The checkpoint from which the run resumes; None: a new run.
        stop: Names of the signals received so far, see signals_of_run."""

    config: RunConfig
    out: Path
    dataset: Dataset
    facts: Mapping[str, Any]
    trainer: Trainer
    point: ResumePoint | None
    stop: list[str]
    console: Console
    report: Report


def _run_folder(
    out: Path, resume: Path | None, replaces: bool, checkpoints: list[tuple[int, Path]], report: Report
) -> RunFolder:
    """Create the run's folder. Called after all checks, so that a refused run leaves nothing behind.

    checkpoints: Step and folder of each checkpoint that `out` had at the start. A resumed run raises ConfigError if
    they have changed since: another process has trained into `out`."""
    folder = RunFolder(out, replaces, new=not (resume or replaces), report=report)
    if resume and checkpoint.checkpoints_in(out) != checkpoints:
        raise ConfigError(f"--resume: another process has trained into {out} meanwhile; allowed: to begin again")
    return folder


def _first_files(run: _Run, make_folder: Callable[[], RunFolder]) -> tuple[RunFolder, Metrics]:
    """Create the run's folder and write config, tokenizer and metrics into it. If that fails, remove these again.

    Returns the folder and its metrics."""
    folder = make_folder()

    def set_aside() -> None:
        for path in checkpoint.set_aside(folder.path, run.point.step) if run.point else ():
            run.report(f"a later checkpoint of this run is now {path.name}")

    try:
        replace_file(folder.path / "config.yaml", run.config.to_yaml())
        for name, content in tokenizer_files(run.dataset.tokenizer, run.config).items():
            folder.make_way(name)
            replace_file(folder.path / name, content)
        metrics = Metrics(folder.path, run.trainer.steps, run.report, run.out, set_aside)
        metrics.first = {"machine": devices(run.config.runtime.cuda != 0)}
        (folder.path / SAMPLE).unlink(missing_ok=True)  # of an earlier end of this run
    except OSError:
        folder.give_up()
        raise
    lost = run.trainer.steps - len({line["step"] for line in metrics.lines})
    if lost and run.point and run_of(run.point.folder).resolve() == run.out.resolve():
        run.report(f"{METRICS} lacks the lines of {lost} of {run.trainer.steps} earlier steps: they are lost")
    return folder, metrics


# -- the steps


def _train_on_rank_0(run: _Run, make_folder: Callable[[], RunFolder], rescue: Path | None) -> bool:
    """Train on rank 0: steps, metrics, checkpoints, weights, summary. Returns False if no step was trained.

    If the disk is full when `make_folder` creates the run's folder, the run goes to the folder `rescue`."""
    try:
        folder, metrics = _first_files(run, make_folder)
    except OSError as error:
        if error.errno not in NO_ROOM or not rescue:
            raise
        run.report(f"cannot begin ({error_text(error)}): training into {rescue} instead")
        folder, metrics = _first_files(run, partial(RunFolder, rescue, new=True))
        rescue = None
    files = model_files(run.trainer, run.dataset.tokenizer, run.config)
    if note := companions_note(run.config):
        run.report(note)
    writer = CheckpointWriter(run.config.checkpoint, run.trainer, folder, files, run.facts, run.report)
    if run.point and checkpoint.checkpoint_folder(folder.path, run.point.step).is_dir():
        writer.newest = run.point.step
    from_start = not run.point or any("held_out_loss_before" in line for line in metrics.lines)
    try:
        loggers = Loggers(run.config, folder.path, run.trainer.steps, run.report, run.stop)
        metrics.listener = loggers.write
        with closing(loggers), Display(run.console, run.config, run.trainer) as display:
            before, last = run_steps(run.config, run.dataset, run.trainer, metrics, display, writer, run.stop)
        writer.finish()
    except BaseException as error:
        writer.abandon(PATIENCE if isinstance(error, KeyboardInterrupt) else None)
        metrics.close()
        folder.close()
        if folder.path != folder.out:
            kept = f"the earlier run in {run.out} stays, this one's metrics are in {folder.path}"
            run.report(f"no checkpoint was made: {kept}")
        raise
    try:
        if not run.trainer.steps:  # untrained weights never replace a run
            writer.close()
            agree(run.stop)
            run.report(f"stopped by {run.stop[0]} before the first step: nothing is saved")
            return False
        saved = save_final(writer, metrics, run.config, rescue, run.stop, run.report)
        writer.close()
    finally:
        metrics.close()
        writer.folder.close()
    measured = f"{last['held_out_loss']:.4f} at the last measurement" if last else "not measured since"
    start = "before the first step" if from_start else f"after step {run.point.step if run.point else 0}"
    run.report(f"held-out loss {before:.4f} {start}, {measured}")
    if writer.best:
        run.report(f"best held-out loss {writer.best[0]:.4f} after step {writer.best[1]}: {saved / BEST}")
    if skips := display.skips():
        run.report(skips)
    run.report(f"weights saved in {saved / checkpoint.MODEL}")
    save_curve(saved, run.report, run.console.is_terminal)
    if last and "confusion" in last and run.dataset.class_names:
        _save_confusion(run.dataset.class_names, last["confusion"], saved, run.report)
    elif last and "entities" in last and run.dataset.class_names:
        run.report(f"\n{EntityScores(run.dataset.class_names, last['entities']).table()}")
    elif sample := sample_text(run.config, run.dataset, run.trainer, run.stop):
        run.report(sample)
        with suppress(OSError):  # a full disk: the sample has been printed
            replace_file(saved / SAMPLE, sample.strip() + "\n")
    return True


def _train_on_other_rank(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str]) -> int:
    """Train on a rank other than 0: run the same steps, and take part in the collective operations of all ranks.

    Returns the exit status 0, also after a signal: with another status, mpirun would end rank 0 before rank 0 reports
    the signal."""
    silent, sender = NoOutput(), TileSender(trainer, config.checkpoint.async_)
    _, last = run_steps(config, dataset, trainer, silent, silent, sender, stop)
    sender.finish()
    if not (last and "confusion" in last):
        sample_text(config, dataset, trainer, stop)
    return 0


# -- the end of a run's output


def _save_confusion(names: list[str], counts: object, folder: Path, report: Report) -> None:
    """Report a classifier's confusion matrix as a table, and save it as pictures in the run's folder."""
    confusion = Confusion(names, counts)
    metrics = confusion.metrics()
    two = f"F1 {metrics['f1']:.4f} of {names[1]}, " if "f1" in metrics else ""
    count = f"{confusion.counts.sum():,} held-out texts"
    report(f"\n{count}: accuracy {metrics['accuracy']:.4f}, {two}F1 {metrics['f1_macro']:.4f} (mean of the classes)")
    report(confusion.table())
    try:
        confusion.save(folder)
    except OSError as error:
        report(f"no picture of it: {error.filename}: {error.strerror}")
    else:
        report(f"drawn in {folder / FILES[0]}")
