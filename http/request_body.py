"""A request's body: read within limits, parsed, and checked into a record whose errors name the field."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from ..engine.errors import RequestError
from .failures import Refused
from .settings import FrontSettings

Body = TypeVar("Body", bound=BaseModel)
SMALL_BYTES = 1 << 20
MAX_DEPTH = 128  # of objects and lists in each other: 60 levels of a schema, and half of what the parser takes apart
CLOSE = {"connection": "close"}  # what is left of such a body will not be read


async def read_json(request: Request, settings: FrontSettings) -> dict[str, Any]:
    """`parsed` of the body of an endpoint that needs only a small one. Raises as `read_body` and `parsed` do."""
    return parsed(await read_body(request, settings, min(settings.max_body_bytes, SMALL_BYTES)))


async def optional_json(request: Request, settings: FrontSettings) -> dict[str, Any]:
    """`read_json` where a request without a body asks for the defaults."""
    is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    return {} if is_empty else await read_json(request, settings)


async def read_body(request: Request, settings: FrontSettings, limit: int) -> bytes:
    """The body, of at most `limit` bytes.

    Raises: Refused with 413 (too large), 408 (too slow), 415 (compressed) or 400.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        message = f"the body has content-encoding {encoding}; send it as it is"
        raise Refused(415, message, code="unsupported_encoding", headers={**CLOSE, "accept-encoding": "identity"})
    length = request.headers.get("content-length", "0")
    if not length.isdecimal():
        raise Refused(400, "content-length is not a number", headers=CLOSE)
    if int(length) > limit:
        raise _too_large(limit)
    return await _read(request, settings.body_timeout_s, limit)


def parsed(body: bytes) -> dict[str, Any]:
    """The JSON object; its null fields are left out, as if they had not been sent. Raises: Refused with 400."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _check_utf8(body)
        raise Refused(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise Refused(400, "the body must be a JSON object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_too_deep(value):
        raise Refused(400, f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    return {name: field for name, field in value.items() if field is not None}


def _is_too_deep(value: object) -> bool:
    """Whether what takes schemas and tools apart, and writes them again, would give up somewhere inside."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, (dict, list))]
        level = [child for children in inner for child in children if isinstance(child, (dict, list))]
        if not level:
            return False
    return True


def _check_utf8(body: bytes) -> None:
    """The parser's own words for it are about surrogates, and its place is none."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise Refused(400, f"the body is not valid UTF-8, from byte {error.start} on", code="invalid_json") from error


async def _read(request: Request, timeout_s: float, limit: int) -> bytes:
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the client went away before its request was complete")
                body += message.get("body", b"")
                if len(body) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        message_text = f"the body did not arrive within {timeout_s:g} s"
        raise Refused(408, message_text, code="body_timeout", headers=CLOSE) from None


def _too_large(limit: int) -> Refused:
    return Refused(413, f"the body is larger than {limit} bytes", code="body_too_large", headers=CLOSE)


def checked(kind: type[Body], fields: dict[str, Any]) -> Body:
    """`fields` as a record.

    Raises: RequestError for the first field that does not fit.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True)[0]
        param = _path(first["loc"])
        if first["type"] == "extra_forbidden":
            message = f"unknown parameter: {param}"
            raise RequestError(message, param=param, code="unknown_parameter") from error
        if first["type"] == "missing":
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter") from error
        if first["type"].startswith("int_") and isinstance(first["input"], float) and abs(first["input"]) >= 2**63:
            # JSON has no limit for integers; the parser makes those that it cannot hold floats.
            raise RequestError(f"{param} is too large", param=param) from error
        cause = first.get("ctx", {}).get("error")
        text = str(cause) if cause is not None else f"{param}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise RequestError(text, param=param) from error


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
