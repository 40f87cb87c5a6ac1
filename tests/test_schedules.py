"""Learning rate schedules: the numbers of transformers' and torch's schedulers, and functions of a user's file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.optim import lr_scheduler
from transformers import optimization

from nntile_py.config.optimizer_section import optimizer_section
from nntile_py.config.run_config import load
from nntile_py.config.saved_code import check_saved_overrides
from nntile_py.config.schedules import SCHEDULES, check_rates, learning_rate
from nntile_py.errors import ConfigError

LR, STEPS = 0.3, 40
Scheduler = Callable[[Any], Any]


def theirs(scheduler: Scheduler) -> list[float]:
    """The rates of another library's scheduler after 1 to STEPS calls of its step()."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = scheduler(optimizer)
    rates = []
    for _ in range(STEPS):
        optimizer.step()
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    return rates


def ours(schedule: str, steps: int = STEPS, **keys: Any) -> list[float]:
    section = optimizer_section("adamw")(lr=LR, schedule=schedule, **keys)
    return [learning_rate(section, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_the_last_rate_is_a_tenth_by_default(name: str) -> None:
    assert ours(name)[-1] == pytest.approx(LR / 10)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_transformers(warmup: int) -> None:
    """All steps of each schedule; with min_lr, those after the warm-up: in transformers some start it at min_lr."""
    cosine, linear = transformers.get_cosine_schedule_with_warmup, transformers.get_linear_schedule_with_warmup
    constant = transformers.get_constant_schedule_with_warmup
    inverse = transformers.get_inverse_sqrt_schedule
    plain = {
        "cosine": lambda one: cosine(one, warmup, STEPS), "linear": lambda one: linear(one, warmup, STEPS),
        "constant": lambda one: constant(one, warmup), "inverse_sqrt": lambda one: inverse(one, warmup),
    }  # fmt: skip
    for name, scheduler in plain.items():
        assert ours(name, warmup_steps=warmup, min_lr=0.0) == pytest.approx(theirs(scheduler), abs=1e-15), name
    falling = optimization.get_cosine_with_min_lr_schedule_with_warmup
    want = theirs(lambda one: falling(one, warmup, STEPS, min_lr=0.06))
    assert ours("cosine", warmup_steps=warmup, min_lr=0.06)[warmup:] == pytest.approx(want[warmup:], abs=1e-15)
    for decay, least in ((10, 0.0), (1, 0.0), (STEPS - warmup, 0.2)):
        want = theirs(
            lambda one, decay=decay, least=least: transformers.get_wsd_schedule(
                one, warmup, decay, num_training_steps=STEPS, min_lr_ratio=least, decay_type="linear"
            )
        )
        for size in (decay, decay / STEPS) if decay < STEPS else (decay,):
            got = ours("wsd", warmup_steps=warmup, min_lr=least * LR, decay_steps=size)
            assert got[warmup:] == pytest.approx(want[warmup:], abs=1e-15), size


def test_torch() -> None:
    cosine = theirs(lambda one: lr_scheduler.CosineAnnealingLR(one, STEPS, eta_min=0.06))
    assert ours("cosine", min_lr=0.06) == pytest.approx(cosine, abs=1e-15)
    linear = theirs(lambda one: lr_scheduler.LinearLR(one, 1.0, 0.2, STEPS))
    assert ours("linear", min_lr=0.06) == pytest.approx(linear, abs=1e-15)


def test_a_longer_run() -> None:
    """Rates that do not depend on the number of steps stay; of wsd those before the fall stay."""
    for name, same in (("constant", STEPS), ("inverse_sqrt", STEPS), ("wsd", STEPS - 10), ("cosine", 4), ("linear", 4)):
        short, long = (ours(name, steps, warmup_steps=4, decay_steps=10) for steps in (STEPS, 2 * STEPS))
        assert [a == b for a, b in zip(short, long, strict=False)] == [True] * same + [False] * (STEPS - same), name
    assert ours("wsd", 8, warmup_steps=4, decay_steps=100)[3:] == ours("linear", 8, warmup_steps=4)[3:]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some words " * 99)
    (tmp_path / "run.yaml").write_text(
        "model: {layers: 1, embed: 8, heads: 2}\ndata: {source: text.txt}\ntrain: {steps: 9, batch: 1, seq: 4}\n"
        "runtime: {cpus: 1, cuda: 0}\noptimizer: {schedule: 'rates.py:steps_down', lr: 0.5, warmup_steps: 2}\n"
    )
    (tmp_path / "rates.py").write_text(
        "def steps_down(step, steps, lr):\n    return lr if step <= steps // 2 else lr / 10\n"
        "def late(step, steps, lr):\n    return lr / (steps - step)\n"
        "def negative(step, steps, lr):\n    return -lr\n"
        "def nothing(step, steps, lr):\n    pass\n"
        "number = 3\n"
    )
    yield tmp_path


def test_a_function_of_the_users(files: Path) -> None:
    config = load(files / "run.yaml")
    rates = [learning_rate(config.optimizer, step, 9) for step in range(1, 10)]
    assert rates == [0.25, 0.5, 0.5, 0.5, 0.05, 0.05, 0.05, 0.05, 0.05]
    check_rates(config.optimizer, 9)
    assert config.optimizer.schedule == f"{files / 'rates.py'}:steps_down"
    (files / "saved.yaml").write_text(config.to_yaml())
    assert load(files / "saved.yaml").optimizer == config.optimizer
    (files / "rates.py").write_text("def steps_down(step, steps, lr):\n    return 7\n")
    assert learning_rate(config.optimizer, 3, 9) == 7


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("late", r"rates.py:late\(9, 9, 0.5\) raises ZeroDivisionError in line 4: .*; allowed: a number of at least 0"),
        ("negative", r"rates.py:negative\(3, 9, 0.5\) returns -0.5; allowed: a number of at least 0"),
        ("nothing", r"returns None; allowed: a number"),
        ("number", r"rates.py:number: no such function in the file; allowed: a function\(step, steps, lr\)"),
    ],
)
def test_wrong_functions(files: Path, schedule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.schedule: .*{message}"):
        config = load(files / "run.yaml", [f"optimizer.schedule=rates.py:{schedule}"])
        check_rates(config.optimizer, config.train.steps)


def test_code_of_a_saved_config_runs_only_if_named(files: Path) -> None:
    run = files / "run"
    (run / "checkpoints").mkdir(parents=True)
    (files / "other.py").write_text("raise SystemExit\n")
    text = (files / "run.yaml").read_text().replace("rates.py", "other.py")
    (run / "config.yaml").write_text(text)
    message = r"the schedule is a function in .*other.py, whose code would run; allowed: --set optimizer\.schedule="
    with pytest.raises(ConfigError, match=message):
        load(run / "config.yaml")
    with pytest.raises(ConfigError, match=message):
        check_saved_overrides(["optimizer.schedule=other.py:f"], run, ["optimizer.lr=1"])
    assert load(run / "config.yaml", ["optimizer.schedule=rates.py:steps_down"])


def test_names() -> None:
    assert [*SCHEDULES] == ["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    wrong: tuple[tuple[str, Any, str], ...] = (
        ("schedule", "step", "'cosine', 'linear', 'constant', 'wsd', 'inverse_sqrt' or 'my_file.py:function'"),
        ("schedule", "nowhere.py:f", "no such file; allowed: the path of a Python file with a function"),
        ("decay_steps", 0, "a number of updates of at least 1, or a share of all updates"),
        ("decay_steps", 1.5, "a number of updates of at least 1, or a share of all updates"),
    )
    for key, value, need in wrong:
        with pytest.raises(ConfigError, match=rf"optimizer\.{key}.*{need}"):
            optimizer_section("adamw")(**{key: value})
