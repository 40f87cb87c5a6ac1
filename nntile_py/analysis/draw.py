"""`nntile graph`: the dataflow graph of a config, or its tile tasks, as a picture made by graphviz.

Operators are ellipses marked by class as in the data-movement paper (contraction, normalization, element-wise); data
are boxes, weights cylinders, inputs parallelograms. Nodes carry flop and bytes; edges are as wide as their bytes are
many. Forward pass, backward pass and update have a box each: what one reads of another is drawn in both, so that no
edge crosses the picture. Layers that are alike are drawn once.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.analysis import dot
from nntile_py.analysis.counts import Tally
from nntile_py.analysis.drawings import Bound, Logical, Tasks, layers
from nntile_py.analysis.workloads import Phase, Work, build, logical, work_title
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.graph.fusion import Fusion
from nntile_py.system.units import si

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

MOST_NODES = 1500  # above, dot takes minutes and nobody reads the picture
MOST_SECONDS = 30.0  # that dot may take: its time grows faster than the number of nodes
MOST_CURVED = 250  # nodes; above, dot spends its time on curves: 13 s with straight edges are minutes
PHASES = ("all", "forward", "backward", "update")
GET_DOT = (
    "graphviz's program `dot` is not on the PATH; get it with `apt-get install graphviz` (macOS: `brew install "
    "graphviz`)"
)
FEWER = "choose --layer 0, --phase forward, --level logical, or larger tiles"


class NoPicture(NNTileError):
    """Graphviz made none: why, and what `nntile graph` advises then."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


def draw(
    config: RunConfig, *, level: str = "logical", work: Work = "train", layer: int | None = None, phase: str = "all",
    fusion: str = "after", folded: bool = True, before: Fusion | None = None, bound: Bound | None = None,
) -> str:  # fmt: skip
    """The picture in the DOT language. fusion: `before`, `after`, or `both`.

    before: what is fused there; None: nothing, every operator is a task of its own. folded: layers that are alike are
    drawn once. bound: marks the operators that it says are bound by memory."""
    titles = {"before": "naive (before fusion)", "after": "fused (after fusion)"}
    parts = ["before", "after"] if fusion == "both" else [fusion]
    lines = [*dot.HEAD, f"label={dot.quote(_about(config, work, layer, phase))} labelloc=t fontsize=16"]
    used: dict[str, None] = {}
    for part in parts:
        # Without a backward pass nothing before an activation is kept for it.
        only: Phase = "forward" if phase == "forward" else "all"
        other = (before or Fusion.of(False)) if part == "before" else None
        made: Logical | Tasks
        if level == "logical":
            made = Logical(logical(config, work, other, only), part, layer, phase, folded, Tally(config, work), bound)
        else:
            made = Tasks(build(config, work, only, fusion=other), part, layer, phase, folded)
        if not made.count:
            asked = f"--phase {phase}" + ("" if layer is None else f" --layer {layer}")
            raise ConfigError(f"{asked}: nothing of {work} is there{layers(made.graphs)}")
        lines += made.picture.lines(f"{titles[part]}: {made.told}, {si(made.flop)}flop, {si(made.volume)}B moved")
        used |= made.picture.used
    return "\n".join([*lines, *dot.legend(used), "}", ""])


def _about(config: RunConfig, work: str, layer: int | None, phase: str) -> str:
    """The title: what is drawn, its sizes and tiles."""
    tiles = [f"{axis} {size}" for axis, size in config.tiles.model_dump().items() if size]
    part = "" if layer is None else f"layer {layer}: "
    part += {"all": "", "update": "the update in "}.get(phase, f"{phase} pass in ")
    return f"{part}{work_title(config, work)}; tiles: {', '.join(tiles) or 'uncut'}"


def write(text: str, out: Path) -> None:
    """Write the picture: .dot as it is, else what `dot` makes of it (.svg, .png, .pdf)."""
    if out.suffix in (".dot", ".gv"):
        out.write_text(text, encoding="utf-8")
        return
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out: {out} has no suffix .svg, .png, .pdf or .dot")
    try:
        made = picture(text, out.suffix[1:])
    except NoPicture as error:
        raise NNTileError(f"{error}{error.advice}; {_kept(text, out.with_suffix('.dot'))}") from None
    out.write_bytes(made)


def picture(text: str, form: str) -> bytes:
    """What graphviz makes of it: svg, png or pdf."""
    program = shutil.which("dot")
    if program is None:
        raise NoPicture(GET_DOT, ", or give --out a name that ends in .dot: that needs no program")
    if (nodes := text.count("shape=")) > MOST_NODES:
        raise ConfigError(f"--out: {nodes} nodes are too many for a picture that can be read (at most {MOST_NODES}): "
                          f"{FEWER}; or write a .dot")  # fmt: skip
    straight = ["-Gsplines=line", "-Gnslimit=1", "-Gnslimit1=1"] if nodes > MOST_CURVED else []
    try:  # run() kills dot when the time is over
        how = [program, f"-T{form}", *straight]
        made = subprocess.run(how, input=text.encode(), capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        why = f"graphviz's dot was stopped after {MOST_SECONDS:g} s on {nodes} nodes"
        less = f": {FEWER}, or give --out a name that ends in .dot and lay that out with graphviz's `sfdp -Tsvg`, "
        raise NoPicture(why, f"{less}which is faster") from None
    if made.returncode:
        raise NoPicture(f"dot: {made.stderr.decode(errors='replace').strip()}", "")
    return made.stdout


def _kept(text: str, path: Path) -> str:
    """Leaves the graph where no picture could be made, but over no file of the user's; and says so."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != text.encode():
            return f"{path} exists and was left as it is"
    return f"the graph is in {path}"
