"""Rotary scaling for longer sequences (transformers' rope_type): frequencies, and a factor of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from nntile_py.errors import ConfigError

from .op import Array

LENGTH = "original_max_position_embeddings"


class Angles(NamedTuple):
    """The input of a rope_type: frequencies without scaling, and lengths of sequences.

    Attributes:
        frequencies: theta^(-2i / head_dim) for each pair i.
        theta: Base of the wavelengths.
        positions: Length of the longest sequence.
        packed: True if sequences are packed. Shorter sequences then use the same table as the longest.
    """

    frequencies: Array
    theta: float
    positions: int
    packed: bool = False


Result = tuple[Array, float]  # the frequencies, and the factor of cosines and sines


def _default(angles: Angles, options: dict[str, Any]) -> Result:
    return angles.frequencies, 1.0


def _linear(angles: Angles, options: dict[str, Any]) -> Result:
    return angles.frequencies / options["factor"], 1.0


def _dynamic(angles: Angles, options: dict[str, Any]) -> Result:
    """Return the frequencies unchanged. Sequences beyond the original length, for which they change, are refused."""
    if angles.positions > options[LENGTH]:
        raise ConfigError(
            f"rope_scaling.rope_type: got dynamic for sequences of {angles.positions} tokens, whose frequencies change"
            f" with each length; allowed: at most {LENGTH} = {options[LENGTH]} tokens"
        )
    return angles.frequencies, 1.0


def _llama3(angles: Angles, options: dict[str, Any]) -> Result:
    """Keep frequencies with at least `high` full turns over the original length; divide those with at most `low`.

    Between `low` and `high`, the two results are mixed linearly.
    """
    factor, low, high, length = (options[key] for key in _TYPES["llama3"].needed)
    if high <= low:
        raise ConfigError(f"rope_scaling.high_freq_factor: got {high}; allowed: more than low_freq_factor = {low}")
    turns = length * angles.frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return angles.frequencies * (kept + (1 - kept) / factor), 1.0


def _yarn(angles: Angles, options: dict[str, Any]) -> Result:
    """Keep frequencies above beta_fast turns, divide those below beta_slow, and mix both in between (Peng 2023)."""
    factor, pairs = options["factor"], len(angles.frequencies)

    def pair(turns: float) -> float:
        return pairs * math.log(options[LENGTH] / (turns * 2 * math.pi)) / math.log(angles.theta)

    def strength(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    low, high = pair(options.get("beta_fast") or 32), pair(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    divided = np.clip((np.arange(pairs) - low) / ((high - low) or 0.001), 0, 1)
    scales = options.get("mscale"), options.get("mscale_all_dim")
    wanted = strength(scales[0]) / strength(scales[1]) if scales[0] and scales[1] else strength(1)
    return angles.frequencies * (1 - divided + divided / factor), options.get("attention_factor", wanted)


def _longrope(angles: Angles, options: dict[str, Any]) -> Result:
    """Divide each frequency by its short_factor, or beyond the original length by its long_factor (Ding 2024)."""
    if angles.packed and angles.positions > options[LENGTH]:
        raise ConfigError(
            f"rope_scaling.rope_type: got longrope for packed sequences of up to {angles.positions} tokens,"
            f" whose frequencies change beyond {options[LENGTH]} tokens; allowed: at most {LENGTH} = {options[LENGTH]}"
            " tokens (in nt.Encoder: max_length)"
        )
    name = "long_factor" if angles.positions > options[LENGTH] else "short_factor"
    divisors, pairs, factor = np.array(options[name]), len(angles.frequencies), options["factor"]
    if divisors.shape != (pairs,):
        raise ConfigError(f"rope_scaling.{name}: got {divisors.size} numbers; allowed: head_dim / 2 = {pairs}")
    wanted = math.sqrt(1 + math.log(factor) / math.log(options[LENGTH])) if factor > 1 else 1.0
    return angles.frequencies / divisors, options.get("attention_factor", wanted)


class RopeType(NamedTuple):
    """A rope_type: its function, its required keys and its optional keys."""

    scaled: Callable[[Angles, dict[str, Any]], Result]
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


_TYPES = {
    "default": RopeType(_default),
    "linear": RopeType(_linear, ("factor",)),
    "dynamic": RopeType(_dynamic, ("factor", LENGTH)),
    "llama3": RopeType(_llama3, ("factor", "low_freq_factor", "high_freq_factor", LENGTH)),
    "yarn": RopeType(
        _yarn, ("factor", LENGTH),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": RopeType(_longrope, ("short_factor", "long_factor", "factor", LENGTH), ("attention_factor",)),
}  # fmt: skip


def scaled(angles: Angles, scaling: Mapping[str, Any]) -> Result:
    """Return the frequencies and the factor of cosines and sines that `scaling` asks for.

    Raises:
        ConfigError: A wrong rope_type; a missing, unknown or wrong key.
    """
    options = {key: value for key, value in scaling.items() if value is not None}
    old = options.pop("type", "default")  # in older checkpoints the key rope_type is called type
    name = options.pop("rope_type", old)
    options.pop("rope_theta", None)  # the caller passes it as `theta`
    if name not in list(_TYPES):
        raise ConfigError(f"rope_scaling.rope_type: got {name!r}; allowed: {', '.join(_TYPES)}")
    kind = _TYPES[name]
    known = [*kind.needed, *kind.optional]
    for key in {**dict.fromkeys(kind.needed), **options}:
        value = options.get(key)
        if key not in known:
            raise ConfigError(f"rope_scaling.{key}: unknown key; rope_type {name} has {', '.join(known) or 'none'}")
        if key == "truncate" and isinstance(value, bool):
            continue
        numbers = value if isinstance(value, list | tuple) and key in ("short_factor", "long_factor") else [value]
        if any(isinstance(one, bool) or not isinstance(one, int | float) or not 0 < one < math.inf for one in numbers):
            raise ConfigError(f"rope_scaling.{key}: got {value!r}; allowed with rope_type {name}: a positive number")
    return kind.scaled(angles, options)
