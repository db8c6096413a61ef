"""Whatever a client sends, the answer is a 4xx that names the field; nothing is computed and nothing breaks."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from slipstream.http.settings import FrontSettings

MESSAGES = [{"role": "user", "content": "go"}]
BAD_FIELDS: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-1, "hot", True, [], {}, 1e9)],
    *[("top_p", value) for value in (0, 1.5, -0.1, "1")],
    *[("top_k", value) for value in (-2, 1.5, "3")],
    *[("min_p", value) for value in (-0.1, 1.1)],
    *[("n", value) for value in (0, -1, 129, 1.5, "2", True)],
    *[("max_tokens", value) for value in (-1, "5", 2.5, 10**6, 2**63, 2**70)],
    *[("max_completion_tokens", value) for value in (-1, 10**6)],
    *[("min_tokens", value) for value in (-1, "1")],
    *[("seed", value) for value in ("7", 1.5, 2**63, 2**70)],
    *[("stop", value) for value in (["x"] * 100, [1], {"a": 1}, "", [""], ["x" * 2000], 5)],
    *[("stop_token_ids", value) for value in ([-1], ["a"], 5, [10**6])],
    *[("stream", value) for value in ("yes", 1)],
    *[("stream_options", value) for value in ({"include_usage": True}, 5, [])],  # without a stream
    *[("model", value) for value in (5, ["tiny"])],
    *[("logit_bias", value) for value in ({"191222": -100}, {"-1": 5}, {"abc": 1}, {str(i): 1 for i in range(3000)})],
    *[("presence_penalty", value) for value in (9, "1", True)],
    *[("frequency_penalty", value) for value in (9, -3)],
    *[("repetition_penalty", value) for value in (-1, 0, 1e-50)],
    *[("response_format", value) for value in ({"type": "json"}, "{}", [], 5, {"schema": "x"}, '"{}"')],
    *[("logprobs", value) for value in (-1, 21, "yes")],
    *[("top_logprobs", value) for value in (1, 21, "x")],
    *[("tools", value) for value in ([{"type": "function"}], "x", 5)],
    *[("tool_choice", value) for value in ("required", {"type": "function"})],
    ("reasoning_effort", "high"),
    ("prompt_logprobs", 21),
    ("request_id", "a\r\nset-cookie: b"),
    ("priority", "3"),
    ("wat", 1),
    ("__class__", "x"),
    ("ignore_eos", "true"),
]
CHAT_FIELDS: list[tuple[str, Any]] = [
    *[("messages", value) for value in ([], "x", 5, {}, [5], [None], ["x"])],
    ("messages[0].role", [{"role": "x", "content": "a"}]),
    ("messages[0].role", [{"content": "a"}]),
    ("messages[1].content", [*MESSAGES, {"role": "user", "content": 5}]),
    ("messages[0].content[0].type", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages[0].content[0].text", [{"role": "user", "content": [{"type": "text"}]}]),
]
BAD_PROMPTS = [[], [[]], 5, {"a": 1}, [1, "a"], [[1], "a"], [1.5], [True], [300], [-1], [2**31], [2**70], [[1], [300]]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_every_bad_value_is_a_400_that_names_its_field(serving: Any, path: str) -> None:
    base: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {"messages": MESSAGES}
    async with serving() as served:
        wrong = []
        for name, value in BAD_FIELDS:
            answer = await served.post(path, {**base, name: value})
            if answer.status != 400 or not (answer.json["error"]["param"] or "").startswith(name):
                wrong.append((name, value, answer.status, answer.body))
        assert wrong == []
        assert served.engine.stats.num_steps == 0
        assert (await served.post(path, base)).status == 200


async def test_bad_messages_are_named_by_their_place(serving: Any) -> None:
    async with serving() as served:
        answers = [
            (param, await served.post("/v1/chat/completions", {"messages": sent})) for param, sent in CHAT_FIELDS
        ]
        missing = await served.post("/v1/chat/completions", {})
    for param, answer in answers:
        assert answer.status == 400
        assert answer.json["error"]["param"].startswith(param), (param, answer.json)
    assert missing.json["error"]["param"] == "messages"


@pytest.mark.parametrize("stream", [True, False])
async def test_bad_prompts_are_refused_before_anything_runs(serving: Any, stream: bool) -> None:
    async with serving() as served:
        answers = [await served.post("/v1/completions", {"prompt": prompt, "stream": stream}) for prompt in BAD_PROMPTS]
        native = [await served.post("/generate", {"input_ids": prompt, "stream": stream}) for prompt in BAD_PROMPTS]
        assert served.engine.stats.num_steps == 0
    for name, refused in (("prompt", answers), ("input_ids", native)):
        assert all(answer.status == 400 for answer in refused)
        assert {answer.json["error"]["param"] for answer in refused} == {name, f"{name}[1]"}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'"x"',
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(serving: Any, body: bytes) -> None:
    async with serving() as served:
        for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"):
            answer = await served.ask("POST", path, body)
            assert answer.status == 400
            assert answer.json["error"]["type"] == "invalid_request_error"


async def test_a_refusal_says_in_its_words_what_is_wrong_and_where(serving: Any) -> None:
    told = [
        (
            "/v1/completions",
            b'{"prompt": "x", "max_tokens": 1%b}' % (b"0" * 30),
            "max_tokens",
            "max_tokens is too large",
        ),
        ("/v1/completions", b'{"prompt": "\xff"}', None, "the body is not valid UTF-8, from byte 12 on"),
        ("/v1/completions", {"prompt": ["a", "", "b"]}, "prompt[1]", "the prompt must have at least one token"),
        ("/v1/completions", {"prompt": [[5], [999]]}, "prompt[1]", "token id 999 is outside the vocabulary 0…299"),
        ("/v1/completions", {"prompt": [[5], []]}, "prompt", "prompt[1] is empty"),
        ("/generate", {"input_ids": [[5], []]}, "input_ids", "input_ids[1] is empty"),
        ("/generate", {"text": ["a", ""]}, "text[1]", "the prompt must have at least one token"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input[1]", "the prompt must have at least one token"),
        (
            "/v1/completions",
            {"prompt": "x", "logprobs": 21},
            "logprobs",
            "logprobs: input should be less than or equal to 20",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant"}, {"role": "user"}]},
            "messages[1].content",
            "a message of the role user has a content",
        ),
    ]
    async with serving() as served:
        for path, body, param, message in told:
            answer = await served.ask("POST", path, body)
            error = answer.json["error"]
            assert (answer.status, error["param"], error["message"]) == (400, param, message)


async def test_what_could_never_wait_in_the_queue_is_refused_for_good(serving: Any) -> None:
    settings = {"max_queued_requests": 4, "max_queued_tokens": 40}
    async with serving(engine_settings=settings) as served:
        for body, param, limit in (
            ({"prompt": "x", "n": 5}, "n", "max_queued_requests"),
            ({"prompt": ["x"] * 5}, "prompt", "max_queued_requests"),
            ({"prompt": [[5] * 21] * 2}, "prompt", "max_queued_tokens"),
            ({"prompt": [5] * 21, "n": 2}, "n", "max_queued_tokens"),
        ):
            for stream in (False, True):
                answer = await served.post("/v1/completions", {**body, "max_tokens": 1, "stream": stream})
                assert (answer.status, answer.json["error"]["param"]) == (400, param)
                assert limit in answer.json["error"]["message"]
        for body in ({"prompt": "x", "n": 4}, {"prompt": [5] * 100}):
            assert (await served.post("/v1/completions", {**body, "max_tokens": 1})).status == 200


async def test_null_means_not_sent(serving: Any) -> None:
    fields = {name: None for name, _ in BAD_FIELDS}
    async with serving() as served:
        answer = await served.post("/v1/chat/completions", {"messages": MESSAGES, "best_of": None, **fields})
    assert answer.status == 200


async def test_values_that_ask_for_nothing_and_hints_are_accepted(serving: Any) -> None:
    nothing = {
        "logprobs": False,
        "logit_bias": {},
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "n": 1,
    }
    async with serving() as served:
        assert (await served.post("/v1/chat/completions", {"messages": MESSAGES, **nothing})).status == 200
        assert (await served.post("/v1/completions", {"prompt": "x", "best_of": 1, "echo": False})).status == 200
        refused = await served.post("/v1/completions", {"prompt": "x", "best_of": 3})
    assert refused.json["error"]["param"] == "best_of"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_context_limit_is_exact_and_gives_both_counts(serving: Any, stream: bool, tokenizer: Any) -> None:
    longest = 64
    async with serving(max_model_len=longest) as served:

        async def ask(num_tokens: int, **more: Any) -> Any:
            return await served.post("/v1/completions", {"prompt": [7] * num_tokens, "stream": stream, **more})

        for num_tokens in (longest, longest + 1, 2 * longest):
            answer = await ask(num_tokens, max_tokens=1)
            assert answer.status == 400
            assert answer.json["error"]["code"] == "context_length_exceeded"
            assert str(num_tokens) in answer.json["error"]["message"]
            assert str(longest) in answer.json["error"]["message"]
        answer = await ask(longest - 1, max_tokens=1, stream=False, ignore_eos=True)
        assert answer.json["usage"]["completion_tokens"] == 1
        one_over = await ask(40, max_tokens=25)
        assert one_over.status == 400
        assert one_over.json["error"]["param"] == "max_tokens"
        assert (await ask(40, max_tokens=24)).status == 200
        text = await served.post("/v1/completions", {"prompt": "stones " * 60, "stream": stream})
        assert text.json["error"]["code"] == "context_length_exceeded"


async def test_chat_fills_the_context_and_the_new_name_for_the_limit_wins(serving: Any) -> None:
    async with serving(max_model_len=64) as served:

        async def count(**limits: Any) -> tuple[int, int]:
            body = {"messages": MESSAGES, "ignore_eos": True, **limits}
            usage = (await served.post("/v1/chat/completions", body)).json["usage"]
            return usage["completion_tokens"], usage["total_tokens"]

        assert (await count())[1] == 64
        assert (await count(max_tokens=None))[1] == 64
        assert (await count(max_tokens=9, max_completion_tokens=5))[0] == 5
        assert (await count(max_tokens=9, max_completion_tokens=None))[0] == 9
        too_long = await served.post("/v1/chat/completions", {"messages": MESSAGES * 40})
        assert too_long.json["error"]["param"] == "messages"
        assert too_long.json["error"]["code"] == "context_length_exceeded"


async def test_extensions_are_honoured(serving: Any, tokenizer: Any) -> None:
    async with serving() as served:

        async def text(**more: Any) -> str:
            body = {"prompt": "the", "max_tokens": 12, "seed": 4, "ignore_eos": True, **more}
            return (await served.post("/v1/completions", body)).json["choices"][0]["text"]

        plain = await text()
        first = (await served.post("/generate", {"text": "the", "sampling_params": {"max_tokens": 12, "seed": 4}})).json
        stopped = await served.post(
            "/v1/completions",
            {
                "prompt": "the",
                "max_tokens": 12,
                "seed": 4,
                "ignore_eos": True,
                "stop_token_ids": [first["output_ids"][2]],
            },
        )
        assert stopped.json["choices"][0]["stop_reason"] == first["output_ids"][2]
        assert stopped.json["usage"]["completion_tokens"] <= 3
        launched = served.worker.script.launched
        served.worker.script.records = True
        assert (
            await text(top_k=3, top_p=0.5, min_p=0.1, temperature=0.7) == plain
        )  # scripted tokens do not depend on them
        sampling = launched[0].starts[0].sampling
        assert (sampling.top_k, sampling.top_p, sampling.min_p, sampling.temperature) == (3, 0.5, 0.1, 0.7)


async def test_a_body_beyond_the_limit_is_a_413_whether_it_says_so_or_not(serving: Any) -> None:
    async with serving(front=FrontSettings(max_body_bytes=1000)) as served:
        body = {"prompt": "x" * 2000}
        announced = await served.post("/v1/completions", body)
        assert announced.status == 413
        assert announced.headers["connection"] == "close"
        client = await served.connect()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n"
        await client.send_raw(head + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        assert (await client.answer()).status == 413


async def test_a_body_that_does_not_arrive_is_a_408(serving: Any) -> None:
    async with serving(front=FrontSettings(body_timeout_s=0.05)) as served:
        client = await served.connect()
        await client.send_raw(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 10\r\n\r\n{")
        answer = await client.answer()
    assert answer.status == 408
    assert answer.json["error"]["code"] == "body_timeout"


async def test_unknown_paths_and_methods_have_the_same_error_shape(serving: Any) -> None:
    async with serving() as served:
        for method, path, status in (("GET", "/nope", 404), ("POST", "/v1/assistants", 404), ("GET", "/generate", 405)):
            answer = await served.ask(method, path)
            assert answer.status == status
            assert set(answer.json["error"]) == {"message", "type", "param", "code"}
            assert answer.headers["x-request-id"]


async def test_a_server_without_a_tokenizer_takes_ids_and_says_so(serving: Any) -> None:
    async with serving(with_tokenizer=False) as served:
        assert (await served.post("/v1/completions", {"prompt": "x"})).json["error"]["code"] == "no_tokenizer"
        chat = await served.post("/v1/chat/completions", {"messages": MESSAGES})
        assert chat.json["error"]["code"] == "no_chat_template"
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
        assert len((await served.post("/generate", body)).json["output_ids"]) == 3
        assert (await served.post("/generate", {"text": "x"})).json["error"]["param"] == "text"


async def test_content_parts_null_content_and_developer_messages_reach_the_template(serving: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "d"}]},
    ]
    async with serving() as served:
        assert (await served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})).status == 200
        ids = (await served.post("/tokenize", {"messages": messages})).json["tokens"]
        text = (await served.post("/detokenize", {"tokens": ids})).json["prompt"]
    turns = ("system ab", "user c", "assistant ", "tool d")
    assert text == "".join(f"<|turn|>{turn}<|end|>" for turn in turns) + "<|turn|>assistant "


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize("depth", [130, 400, 900])
async def test_a_body_nested_deeper_than_its_reader_goes_is_refused(serving: Any, depth: int) -> None:
    function = {"name": "f", "parameters": nested(depth)}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(depth)}}
    chat = {"messages": MESSAGES, "max_tokens": 1}
    tools = {"tool_choice": "required", "tools": [{"type": "function", "function": function}]}
    native = {"tool_choice": "required", "tools": [{"type": "function", **function}]}
    async with serving() as served:
        for path, body in (
            ("/v1/chat/completions", {**chat, "response_format": schema}),
            ("/v1/chat/completions", {**chat, **tools}),
            ("/v1/chat/completions", {**chat, "chat_template_kwargs": nested(depth)}),
            ("/v1/responses", {"input": "x", **native}),
            ("/v1/completions", {"prompt": "x", "guided_json": nested(depth)}),
            ("/tokenize", {"prompt": "x", "wat": nested(depth)}),
        ):
            answer = await served.post(path, body)
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_json"), (path, answer.body[:200])
            assert "nested more than" in answer.json["error"]["message"]


async def test_a_body_may_be_nested_as_deep_as_schemas_are(serving: Any) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 1, "chat_template_kwargs": nested(120)}
    many = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 45
    async with serving() as served:
        assert (await served.post("/v1/chat/completions", asked)).status == 200
        assert (await served.post("/v1/chat/completions", {**asked, "messages": many})).status == 200


async def test_a_compressed_body_is_told_so(serving: Any) -> None:
    body = gzip.compress(b'{"prompt": "the"}')
    async with serving() as served:
        answer = await served.post("/v1/completions", body, content_encoding="gzip")
        assert (answer.status, answer.json["error"]["code"]) == (415, "unsupported_encoding")
        assert answer.headers["accept-encoding"] == "identity"
        plain = await served.post("/v1/completions", {"prompt": "the", "max_tokens": 1}, content_encoding="identity")
        assert plain.status == 200
