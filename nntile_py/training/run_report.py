"""A page about a run: curves, results, samples and config, as one HTML file that needs no network."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from nntile_py.checkpoint.format import TOKENIZER
from nntile_py.checkpoint.resume import flattened
from nntile_py.config.run_config import resolve
from nntile_py.config.sections import TokenizerSection, TrainSection, default_prompt
from nntile_py.errors import ConfigError
from nntile_py.models.hf_config import read_raw
from nntile_py.models.registry import code_of, find
from nntile_py.system.pages import templates
from nntile_py.system.pictures import new_figure
from nntile_py.training.curves import COLOURS, draw_losses, finish, smoothed
from nntile_py.training.display import size
from nntile_py.training.run_comparison import RecordedRun
from nntile_py.yaml_text import as_written

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# {name in metrics.jsonl: (title, unit)} of the curves besides the losses
_CURVES = {
    "tokens_per_s": ("Throughput", "tokens/s"),
    "grad_norm": ("Norm of the gradient", "norm"),
    "accuracy": ("Held-out accuracy", "accuracy"),
    "memory_bytes": ("Memory of the tiles", "MiB"),
    "data_wait_s": ("Wait for a batch", "seconds"),
}


# Keys whose default is null: a run replaces null by a value that depends on other keys.
_NULL = ("sample.prompt", "model.vocab", "model.positions", "model.masked")


def report_page(run: RecordedRun) -> str:
    """Return the HTML page of a run."""
    pictures = [("Loss", _svg(draw_losses({run.name: run.curves})))]
    for key, (title, unit) in _CURVES.items():
        steps, values = run.curves.values.get(key, ([], []))
        if unit == "MiB":
            values = [value / 2**20 for value in values]
        if len(values) > 1:
            pictures.append((title, _svg(_draw(steps, values, unit))))
    page = templates(Path(__file__).parent).get_template("run_report.html.j2")
    return page.render(
        title=f"Run {run.name}", summary=shown(run.summary()), pictures=pictures, changed=changed_keys(run),
        sample=run.sample(),
        config=[(key, as_written(value)) for key, value in run.config.items()],
    )  # fmt: skip


def _draw(steps: list[int], values: list[float], unit: str) -> Figure:
    figure = new_figure((8.0, 2.6))
    axes = figure.subplots()
    axes.plot(steps, values, color=COLOURS[0], alpha=0.3, linewidth=0.8)
    axes.plot(steps, smoothed(values), color=COLOURS[0], linewidth=1.6)
    finish(axes, unit)
    axes.set_xlabel("step")
    return figure


def _svg(figure: Figure) -> Markup:
    """Return a figure as SVG that fits the width of a page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    return Markup(re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2))  # the page sets the width


def changed_keys(run: RecordedRun) -> list[tuple[str, str, str]]:
    """Return (key, value, default) of the keys whose values differ from the defaults, as texts.

    A config.yaml also has the keys that were left out. Those are not listed, even if their values depend on other keys
    or on the folder of `model.from`. The default of a required key is ""."""
    defaults, derived = _defaults(run.config), _derived(run)
    rows = []
    for key, value in run.config.items():
        known = key in defaults
        if key == "out" or (known and value == defaults[key]) or (value is None and not known):
            continue
        if key not in derived or value != derived[key]:
            default = None if key in _NULL else defaults.get(key)
            rows.append((key, as_written(value), as_written(default) if known else ""))
    return rows


def _derived(run: RecordedRun) -> dict[str, Any]:
    """Return {dotted key: value that the key gets if it is left out} of keys that depend on other keys or files."""
    config = run.config
    derived: dict[str, Any] = {"sample.prompt": default_prompt(config.get("data.source"))}
    if config.get("tokenizer.path"):
        derived["tokenizer.vocab_size"] = None
        with suppress(ConfigError):  # the run's folder has a copy of the tokenizer
            derived["model.vocab"] = TokenizerSection(path=str(run.folder / TOKENIZER)).size()
    kind = str(config.get("model.type"))
    if (source := config.get("model.from")) and not code_of(kind):
        derived["tokenizer.path"] = str(Path(source) / TOKENIZER)
        with suppress(ConfigError):
            model = find(kind)
            sizes = model.saved_fields(read_raw(run.folder)).keys() - model.head_fields
            derived |= {f"model.{key}": config.get(f"model.{key}") for key in sizes}
    return derived


def _defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {dotted key: default} of all keys, for a run whose required keys have the values of `config`.

    {} for a model of the user's own, whose code is not run here."""
    if code_of(str(config.get("model.type"))):
        return {}
    try:
        model = find(str(config["model.type"])).Config
        required: dict[str, Any] = {"model": model, "train": TrainSection}
        tree: dict[str, Any] = {
            section: {key: config[f"{section}.{key}"] for key, field in cls.model_fields.items() if field.is_required()}
            for section, cls in required.items()
        }
        tree["model"]["type"] = config["model.type"]
        tree["tokenizer"] = {"vocab_size": config.get("tokenizer.vocab_size")}  # sets the default of model.vocab
        resolved = resolve(tree, [], "the defaults").model_dump(mode="json", by_alias=True)
    except (ConfigError, KeyError):
        return {}
    sizes = [f"{section}.{key}" for section in required for key in tree[section]]
    defaults = {key: value for key, value in flattened(resolved).items() if key not in sizes}
    return defaults | {"tokenizer.vocab_size": TokenizerSection().vocab_size}


def shown(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return a run's summary as (name, text)."""
    rows = []
    for key, value in summary.items():
        if value is None:
            continue
        if key == "data_wait_share":
            text = f"{value:.2%}"
        elif key == "seconds":
            key = "time"
            scale, unit = (3600, "h") if value >= 3600 else (60, "min") if value >= 60 else (1, "s")
            text = f"{value / scale:.1f} {unit}"
        elif key == "smoothed_loss":
            key, text = "training loss, smoothed", f"{value:.4f}"
        elif key == "memory_bytes":
            key, text = "memory", size(value)
        elif isinstance(value, float):
            text = f"{value:,.0f}" if value >= 1000 else f"{value:.4f}"
        else:
            text = f"{value:,}" if isinstance(value, int) else str(value)
        rows.append((key.replace("_", " "), text))
    return rows


