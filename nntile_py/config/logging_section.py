"""The section `logging` of a run's YAML: where the metrics of a run go besides metrics.jsonl."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from nntile_py.models.registry import code_of, function_of, resolved
from nntile_py.schema import Section, Switch, only


class WandbSection(Section):
    """Weights & Biases."""

    project: str
    """Name of the project."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes files in the run's folder, which `wandb sync` sends later."""
    name: str | None = None
    """Name of the run; null: the name of the run's folder."""


def _callback(value: Any) -> str | None:
    if not (isinstance(value, str) and code_of(value)):
        return None
    value = resolved(value)
    own_callback(value)
    return str(value)


def own_callback(name: str) -> Callable[[dict[str, Any]], Any]:
    """Return the function that a callback `my_file.py:function` names. Runs the code of the file.

    Raises:
        ConfigError: There is no such function.
    """
    return function_of(name, "logging.callback", "a function(line) of a dict")


CallbackName = Annotated[str, *only("'my_file.py:function'", _callback, type="string", pattern=r"\.py:")]


class LoggingSection(Section):
    """Where the metrics of a run go besides metrics.jsonl."""

    tensorboard: Switch = False
    """Write event files for TensorBoard into the folder `tensorboard` of the run (package tensorboardX)."""
    wandb: WandbSection | None = None
    """Send the metrics to Weights & Biases (package wandb); null: do not."""
    callback: CallbackName | None = None
    """A function(line) of a Python file, which gets each line of metrics.jsonl as a dict. If the function returns True,
    the run saves its weights and ends, at most two steps later."""
