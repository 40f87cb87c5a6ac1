"""The command `nntile` in the process of a test."""

import sys
from typing import Any

import pytest

from nntile_py import cli


def nntile(*arguments: Any) -> int:
    """Run `nntile ARGUMENTS`; return its exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["nntile", *map(str, arguments)])
        try:
            cli.main()
        except SystemExit as end:
            return int(end.code or 0)
    return 0
