"""EntityScores: accuracy of words' labels, and precision, recall and F1 of entities, as numbers and as a table.

A label such as B-PER says that a word begins an entity of the kind PER, I-PER that the word continues it, and O that
the word is in no entity. The schemes IOB1, IOB2, BIOES and BILOU are read; an entity counts as right if its kind, its
first and its last word are right (Tjong Kim Sang and De Meulder 2003, CoNLL shared task).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

OUTSIDE = "O"
_LABEL = re.compile(r"([BIESLU])-(.+)")
Entity = tuple[str, int, int]  # kind, first word, last word


def has_entities(names: Iterable[str]) -> bool:
    """Return True if all class names are labels of entities, such as B-PER, or O."""
    others = [name for name in names if name != OUTSIDE]
    return bool(others) and all(_LABEL.fullmatch(name) for name in others)


def entities(labels: Sequence[str]) -> set[Entity]:
    """Return the entities of a text from the labels of its words.

    A label that cannot continue the entity before it, such as I-PER after O, begins a new entity."""
    found: list[Entity] = []
    ended = True  # this word cannot belong to the entity of the word before
    for place, label in enumerate(labels):
        match = _LABEL.fullmatch(label)
        if not match:
            ended = True
            continue
        prefix, kind = match.groups()
        if prefix in "IEL" and not ended and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1], place)
        else:
            found.append((kind, place, place))
        ended = prefix in "ESLU"
    return set(found)


class EntityScores:
    """Counts of words, and of entities by kind.

    If the class names are not labels of entities, such as parts of speech, each word counts as an entity of its own,
    whose kind is its label.

    Args:
        names: Names of the classes.
        counts: {kind: [right, predicted, true]}, the numbers of entities. None: no entities.
    """

    def __init__(self, names: Sequence[str], counts: dict[str, list[int]] | None = None) -> None:
        self.names = names
        self.of_entities = has_entities(names)
        counts = counts or {}
        self.right, self.predicted, self.true = (
            Counter({kind: numbers[k] for kind, numbers in counts.items()}) for k in range(3)
        )
        self.words = self.right_words = 0

    def add(self, true: Sequence[int], predicted: Sequence[int]) -> None:
        """Add a text to the counts. true, predicted: for each word, the number of its true and predicted class."""
        self.words += len(true)
        self.right_words += sum(a == b for a, b in zip(true, predicted, strict=True))
        labels = [[self.names[number] for number in numbers] for numbers in (true, predicted)]
        first, second = (
            entities(one) if self.of_entities else {(name, at, at) for at, name in enumerate(one)} for one in labels
        )
        self.true.update(kind for kind, *_ in first)
        self.predicted.update(kind for kind, *_ in second)
        self.right.update(kind for kind, *_ in first & second)

    @property
    def kinds(self) -> list[str]:
        """The kinds of entities that occur or were predicted, sorted."""
        return sorted(self.true.keys() | self.predicted.keys())

    def metrics(self) -> dict[str, Any]:
        """Return the entries for metrics.jsonl.

        accuracy is the share of words whose label is right. precision, recall and f1 count the entities of all kinds
        together, and exist only if the classes are labels of entities. f1_macro is the mean F1 of the kinds."""
        each = [_rates(self.right[kind], self.predicted[kind], self.true[kind])[2] for kind in self.kinds]
        counts = {kind: [self.right[kind], self.predicted[kind], self.true[kind]] for kind in self.kinds}
        totals = _rates(self.right.total(), self.predicted.total(), self.true.total())
        found = dict(zip(("precision", "recall", "f1"), totals, strict=True)) if self.of_entities else {}
        accuracy = self.right_words / self.words if self.words else float("nan")
        macro = sum(each) / len(each) if each else float("nan")
        return {"accuracy": accuracy, **found, "f1_macro": macro, "entities": counts}

    def table(self) -> str:
        """Format one line for each kind: number of true entities, precision, recall and F1."""
        head, count = ("entity", "entities") if self.of_entities else ("label", "words")
        left = max(map(len, [*self.kinds, head, "all"]))
        rows = [(kind, self.right[kind], self.predicted[kind], self.true[kind]) for kind in self.kinds]
        if self.of_entities:
            rows.append(("all", self.right.total(), self.predicted.total(), self.true.total()))
        lines = [f"{head:{left}}  {count:>8}  precision  recall     F1"]
        for kind, right, predicted, true in rows:
            precision, recall, f1 = _rates(right, predicted, true)
            lines.append(f"{kind:{left}}  {true:8}  {precision:9.3f}  {recall:6.3f}  {f1:5.3f}")
        return "\n".join(lines)


def _rates(right: int, predicted: int, true: int) -> tuple[float, float, float]:
    """Return precision, recall and F1; 0 in place of a quotient by 0."""
    return right / predicted if predicted else 0.0, right / true if true else 0.0, 2 * right / max(predicted + true, 1)
