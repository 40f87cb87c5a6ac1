"""What a trained model is shown to do at the end of a run."""

from nntile_py.config.run_config import RunConfig
from nntile_py.data.dataset import Dataset
from nntile_py.inference.generate import fill_masked, generate
from nntile_py.training.collectives import agree, ranks_of_run
from nntile_py.training.trainer import Trainer


def sampled(config: RunConfig, dataset: Dataset, trainer: Trainer, stop: list[str]) -> str:
    """What the trained model makes of a prompt or of held-out text."""
    asked, _ = agree(stop)  # and the first rank has saved what was trained
    if dataset.example is None or not config.sample.tokens or asked:
        return ""
    if lack := no_logits(trainer):
        return lack
    if config.aim == "causal":
        return f"\nsample:\n{generate(trainer, dataset.tokenizer, config, [] if ranks_of_run() else stop)}"
    filled = fill_masked(trainer, dataset.tokenizer, dataset.example, config.sample.tokens)
    return f"\nheld-out text, guesses at its masked tokens in [[ ]]:\n{filled}"


def no_logits(trainer: Trainer) -> str:
    """Why no sample of text can be made, if that is so."""
    outputs = trainer.spec.trace(training=False)[1].outputs
    if "logits" in outputs and tuple(outputs["logits"].axes[:-1]) == ("batch", "seq"):
        return ""
    return (
        "no sample: it is made of the model's output logits [batch, seq, vocab]; the outputs of"
        f" {type(trainer.model).__name__} are {', '.join(f'{n} {[*t.axes]}' for n, t in outputs.items()) or 'none'}"
    )
