"""The training loop of `nntile train`: text in, steps through the runtime, metrics, weights and a sample out."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from rich.console import Console

from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig, runtime_options
from nntile_py.data.confusion import FILES, Confusion
from nntile_py.data.dataset import Dataset
from nntile_py.errors import ConfigError
from nntile_py.execution.runtime import Runtime
from nntile_py.models.base import Model
from nntile_py.system.folders import replace_file
from nntile_py.training import checkpoint, final_save
from nntile_py.training.checkpoint_writer import Saver, told
from nntile_py.training.collectives import Giver, Silent, agree
from nntile_py.training.datasets import build_dataset, check_objective
from nntile_py.training.display import Display, Screen, say
from nntile_py.training.export import beside_arrays, tokenizer_files
from nntile_py.training.loop import run_steps
from nntile_py.training.resume import Resumed, check_same, data_facts, flat, newest
from nntile_py.training.run_folder import Metrics, RunFolder, check_alone, check_place, check_replaced
from nntile_py.training.sample import sampled
from nntile_py.training.trainer import Trainer


def train(
    config: RunConfig, out: Path, console: Console, *, resume: Path | None = None, replaces: bool = False,
    rescue: Path | None = None, again: str = "nntile train CONFIG",
) -> int:  # fmt: skip
    """Train as `config` says; leaves config, tokenizer, metrics, checkpoints and weights in the folder `out`.

    resume: a run's folder, or a checkpoint, to go on from. replaces: an earlier run in `out` goes when this one has its
    first checkpoint. rescue: where the run goes if `out` has no room at the start, or at the end. again: the command
    that this is.

    Returns the exit status: 0, or after SIGINT or SIGTERM 130 or 143, with what was trained saved.
    Raises NNTileError, without writing weights, when the loss or the gradient is no longer a finite number."""
    # Refuses what cannot be trained and what the machine lacks, before any work.
    check_objective(config)
    runtime = Runtime(**runtime_options(config.runtime.model_dump()), mpi=True)
    ranks = runtime.ranks
    leads = not ranks or ranks.rank == 0  # writes and shows everything; the others compute and read alone
    if ranks:  # what mpirun shows each rank looks like a terminal
        console = Screen(quiet=not leads, force_terminal=False)
    tell = partial(say, console)
    if config.short_warmup:
        tell(f"note: {config.short_warmup}")
    if leads:
        for option, folder in {"--out": out, "--rescue": rescue}.items():
            if folder:
                check_place(option, folder)
        check_alone(out)
        if replaces and out.exists():
            check_replaced(out)
    there = checkpoint.found(out)
    resumed = newest(resume, tell) if resume else None
    dataset, data = _read(config, runtime, resumed, tell)
    tell(f"{dataset.describe()}; writing to {out}")
    if resumed:
        differs = check_same(resumed, config, data)
        tell(f"going on after step {resumed.step}, from {resumed.folder}" + (f"; {differs}" if differs else ""))
    with runtime, _signals() as stop:
        trainer = _prepared(config, runtime, resumed)
        if about := dataset.describe_lengths():
            tell(about)
        if not leads:
            return _follow(config, dataset, trainer, stop)
        run = _Run(config, out, dataset, data, trainer, resumed, stop, console, tell)
        if not _lead(run, partial(_folder, out, resume, replaces, there), rescue):
            return 128 + signal.Signals[stop[0]].value
    if stop:
        more = f"; {again} --resume goes on" if trainer.steps < config.train.steps else ""
        done = f"after step {trainer.steps} of {config.train.steps}"
        tell(f"stopped by {stop[0]} {done}; what was trained is saved{more}")
        return 128 + signal.Signals[stop[0]].value
    return 0


def _read(
    config: RunConfig, runtime: Runtime, resumed: Resumed | None, tell: Callable[[str], None]
) -> tuple[Dataset, dict[str, str]]:
    """The text, as tokens, and what tells it from another; of several ranks, the same on all."""
    tell(f"reading {config.data.source}")
    dataset = build_dataset(config)
    data = data_facts(config, dataset)
    if ranks := runtime.ranks:
        ranks.same("the config", flat(config.model_dump(mode="json", by_alias=True)))
        ranks.same("the data", data)
        ranks.same("the checkpoint", {"folder": str(resumed.folder), "step": resumed.step} if resumed else {})
        workers = {"GPU": runtime.cuda, "CPU worker": runtime.cpus}
        each = " and ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in workers.items() if count)
        shared = f", of which {ranks.sharers} ranks share one" if ranks.sharers > 1 else ""
        tell(f"{ranks.size} ranks, each with {each}{shared}")
        if (tiles := len(step_spec(config).tiling.parts("batch", config.train.batch))) < ranks.size:
            tell(f"note: the batch has {tiles} tile{'s' * (tiles > 1)}: smaller tiles.batch gives all ranks work")
    return dataset, data


def _prepared(config: RunConfig, runtime: Runtime, resumed: Resumed | None) -> Trainer:
    """The trainer of each rank."""
    trainer = build_trainer(config, resumed.model(config) if resumed else None)
    if runtime.ranks:
        runtime.forget(trainer)  # at the end no rank wants all weights: the first has written them
        trainer.model.weights = {}  # they are in tiles
    if resumed:
        resumed.restore(trainer)
    return trainer


@dataclass(frozen=True)
class _Run:
    """What the first rank has before the first step. data: see data_facts; stop: see _signals."""

    config: RunConfig
    out: Path
    dataset: Dataset
    data: dict[str, str]
    trainer: Trainer
    resumed: Resumed | None
    stop: list[str]
    console: Console
    tell: Callable[[str], None]


def _folder(out: Path, resume: Path | None, replaces: bool, there: list[tuple[int, Path]]) -> RunFolder:
    """Made when all else is ready: what is refused leaves nothing behind. there: checkpoints at the start."""
    folder = RunFolder(out, replaces, new=not (resume or replaces))
    if resume and checkpoint.found(out) != there:
        raise ConfigError(f"--resume: another process has trained into {out} meanwhile; allowed: to begin again")
    return folder


def _lead(run: _Run, made: Callable[[], RunFolder], rescue: Path | None) -> bool:
    """What the first rank does: train, measure, save, tell. Whether there is something trained. made: the run's folder;
    where that has no room to begin, all goes to `rescue`."""
    try:
        folder, metrics = _begun(run, made)
    except OSError as error:
        if error.errno not in checkpoint.NO_ROOM or not rescue:
            raise
        run.tell(f"cannot begin ({told(error)}): training into {rescue} instead")
        folder, metrics = _begun(run, partial(RunFolder, rescue, new=True))
        rescue = None
    saver = _saver(run, folder)
    known = not run.resumed or any("held_out_loss_before" in line for line in metrics.lines)
    try:
        with Display(run.console, run.config, run.trainer) as display:
            before, after = run_steps(run.config, run.dataset, run.trainer, metrics, display, saver, run.stop)
        saver.finish()
    except BaseException:
        saver.abandon()
        metrics.close()
        folder.close()
        if folder.path != folder.out:
            run.tell(
                f"no checkpoint was made: the earlier run in {run.out} stays, this one's metrics are in {folder.path}"
            )
        raise
    try:
        if not run.trainer.steps:  # weights that nobody trained take no run's place
            saver.close()
            agree(run.stop)
            run.tell(f"stopped by {run.stop[0]} before the first step: nothing is saved")
            return False
        saved = final_save.save(saver, metrics, run.config, rescue, run.stop, run.tell)
        saver.close()
    finally:
        metrics.close()
        saver.folder.close()
    measured = f"{after['held_out_loss']:.4f} at the last measurement" if after else "not measured since"
    begun = "before the first step" if known else f"after step {run.resumed.step if run.resumed else 0}"
    run.tell(f"held-out loss {before:.4f} {begun}, {measured}")
    if skips := display.skips():
        run.tell(skips)
    run.tell(f"weights saved in {saved / checkpoint.MODEL}")
    if after and "confusion" in after and run.dataset.class_names:
        _show_confusion(Confusion(run.dataset.class_names, after["confusion"]), saved, run.tell)
    elif sample := sampled(run.config, run.dataset, run.trainer, run.stop):
        run.tell(sample)
    return True


def _begun(run: _Run, made: Callable[[], RunFolder]) -> tuple[RunFolder, Metrics]:
    """A run's folder with what it has before the first step; where that fails, a new one is gone again."""
    folder = made()
    try:
        replace_file(folder.path / "config.yaml", run.config.to_yaml())
        for name, content in tokenizer_files(run.dataset.tokenizer, run.config).items():
            replace_file(folder.path / name, content)
        return folder, Metrics(folder.path, run.trainer.steps, run.tell, run.out, partial(_set_aside, run, folder.path))
    except OSError:
        folder.give_up()
        raise


