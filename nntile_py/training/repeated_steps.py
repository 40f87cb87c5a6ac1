"""Steps that all have the same inputs, for whoever times them."""

from __future__ import annotations

from collections.abc import Callable

from nntile_py.training.inputs import Inputs, IntArray
from nntile_py.training.trainer import Trainer


def same_steps(trainer: Trainer, inputs: Inputs, labels: IntArray | None = None) -> Callable[[int], list[float]]:
    """What submits n steps together, waits for them and returns their losses. Arguments as of `Trainer.submit`.

    Sequences are packed here, once: PyTorch, too, is given its offsets and masks, and a run packs while steps run."""
    filled = trainer.filled(inputs, labels)

    def run(count: int) -> list[float]:
        return [pending.result().loss for pending in [trainer.submit(filled) for _ in range(count)]]

    return run
