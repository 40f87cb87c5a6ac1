"""Heads of models: config fields, and what transformers' config.json says about a head. `heads.py` has the layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import model_validator

from nntile_py.errors import ConfigError
from nntile_py.models.base import ConfigT, Model
from nntile_py.models.hf_config import architecture, choice
from nntile_py.models.model_config import ModelConfig
from nntile_py.schema import UNFILLED, Filled

# {head: end of the name of transformers' class}. If several heads share a class, a config.json with this class is read
# as the last of these heads: `classification`, or `none`. A problem_type in config.json selects another head.
CLASSES = {
    "causal_lm": "ForCausalLM", "masked_lm": "ForMaskedLM", "pretraining": "ForPreTraining",
    **dict.fromkeys(("regression", "multi_label_classification", "classification"), "ForSequenceClassification"),
    "token_classification": "ForTokenClassification", "question_answering": "ForQuestionAnswering",
    "multiple_choice": "ForMultipleChoice", "next_sentence_prediction": "ForNextSentencePrediction",
    "sentence_embedding": "Model", "pooler": "Model", "none": "Model",
}  # fmt: skip
SequenceHead = Literal["regression", "multi_label_classification", "classification"]
EncoderHead = Literal["masked_lm", SequenceHead, "token_classification", "question_answering", "sentence_embedding"]
SEQUENCE_HEADS = get_args(SequenceHead)
_PROBLEMS = ("regression", "multi_label_classification")  # heads that are values of problem_type
_TWO = ("question_answering", "next_sentence_prediction")  # heads with two classes


class HeadConfig(ModelConfig):
    """Config of a model with one of several heads. A subclass adds the field `head`."""

    classes: Filled = UNFILLED
    """Number of classes of a classifier (of sequences or tokens); with head: regression, the number of values to
    predict. Null: the number of `labels`; without `labels`: 2, for regression 1."""
    labels: list[str] | None = None
    """Names of a classifier's classes, in order. Null: `nntile train` sorts the labels of the table; numeric labels are
    sorted by value."""

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        self.fill(classes=len(self.labels or ()) or (1 if self.head == "regression" else 2))
        if self.head == "classification" and self.classes == 1:
            need = "at least 2 with head: classification; head: regression predicts a number"
            raise ConfigError(f"model.classes: got 1; allowed: {need}")
        if self.head in _TWO and self.classes != 2:
            raise ConfigError(f"model.classes: got {self.classes}; allowed: 2 with head: {self.head}")
        if self.labels is not None and len(self.labels) != self.classes:
            need = f"a name for each of model.classes = {self.classes}"
            raise ConfigError(f"model.labels: got {len(self.labels)} names; allowed: {need}")
        if self.labels is not None and len(set(self.labels)) != self.classes:
            raise ConfigError("model.labels: a name is there twice; allowed: each once")
        return self


class HeadedModel(Model[ConfigT]):
    """Base class of models with one of several heads."""

    head_fields = ("head", "classes", "labels")
    stem: ClassVar[str]  # prefix of the names of transformers' classes, such as Bert
    bare: ClassVar[str] = "none"  # head of a checkpoint of transformers' class without a head

    @classmethod
    def architectures(cls) -> dict[str, str]:
        """Return {head: name of transformers' class} for the heads of the model."""
        return {head: cls.stem + CLASSES[head] for head in get_args(cls.Config.model_fields["head"].annotation)}

    @classmethod
    def read_head(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config's fields head, classes and labels from the content of config.json."""
        heads, names = {name: head for head, name in cls.architectures().items()}, raw.get("id2label") or {}
        head = heads[architecture(raw, *heads)]
        if not isinstance(names, dict):
            raise ConfigError(f"model: id2label is {names!r} in the model's config; allowed: an object")
        problem = choice(raw, "problem_type", None, "single_label_classification", *_PROBLEMS)
        classes = len(names) or raw.get("num_labels", 2)
        if "Classification" in architecture(raw, *heads) and classes != (given := raw.get("num_labels", classes)):
            told = f"num_labels is {given!r}, but id2label has {classes} classes in the model's config"
            raise ConfigError(f"model: {told}; allowed: equal numbers, or only one of the two keys")
        if head == "classification" and problem in _PROBLEMS:
            head = problem
        elif head == "classification" and problem is None and classes == 1:
            head = "regression"
        labels = None if head == "regression" else _labels(names)
        return {"head": cls.bare if head == "none" else head, "classes": classes, "labels": labels}

    def hf_head(self) -> dict[str, Any]:
        """Return the entries of config.json that describe the head."""
        c = self.config
        own: dict[str, Any] = {"architectures": [self.architectures()[c.head]], "num_labels": c.classes}
        if c.head in _PROBLEMS:
            own["problem_type"] = c.head
        if c.labels:
            own["id2label"] = {str(number): name for number, name in enumerate(c.labels)}
            own["label2id"] = {name: number for number, name in enumerate(c.labels)}
        return own


def _labels(names: Mapping[Any, Any]) -> list[str] | None:
    """Return the class names of transformers' id2label, in order; None for the default names LABEL_0, LABEL_1, ...

    Return None also if names are missing or occur twice.
    """
    found = [names.get(str(number), names.get(number)) for number in range(len(names))]
    named = all(isinstance(one, str) for one in found) and len(set(found)) == len(found)
    return found if named and found != [f"LABEL_{number}" for number in range(len(found))] and found else None
