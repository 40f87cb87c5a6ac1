"""Loggers: pass the metrics of a run to TensorBoard, Weights & Biases and a user's function."""

from __future__ import annotations

import importlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from nntile_py.config.logging_section import own_callback
from nntile_py.config.run_config import RunConfig
from nntile_py.errors import ConfigError, raised
from nntile_py.models.registry import code_of
from nntile_py.system.interrupts import ends_at_once

CALLBACK = "logging.callback"
FLUSH_SECONDS = 10  # time between two flushes of TensorBoard's file


class Logger(Protocol):
    """Gets the lines of metrics.jsonl."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line."""

    def close(self) -> None:
        """Write what the logger still holds."""


class TensorBoard:
    """Writes the numbers of each line of metrics.jsonl to the event files in RUN/tensorboard.

    Args:
        folder: The run's folder.
        after: Step after which the run resumes: TensorBoard forgets later steps of an interrupted run.
    """

    def __init__(self, folder: Path, after: int) -> None:
        package = _package("tensorboardX", "logging.tensorboard")
        folder = folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._scalar, events = package.summary.scalar, package.proto.event_pb2
        self._event = events.Event
        # tensorboardX's SummaryWriter would write in a thread. The thread ends when the disk is full, and the training
        # would then wait for it forever.
        # The names of tensorboardX have seconds: a run that resumed within one second overwrote the file.
        self._file = package.event_file_writer.EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._flushed = time.monotonic()
        if after:
            start = events.SessionLog(status=events.SessionLog.START)
            self._file.write_event(self._event(wall_time=time.time(), step=after + 1, session_log=start))

    def write(self, line: Mapping[str, Any]) -> None:
        moment = line.get("time") or time.time()
        for key, value in _numbers(line).items():
            summary = self._scalar(key, value)
            self._file.write_event(self._event(wall_time=moment, step=line["step"], summary=summary))
        if time.monotonic() > self._flushed + FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class WandB:
    """Sends the numbers of each line of metrics.jsonl to Weights & Biases. A resumed run continues its series.

    Args:
        folder: The run's folder.
        config: The run's config.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        section, name = config.logging.wandb, config.out or folder.name
        assert section
        wandb = _package("wandb", "logging.wandb")
        identity = folder / "wandb-id"
        if not identity.is_file():
            identity.write_text(secrets.token_hex(4))
        self._run = wandb.init(
            project=section.project, name=section.name or Path(name).name, mode=section.mode, dir=str(folder),
            id=identity.read_text().strip(), resume="allow", config=config.model_dump(mode="json", by_alias=True),
            settings=wandb.Settings(console="off", silent=True),
        )  # fmt: skip

    def write(self, line: Mapping[str, Any]) -> None:
        self._run.log(_numbers(line), step=line["step"])

    def close(self) -> None:
        self._run.finish(quiet=True)


class Callback:
    """Passes each line of metrics.jsonl to a user's function.

    Args:
        config: The run's config.
        stop: CALLBACK is appended if the function returns True before the last step.
    """

    def __init__(self, config: RunConfig, stop: list[str]) -> None:
        assert config.logging.callback
        self.file = str(code_of(config.logging.callback))
        self._function, self._steps, self._stop = own_callback(config.logging.callback), config.train.steps, stop

    def write(self, line: Mapping[str, Any]) -> None:
        ends = self._function(dict(line))
        if isinstance(ends, bool | np.bool_) and ends and line["step"] < self._steps and not self._stop:
            self._stop.append(CALLBACK)

    def close(self) -> None:
        pass


class Loggers:
    """All loggers of a run. A logger that fails is reported once and then left out: it never ends a run.

    Args:
        config: The run's config.
        folder: The run's folder.
        after: Step after which the run resumes; 0: a new run.
        report: Shows a message.
        stop: Names of signals, which end the run early; the callback may append CALLBACK.

    Raises:
        ConfigError: A package is missing.
    """

    def __init__(
        self, config: RunConfig, folder: Path, after: int, report: Callable[[str], None], stop: list[str]
    ) -> None:
        makers: list[Callable[[], Logger]] = []
        if config.logging.tensorboard:
            makers.append(lambda: TensorBoard(folder, after))
        if config.logging.wandb:
            makers.append(lambda: WandB(folder, config))
        if config.logging.callback:
            makers.append(lambda: Callback(config, stop))
        self._report, self._loggers = report, list[Logger]()
        for make in makers:
            try:
                self._loggers.append(make())
            except ConfigError:
                raise
            except Exception as error:  # a service may fail in any way
                report(f"note: a logger of the section logging cannot begin ({error}); training goes on without it")

    def write(self, line: Mapping[str, Any]) -> None:
        """Pass a line of metrics.jsonl to all loggers."""
        for logger in [*self._loggers]:
            self._attempt(logger, lambda logger=logger: logger.write(line))  # type: ignore[misc]

    def close(self) -> None:
        """Write what the loggers still hold."""
        for logger in [*self._loggers]:
            self._attempt(logger, logger.close)
        self._loggers.clear()

    def _attempt(self, logger: Logger, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            what = f"raises {raised(error, logger.file)}" if isinstance(logger, Callback) else f"failed ({error})"
            self._report(f"note: {type(logger).__name__} {what}; training goes on without it")
            self._loggers.remove(logger)


def check_packages(config: RunConfig) -> None:
    """Raise ConfigError if a package that the section `logging` needs is missing."""
    if config.logging.tensorboard:
        _package("tensorboardX", "logging.tensorboard")
    if config.logging.wandb:
        _package("wandb", "logging.wandb")


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: value for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in ("step", "time")
    }  # fmt: skip


def _package(name: str, key: str) -> Any:
    try:
        with ends_at_once():  # tensorboardX imports torch
            return importlib.import_module(name)
    except ImportError:
        raise ConfigError(f"{key}: needs the package {name}; allowed after: pip install {name}") from None
