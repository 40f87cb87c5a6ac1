"""What a sweep tells as it goes, where there is no terminal for a bar: in a job's log."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from nntile_py.measure import runner as sweep_run
from nntile_py.measure.sweep_points import Point, load_sweep

ROOT = Path(__file__).parents[1]
SWEEP = f"""
config: {ROOT / "experiments/gpt2_tiny.yaml"}
grid: {{tiles.batch: [2, 4]}}
measure: {{how: plan}}
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_for_each_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, terminal: bool) -> None:
    def measured(point: Point, *_: Any) -> dict[str, Any]:
        row = {"id": point.id, "sets": point.sets, "measure": {}}
        if point.sets["tiles.batch"] == 4:
            return row | {"status": "timeout", "error": "took too long"}
        return row | {"status": "ok", "seconds": 0.25}

    monkeypatch.setattr(sweep_run, "measure_point", measured)
    (tmp_path / "s.yaml").write_text(SWEEP)
    told = io.StringIO()
    console = Console(file=told, force_terminal=terminal, width=40)
    sweep_run.run(load_sweep(tmp_path / "s.yaml"), tmp_path / "out", console)
    lines = [f"{k} of 2: tiles.batch {size}: {end}\n" for k, size, end in ((1, 2, "0.25 s"), (2, 4, "timeout"))]
    assert [line in told.getvalue() for line in lines] == 2 * [not terminal]
    assert terminal or told.getvalue().startswith("".join(lines)), "nothing else, wrapped nowhere"
