"""Triton kernels that are launched before the kernel ahead of them in the stream has ended.

Their blocks take their places while the last blocks of that kernel run, then wait for all that it writes: programmatic
dependent launch (CUDA C++ Programming Guide), from compute capability 9.0 on. Each of our kernels waits before it reads
or writes, so a kernel that has ended has all those before it behind it, whether or not the next one waits. All that one
may do ahead of that (`wait_here`) is to ask for what it will read to be brought into the L2 cache, which all of the GPU
shares: whoever writes there meanwhile writes into that cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "NNTILE_OVERLAP"
LEAST = 90  # compute capability
# The PTX ISA allows instructions ahead of declarations. The next kernel may come as soon as all blocks run.
FIRST = "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n"
HERE = "// nntile: wait here"  # in the text of a kernel that does something ahead of that


def overlaps(capability: int) -> bool:
    """Whether kernels are compiled and launched so; `NNTILE_OVERLAP=0`, in the environment, is to compare."""
    return capability >= LEAST and os.environ.get(VARIABLE) != "0"


def waiting(ptx: str) -> str:
    """The text of a kernel with what it does first."""
    before, entry, after = ptx.partition(".visible .entry")
    head, brace, text = after.partition("\n{\n")
    assert entry and brace, "this version of Triton writes its kernels otherwise"
    # A compiler may have made two branches of what follows a branch: each waits.
    text, found = re.subn(f"{HERE}.*\\n", lambda line: line[0] + FIRST, text)
    return before + entry + head + brace + ("" if found else FIRST) + text


def waits(ptx: str) -> bool:
    """Whether a kernel does that first: Triton's cache may have one of the same options that was compiled otherwise."""
    return FIRST in ptx


@contextmanager
def compiled_so() -> Iterator[None]:
    """Within it Triton compiles kernels whose options have launch_pdl with what they do first."""
    from triton import knobs

    before = knobs.runtime.add_stages_inspection_hook

    def hook(backend: Any, stages: dict[str, Any], options: Any, language: Any, capability: int) -> None:
        if before is not None:
            before(backend, stages, options, language, capability)
        ptx = stages["ptx"]
        if options.launch_pdl:
            stages["ptx"] = lambda source, metadata: waiting(ptx(source, metadata))

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before
