"""The command `nntile`. Commands import slow modules only when they run, so --help and config errors appear at once."""

from nntile_py.system import interrupts

with interrupts.ends_at_once():
    import atexit
    import gc
    import os
    import resource
    import signal
    import sys
    import warnings
    from collections.abc import Callable
    from typing import Annotated, Any

    import typer

    from nntile_py.cli import train, data, recorded_runs, generation, server, evaluations, inspect, measurements, encode  # isort: skip  # order of --help
    from nntile_py.cli.options import app
    from nntile_py.errors import LIMITS, NNTileError, exit_status, shown
    from nntile_py.system import launcher, output

LEAST_ADDRESS_SPACE = 750 << 20  # bytes that a command needs; libraries abort the process if they get less

__all__ = ["app", "data", "encode", "evaluations", "generation", "inspect", "main", "measurements", "recorded_runs"]
__all__ += ["server", "train"]


def main(run: Callable[[], Any] = app) -> None:
    """Run the command that sys.argv names, or `run`. An error becomes one message and the exit status 1 or 2.

    NNTILE_DEBUG=1 shows the traceback instead.
    """
    atexit.register(interrupts.to_default, signal.SIGINT)  # Ctrl-C in the interpreter's end shows no traceback
    atexit.register(gc.freeze)  # skips the garbage collection at the end of the process, which takes 0.4 s
    output.protect()
    if os.environ.get("NNTILE_DEBUG") != "1":
        warnings.formatwarning = lambda message, *_, **__: f"{message}\n"  # no file name, line number and source line
    try:
        try:
            with interrupts.ends_at_sigterm():
                run()
        finally:
            sys.stdout.flush()
    except (KeyboardInterrupt, SystemExit) as end:
        causes = end, getattr(end.__context__, "__cause__", None)  # typer turns a KeyboardInterrupt into an exit
        if not any(isinstance(cause, KeyboardInterrupt) for cause in causes):
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except (NNTileError, OSError, MemoryError, RuntimeError) as error:
        no_threads = isinstance(error, RuntimeError) and "start new thread" in str(error)  # Python's own words
        if os.environ.get("NNTILE_DEBUG") == "1" or (isinstance(error, RuntimeError) and not no_threads):
            raise
        if isinstance(error, BrokenPipeError) and error.filename == output.NAME:
            sys.exit(1)  # the reader of a pipe, such as `| head -1`, has ended
        text = f"out of memory ({error})" if isinstance(error, MemoryError) else str(error)
        text += LIMITS if no_threads else ""
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename}: {error.strerror}"
        launcher.failing(status := exit_status(error))
        print(shown(f"{launcher.who()}error: {text}"), file=sys.stderr)
        sys.exit(status)


def _check_address_space() -> None:
    """Raise NNTileError if `ulimit -v` allows less address space than LEAST_ADDRESS_SPACE."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < LEAST_ADDRESS_SPACE:
        need = f"at least {LEAST_ADDRESS_SPACE >> 10}, of which torch takes most"
        raise NNTileError(f"the limit of memory (ulimit -v) is {limit >> 10} KiB; allowed: {need}")


def _version(asked: bool) -> None:
    if asked:
        from nntile_py.system.version import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train transformers on CPU cores and GPUs: tensors are cut into tiles, and StarPU schedules tasks on the tiles."""
    if not {"--help", "-h"} & set(sys.argv):
        _check_address_space()
