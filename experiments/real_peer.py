"""Train one of the two models of real.py with transformers' Trainer: `real_peer.py WORK FOLDER`.

FOLDER holds batches.json with the texts of each step, and gets losses, times and accuracy in result.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

Batch = dict[str, list[Any]]


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch padded to its longest text, as transformers' DataCollatorWithPadding does."""
    longest = max(map(len, batch["input_ids"]))
    inputs = {"attention_mask": [[1] * len(row) + [0] * (longest - len(row)) for row in batch["input_ids"]]}
    for key, fill in (("input_ids", 0), ("labels", -100)):
        rows = batch[key]
        inputs[key] = [row + [fill] * (longest - len(row)) for row in rows] if isinstance(rows[0], list) else rows
    return {key: torch.tensor(rows) for key, rows in inputs.items()}


class Steps(transformers.Trainer):
    """A Trainer that takes one given batch in each step, and records unrounded losses and times."""

    losses: list[float]
    times: list[float]

    def get_train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=None, collate_fn=tensors)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def opened(work: str, folder: Path) -> Any:
    """Return the model in `folder.parent / work`, with the adapter in `folder / adapter` if there is one."""
    kind = transformers.AutoModelForSequenceClassification if work == "minilm" else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder.parent / work, dtype=torch.float32)
    if (folder / "adapter").is_dir():
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    return model


def main(work: str, folder: Path) -> None:
    given = json.loads((folder / "batches.json").read_text())
    model, optimizer = opened(work, folder), given["optimizer"]
    steps = Steps(
        model, train_dataset=given["steps"],
        args=transformers.TrainingArguments(
            output_dir=str(folder / "trainer"), max_steps=len(given["steps"]), seed=0, report_to=[], save_strategy="no",
            logging_strategy="no", disable_tqdm=True, learning_rate=optimizer["lr"], lr_scheduler_type="constant",
            weight_decay=optimizer["weight_decay"], max_grad_norm=optimizer["clip_grad_norm"], optim="adamw_torch",
            remove_unused_columns=False, use_cpu=True,
        ),
    )  # fmt: skip
    steps.losses, steps.times = [], []
    steps.train()
    ends = [*steps.times[1:], time.perf_counter()]
    result = {"losses": steps.losses, "step_s": [b - a for a, b in zip(steps.times, ends, strict=True)]}
    model.eval()
    with torch.no_grad():
        if work == "minilm":
            right = [(model(**(x := tensors(batch))).logits.argmax(-1) == x["labels"]) for batch in given["held_out"]]
            result["accuracy"] = torch.cat(right).float().mean().item()
        else:
            model.save_pretrained(folder / "trained")
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
