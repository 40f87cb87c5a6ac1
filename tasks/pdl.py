"""Programmatic dependent launch of Triton kernels (CUDA C++ Programming Guide), from compute capability 9.0 on.

With programmatic dependent launch, a kernel starts before the previous kernel of the stream has ended: its blocks are
placed on the GPU while the last blocks of the previous kernel run, or wait. The blocks then wait for all writes of the
previous kernel. Each Triton kernel of this package waits before its first read or write, so the end of a kernel implies
the end of all kernels before it. Before the wait (`wait_here`), a kernel may only prefetch its inputs into the L2
cache, which is safe because all writes of the GPU go through the L2 cache. A launch with `early` (see launch.py) may
also read parameters and cached keys and values there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "NNTILE_OVERLAP"
LEAST = 90  # smallest compute capability with programmatic dependent launch
# Inserted at the beginning of a kernel; the PTX ISA allows instructions before declarations. The first instruction lets
# the next kernel start as soon as all blocks of this kernel run, even if they still wait: the next kernel can then read
# weights while this one waits. The second waits for the previous kernel.
FIRST = "\tgriddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;\n"
HERE = "// nntile: wait here"  # marks the place of the wait in a kernel that prefetches before the wait


def overlaps(capability: int) -> bool:
    """Return True if kernels for this compute capability are compiled to start before the previous kernel has ended.

    The environment variable `NNTILE_OVERLAP=0` turns this off.
    """
    return capability >= LEAST and os.environ.get(VARIABLE) != "0"


def waiting(ptx: str) -> str:
    """Return a kernel's PTX text with the wait inserted: at each mark of `wait_here`, or else at the beginning."""
    before, entry, after = ptx.partition(".visible .entry")
    head, brace, text = after.partition("\n{\n")
    assert entry and brace, "this version of Triton writes PTX in another form"
    # The compiler may have duplicated the mark behind a branch: each copy gets a wait.
    text, count = re.subn(f"{HERE}.*\\n", lambda line: line[0] + FIRST, text)
    return before + entry + head + brace + ("" if count else FIRST) + text


def waits(ptx: str) -> bool:
    """Return True if a kernel's PTX has the wait. A kernel from Triton's cache may lack it despite equal options."""
    return FIRST in ptx


@contextmanager
def compiled_so() -> Iterator[None]:
    """Return a context in which Triton inserts the wait into kernels that it compiles with the option launch_pdl."""
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
