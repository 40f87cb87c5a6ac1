"""Models trained on the rows of one table: classifiers and sentence embeddings.

Checks the sections `data` and `train` of such configs. Sets `choices`, or classes and labels, of `model` by the table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nntile_py.config.data_section import DataSection
from nntile_py.config.sections import TrainSection
from nntile_py.data.labelled_words import ONE, SEVERAL, WORDS, LabelKind, read_samples
from nntile_py.data.tables import class_numbers, labels_of, no_numbers, unknown_label
from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import read_raw
from nntile_py.models.registry import find
from nntile_py.system.folders import STDLIB
from nntile_py.yaml_text import one_line

CLASSIFICATION = "classification"  # the value of RunConfig.aim for heads in CLASSIFIERS
CONTRASTIVE = "contrastive"  # the value of RunConfig.aim for head: sentence_embedding
OF_TABLES = (CLASSIFICATION, CONTRASTIVE)  # aims whose data are the rows of one table
# {value of model.head: a text has one label, several, or one for each word}
CLASSIFIERS: dict[str, LabelKind] = {
    CLASSIFICATION: ONE, "multi_label_classification": SEVERAL, "token_classification": WORDS,
}  # fmt: skip


def check_table(data: DataSection, head: str) -> None:
    """Check the section `data` of a model whose data are the rows of one table."""
    if data.max_bytes:
        raise ConfigError(f"data.max_bytes: got {data.max_bytes}; allowed: null, since a table is read completely")
    if data.sequences != "window":
        raise ConfigError(f"data.sequences: got {data.sequences}; allowed: window, since rows are sequences")
    if key := next((name for name in ("concatenate", "messages", "prompt", "response") if getattr(data, name)), ""):
        got = f"{one_line(getattr(data, key))} with model.head: {head}"
        raise ConfigError(f"data.{key}: got {got}; allowed: no data.{key}")
    if not isinstance(data.source, str):
        raise ConfigError(f"data.source: allowed with model.head: {head}: one path")


def with_choices(model: Any, data: DataSection, train: TrainSection) -> Any:
    """Return the section `model` of sentence embeddings with `choices` set to the number of texts in a table row."""
    columns, batch = data.texts, train.batch
    if train.pack:
        raise ConfigError(f"train.pack: got true with model.head: {model.head}; allowed: false")
    for key, default in (("text", "text"), ("label", "label")):
        if getattr(data, key) != default:
            got = f"{getattr(data, key)} with model.head: {model.head}"
            raise ConfigError(f"data.{key}: got {got}; allowed: data.texts instead of data.{key}")
    if len({*columns}) < max(len(columns), 2):
        raise ConfigError(f"data.texts: got {list(columns)}; allowed: at least two columns, each once")
    if data.source == STDLIB and len(columns) > 2:
        raise ConfigError(f"data.texts: got {len(columns)} columns; allowed with data.source: {STDLIB}: two")
    if "choices" in model.model_fields_set and model.choices != len(columns):
        raise ConfigError(f"model.choices: got {model.choices}; allowed: {len(columns)}, the columns of data.texts")
    if batch % len(columns) or batch < 2 * len(columns):
        need = f"a multiple of {len(columns)}, the texts in a row (data.texts), and at least two rows"
        raise ConfigError(f"train.batch: got {batch}; allowed: {need}")
    return model.changed(choices=len(columns))


def with_labels(model: Any, data: DataSection) -> Any:
    """Return the section `model` of a classifier with the table's labels as its classes.

    If the folder `model.from` has a classifier with the same labels, the labels keep the order of that classifier.
    """
    fields = type(model).model_fields
    samples = read_samples("data.source", data.name, data.text, data.label, CLASSIFIERS[model.head])
    names = labels_of(data.name, samples)
    if "labels" not in fields or "classes" not in fields:
        return model
    if model.labels is not None:
        numbers = class_numbers(model.labels, model.classes, samples)
        if other := unknown_label(samples, numbers):
            need = f"{', '.join(model.labels)} (model.labels)"
            here = f"data.source: {data.source}, line {other[0]}"
            raise ConfigError(f"{here}: the label {other[1]!r}; allowed: {need}")
        return model
    if "classes" in model.model_fields_set and model.classes not in (None, len(names)):
        need = f"{len(names)}, the number of labels in {data.source}"
        raise ConfigError(f"model.classes: got {model.classes}; allowed: {need}")
    if model.from_:
        saved = find(model.type).saved_fields(read_raw(Path(model.from_)))
        labels, classes = saved.get("labels"), saved.get("classes")
        if saved.get("head") == model.head and (
            set(names) == set(labels or ())
            or (no_numbers(labels) and names == [str(number) for number in range(classes or 0)])
        ):
            return model.changed(classes=classes, labels=labels)
    return model.changed(classes=len(names), labels=names)
