"""Fuzzed configs and damaged files: accepted, or one message; see fuzz.py. `make torture` takes the large number."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import fuzz

TORTURE = bool(os.environ.get("NNTILE_TORTURE"))
SEED = int(os.environ.get("NNTILE_SEED", "0"))  # printed with each case that goes wrong
# Cases of each of three parts.
COUNTS = {"configs": 3_334, "files": 667} if TORTURE else {"configs": 20, "files": 12}


def _none(cases: Iterable[Any], damaged: bool = True) -> None:
    found = fuzz.fuzz(cases, 2 if TORTURE else 1, damaged)
    told = [f"{done['wrong']}: python tests/faults/fuzz.py {name}\n{done['err'][-2000:]}" for name, _, done in found]
    assert not found, "\n".join(told[:20])


@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_nothing_goes_wrong(kind: str, part: int) -> None:
    _none(fuzz.named(kind, SEED, range(COUNTS[kind] * part, COUNTS[kind] * (part + 1))), kind == "files")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2))])
def test_what_once_went_wrong(part: int) -> None:
    """Each is a file in corpus/; a third of them at a time."""
    cases = dict([*fuzz.kept().items()][part::3])
    assert cases
    _none((name, lambda _, case=case: case) for name, case in cases.items())
