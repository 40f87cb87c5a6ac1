"""`nntile experiment fig07`: rows, ratios and refused sections."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nntile_py.errors import ConfigError
from nntile_py.measure import capacity, capacity_experiment
from nntile_py.measure.capacity_experiment import CapacityExperiment, largest
from nntile_py.schema import validated


def row(model: str, contestant: str, parameters: int, rate: float = 0.0) -> dict[str, Any]:
    one: dict[str, Any] = {"model": model, "contestant": contestant, "parameters": parameters}
    if not rate:
        return one | {"error": "out of memory"}
    return one | {"tokens_per_s": rate, "seconds": {"median": 0.5}, "peak_mib": 2048.0, "host_mib": 3072.0}


ROWS = [
    row("tiny", "nntile", 10, 300.0), row("tiny", "fsdp2", 10, 200.0), row("tiny", "ddp", 10),
    row("45M", "nntile", 25, 30.0), row("45M", "fsdp2", 25),
]  # fmt: skip


def test_the_report_compares_the_largest_models() -> None:
    assert largest(ROWS, ["nntile", "fsdp2", "ddp"]) == [
        "nntile: the largest model that trains is 45M.",
        "fsdp2: the largest model that trains is tiny.",
        "ddp: the largest model that trains is none of these.",
        "nntile trains 2.5 times the parameters of fsdp2; its speed on tiny is 1.50 of fsdp2's.",
    ]


def test_a_table_names_what_its_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tflop/s are those of the parameters and of attention; a model that does not train has its error."""
    monkeypatch.setattr(capacity_experiment, "tried", lambda *_: iter(ROWS))
    section = {"models": ["tiny", "45M"], "contestants": ["nntile", "ddp", "fsdp2"], "cuda": 0}
    made = validated(CapacityExperiment, section | {"set": {"train.seq": 16}}, "cpu.")
    result = made.run(tmp_path, Console(stderr=True))
    rows = list(csv.DictReader(io.StringIO(result.csv)))
    assert [each["trains"] for each in rows] == ["yes", "yes", "no", "yes", "no"]
    assert rows[0]["GiB of the largest process"] == "2.00" and rows[2]["error"] == "out of memory"
    config = made._config("45M")
    flop = 6 * capacity.parameters(config) + 12 * 6 * 512 * 16
    assert float(rows[3]["Tflop/s"]) == pytest.approx(30 * flop / 1e12, abs=1e-3)
    assert result.pictures["png"] and result.totals[0].startswith("nntile: the largest")
    assert "GiB allocated on the fullest GPU" in capacity.heads(2)


def test_a_small_model_trains(tmp_path: Path) -> None:
    small = {"train.seq": 16, "tokenizer.vocab_size": 300, "runtime.cpus": 1, "train.batch": 2}
    section = {"models": ["tiny"], "contestants": ["nntile"], "cuda": 0, "rounds": 1, "set": small}
    result = validated(CapacityExperiment, section, "cpu.").run(tmp_path, Console(stderr=True))
    (trained,) = csv.DictReader(io.StringIO(result.csv))
    assert trained["trains"] == "yes" and 0 < float(trained["GiB of the largest process"]) < 8
    assert float(trained["tokens/s"]) > 0 and result.totals[0] == "nntile: the largest model that trains is tiny."


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"models": ["1T"]}, r"cpu\.models\.0: got '?1T'?; allowed: tiny, 45M"), ({"models": []}, r"cpu\.models"),
     ({"contestants": ["jax"]}, r"cpu\.contestants\.0: got 'jax'; allowed: 'nntile'"), ({"cuda": -1}, r"cpu\.cuda")],
)  # fmt: skip
def test_wrong_sections(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        validated(CapacityExperiment, {"models": ["tiny"], "contestants": ["nntile"]} | wrong, "cpu.")
