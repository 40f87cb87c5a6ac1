"""Base classes of models' configs."""

from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

from nntile_py.errors import ConfigError, raised
from nntile_py.graph.lora import LoRA
from nntile_py.schema import UNFILLED, Filled, Section, allowed, explained, short
from nntile_py.yaml_text import one_line


class ModelConfig(Section):
    """Sizes and options of a model: the section `model` of a YAML. Immutable; raises ConfigError for wrong values.

    A subclass adds fields and sets `type`, the model's name in a YAML. A run fills in `vocab` from the tokenizer,
    `positions` from train.seq, and `masked` from train.seq and train.mask_probability, if the model has these fields.
    """

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    if TYPE_CHECKING:  # code that handles any model may read fields that only subclasses declare

        def __getattr__(self, name: str) -> Any: ...

    type: str = ""
    """The model: gpt2, bert, llama, ... (the files of models/), or a class in your own file: `my_file.py:MyModel`."""
    from_: str | None = Field(None, alias="from")
    """Folder with weights and sizes to start from, written by transformers' `save_pretrained` or by `nntile train`;
    null: random weights."""
    lora: LoRA | None = None
    """Train adapters of low rank instead of the weights; null: train the weights."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ConfigError(explained(type(self), error, "model.")) from None
        except Exception as error:  # raised by a validator in the user's subclass
            raise told(type(self), error) from error
        for name, value in self:
            try:
                self.model_dump(mode="json", include={name})
            except ValueError as error:
                need = f"what config.yaml can hold: numbers, texts, lists, mappings ({error})"
                raise ConfigError(f"model.{name}: got {short(value)}; allowed: {need}") from None

    @field_validator("*", mode="wrap")
    @classmethod
    def _as_yaml_has_it(cls, value: Any, checked: Any, info: ValidationInfo) -> Any:
        """Return the validated value; retry a list or text as JSON, because YAML has no tuples, sets or paths.

        A field may thus be annotated as tuple or set (written as a list) or as Path (written as a text).
        """
        try:
            return checked(value)
        except ValidationError:
            if not isinstance(value, list | str) or not info.field_name:
                raise
            field = cls.model_fields[info.field_name]
            try:
                return TypeAdapter(field.rebuild_annotation()).validate_json(json.dumps(value), strict=True)
            except (ValidationError, TypeError):
                pass
            raise

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields."""
        known = type(self).model_fields
        for name in fields:
            if name not in known:
                raise ConfigError(f"model.{name}: unknown key; {allowed(name, list(known))}")
        return type(self)(**(self.model_dump(by_alias=True) | fields))

    def fill(self, **defaults: Any) -> None:
        """Replace None in the named fields by the given defaults. For validators of subclasses."""
        for name, value in defaults.items():
            if getattr(self, name) is None:
                self.__dict__[name] = value

    def check_size(self, name: str, divisor: str) -> None:
        """Raise ConfigError unless the field `divisor` divides the field `name`, such as heads and embed."""
        whole, part = getattr(self, name), getattr(self, divisor)
        for key, size in ((name, whole), (divisor, part)):
            if not isinstance(size, int) or size < 1:
                raise ConfigError(f"model.{key}: got {one_line(size)}; allowed: an integer of at least 1")
        if whole % part:
            small = [n for n in range(1, math.isqrt(min(whole, 2**40)) + 1) if whole % n == 0]
            fitting = ", ".join(map(str, sorted({*small, *(whole // n for n in small)})))
            raise ConfigError(f"model.{divisor}: got {part}; allowed: a divisor of model.{name} = {whole}: {fitting}")


class TokenConfig(ModelConfig):
    """Config of a model that reads tokens."""

    vocab: Filled = UNFILLED
    """Size of the vocabulary; null: the tokenizer's."""


def told(cls: type, error: Exception) -> Exception:
    """Turn an error raised in a user's own class into a ConfigError that names file and line.

    Return a ConfigError, and an error of nntile_py's own classes, unchanged.
    """
    if isinstance(error, ConfigError) or cls.__module__.startswith("nntile_py."):
        return error
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return ConfigError(f"model: {cls.__name__} ({file}) raises {raised(error, file)}")
