"""Programmatic dependent launch of Triton kernels (CUDA C++ Programming Guide), from compute capability 9.0 on.

A kernel starts before the previous kernel of the stream has ended: its blocks are placed while the last blocks of the
previous kernel run, then they wait for all writes of the previous kernel. Each Triton kernel of this package waits
before its first read or write, so the end of a kernel implies the end of all kernels before it. Before the wait
(`wait_here`), a kernel may only prefetch its inputs into the L2 cache. This is safe, as all writes of the GPU go
through this cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "NNTILE_OVERLAP"
LEAST = 90  # compute capability
# The PTX ISA allows instructions before declarations. The next kernel may start as soon as all blocks run.
FIRST = "\tgriddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;\n"
HERE = "// nntile: wait here"  # in the text of a kernel with instructions before the wait


def overlaps(capability: int) -> bool:
    """Return whether kernels are compiled for this; the environment variable `NNTILE_OVERLAP=0` turns it off."""
    return capability >= LEAST and os.environ.get(VARIABLE) != "0"


def waiting(ptx: str) -> str:
    """Return a kernel's PTX text with the wait inserted."""
    before, entry, after = ptx.partition(".visible .entry")
    head, brace, text = after.partition("\n{\n")
    assert entry and brace, "this version of Triton writes PTX in another form"
    # The compiler may have duplicated code behind a branch: each copy waits.
    text, count = re.subn(f"{HERE}.*\\n", lambda line: line[0] + FIRST, text)
    return before + entry + head + brace + ("" if count else FIRST) + text


def waits(ptx: str) -> bool:
    """Return whether a kernel has the wait: Triton's cache may contain a kernel of equal options without it."""
    return FIRST in ptx


@contextmanager
def compiled_so() -> Iterator[None]:
    """Within the block, Triton inserts the wait into kernels with the option launch_pdl."""
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
