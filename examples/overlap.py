"""See the overlap without a GPU: a scripted device that takes 5 ms a step, and a host that needs 2 ms a launch.

One after the other that is 7 ms a step; overlapped, the host's work hides behind the device's.
"""

import asyncio
import time

from slipstream import Engine, SamplingParams
from slipstream.engine.scripted_worker import Script, ScriptedWorker
from slipstream.engine.worker import WorkerLimits

LIMITS = WorkerLimits(num_pages=64, page_size=16, num_rows=4, max_model_len=512, vocab_size=1000)
NUM_TOKENS = 100


async def ms_a_step(*, overlap: bool) -> float:
    script = Script(step_time_s=0.005, launch_cost_s=0.002)
    async with Engine.on(ScriptedWorker(LIMITS, script), page_size=16, overlap=overlap) as engine:
        started_s = time.perf_counter()
        await engine.complete([1, 2, 3], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
        return (time.perf_counter() - started_s) * 1000 / NUM_TOKENS


async def main() -> None:
    for overlap in (False, True):
        print(f"overlap={overlap!s:5}: {await ms_a_step(overlap=overlap):.2f} ms a step")


asyncio.run(main())
