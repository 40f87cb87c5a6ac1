"""The sample of text at the end of a run, and what happens if there is none."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Dataset
from nntile_py.errors import NotFinite, TaskError
from nntile_py.execution import memory_checks
from nntile_py.execution.runtime import Runtime
from nntile_py.inference.generate import fill_masked, generate
from nntile_py.training.collectives import agree, ranks_of_run
from nntile_py.training.trainer import Trainer

HEADING = "sample:"  # of the text at the end of the output; the file sample.txt has the text alone


class NoSample(TaskError):
    """A task of the sample has failed. The error ends the block of the runtime, because its tiles are then invalid."""


@contextmanager
def missing_sample_reported(report: Callable[[str], None]) -> Iterator[None]:
    """Context manager around the block of a run's runtime: report a failed sample, as the training is complete."""
    try:
        yield
    except NoSample as error:
        report(_no_sample(error))


def sample_text(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str]) -> str:
    """Return the model's continuation of a prompt, or its guesses at masked tokens; "" if there is no sample.

    All ranks must call this function. Other ranks wait in it until rank 0 has saved the run.

    Raises:
        NoSample: A task has failed, for example because memory is short. Never raised with several ranks."""
    stopped, _ = agree(stop)
    if dataset.example is None or not config.sample.tokens or stopped:
        return ""
    if reason := _missing_logits(trainer):
        return reason
    ranks = ranks_of_run()
    try:
        if config.aim == "causal":
            return f"\n{HEADING}\n{_continuation(config, dataset, trainer, stop, alone=not ranks)}"
        guesses = fill_masked(trainer, dataset.tokenizer, dataset.example, config.sample.tokens)
        return f"\nheld-out text, guesses at its masked tokens in [[ ]]:\n{guesses}"
    except NotFinite as error:
        return _no_sample(error)
    except TaskError as error:
        if ranks:
            raise
        raise NoSample(str(error)) from error


def _no_sample(error: Exception) -> str:
    """Return the report of a run whose training is complete, but whose sample failed."""
    return f"no sample, but the training is complete and the weights are saved: {error}"


def _continuation(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str], *, alone: bool) -> str:
    """Return the prompt of `config.sample` and its continuation.

    A Generator computes the continuation if memory has room for a second copy of the weights; else the trainer does.

    alone: False if several ranks compute each token.
    """

    def model() -> Any:
        trainer.state_dict()  # puts the weights into the model
        return trainer.model

    has_room = Runtime.current is not None and memory_checks.has_room_for_copy(trainer.built, Runtime.current)
    how = (stop if alone else [], model if alone and has_room else None)
    return generate(trainer, dataset.tokenizer, config, *how)


def _missing_logits(trainer: Trainer) -> str:
    """Return the reason why this model can give no sample of text; "" if it can."""
    outputs = trainer.outputs
    if "logits" in outputs and tuple(outputs["logits"].axes[:-1]) == ("batch", "seq"):
        return ""
    return (
        "no sample: it needs the model's output logits [batch, seq, vocab]; the outputs of"
        f" {type(trainer.model).__name__} are {', '.join(f'{n} {[*t.axes]}' for n, t in outputs.items()) or 'none'}"
    )
