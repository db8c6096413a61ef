from __future__ import annotations

import subprocess
import sys

TORCH_FREE = ["errors", "fence", "hold", "host_lane", "lane", "marks", "ticket", "wake"]


def test_the_torch_free_files_import_and_run_with_torch_blocked() -> None:
    script = f"""
import sys
sys.modules["torch"] = None
for name in {TORCH_FREE!r}:
    __import__("slipstream.streams." + name)
from slipstream.streams.host_lane import HostLane
lane = HostLane("compute")
lane.submit(lambda: None)
ticket = lane.ticket(lambda: 3)
lane.synchronize_blocking()
print(ticket.result())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
