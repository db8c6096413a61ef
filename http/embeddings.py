"""POST /v1/embeddings and /v1/score: prompts pooled to one vector each, nothing drawn."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Literal

import orjson
from starlette.responses import Response

from ..engine.errors import RequestError
from ..engine.outputs import Usage
from ..engine.sampling_params import SamplingParams
from .bodies import Prompt, Strict, TextPrompt
from .endpoint import Call, answer_whole
from .frames import Collected
from .front import Front
from .prompts import encode_prompts
from .request_body import checked, read_json
from .submission import Urgency, jobs_of

Vector = Sequence[float]


class EmbeddingBody(Strict):
    """`pooling` and `normalize` are ours: the last token's state or the mean of all, and its length made 1."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    pooling: Literal["last", "mean"] = "last"
    normalize: bool = True


class ScoreBody(Strict):
    """One text against one or several, or pairs of them."""

    model: str | None = None
    text_1: TextPrompt
    text_2: TextPrompt
    pooling: Literal["last", "mean"] = "last"


async def embeddings(front: Front, call: Call) -> Response:
    """A vector for each input."""
    front.check_open()
    body = checked(EmbeddingBody, await read_json(call.request, front.settings))
    call.names = {"prompt": "input"}
    model = front.model(body.model)
    prompts = await encode_prompts(front.engine, body.input, param="input")
    jobs = await jobs_of(front, prompts, [SamplingParams(max_tokens=0, pooling=body.pooling)], Urgency())
    shape = EmbeddingShape(model, as_base64=body.encoding_format == "base64", normalizes=body.normalize)
    return await answer_whole(front, call, shape, jobs)


async def score(front: Front, call: Call) -> Response:
    """How alike texts are: the cosine between their vectors."""
    front.check_open()
    body = checked(ScoreBody, await read_json(call.request, front.settings))
    model = front.model(body.model)
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) not in (1, len(second)):
        raise RequestError("text_1 is one text, or as many as text_2", param="text_1")
    # The engine knows of one list of prompts: the first texts, then the second ones.
    owners = ["text_1"] * len(first) + ["text_2"] * len(second)
    call.names = {f"prompt[{index}]": owner for index, owner in enumerate(owners)}
    ids = await encode_prompts(front.engine, first, param="text_1")
    ids += await encode_prompts(front.engine, second, param="text_2")
    jobs = await jobs_of(front, ids, [SamplingParams(max_tokens=0, pooling=body.pooling)], Urgency())
    return await answer_whole(front, call, ScoreShape(model, num_first=len(first)), jobs)


class EmbeddingShape:
    """A list of vectors."""

    def __init__(self, model: str, *, as_base64: bool, normalizes: bool) -> None:
        self._model = model
        self._as_base64 = as_base64
        self._normalizes = normalizes

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        entries = [
            {"object": "embedding", "index": choice.index, "embedding": self._told(_vector(choice))}
            for choice in choices
        ]
        return _listed(self._model, entries, usage)

    def _told(self, vector: Vector) -> list[float] | str:
        told = normalized(vector) if self._normalizes else list(vector)
        return base64.b64encode(array("f", told).tobytes()).decode() if self._as_base64 else told


class ScoreShape:
    """A list of cosines: the first texts come first, one for all or one a pair."""

    def __init__(self, model: str, *, num_first: int) -> None:
        self._model = model
        self._num_first = num_first

    def whole(self, choices: Sequence[Collected], usage: Usage) -> bytes:
        vectors = [normalized(_vector(choice)) for choice in choices]
        first, second = vectors[: self._num_first], vectors[self._num_first :]
        pairs = zip(first * (len(second) if len(first) == 1 else 1), second, strict=True)
        entries = [
            {"object": "score", "index": index, "score": sum(map(float.__mul__, one, other))}
            for index, (one, other) in enumerate(pairs)
        ]
        return _listed(self._model, entries, usage)


def normalized(vector: Vector) -> list[float]:
    """The vector with length 1; one without a length stays."""
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length else list(vector)


def _vector(choice: Collected) -> Vector:
    return choice.end.embedding or ()


def _listed(model: str, entries: Sequence[object], usage: Usage) -> bytes:
    counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return orjson.dumps({"object": "list", "data": entries, "model": model, "usage": counts})
