"""Runs the command `nntile` as `python -m nntile_py.cli`."""

from nntile_py.cli import main

main()
