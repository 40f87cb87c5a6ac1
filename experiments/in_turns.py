"""Time training steps of a config with several values of a constant in the sources, alternating in one process.

python experiments/in_turns.py experiments/gpt2_124m.yaml nntile_py.tiles.task_groups.EXPORT_SECONDS 1 2e-4 \\
    --set runtime.cuda=2 --set tiles.batch=16
"""

import argparse
import importlib
from contextlib import ExitStack
from typing import Any

from nntile_py.config.run_config import load
from nntile_py.measure.sweep_spec import Measure
from nntile_py.measure.worker import Session
from nntile_py.system.clock import clocked, spread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("constant", help="MODULE.NAME of a constant that the building of a program reads")
    parser.add_argument("values", type=float, nargs="+")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each value")
    parser.add_argument("--steps", type=int, default=3, help="steps in a measurement")
    o = parser.parse_args()
    where, _, name = o.constant.rpartition(".")
    module = importlib.import_module(where)
    kind = type(getattr(module, name))  # raises an error for an unknown constant
    request: dict[str, Any] = {"config": load(o.config, o.sets).model_dump(by_alias=True)}
    request["measure"] = Measure(warmup=o.steps).model_dump()
    with ExitStack() as running:
        sessions = {}
        for value in o.values:
            setattr(module, name, kind(value))
            sessions[value] = Session(request, running)
        times: dict[float, list[float]] = {value: [] for value in o.values}
        for _ in range(o.turns):
            for value, session in sessions.items():
                assert session.run
                times[value] += clocked(session.run, 1, o.steps)
        for value, session in sessions.items():
            t = {key: 1e3 * seconds for key, seconds in spread(times[value]).items()}
            tasks = session.facts["tasks"]
            print(f"{value:g}: {t['median']:.1f} ms a step ({t['min']:.1f} to {t['max']:.1f}), {tasks} tasks")


if __name__ == "__main__":
    main()
