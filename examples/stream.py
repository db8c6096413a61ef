"""Stream one answer of the demo model: `python examples/stream.py "your question"`."""

import asyncio
import sys

from slipstream import Engine, SamplingParams


async def main() -> None:
    question = sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?"
    async with Engine(model="smollm2-135m-instruct") as engine:
        prompt = engine.chat_template.render([{"role": "user", "content": question}])
        async for delta in engine.generate(prompt, SamplingParams(max_tokens=48, temperature=0.0)):
            print(delta.text, end="", flush=True)
    print()


asyncio.run(main())
