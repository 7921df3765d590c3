"""From the bytes of a request to a validated schema. Every fault becomes InvalidRequest (400)."""

from __future__ import annotations

import asyncio
import difflib
from functools import partial
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from octavo.server.errors import BodyTooLarge, ClientGone, TimedOut
from octavo.server.protocol import HARMLESS_VALUES, LATER_FIELDS, Body
from octavo.types import EngineDead, InvalidRequest

MAX_BODY_BYTES = 32 << 20
BODY_SECONDS = 60.0  # that may pass between two parts of a body
LONG_BODY = 32 << 10  # bytes; longer ones are parsed and checked in a thread
LONGEST_NAME = 64  # characters of an unknown field's name that are compared with known ones
MOST_UNKNOWN = 64  # unknown fields that --lenient lists
# What parsing and validating may cost, since each is one call of C that no other thread divides: a
# million numbers, or 50,000 texts or objects, take about 50 ms.
MOST_COST = 1_000_000
LIST_COST, TEXT_COST = 5, 20
MOST_ESCAPES = 2_000_000  # backslashes and quotes within texts, of a body that may cost too much
# What a request is about, and its route: for a body that was sent to another one.
ROUTE_OF_FIELD = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/embeddings",
}
# What pydantic says, in the words of a person.
PLAINER = (
    ("Input should", "must"),
    ("List should", "must"),
    (" after validation", ""),
    ("be a valid list", "be a list"),
    ("be a valid string", "be a string"),
    ("be a valid dictionary", "be an object"),
)

B = TypeVar("B", bound=Body)


async def read_body(
    request: Request, schema: type[B], lenient: bool = False, optional: bool = False
) -> tuple[B, list[str]]:
    """The validated body and, with ``lenient``, a warning per unknown field.

    ``optional``: no body at all reads as {}. The JSON parser itself refuses more than 200 levels
    of nesting and unpaired surrogates.
    """
    raw = await _read(request)
    request.scope["octavo.body_size"] = len(raw)
    if optional and not raw:
        return schema(), []
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(kind) if kind else "missing"
        raise InvalidRequest(
            f"the content type is {shown}; send application/json "
            "(curl: -H 'content-type: application/json')"
        )
    if len(raw) <= LONG_BODY:
        return parse_body(raw, schema, lenient)
    parse = partial(parse_body, raw, schema, lenient)
    workers = request.app.state.workers
    return await workers.run(parse, len(raw), request.receive)  # type: ignore[no-any-return]


def parse_body(raw: bytes, schema: type[B], lenient: bool = False) -> tuple[B, list[str]]:
    """As ``read_body``, of the bytes."""
    if len(raw) > LONG_BODY:
        _check_cost(raw)
    try:
        fields = from_json(raw)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("the body must be a JSON object")
    warnings = _settle_unknown_fields(fields, schema, lenient)
    try:
        return schema.model_validate(fields), warnings
    except ValidationError as error:
        raise _as_invalid_request(error, schema) from None


def _check_cost(raw: bytes) -> None:
    """Raises InvalidRequest for JSON of too many values."""
    if _cost(raw, raw.count(b'"') // 2) <= MOST_COST:
        return  # even if all that looks like values were outside of texts
    num_escapes = raw.count(rb"\\") + raw.count(rb"\"")
    if num_escapes <= MOST_ESCAPES:
        plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
        parts = plain.split(b'"', 2 * MOST_COST // TEXT_COST)  # outside, inside of texts, and so on
    if num_escapes > MOST_ESCAPES or _cost(b"".join(parts[::2]), len(parts) // 2) > MOST_COST:
        raise InvalidRequest(
            f"the body of {len(raw)} bytes holds too many JSON values: at most {MOST_COST} "
            f"numbers, or {MOST_COST // TEXT_COST} texts and objects (the names of fields count), "
            "are read at once"
        )


def _cost(raw: bytes, num_texts: int) -> int:
    num_lists, num_objects = raw.count(b"["), raw.count(b"{")
    return raw.count(b",") + LIST_COST * num_lists + TEXT_COST * (num_texts + num_objects)


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has {length} bytes, at most {MAX_BODY_BYTES} are read")
    workers = request.app.state.workers
    loop = asyncio.get_running_loop()
    chunks, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS) as limit:
            async for chunk in request.stream():
                size += len(chunk)
                workers.hold(len(chunk))
                if size > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"the body is above {MAX_BODY_BYTES} bytes")
                chunks.append(chunk)
                limit.reschedule(loop.time() + BODY_SECONDS)
    except ClientDisconnect:
        raise ClientGone from None
    except TimeoutError:
        raise TimedOut(f"no more of the body came for {BODY_SECONDS:g} s") from None
    except asyncio.CancelledError:  # the HTTP server ends and this body never did
        raise EngineDead("the server is shutting down") from None
    finally:
        workers.hold(-size)
    return b"".join(chunks)


def _settle_unknown_fields(fields: dict[str, Any], schema: type[Body], lenient: bool) -> list[str]:
    """Removes fields the schema lacks, with a warning or InvalidRequest; known fields of later
    versions silently where their value asks for nothing."""
    warnings = []
    unknown = [name for name in fields if name not in schema.model_fields]
    if len(unknown) > MOST_UNKNOWN:
        raise InvalidRequest(f"the body has {len(unknown)} unknown fields, {unknown[0]!r} first")
    for name in unknown:
        value = fields.pop(name)
        if name in LATER_FIELDS:
            if value is None or value in HARMLESS_VALUES.get(name, ()):
                continue
            problem = f"{name}: {LATER_FIELDS[name]}"
        else:
            near = difflib.get_close_matches(name[:LONGEST_NAME], schema.model_fields, n=1)
            problem = f"unknown field {name!r}"
            if near:
                problem += f"; did you mean {near[0]!r}?"
            elif name in ROUTE_OF_FIELD:
                problem += f"; that is a field of {ROUTE_OF_FIELD[name]}"
        if not lenient:
            raise InvalidRequest(problem, name)
        warnings.append(f"{problem} (ignored)")
    return warnings


def _as_invalid_request(error: ValidationError, schema: type[Body]) -> InvalidRequest:
    """One line for the first fault. A field of several types (prompt) tells what it may be."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    first = _telling(faults)
    field = str(first["loc"][0]) if first["loc"] else None
    if first["type"] == "missing":
        where = ".".join(str(part) for part in first["loc"])
        return InvalidRequest(f"the field {where} is missing", field)
    described = schema.model_fields[field].description if field in schema.model_fields else None
    if described:
        return InvalidRequest(f"{field} must be {described}", field)
    where = ".".join(str(part) for part in first["loc"] if "[" not in str(part))
    if first["type"] == "extra_forbidden":
        return InvalidRequest(f"unknown field {where!r}", field)
    message = first["msg"].removeprefix("Value error, ")
    for theirs, ours in PLAINER:
        message = message.replace(theirs, ours)
    return InvalidRequest(f"{where} {message}", field)


def _telling(faults: list[Any]) -> Any:
    """The first fault; of a value that may be text or a list, and is a list, the list's first."""
    first = faults[0]
    *place, kind = first["loc"] or ("",)
    if kind == "str" and first["type"] == "string_type":
        inside = (f for f in faults[1:] if [*f["loc"][: len(place)]] == place)
        return next((f for f in inside if len(f["loc"]) > len(place) + 1), first)
    return first
