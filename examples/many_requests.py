"""Many requests at once, each its own task; one is cancelled, the others never notice."""

import asyncio
import time

from slipstream import Engine, SamplingParams

COUNTRIES = ("France", "Japan", "Italy", "Spain", "Egypt", "Kenya", "Peru", "Canada")


async def ask(engine: Engine, country: str) -> None:
    prompt = engine.chat_template.render([{"role": "user", "content": f"What is the capital of {country}?"}])
    answer = await engine.complete(prompt, SamplingParams(max_tokens=24, temperature=0.0))
    print(f"{country}: {answer.text.strip()} [{answer.usage.output_tokens} tokens, {answer.finish_reason}]")


async def main() -> None:
    async with Engine(model="smollm2-135m-instruct", max_running_requests=16) as engine:
        started_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for country in COUNTRIES:
                tasks.create_task(ask(engine, country))
            lost = tasks.create_task(engine.complete("Once upon a time", SamplingParams(max_tokens=2000)))
            await asyncio.sleep(0.5)
            lost.cancel()  # its pages come home at the next step
        print(f"{len(COUNTRIES)} answers in {time.perf_counter() - started_s:.1f} s, {engine.num_aborted} aborted")


asyncio.run(main())
