"""Kernels that are launched before the one ahead of them has ended: what they wait for stands first."""

from pathlib import Path

import pytest
from conftest import Python

import nntile_py as nt
from nntile_py.tasks import pdl

COMPILE = """
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nntile_py.graph.lowering import lower
from nntile_py.tasks import launch, launch_binary, pdl
from nntile_py.testing import Case
from nntile_py.tiles import Tiling
sys.path.insert(0, sys.argv[1])
from operators import ROWS

case = Case({"batch": 2, "seq": 8, "embed": 64}, "bf16")
ROWS["LayerNorm residual"](case)
(task,) = lower(case.graph, Tiling({})).tasks.tasks
(one,) = launch.describer(task.kernel)([task]).launches
for capability in 80, 90:
    print(capability, launch_binary.compile_launch(one, capability).overlaps)

add = launch.load() and sys.modules["nntile_py.tasks.elementwise_triton"]._add
signature = {"Y": "*fp32", "A": "*fp32", "B": "*fp32", "n": "i32", "BLOCK": "constexpr"}
source = ASTSource(add, signature, {"BLOCK": 128}, {})
for enabled in False, True:
    with pdl.compiled_so():
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": enabled})
    body = made.asm["ptx"].split("\\n{\\n")[1]
    found = re.findall(r"griddepcontrol.\\w+|ld.global|st.global", body)
    print(enabled, list(dict.fromkeys(found)))
assert triton.knobs.runtime.add_stages_inspection_hook is None

from operators_contract import linear
case = Case({"batch": 1, "seq": 64, "embed": 768, "ffn": 3072}, "bf16")
linear(b="ffn embed", bias="ffn", activation="gelu")(case)
(task,) = lower(case.graph, Tiling({})).tasks.tasks
compiler = triton.compile
for way in launch.describer(task.kernel)([task]).ways:
    texts = []
    triton.compile = lambda *given, **options: texts.append(made := compiler(*given, **options)) or made
    launch_binary.compile_launch(way[0], 90)
    ahead, _, behind = texts[0].asm["ptx"].partition("griddepcontrol.wait")
    names = "prefetch.global.L2|ld.global|cp.async|st.global"
    print({*re.findall(names, ahead)}, {*re.findall(names, behind)} >= {"cp.async", "st.global"})
triton.compile = compiler

other, launch_binary.compiled_so = replace(one, warps=8), nullcontext
launch_binary.compile_launch(other, 90)
launch_binary._compile.cache_clear()
launch_binary.compiled_so = pdl.compiled_so
print("kept", launch_binary.compile_launch(other, 90).overlaps)
"""

EARLY = """
import re, sys
import triton
from nntile_py.graph.graph import Graph
from nntile_py.graph.lowering import lower
from nntile_py.tasks import Gemv, launch, launch_binary
from nntile_py.tiles import Tiling

graph = Graph("bf16")
x, w = graph.named("x", ["one", "embed"], [1, 1500], "input"), graph.named("w", ["ffn", "embed"], [64, 1500], "param")
graph.add(Gemv([x], w, [graph.named("y", ["one", "ffn"], [1, 64], "scalar")]))
(task,) = lower(graph, Tiling({})).tasks.tasks
first, compiler, texts = launch.describer(task.kernel)([task]).launches[0], triton.compile, []
triton.compile = lambda *given, **options: texts.append(made := compiler(*given, **options)) or made
binary = launch_binary.compile_launch(first, 90)
for part in texts[0].asm["ptx"].split("griddepcontrol.wait"):
    print(*sorted({*re.findall("prefetch|ld.global|st.global", part)}))
print(binary.overlaps, launch_binary.encode(first, binary)[4] == launch_binary.IN_GRAPH)

sys.path.insert(0, sys.argv[1])
import operators_generation
from operators import ROWS
from nntile_py.testing import Case
operators_generation.ENTRIES = 40  # pages: several programs read the keys of a head
case = Case({"batch": 1, "seq": 1, "key": 1, "heads": 4, "head_dim": 64}, "bf16")
ROWS["CachedAttention rotary"](case)
(task,) = lower(case.graph, Tiling({})).tasks.tasks
texts.clear()
for one in launch.load()[task.kernel]([task]).launches:
    binary = launch_binary.compile_launch(one, 90)
    before, _, after = texts[-1].asm["ptx"].partition("griddepcontrol.wait")
    found = [sorted({*re.findall("ld.global|cp.async.c|st.global", part)}) for part in (before, after)]
    print(*found, launch_binary.encode(one, binary)[4] == launch_binary.IN_GRAPH)
"""


def compiled(python: Python, folder: Path, **env: str) -> list[str]:
    done = python(COMPILE, Path(__file__).parent, TRITON_CACHE_DIR=str(folder), **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_kernels_wait_before_they_read(python: Python, tmp_path: Path) -> None:
    waiting = ["griddepcontrol.launch_dependents", "griddepcontrol.wait", "ld.global", "st.global"]
    *made, kept = compiled(python, tmp_path)
    assert made[:4] == ["80 False", "90 True", f"False {waiting[2:]}", f"True {waiting}"]
    assert {*made[4:]} == {"{'prefetch.global.L2'} True"}  # products: of the weights, and nothing else, ahead of it
    assert kept == "kept False"  # Triton's cache has it as it was compiled otherwise


@pytest.mark.long
def test_none_overlap_where_that_is_switched_off(python: Python, tmp_path: Path) -> None:
    assert compiled(python, tmp_path, NNTILE_OVERLAP="0")[:2] == ["80 False", "90 False"]


def test_an_unknown_kind_of_text_is_told() -> None:
    with pytest.raises(AssertionError, match="this version of Triton"):
        pdl.waiting("// nothing")


def test_a_wrong_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(pdl.VARIABLE, "no")
    with pytest.raises(nt.ConfigError, match="NNTILE_OVERLAP: got no; allowed: 0 or 1"):
        nt.Runtime(cpus=1)


def test_what_no_kernel_of_the_graph_writes_is_read_before_the_wait(python: Python, tmp_path: Path) -> None:
    """Weights, and pages of the cache. The new token is read after the wait, as are the parts that are combined."""
    done = python(EARLY, Path(__file__).parent, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    *weights, attend, combine = done.stdout.splitlines()
    assert weights == ["ld.global", "ld.global st.global", "True True"]
    assert attend == "['ld.global'] ['cp.async.c', 'ld.global', 'st.global'] True"
    assert combine == "[] ['ld.global', 'st.global'] False"
