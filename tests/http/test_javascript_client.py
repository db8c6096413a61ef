"""The official JavaScript client against a real server, beside the Python one: both must read the same."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest

from slipstream.engine.scripted_worker import Script

NODE, NPM = shutil.which("node"), shutil.which("npm")
SCRIPT = """
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const told = {};
const messages = [{ role: "system", content: "be brief" }, { role: "user", content: "stones?" }];
const asked = { model: "tiny", messages, max_completion_tokens: 12, seed: 3 };

const whole = await client.chat.completions.create(asked);
told.whole = [whole.choices[0].message.content, whole.choices[0].finish_reason, whole.usage.total_tokens];

const chunks = [];
for await (const chunk of await client.chat.completions.create({
  ...asked, stream: true, stream_options: { include_usage: true },
})) chunks.push(chunk);
told.chunks = chunks.map(({ id, created, ...rest }) => rest);
told.ids = new Set(chunks.map(({ id }) => id)).size;

const helper = client.chat.completions.stream({ ...asked, n: 2 });
const final = await helper.finalChatCompletion();
told.choices = final.choices.map((choice) => [choice.index, choice.message.content, choice.finish_reason]);

const text = await client.completions.create({ model: "tiny", prompt: ["the", "past"], max_tokens: 5, seed: 4 });
told.completions = text.choices.map((choice) => [choice.index, choice.text, choice.finish_reason]);

const response = await client.responses.create({ model: "tiny", input: "stones?", max_output_tokens: 4 });
told.response = [response.status, response.usage.output_tokens, typeof response.output_text];

told.models = (await client.models.list()).data.map(({ id }) => id);
try {
  await client.chat.completions.create({ ...asked, temperature: -1 });
} catch (error) {
  told.error = [error.constructor.name, error.status, error.param, error.code, typeof error.requestID];
}
const stream = await client.completions.create({ model: "tiny", prompt: "the", max_tokens: 10000, stream: true });
for await (const chunk of stream) break; // leaving the loop closes the connection
console.log(JSON.stringify(told));
"""


@pytest.fixture(scope="session")
def javascript(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the official client and the script that uses it."""
    if NODE is None or NPM is None:
        pytest.skip("needs node and npm")
    folder = tmp_path_factory.mktemp("javascript")
    (folder / "package.json").write_text('{"type": "module"}')
    command = [NPM, "install", "--no-audit", "--no-fund", "--silent", "openai@6"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=40)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if done.returncode:
        pytest.skip(f"npm cannot install the client: {done.stderr[-200:]}")
    (folder / "client.js").write_text(SCRIPT)
    return folder


@pytest.mark.timeout(90)
async def test_the_javascript_client_reads_what_the_python_client_reads(javascript: Path, serving: Any) -> None:
    script = Script(step_time_s=0.001, verifies=False)
    async with serving(script, num_pages=4096, max_model_len=16384) as served:
        client = await asyncio.create_subprocess_exec(
            str(NODE), "client.js", f"{served.url}/v1", cwd=javascript, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, complaints = await client.communicate()
        assert client.returncode == 0, complaints.decode()[-2000:]
        told = json.loads(output)
        await served.idle()
        assert served.engine.num_aborted == 1, "leaving a stream aborts its request"
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as python:
            asked: dict[str, Any] = {
                "model": "tiny",
                "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "stones?"}],
                "max_completion_tokens": 12,
                "seed": 3,
            }
            whole = await python.chat.completions.create(**asked)
            stream = await python.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
            chunks = [chunk async for chunk in stream]
            several = await python.chat.completions.create(**asked, n=2)
            texts = await python.completions.create(model="tiny", prompt=["the", "past"], max_tokens=5, seed=4)
    assert whole.usage is not None
    first = whole.choices[0]
    assert told["whole"] == [first.message.content, first.finish_reason, whole.usage.total_tokens]
    # The golden form of every chunk, as both clients hand it over; the texts are the scripted model's.
    pieces = [chunk.choices[0].delta.content for chunk in chunks[1:-2]]
    assert "".join(pieces) == whole.choices[0].message.content  # type: ignore[arg-type]
    assert [list_of(chunk) for chunk in told["chunks"]] == [
        ({"role": "assistant", "content": ""}, None, None),
        *(({"content": piece}, None, None) for piece in pieces),
        ({}, "length", None),
        (None, None, 12),
    ]
    assert all(set(chunk) == {"object", "model", "system_fingerprint", "choices", "usage"} for chunk in told["chunks"])
    assert told["ids"] == 1
    assert told["choices"] == [[each.index, each.message.content, each.finish_reason] for each in several.choices]
    assert told["completions"] == [[each.index, each.text, each.finish_reason] for each in texts.choices]
    assert told["response"] == ["incomplete", 4, "string"]
    assert told["models"] == ["tiny"]
    assert told["error"] == ["BadRequestError", 400, "temperature", "invalid_value", "string"]


def list_of(chunk: dict[str, Any]) -> tuple[Any, Any, Any]:
    """A chunk's delta, finish reason and completion tokens."""
    assert chunk["object"] == "chat.completion.chunk"
    usage = chunk["usage"]
    if not chunk["choices"]:
        return None, None, usage["completion_tokens"]
    (choice,) = chunk["choices"]
    assert usage is None
    assert choice["index"] == 0
    return choice["delta"], choice["finish_reason"], None
