"""Embeddings and scores over HTTP. The scripted worker's vector of a prompt: the sum of its ids and their number."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import openai
import pytest


async def test_each_input_has_its_vector_in_order(serving: Any, tokenizer: Any) -> None:
    texts = ["stones", "the stream slips past the stones", "x"]
    async with serving() as served:
        body = {"model": "tiny", "input": texts, "pooling": "mean", "normalize": False}
        answer = await served.post("/v1/embeddings", body)
        assert answer.status == 200, answer.body
        ids = [tokenizer.encode(text) for text in texts]
        expected = [[sum(each) / len(each), 1.0] for each in ids]
        assert [entry["embedding"] for entry in answer.json["data"]] == expected
        assert [entry["index"] for entry in answer.json["data"]] == [0, 1, 2]
        assert answer.json["usage"]["prompt_tokens"] == sum(map(len, ids))
        last = await served.post("/v1/embeddings", {"input": ids[1], "normalize": False})
        assert last.json["data"][0]["embedding"] == [float(ids[1][-1]), 1.0]


async def test_vectors_have_length_1_unless_told_otherwise_and_come_as_bytes_on_request(serving: Any) -> None:
    async with serving() as served:
        plain = (await served.post("/v1/embeddings", {"input": "stones"})).json["data"][0]["embedding"]
        packed = (await served.post("/v1/embeddings", {"input": "stones", "encoding_format": "base64"})).json
    assert math.isclose(sum(value * value for value in plain), 1.0)
    unpacked = struct.unpack("2f", base64.b64decode(packed["data"][0]["embedding"]))
    assert unpacked == pytest.approx(plain)


async def test_scores_are_cosines_of_one_with_several_or_of_pairs(serving: Any) -> None:
    async with serving() as served:
        one = await served.post("/v1/score", {"text_1": "stones", "text_2": ["stones", "the stream"]})
        assert next(entry["score"] for entry in one.json["data"]) == pytest.approx(1.0)
        assert 0 < one.json["data"][1]["score"] <= 1.0 + 1e-9
        pairs = await served.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b"]})
        assert [entry["score"] for entry in pairs.json["data"]] == pytest.approx([1.0, 1.0])
        refused = await served.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["a"]})
        assert (refused.status, refused.json["error"]["param"]) == (400, "text_1")
        for bad in ("", "stones " * 1000):
            for texts, param in (([bad, "b"], "text_1"), (["b", bad], "text_1"), (["a", "b"], "text_2")):
                other = [bad, "b"] if param == "text_2" else ["a", "b"]
                refused = await served.post("/v1/score", {"text_1": texts, "text_2": other})
                assert (refused.status, refused.json["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"input": []}, "input"), ({"input": [300]}, "input"), ({"input": "x", "dimensions": 3}, "dimensions"),
     ({"input": "x", "pooling": "max"}, "pooling"), ({}, "input"),
     ({"input": "x", "encoding_format": "int8"}, "encoding_format")],
)  # fmt: skip
async def test_bad_embedding_requests_are_refused_by_name(serving: Any, fields: dict[str, Any], param: str) -> None:
    async with serving() as served:
        answer = await served.post("/v1/embeddings", fields)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_the_openai_client_reads_embeddings(serving: Any) -> None:
    async with serving() as served, openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x") as client:
        answer = await client.embeddings.create(model="tiny", input=["stones", "x"])
    assert len(answer.data) == 2
    assert all(len(entry.embedding) == 2 for entry in answer.data)
