"""The command `nntile train`: read data, create the trainer, train, save checkpoints and weights, print a summary."""

import shlex
from functools import partial
from pathlib import Path

from rich.console import Console

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.resume import (
    ResumePoint,
    check_same_config,
    check_same_data,
    check_steps,
    data_facts,
    newest_checkpoint,
)
from nntile_py.checkpoint.writer import TileSender
from nntile_py.config.run_config import RunConfig
from nntile_py.config.saved_code import CODE
from nntile_py.config.scheduler_file import runtime_options
from nntile_py.config.schedules import check_rates
from nntile_py.data.dataset import Dataset
from nntile_py.data.tokenization import Report
from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.recompute_rule import AUTO
from nntile_py.graph.step import StepSpec
from nntile_py.models.registry import code_of
from nntile_py.runs import check_writable, run_of
from nntile_py.system.folders import same_content
from nntile_py.training.collectives import NoOutput
from nntile_py.training.datasets import build_dataset, check_objective
from nntile_py.training.display import say
from nntile_py.training.loggers import check_packages
from nntile_py.training.loop import run_steps
from nntile_py.training.rank_0 import TrainingRun, new_run_folder, train_on_rank_0
from nntile_py.training.run_sample import missing_sample_reported, sample_text
from nntile_py.training.run_start import (
    check_folders,
    check_ranks,
    check_same_start,
    first_trainer,
    publish_on_rank_0,
)
from nntile_py.training.signals import exit_status, signals_of_run
from nntile_py.training.trainer import Trainer


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
    if is_rank_0:
        check_folders(out, rescue, replaces, resume)

    # Data, and the checkpoint to resume from.
    checkpoints = checkpoint.checkpoints_in(out)
    point = newest_checkpoint(resume, report) if resume else None
    check_same_start(config, ranks, point)
    differences = check_same_config(point, config) if point else ""
    if point and _all_trained(point, config, out, ranks, report):
        return 0
    if config.short_warmup:
        report(f"note: {config.short_warmup}")
    if is_rank_0 and point:  # the folder of a new run has been checked before
        check_writable("--resume", out)
    dataset, data = _read_data(config, spec, runtime, out, report)
    if point:
        check_same_data(point, data)
        report(f"going on after step {point.step}, from {point.folder}" + (f"; {differences}" if differences else ""))

    # Trainer, steps, weights.
    with missing_sample_reported(report), runtime, signals_of_run(runtime) as stop:
        trainer = first_trainer(config, spec, runtime, point)
        _report_trainer(trainer, config, dataset, report)
        if not is_rank_0:
            return _train_on_other_rank(config, dataset, trainer, stop)
        facts = {"config": config.model_dump(mode="json", by_alias=True), "data": data, "overrides": overrides or []}
        run = TrainingRun(config, out, dataset, facts, trainer, point, stop, console, report)
        if not train_on_rank_0(run, partial(new_run_folder, out, resume, replaces, checkpoints, report), rescue):
            return exit_status(stop)
    if stop:
        _report_stop(stop, trainer.steps, config, out, report)
    return exit_status(stop)


def _read_data(
    config: RunConfig, spec: StepSpec, runtime: Runtime, out: Path, report: Report
) -> tuple[Dataset, dict[str, str]]:
    """Return the dataset and the hashes of its data, which are the same on all ranks."""
    report(f"reading {config.data.name}")
    dataset = build_dataset(config, spec, report)
    data = data_facts(config, dataset)
    check_ranks(spec, runtime, data, report)
    report(f"{dataset.describe()}; writing to {out}")
    if config.tokenizer.path is None and (count := dataset.tokenizer.get_vocab_size()) < config.tokenizer.size():
        report(f"note: the tokenizer has {count:,} tokens; tokenizer.vocab_size={count} saves unused rows of weights")
    return dataset, data


def _all_trained(point: ResumePoint, config: RunConfig, out: Path, ranks: Ranks | None, report: Report) -> bool:
    """Return True if the run in `out` has trained all its steps, and report where the weights are.

    If the run ended before it had copied the weights into its folder, they are copied now.

    Raises:
        ConfigError: The checkpoint has more steps than train.steps, or as many and is of a run in another folder."""
    same_folder = run_of(point.folder).resolve() == out.resolve()
    if point.step != config.train.steps or not same_folder:
        check_steps(point, config)
        return False
    target, saved = out / checkpoint.MODEL, point.folder / checkpoint.MODEL
    if publish_on_rank_0(point, out, ranks, report):
        where = f"weights saved in {target}"
    else:
        where = f"the weights are in {target if same_content(target, saved) else saved}"
    done = f"all {point.step} steps are" if point.step > 1 else "the only step is"
    report(f"{done} trained; {where}; to train on, add --set train.steps=N with N above {point.step}")
    return True


def _report_trainer(trainer: Trainer, config: RunConfig, dataset: Dataset, report: Report) -> None:
    """Report the choice of `recompute: auto`, the frozen parameters, and the lengths of the dataset's sequences."""
    if config.recompute == AUTO:
        report(f"recompute: {trainer.spec.recompute}, the fastest that fits into the memory")
    trained, every = trainer.parameters
    if trained < every:
        report(f"{trained:,} of {every:,} parameters are trained, the others are frozen")
    if lengths := dataset.describe_lengths():
        report(lengths)


def _report_stop(stop: list[str], steps: int, config: RunConfig, out: Path, report: Report) -> None:
    """Report that a signal stopped the run after `steps` steps, with the command that continues the run."""
    files = {f"{section}.{key}": getattr(getattr(config, section), key) for section, key in CODE}
    code = "".join(f" --set {shlex.quote(f'{key}={name}')}" for key, name in files.items() if code_of(name))
    unfinished = steps < config.train.steps
    more = f"; to continue: nntile train --resume {shlex.quote(str(out))}{code}" if unfinished else ""
    report(f"stopped by {stop[0]} after step {steps} of {config.train.steps}; all trained steps are saved{more}")


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
