"""`nntile graph`: a picture of a config's operators or tile tasks, drawn by graphviz.

Operators are ellipses, marked by class (contraction, normalization, element-wise) as in Ivanov et al. 2021. Data are
boxes, weights cylinders, inputs parallelograms. Nodes show flop and bytes. The width of an edge shows its bytes. Each
of forward pass, backward pass and update has a box. A tensor that another pass reads is drawn in both boxes, so that no
edge crosses the picture. Equal layers are drawn once. A whole model is drawn as an overview of operators.
If a picture of a whole model's tasks would be too large, it shows only layer 0; its title says so.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nntile_py.analysis import dot
from nntile_py.analysis.counts import Tally
from nntile_py.analysis.drawings import Bound, LogicalDrawing, TaskDrawing, count_layers
from nntile_py.analysis.workloads import Phase, Work, build, logical, work_title
from nntile_py.config.builders import tiling
from nntile_py.errors import ConfigError, NNTileError
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.graph import Graph
from nntile_py.system.folders import replace_file, write_new
from nntile_py.system.units import counted, si

if TYPE_CHECKING:
    from nntile_py.config.run_config import RunConfig

MOST_NODES = 1500  # limit for a picture; with more nodes dot takes minutes, and the picture cannot be read
MOST_SECONDS = 30.0  # limit for dot, whose time grows faster than the number of nodes
MOST_CURVED = 250  # with more nodes edges are straight, which takes dot seconds; curves would take minutes
ONE_LAYER = "only layer 0"  # in the title of a picture that shows one layer of a large model
PHASES = ("all", "forward", "backward", "update")
GET_DOT = (
    "graphviz's program `dot` is not on the PATH; get it with `apt-get install graphviz` (macOS: `brew install "
    "graphviz`)"
)
FEWER = "choose --layer 0, --phase forward, --level logical, or larger tiles"


class NoPicture(NNTileError):
    """Graphviz drew no picture. advice: text for users of `nntile graph`, added to the message."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.advice = advice


def draw(
    config: RunConfig, *, level: str = "logical", work: Work = "train", layer: int | None = None, phase: str = "all",
    fusion: str = "after", folded: bool = True, before: Fusion | None = None, bound: Bound | None = None,
    tensors: bool = False,
) -> str:  # fmt: skip
    """Return a picture of a config's operators or tasks in the DOT language.

    Args:
        level: `logical`: operators and tensors; `tiles`: tasks and tiles.
        work: the workload.
        layer: draw only this layer. None: all.
        phase: draw only this phase, one of PHASES.
        fusion: draw the graph `before` fusion, `after` fusion, or `both`.
        folded: draw equal layers once.
        before: fusion of the graph that is drawn as `before`. None: this graph is not fused.
        bound: returns True for counts of a memory-bound operator, which is then marked. None: no marks.
        tensors: True: draw a whole model in full. False: of a whole model, `logical` draws no tensors, and `tiles`
            draws only layer 0 if there are more than MOST_CURVED nodes.
    """
    text, number = _drawn(config, level, work, layer, phase, fusion, folded, before, bound, tensors)
    nodes = text.count("shape=")
    if level == "logical" or tensors or layer is not None or phase == "update" or nodes <= MOST_CURVED or number < 2:
        return text
    why = f"{ONE_LAYER} of {number}, as the whole has {nodes} nodes; --tensors draws all"
    return _drawn(config, level, work, 0, phase, fusion, folded, before, bound, tensors, why)[0]


def _drawn(
    config: RunConfig, level: str, work: Work, layer: int | None, phase: str, fusion: str, folded: bool,
    before: Fusion | None, bound: Bound | None, tensors: bool, why: str = "",
) -> tuple[str, int]:  # fmt: skip
    """Return a picture as `draw` does, with a line `why` below its title, and the number of the model's layers."""
    titles = {"before": "naive (before fusion)", "after": "fused (after fusion)"}
    parts = ["before", "after"] if fusion == "both" else [fusion]
    about = "\n".join(filter(None, (_about(config, work, layer, phase), why)))
    lines, number = [*dot.HEAD, f"label={dot.quote(about)} labelloc=t fontsize=16"], 0
    used: dict[str, None] = {}
    for part in parts:
        # For the phase `forward`, the graph has no backward pass: activations then store no inputs for it.
        only: Phase = "forward" if phase == "forward" else "all"
        other = (before or Fusion.of(False)) if part == "before" else None
        drawing: LogicalDrawing | TaskDrawing
        if level == "logical":
            overview = not tensors and is_overview(level, work, layer, phase)
            graphs = logical(config, work, other, only)
            drawing = LogicalDrawing(graphs, part, layer, phase, folded, Tally(config, work), bound, overview)
        else:
            drawing = TaskDrawing(build(config, work, only, fusion=other), part, layer, phase, folded)
        if not drawing.count:
            asked = f"--phase {phase}" + ("" if layer is None else f" --layer {layer}")
            raise ConfigError(f"{asked}: {work} has no such operators{_layers(drawing.graphs)}")
        sums = f"{drawing.size_text}, {si(drawing.flop)}flop, {si(drawing.volume)}B moved"
        lines += drawing.picture.lines(f"{titles[part]}: {sums}")
        used |= drawing.picture.used
        number = count_layers(drawing.graphs)
    return "\n".join([*lines, *dot.legend(used), "}", ""]), number


