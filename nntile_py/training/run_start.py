"""Before a run's first step: checks, the weights of a run that has ended, the trainer."""

from dataclasses import replace
from pathlib import Path

from nntile_py.checkpoint import format as checkpoint
from nntile_py.checkpoint.resume import ResumePoint, flattened
from nntile_py.checkpoint.run_folder import RunFolder, check_place, check_replaced, check_unlocked, missing_files
from nntile_py.config.builders import build_model, step_spec
from nntile_py.config.run_config import RunConfig
from nntile_py.data.tokenization import Report
from nntile_py.errors import NNTileError
from nntile_py.execution.mpi import Ranks
from nntile_py.execution.runtime import Runtime
from nntile_py.graph.step import StepSpec
from nntile_py.runs import check_writable, run_of
from nntile_py.system.folders import same_content
from nntile_py.system.units import counted
from nntile_py.training.trainer import Trainer


def check_folders(out: Path, rescue: Path | None, replaces: bool, resume: Path | None = None) -> None:
    """Raise an error if the run may not write into one of its folders. Arguments: see `train` in run.py."""
    for option, folder in {"--out": out, "--rescue": rescue}.items():
        if folder:
            check_place(option, folder)
    if rescue:
        check_writable("--rescue", rescue)
    same_folder = resume is not None and run_of(resume).resolve() == out.resolve()
    check_unlocked(out, "--resume" if same_folder else "--out")
    if replaces and out.exists():
        check_replaced(out)


def publish_on_rank_0(point: ResumePoint, out: Path, ranks: Ranks | None, report: Report) -> bool:
    """Call _publish on rank 0, and return its result on all ranks. If _publish fails, all ranks raise an error."""
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
    """Copy the weights of a checkpoint into the run folder `out`, if the run ended before it had copied them.

    If the folder has these weights, only the files beside them that are missing are copied. Return False if no file is
    missing, if the folder has newer weights, or if the checkpoint belongs to another run."""
    target, weights = out / checkpoint.MODEL, point.folder / checkpoint.MODEL
    saved, missing = same_content(target, weights), missing_files(out, point.folder)
    if run_of(point.folder).resolve() != out.resolve() or (saved and not missing):
        return False
    newer = target.exists() and target.stat().st_mtime > (point.folder / checkpoint.STATE).stat().st_mtime
    if newer and not saved:
        return False
    folder = RunFolder(out, report=report)
    try:
        folder.publish(point.step, missing if saved else None)
    finally:
        folder.close()
    return True


def check_same_start(config: RunConfig, ranks: Ranks | None, point: ResumePoint | None) -> None:
    """Raise ConfigError if ranks have different configs, or resume from different checkpoints."""
    if ranks:
        ranks.same("the config", flattened(config.model_dump(mode="json", by_alias=True)))
        ranks.same("the checkpoint", {"folder": str(point.folder), "step": point.step} if point else {})


def check_ranks(spec: StepSpec, runtime: Runtime, data: dict[str, str], report: Report) -> None:
    """Raise ConfigError if ranks have different data; report the ranks' workers."""
    if not (ranks := runtime.ranks):
        return
    ranks.same("the data", data)
    workers = {"GPU": runtime.cuda, "CPU worker": runtime.cpus}
    each = " and ".join(counted(count, name) for name, count in workers.items() if count)
    shared = f", of which {ranks.sharers} ranks share one" if ranks.sharers > 1 else ""
    report(f"{ranks.size} ranks, each with {each}{shared}")
    if (tiles := len(spec.tiling.parts("batch", spec.batch))) < ranks.size:
        report(f"note: the batch has {counted(tiles, 'tile')}: smaller tiles.batch gives all ranks work")


def build_trainer(config: RunConfig, spec: StepSpec | None = None) -> Trainer:
    """Return the Trainer of a config. Needs a running Runtime.

    spec: The training step and its model. Default: from the config, with the weights that `model.from` names."""
    spec = spec or step_spec(config, build_model(config))
    return Trainer.of_spec(spec, seed=config.seed, check_finite=config.debug.nonfinite)


def first_trainer(config: RunConfig, spec: StepSpec, runtime: Runtime, point: ResumePoint | None) -> Trainer:
    """Return the trainer for this process's first step.

    The trainer starts with the weights of the checkpoint `point`. Without a checkpoint, it starts with the weights of
    the model that `model.from` names. Without both, it starts with the weights of `spec.model`.
    The trainer's model keeps no weights: the tiles hold them, and the run's end copies no weights into the model."""
    if point or config.model.from_ is not None:
        spec = replace(spec, model=point.model(config) if point else build_model(config))
    trainer = build_trainer(config, spec)
    trainer.model.weights = {}  # frees the arrays of a checkpoint
    trainer.copies_at_end = False
    if runtime.ranks:
        runtime.forget(trainer)  # close() is a collective operation, and a failed rank does not call it
    if point:
        point.restore(trainer)
    return trainer
