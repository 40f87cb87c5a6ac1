"""experiments/counters.py, without a GPU: what it makes of the output of ncu."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments/counters.py"
OUTPUT = """==PROF== Connected to process 1
task: mha.qkv\t25165824\t50331648
task: mha.norm\t1000000\t2000000
==PROF== Disconnected from process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","nvjet","dram__bytes_read.sum","byte","25,000,000"
"0","1","nvjet","l1tex__m_l1tex2xbar_write_bytes.sum","byte","50331648"
"1","1","made","dram__bytes_read.sum","byte","1500000"
"""


def test_a_table_of_counters(capsys: pytest.CaptureFixture[str]) -> None:
    of = importlib.util.spec_from_file_location("counters", SCRIPT)
    assert of and of.loader
    counters = importlib.util.module_from_spec(of)
    of.loader.exec_module(counters)
    seen = counters.kernels(OUTPUT)
    assert [name for name, _ in seen] == ["nvjet", "made"]
    tasks = [line[len(counters.TASK) :].split("\t") for line in OUTPUT.splitlines() if line.startswith(counters.TASK)]
    counters.table(tasks, seen)
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split() == ["mha.qkv", "nvjet", "25.17", "0.00", "25.00", "50.33", "50.33", "0.00"]
    assert second.split() == ["mha.norm", "made", "1.00", "0.00", "1.50", "2.00", "0.00", "0.00"]
    counters.table(tasks, seen[:1])  # a task without a kernel
    assert "2 tasks and 1 kernels" in capsys.readouterr().out