def _set_aside(run: _Run, folder: Path) -> None:
    for path in checkpoint.set_aside(folder, run.resumed.step) if run.resumed else ():
        run.tell(f"a later checkpoint of this run is now {path.name}")


def _saver(run: _Run, folder: RunFolder) -> Saver:
    facts = {"config": run.config.model_dump(mode="json", by_alias=True), "data": run.data}
    files = beside_arrays(run.trainer, run.dataset.tokenizer, run.config)
    made = Saver(run.config.checkpoint, run.trainer, folder, files, facts, run.tell)
    if run.resumed and checkpoint.folder_of(folder.path, run.resumed.step).is_dir():
        made.newest = run.resumed.step
    return made


def _follow(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str]) -> int:
    """What a rank does that is not the first: the same steps, and whatever all ranks do together.

    It ends well even where a signal has ended the run: mpirun would end the first rank before that has told of it."""
    silent, giver = Silent(), Giver(trainer, config.checkpoint.async_)
    _, after = run_steps(config, dataset, trainer, silent, silent, giver, stop)
    giver.finish()
    if not (after and "confusion" in after):
        sampled(config, dataset, trainer, stop)
    return 0


def _show_confusion(found: Confusion, folder: Path, tell: Callable[[str], None]) -> None:
    """The last measurement of a classifier, as a table and a picture."""
    told = found.metrics()
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


def build_trainer(config: RunConfig, model: Model | None = None) -> Trainer:
    """The Trainer that `config` asks for; needs a running Runtime."""
    return Trainer.of_spec(
        step_spec(config, model or build_model(config)), seed=config.seed, check_finite=config.debug.nonfinite
    )


@contextmanager
def _signals() -> Iterator[list[str]]:
    """A list that SIGINT and SIGTERM put their name into. After one a SIGINT acts as usual, at once; a SIGTERM does
    not, as Slurm sends a rank two when its time is over."""
    stop: list[str] = []

    def ask(number: int, frame: FrameType | None) -> None:
        stop.append(signal.Signals(number).name)
        signal.signal(signal.SIGINT, before[signal.SIGINT])

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        restore()
