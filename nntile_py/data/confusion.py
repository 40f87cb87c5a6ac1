"""Confusion: accuracy, F1 and confusion matrix of a classifier, as numbers, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nntile_py.system.pictures import new_figure, save_figure
from nntile_py.system.units import counted

Array = np.ndarray[Any, Any]
MAX_SHOWN = 20  # with more classes, there is no room for the matrix in the table, nor for counts in the picture
FILES = ("confusion.png", "confusion.svg")
# Limits of a picture: with more than MOST_NAMED classes, the axes show numbers instead of names. Names longer than
# MOST_LETTERS are cut. Beyond these limits, Matplotlib takes minutes and leaves no room for the matrix.
MOST_NAMED, MOST_LETTERS = 80, 24


class Confusion:
    """Confusion matrix: counts of samples by true class (row) and predicted class (column).

    Args:
        names: Names of the classes.
        counts: The matrix [classes, classes]. None: zeros.
    """

    def __init__(self, names: list[str], counts: Any = None) -> None:
        self.names = names
        self.counts = np.zeros((len(names), len(names)), np.int64) if counts is None else np.array(counts)

    def add(self, true: Array, predicted: Array) -> None:
        """Add samples to the counts. true, predicted: for each sample, the number of its true and predicted class."""
        np.add.at(self.counts, (true, predicted), 1)

    @property
    def accuracy(self) -> float:
        """Share of samples whose class was predicted correctly; nan without samples."""
        return float(self.counts.trace() / self.counts.sum()) if self.counts.any() else float("nan")

    @property
    def f1(self) -> Array:
        """F1 of each class, 2 TP / (2 TP + FP + FN), the harmonic mean of precision and recall; nan for a class that
        neither occurs nor was predicted."""
        right, both = self.counts.diagonal(), self.counts.sum(0) + self.counts.sum(1)
        return np.where(both > 0, 2 * right / np.maximum(both, 1), np.nan)

    def metrics(self) -> dict[str, Any]:
        """Return the entries for metrics.jsonl.

        f1_macro is the mean F1 of the classes that occur or were predicted. f1 exists only with two classes: it is the
        F1 of the second class, which counts as the positive class."""
        macro = float(np.nanmean(self.f1)) if self.counts.any() else float("nan")
        two = {"f1": float(self.f1[1])} if len(self.names) == 2 else {}
        return {"accuracy": self.accuracy, "f1_macro": macro, **two, "confusion": self.counts.tolist()}

    def table(self) -> str:
        """Format one line for each true class: counts by predicted class, precision, recall and F1."""
        shown = len(self.names) <= MAX_SHOWN
        named = [f"{number} {name}" for number, name in enumerate(self.names)]
        left = max(map(len, [*named, "true class"]))
        wide = max(len(str(self.counts.max())), len(str(len(self.names)))) + 2
        columns = "".join(f"{number:{wide}}" for number in range(len(self.names))) if shown else ""
        lines = [f"{'true class':{left}}{columns}  samples  precision  recall     F1"]
        for name, row, right, predicted, f1 in zip(
            named, self.counts, self.counts.diagonal(), self.counts.sum(0), self.f1, strict=True
        ):
            counts = "".join(f"{count:{wide}}" for count in row) if shown else ""
            rates = f"{_share(right, predicted):>9}  {_share(right, row.sum()):>6}  {_share(f1, 1):>5}"
            lines.append(f"{name:{left}}{counts}  {row.sum():7}  {rates}")
        head = [f"{'':{left}}{'predicted class':>{max(len(columns), 15)}}"] if shown else []
        return "\n".join([*head, *lines])

    def save(self, folder: Path) -> None:
        """Draw the matrix into the files FILES in `folder`. Equal counts give files with equal bytes.

        A cell's colour shows its count as a share of all samples of the true class."""
        save_figure(self._drawn(), folder / "confusion", [Path(name).suffix[1:] for name in FILES])

    def _drawn(self) -> Any:
        count = len(self.names)
        side = min(2.5 + 0.45 * count, 14)
        figure = new_figure((side + 1.2, side))
        axes = figure.add_subplot()
        share = self.counts / np.maximum(self.counts.sum(1, keepdims=True), 1)
        image = axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
        size = 8 if count <= MAX_SHOWN else 5
        if count <= MOST_NAMED:
            names = [name if len(name) <= MOST_LETTERS else f"{name[: MOST_LETTERS - 1]}…" for name in self.names]
            axes.set_xticks(range(count), names, rotation=90 if count > 3 else 0, fontsize=size, parse_math=False)
            axes.set_yticks(range(count), names, fontsize=size, parse_math=False)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        for (row, column), number in np.ndenumerate(self.counts) if count <= MAX_SHOWN else ():
            if number:
                colour = "white" if share[row, column] > 0.5 else "black"
                axes.text(column, row, str(number), ha="center", va="center", fontsize=size, color=colour)
        macro = self.metrics()["f1_macro"]
        texts = counted(int(self.counts.sum()), "held-out text")
        axes.set_title(f"{texts}: accuracy {self.accuracy:.3f}, F1 {macro:.3f}", fontsize=10)
        figure.colorbar(image, ax=axes, label="share of the true class", shrink=0.8)
        return figure


class LabelScores:
    """Counts of right and wrong labels of texts that may have any number of labels.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int) -> None:
        self.right, self.wrong = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
        self.texts = self.exact = 0

    def add(self, true: Array, predicted: Array) -> None:
        """Add texts to the counts. true, predicted: [texts, classes], true for each class that applies."""
        true = true > 0.5
        self.right += (true & predicted).sum(0)
        self.wrong += (true != predicted).sum(0)
        self.texts += len(true)
        self.exact += int((true == predicted).all(1).sum())

    def metrics(self) -> dict[str, Any]:
        """Return the entries for metrics.jsonl.

        accuracy is the share of texts all of whose labels are right. f1 counts the labels of all classes together;
        f1_macro is the mean F1 of the classes that occur or were predicted.
        """
        both = 2 * self.right + self.wrong
        found = self.right[both > 0] * 2 / both[both > 0]
        macro = float(found.mean()) if len(found) else float("nan")
        micro = float(2 * self.right.sum() / both.sum()) if both.any() else float("nan")
        return {"accuracy": self.exact / self.texts if self.texts else float("nan"), "f1_macro": macro, "f1": micro}


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.3f}" if whole and not np.isnan(part) else "-"