def is_overview(level: str, work: str, layer: int | None, phase: str) -> bool:
    """Return True if a picture shows the operators of a whole model.

    Such a picture leaves out tensors, which would make it unreadable."""
    return level == "logical" and work in ("train", "inference") and layer is None and phase == "all"


def note(text: str, overview: bool) -> str:
    """Return advice on how to see more details (if `overview`) or draw a smaller picture; "" if none is needed.

    text: the picture in the DOT language."""
    if overview:
        return "an overview of the operators; --layer 0 draws a layer with its tensors, --tensors draws all tensors"
    if ONE_LAYER in text:
        return "the picture shows layer 0 only; --tensors draws the whole model"
    nodes = text.count("shape=")
    return f"{nodes} nodes; --layer 0 or --phase forward draws a part that can be read" if nodes > MOST_CURVED else ""


def _about(config: RunConfig, work: str, layer: int | None, phase: str) -> str:
    """Return the picture's title: the part that is drawn, with its sizes and tiles."""
    tiles = [f"{axis} {size}" for axis, size in tiling(config).tiles.items()]
    part = "" if layer is None else f"layer {layer}: "
    part += {"all": "", "update": "the update in "}.get(phase, f"{phase} pass in ")
    return f"{part}{work_title(config, work)}; tiles: {', '.join(tiles) or 'uncut'}"


def _layers(graphs: Sequence[Graph]) -> str:
    """Return the end of a message with the model's number of layers; "" if the model has no layers."""
    number = count_layers(graphs)
    return f"; the model has {counted(number, 'layer')}" if number else ""


def write(text: str, out: Path) -> None:
    """Write a picture, given in the DOT language, to `out`: a .dot as it is, a .svg, .png or .pdf by graphviz.

    If graphviz fails, write a .dot beside `out` and raise NNTileError."""
    if out.suffix in (".dot", ".gv"):
        replace_file(out, text)
        return
    if out.suffix not in (".svg", ".png", ".pdf"):
        raise ConfigError(f"--out: {out} has no suffix .svg, .png, .pdf or .dot")
    try:
        content = picture(text, out.suffix[1:])
    except NoPicture as error:
        raise NNTileError(f"{error}{error.advice}; {_kept(text, out.with_suffix('.dot'))}") from None
    replace_file(out, content)


def picture(text: str, form: str) -> bytes:
    """Let graphviz draw a picture given in the DOT language, and return the file's content. form: svg, png or pdf.

    Raises:
        NoPicture: graphviz is not installed, fails, or takes too long.
        ConfigError: there are more than MOST_NODES nodes.
    """
    program = shutil.which("dot")
    if program is None:
        raise NoPicture(GET_DOT, ", or give --out a name that ends in .dot, which needs no program")
    if (nodes := text.count("shape=")) > MOST_NODES:
        raise ConfigError(f"--out: {nodes} nodes are too many for a picture that can be read (at most {MOST_NODES}): "
                          f"{FEWER}; or write a .dot")  # fmt: skip
    straight = ["-Gsplines=line", "-Gnslimit=1", "-Gnslimit1=1"] if nodes > MOST_CURVED else []
    try:
        command = [program, f"-T{form}", *straight]
        drawn = subprocess.run(command, input=text.encode(), capture_output=True, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        why = f"graphviz's dot was stopped after {MOST_SECONDS:g} s on {nodes} nodes"
        less = f": {FEWER}, or give --out a name that ends in .dot and lay that out with graphviz's `sfdp -Tsvg`, "
        raise NoPicture(why, f"{less}which is faster") from None
    if drawn.returncode:
        raise NoPicture(f"dot: {drawn.stderr.decode(errors='replace').strip()}", "")
    return drawn.stdout


def _kept(text: str, path: Path) -> str:
    """Write the .dot of a picture that graphviz could not draw. Returns a message. An existing file is left alone."""
    try:
        write_new(path, text)
    except FileExistsError:
        if not path.is_file() or path.read_bytes() != text.encode():
            return f"{path} exists and was left as it is"
    return f"the graph is in {path}"
