"""BoundModel: a model's weights as tiles in the running Runtime, and the forward programs that share these tiles."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import Any, Self

from nntile_py import _core
from nntile_py.errors import ConfigError
from nntile_py.execution.forward_program import ForwardProgram
from nntile_py.execution.program import Store
from nntile_py.execution.runtime import Runtime, in_turns
from nntile_py.graph.built_step import Evaluation
from nntile_py.graph.fusion import Fusion
from nntile_py.graph.passes.fp8 import FP8
from nntile_py.graph.step import StepSpec, check_precision
from nntile_py.system.gc_pause import no_search_for_cycles
from nntile_py.system.interrupts import uninterrupted
from nntile_py.tiles import Tiling


class BoundModel:
    """A model for forward passes of several sizes: the weights are written into tiles once, and all programs read them.

    The model uses the running Runtime. If no Runtime runs, `bind` starts one on all cores. That Runtime stops at
    `close()`, at the end of `with bound:`, or when the user starts a Runtime. If another Runtime runs, or weights in
    `model.weights` were replaced, `bind` drops the programs and the weights in tiles.

        bound = BoundModel(model, tiles={"embed": 256})
        program = bound.program((4, 128), lambda: bound.spec(4, 128).outputs("logits"))
        program.write(program.check({"input_ids": ids}))
        program.run({})
        logits = program.read("logits")

    All threads of the process share the programs: hold `Runtime.turn` from `program` to the start of a copy.

    Args:
        model: A model of nt.models, or of a user's own class.
        precision: fp32; on CUDA workers also tf32, bf16 and fp16 (outputs come in float32), on CPU workers fp64.
        tiles: {axis: tile size}. An axis left out is not cut.
        accumulate: Accumulation policy, see StepSpec.
        fusion: Fusion of operators, see StepSpec.
        fp8: Options of `precision: fp8`, see StepSpec.
        captured: Whether a program runs as a CUDA graph on one GPU; see ForwardProgram.
        source: Object whose attribute `weights` has the weights. Default: `model`. For `model.changed(...)`, the
            source can be the original model.
        owner: Name of the user of this object in messages.

    Attributes:
        programs: The programs built so far on the latest Runtime, by key.
    """

    def __init__(
        self,
        model: Any,
        precision: str = "fp32",
        tiles: Mapping[str, int] | None = None,
        *,
        accumulate: str = "chain",
        fusion: Fusion | None = None,
        fp8: FP8 | None = None,
        captured: bool | None = False,
        source: Any = None,
        owner: str = "BoundModel",
    ) -> None:
        self.model, self.precision, self.tiles = model, precision, dict(tiles or {})
        self.programs: dict[Hashable, ForwardProgram] = {}
        self._how: dict[str, Any] = {"accumulate": accumulate, "fusion": fusion or Fusion(), "fp8": fp8 or FP8()}
        self._captured, self._owner, self._source = captured, owner, model if source is None else source
        self._runtime: Runtime | None = None  # the Runtime that has the weights
        self._started: Runtime | None = None  # the Runtime that `bind` started
        self._weights: Store | None = None
        self._written: Any = None  # the weights that the tiles have
        self.spec(1, 1)  # checks the settings

    def spec(self, batch: int, seq: int, *, tiles: Mapping[str, int] | None = None, **changes: Any) -> StepSpec:
        """Return the StepSpec of a pass over `batch` sequences of `seq` tokens.

        Args:
            batch: Number of sequences.
            seq: Number of positions of a sequence.
            tiles: Tile sizes of further axes, such as batch. Tile sizes of axes of weights must not change.
            changes: Further arguments of StepSpec, such as pack.
        """
        tiling = Tiling({**self.tiles, **(tiles or {})})
        return StepSpec(self.model, batch, seq, tiling, self.precision, **{**self._how, **changes})

    @property
    def stale(self) -> bool:
        """True if the tiles do not have the model's weights: before the first `bind`, on another Runtime, or after an
        array in `model.weights` was replaced."""
        if self._runtime is None or self._runtime is not Runtime.current:
            return True
        now, written = self._source.weights, self._written
        if not (isinstance(now, dict) and isinstance(written, dict)):
            return now is not written
        return now.keys() != written.keys() or any(written[name] is not value for name, value in now.items())

    @in_turns
    def bind(self) -> Runtime:
        """Return the running Runtime; start one if none runs. Drop programs and weights if they are `stale`.

        Raises:
            ConfigError: The Runtime's workers do not compute in this precision, or it has several ranks.
        """
        if Runtime.current is None:
            own = Runtime()
            own.lent = True
            self._started = own.__enter__()
        runtime = Runtime.current
        assert runtime is not None
        if runtime.ranks:
            need = "nt.Runtime(mpi=False) on each rank"
            raise ConfigError(f"{self._owner}: not supported on several ranks yet; allowed: {need}")
        if self.stale:
            check_precision("precision", self.precision, bool(_core.cuda_workers()))
            self.programs = {}
            now = self._source.weights
            self._weights, self._runtime = Store(), runtime
            self._written = dict(now) if isinstance(now, dict) else now
        return runtime

    @in_turns
    def program(
        self, key: Hashable, evaluation: Callable[[], Evaluation], shared: Mapping[Hashable, _core.Tile] | None = None
    ) -> ForwardProgram:
        """Return the program of `key`.

        At the first call, build the program, and write the weights that no earlier program has needed.

        Args:
            key: Any key that determines the program, such as its sizes.
            evaluation: Returns the pass, as StepSpec.evaluation or StepSpec.outputs does.
            shared: {key of a tile: handle} of further persistent tiles that the program shares with other programs. All
                other inputs and outputs belong to this program alone.
        """
        self.bind()
        if key not in self.programs:
            with no_search_for_cycles():
                self.programs[key] = self._built(evaluation(), shared or {})
        return self.programs[key]

    def _built(self, evaluation: Evaluation, shared: Mapping[Hashable, _core.Tile]) -> ForwardProgram:
        assert self._weights is not None
        for param in evaluation.params:
            tiles = [tile.key for _, tile in evaluation.forward.grid(param.tensor)]
            if not {*tiles} <= self._weights.handles.keys():
                with uninterrupted():  # an interrupt must not leave tiles without values, which would count as written
                    self._weights.write(evaluation.forward, param.tensor, param.weight(self._written))
        # Each program has its own store: inputs and outputs of different programs have the same keys but different
        # sizes. The stores share the tiles of the weights.
        store = Store()
        store.handles.update(self._weights.handles)
        store.handles.update(shared)
        store.residency = self._weights.residency
        return ForwardProgram(evaluation, store, tf32=self.precision == "tf32", captured=self._captured)

    @in_turns
    def close(self) -> None:
        """Release programs and weights; stop the Runtime if `bind` started it."""
        self.programs, self._written, self._runtime = {}, None, None
        self._weights, own, self._started = None, self._started, None
        if own is not None and Runtime.current is own:
            own.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be ending, or __init__ has failed
            self.close()
