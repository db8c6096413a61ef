"""Every endpoint, and the OpenAPI document that says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from .bodies import ChatBody, CompletionBody
from .cache import FlushCacheBody, flush_cache
from .embeddings import EmbeddingBody, ScoreBody, embeddings, score
from .endpoint import Call, Handler, json_response
from .front import Front
from .native import (
    AbortBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    abort_request,
    detokenize,
    generate,
    tokenize,
)
from .openai_chat import chat_completions
from .openai_completions import completions
from .openai_responses import ResponsesBody, responses
from .probes import health, list_models, metrics, one_model, ready, server_info
from .profile import StartProfileBody, StopProfileBody, start_profile, stop_profile
from .web_page import live


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One endpoint. `is_open`: needs no key. `is_admin`: acts on others' requests, wants the admin key."""

    method: str
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    streams: bool = False
    is_open: bool = False
    is_admin: bool = False


async def openapi(front: Front, call: Call) -> Response:
    """This document."""
    described = document(OPERATIONS)
    root_path = call.request.scope.get("root_path", "")
    if root_path:
        described["servers"] = [{"url": root_path}]
    return json_response(described)


OPERATIONS: tuple[Operation, ...] = (
    Operation(method="GET", path="/health", handler=health, is_open=True),
    Operation(method="GET", path="/ready", handler=ready, is_open=True),
    Operation(method="GET", path="/metrics", handler=metrics, is_open=True),
    Operation(method="GET", path="/server_info", handler=server_info),
    Operation(method="GET", path="/live", handler=live),
    Operation(method="GET", path="/openapi.json", handler=openapi),
    Operation(method="GET", path="/v1/models", handler=list_models),
    Operation(method="GET", path="/v1/models/{model}", handler=one_model),
    Operation(method="POST", path="/v1/completions", handler=completions, body=CompletionBody, streams=True),
    Operation(method="POST", path="/v1/chat/completions", handler=chat_completions, body=ChatBody, streams=True),
    Operation(method="POST", path="/v1/responses", handler=responses, body=ResponsesBody, streams=True),
    Operation(method="POST", path="/v1/embeddings", handler=embeddings, body=EmbeddingBody),
    Operation(method="POST", path="/v1/score", handler=score, body=ScoreBody),
    Operation(method="POST", path="/generate", handler=generate, body=GenerateBody, streams=True),
    Operation(method="POST", path="/tokenize", handler=tokenize, body=TokenizeBody),
    Operation(method="POST", path="/detokenize", handler=detokenize, body=DetokenizeBody),
    Operation(method="POST", path="/flush_cache", handler=flush_cache, body=FlushCacheBody, is_admin=True),
    Operation(method="POST", path="/abort_request", handler=abort_request, body=AbortBody, is_admin=True),
    Operation(method="POST", path="/start_profile", handler=start_profile, body=StartProfileBody, is_admin=True),
    Operation(method="POST", path="/stop_profile", handler=stop_profile, body=StopProfileBody, is_admin=True),
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    "400": "a field is wrong; `param` names it",
    "401": "the key is missing or wrong",
    "404": "no such model",
    "408": "the body did not arrive in time, or the request's own deadline passed while it waited",
    "409": "not while requests, or a recording, are under way",
    "413": "the body is too large",
    "415": "the body is compressed",
    "429": "the queue is full; see Retry-After",
    "500": "the request failed here",
    "503": "the engine is starting, draining or dead",
}


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI 3.1 description of `operations`; summaries are the handlers' docstrings."""
    bodies = [operation.body for operation in operations if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": "1", "description": "OpenAI's API, and the engine's own."},
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {}} if operation.path == "/metrics" else {"application/json": {}}
    if operation.streams:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    described: dict[str, Any] = {
        "operationId": getattr(operation.handler, "__name__", operation.path),
        "summary": (operation.handler.__doc__ or "").split("\n")[0],
        "responses": {
            "200": {"description": "done", "content": content},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }
    if not operation.is_open:
        described["security"] = [{"key": []}, {}]
    if "{model}" in operation.path:
        described["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described
