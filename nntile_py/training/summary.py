"""The end of a run's output: a sample of text, or a classifier's confusion matrix."""

from collections.abc import Callable
from pathlib import Path

from nntile_py.config.run_config import RunConfig
from nntile_py.data.confusion import FILES, Confusion
from nntile_py.data.dataset import Dataset
from nntile_py.inference.generate import fill_masked, generate
from nntile_py.training.collectives import agree, ranks_of_run
from nntile_py.training.trainer import Trainer


def sample_text(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str]) -> str:
    """Return the model's continuation of a prompt, or its guesses at masked tokens; empty if there is no sample.

    All ranks call it. It waits until rank 0 has saved the run."""
    stopped, _ = agree(stop)
    if dataset.example is None or not config.sample.tokens or stopped:
        return ""
    if reason := missing_logits(trainer):
        return reason
    if config.aim == "causal":
        return f"\nsample:\n{generate(trainer, dataset.tokenizer, config, [] if ranks_of_run() else stop)}"
    guesses = fill_masked(trainer, dataset.tokenizer, dataset.example, config.sample.tokens)
    return f"\nheld-out text, guesses at its masked tokens in [[ ]]:\n{guesses}"


def missing_logits(trainer: Trainer) -> str:
    """Return why no sample of text is possible with this model; empty if it is possible."""
    outputs = trainer.outputs
    if "logits" in outputs and tuple(outputs["logits"].axes[:-1]) == ("batch", "seq"):
        return ""
    return (
        "no sample: it needs the model's output logits [batch, seq, vocab]; the outputs of"
        f" {type(trainer.model).__name__} are {', '.join(f'{n} {[*t.axes]}' for n, t in outputs.items()) or 'none'}"
    )


def save_confusion(names: list[str], counts: object, folder: Path, report: Callable[[str], None]) -> None:
    """Report a classifier's last measurement as a table, and draw it into the run's folder."""
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
