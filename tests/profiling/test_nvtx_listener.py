"""Our ranges as a tool receives them: through the real NVTX library, which loads a listener as it would load Nsight's."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler is here"),
    pytest.mark.skipif(importlib.util.find_spec("nvtx") is None, reason="the nvtx package is not installed"),
]

EMIT = """
from slipstream.streams import marks
ring = marks.RingMarks(8, nvtx=True)
assert ring.emits_nvtx
waiting = ring.start(marks.AWAIT, 41)
planning = ring.start(marks.SCHEDULE, 42)
ring.end(waiting)
ring.end(planning)
ring.lane_end(ring.lane_start(marks.FORWARD, 42))
"""


def test_a_tool_sees_each_range_in_our_domain_with_its_step(tmp_path: Path) -> None:
    assert COMPILER is not None
    listener, heard = tmp_path / "listener.so", tmp_path / "heard.txt"
    source = Path(__file__).with_name("nvtx_listener.c")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", listener, source], check=True)
    environ = {**os.environ, "NVTX_INJECTION64_PATH": str(listener), "NVTX_LISTENER_OUT": str(heard)}
    subprocess.run([sys.executable, "-c", EMIT], check=True, env=environ, timeout=60)
    assert heard.read_text().splitlines() == [
        "start slipstream await 41",
        "start slipstream schedule 42",
        "end slipstream 1",
        "end slipstream 2",
        "start slipstream forward 42",
        "end slipstream 3",
    ]
