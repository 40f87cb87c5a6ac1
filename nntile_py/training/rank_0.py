"""Training on rank 0, which writes all files of a run and prints."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.best import BEST, changed_conditions
from nntile_py.checkpoint.model_files import companions_note, model_files, tokenizer_files
from nntile_py.checkpoint.resume import ResumePoint
from nntile_py.checkpoint.run_folder import METRICS, SAMPLE, Metrics, RunFolder
from nntile_py.checkpoint.writer import CheckpointWriter, error_text, save_final
from nntile_py.config.run_config import RunConfig
from nntile_py.data.confusion import FILES, Confusion
from nntile_py.data.dataset import Dataset
from nntile_py.data.entities import EntityScores
from nntile_py.data.tokenization import Report
from nntile_py.errors import ConfigError
from nntile_py.runs import run_of
from nntile_py.system.folders import NO_ROOM, replace_file
from nntile_py.system.machine import devices
from nntile_py.system.units import counted
from nntile_py.training.collectives import agree
from nntile_py.training.curves import save_curve
from nntile_py.training.display import Display
from nntile_py.training.loggers import Loggers
from nntile_py.training.loop import run_steps
from nntile_py.training.run_sample import HEADING, sample_text
from nntile_py.training.trainer import Trainer

PATIENCE = 3.0  # seconds that a second Ctrl-C waits for a checkpoint that is being written


@dataclass(frozen=True)
class TrainingRun:
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


def new_run_folder(
    out: Path, resume: Path | None, replaces: bool, checkpoints: list[tuple[int, Path]], report: Report
) -> RunFolder:
    """Create the run's folder. Called after all checks, so that a refused run leaves nothing behind.

    checkpoints: Step and folder of each checkpoint that `out` had at the start. A resumed run raises ConfigError if
    they have changed since: another process has trained into `out`."""
    folder = RunFolder(out, replaces, new=not (resume or replaces), report=report)
    if resume and checkpoint.checkpoints_in(out) != checkpoints:
        raise ConfigError(f"--resume: another process has trained into {out} meanwhile; allowed: to begin again")
    return folder


def _first_files(run: TrainingRun, make_folder: Callable[[], RunFolder]) -> tuple[RunFolder, Metrics]:
    """Create the run's folder, write config and tokenizer into it, and open its metrics.

    Returns the folder and the metrics. After an OSError, a new run's files are removed again."""
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
        if run.point and (changed := changed_conditions(run.point.facts, run.facts)):
            metrics.first["changed"] = changed
        (folder.path / SAMPLE).unlink(missing_ok=True)  # of an earlier end of this run
    except OSError:
        folder.give_up()
        raise
    lost = run.trainer.steps - len({line["step"] for line in metrics.lines})
    if lost and run.point and run_of(run.point.folder).resolve() == run.out.resolve():
        run.report(f"{METRICS} lacks the lines of {lost} of {run.trainer.steps} earlier steps: they are lost")
    return folder, metrics


def train_on_rank_0(run: TrainingRun, make_folder: Callable[[], RunFolder], rescue: Path | None) -> bool:
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
    changes = [f" ({line['changed']})" for line in (*metrics.lines, metrics.first) if "changed" in line]
    try:
        loggers = Loggers(run.config, folder.path, run.trainer.steps, run.report, run.stop)
        metrics.listener = loggers.write
        with closing(loggers), Display(run.console, run.config, run.trainer) as display:
            (start, before), last = run_steps(run.config, run.dataset, run.trainer, metrics, display, writer, run.stop)
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
    first = f"after step {start}{(changes or [''])[-1]}" if start else "before the first step"
    run.report(f"held-out loss {before:.4f} {first}, {measured}")
    if writer.best:
        run.report(f"best held-out loss {writer.best[0]:.4f} after step {writer.best[1]}: {saved / BEST}")
    if skips := display.skips():
        run.report(skips)
    run.report(f"weights saved in {saved / checkpoint.MODEL}")
    save_curve(saved, run.report, run.console.is_terminal)
    _show_predictions(run, saved, last)
    return True


def _show_predictions(run: TrainingRun, saved: Path, last: Mapping[str, Any] | None) -> None:
    """Report a classifier's confusion matrix, the scores of entities, or a sample of text, and save them in `saved`.

    last: Entries of the last measurement; None if there was none."""
    if last and "confusion" in last and run.dataset.class_names:
        _save_confusion(run.dataset.class_names, last["confusion"], saved, run.report)
    elif last and "entities" in last and run.dataset.class_names:
        run.report(f"\n{EntityScores(run.dataset.class_names, last['entities']).table()}")
    elif sample := sample_text(run.config, run.dataset, run.trainer, run.stop):
        run.report(sample)
        with suppress(OSError):  # a full disk: the sample has been printed
            replace_file(saved / SAMPLE, sample.strip().removeprefix(HEADING).strip() + "\n")


def _save_confusion(names: list[str], counts: object, folder: Path, report: Report) -> None:
    """Report a classifier's confusion matrix as a table, and save it as pictures in the run's folder."""
    confusion = Confusion(names, counts)
    metrics = confusion.metrics()
    two = f"F1 {metrics['f1']:.4f} of {names[1]}, " if "f1" in metrics else ""
    count = counted(int(confusion.counts.sum()), "held-out text")
    report(f"\n{count}: accuracy {metrics['accuracy']:.4f}, {two}F1 {metrics['f1_macro']:.4f} (mean of the classes)")
    report(confusion.table())
    try:
        confusion.save(folder)
    except OSError as error:
        report(f"no picture of it: {error.filename}: {error.strerror}")
    else:
        report(f"drawn in {folder / FILES[0]}")
