"""From ``StructuredOutputsParams`` to the text of an llguidance grammar. Pure text work: whether
the grammar compiles is ``checker``'s to find out, with a limit of time and memory.

Every grammar is a list: a first one that says which part starts and that no token is forced (the
model chooses how to spell what must come), then ``main``, the client's, and what that refers to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json import JSONDecoder
from typing import Any

import msgspec

from octavo.grammar.keywords import check_keywords
from octavo.grammar.regexes import between_slashes, literal
from octavo.grammar.structural import FIELD, structural_grammars
from octavo.grammar.unions import with_plain_unions
from octavo.types import InvalidRequest, StructuredOutputsParams

# Of a constraint's text. What takes more than moments to compile is refused by the checker.
MOST_BYTES = 256 << 10
# White space where JSON allows it: a blank or two, or a line break and an indentation. Matched at
# most once at each place, so that no model can fill its answer with it.
WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"

_HALF = "holds half a surrogate pair, which is not Unicode"

Grammar = dict[str, Any]


def grammar_text(
    params: StructuredOutputsParams,
    special: Mapping[str, int],
    disable_any_whitespace: bool = False,
) -> str:
    """The grammar of a request, as text. ``special``: the id of each special token. Raises
    InvalidRequest naming ``structured_outputs.FIELD`` for what is refused without compiling it."""
    _check_size(params)
    try:
        return _encode(_grammars(params, special, disable_any_whitespace))
    except RecursionError:
        field = f"structured_outputs.{params.kind}"
        raise InvalidRequest(f"{field} is nested too deeply", field) from None


def _grammars(
    params: StructuredOutputsParams, special: Mapping[str, int], disable_any_whitespace: bool
) -> list[Grammar]:
    options = _json_options(params, disable_any_whitespace)
    if params.structural_tag is None:
        return [{"name": "main", **_WRITERS[params.kind](params, options)}]

    def schema_grammar(schema: Grammar, field: str) -> Grammar:
        return json_grammar(schema, options, field)

    tag = _as_object(params.structural_tag, FIELD)
    return structural_grammars(tag, schema_grammar, special)


def _json(params: StructuredOutputsParams, options: Grammar) -> Grammar:
    return json_grammar(_as_object(params.json, "structured_outputs.json"), options)


def _json_object(params: StructuredOutputsParams, options: Grammar) -> Grammar:
    return json_grammar({"type": "object"}, options)


def json_grammar(
    schema: Grammar, options: Grammar, field: str = "structured_outputs.json"
) -> Grammar:
    check_keywords(schema, field)
    return {"json_schema": {**with_plain_unions(schema), "x-guidance": options}}


def _regex(params: StructuredOutputsParams, options: Grammar) -> Grammar:
    assert params.regex is not None
    return {"lark_grammar": f"start: /{between_slashes(params.regex)}/"}


def _choice(params: StructuredOutputsParams, options: Grammar) -> Grammar:
    assert params.choice is not None
    return {"lark_grammar": f"start: /{'|'.join(map(literal, dict.fromkeys(params.choice)))}/"}


def _lark(params: StructuredOutputsParams, options: Grammar) -> Grammar:
    text = params.grammar
    assert text is not None
    field = "structured_outputs.grammar"
    if "::=" in text:
        raise InvalidRequest(
            f"{field} looks like GBNF or EBNF (it has '::='); Lark grammars are taken, whose rules "
            'are written `start: "a" | b` and whose first rule is called start',
            field,
        )
    if text.lstrip()[:1] in ("{", "["):
        raise InvalidRequest(f"{field} is JSON; it must be the text of a Lark grammar", field)
    return {"lark_grammar": _with_options(text, options, field)}


_WRITERS: dict[str, Callable[[StructuredOutputsParams, Grammar], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def _encode(grammars: list[Grammar]) -> str:
    first = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @main'}
    return msgspec.json.encode({"grammars": [first, *grammars]}).decode()


def _json_options(params: StructuredOutputsParams, disable_any_whitespace: bool) -> Grammar:
    options: Grammar = {"lenient": False, "coerce_one_of": False}
    if params.whitespace_pattern is not None:
        return {**options, "whitespace_pattern": params.whitespace_pattern}
    if params.disable_any_whitespace or disable_any_whitespace:
        return {**options, "whitespace_flexible": False}
    return {**options, "whitespace_pattern": WHITE_SPACE}


def _as_object(given: str | Grammar | None, field: str) -> Grammar:
    """An object that may come as its text. Raises InvalidRequest if it is none."""
    if isinstance(given, dict):
        return given
    try:
        found = msgspec.json.decode(given or "")
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{field} is not JSON: {error}", field) from None
    except RecursionError:
        raise InvalidRequest(f"{field} is nested too deeply", field) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} is JSON, but not an object", field)
    return found


def _with_options(lark: str, options: Grammar, field: str) -> str:
    """The grammar with the schema behind each ``%json`` checked, and bound to ``options``."""
    first, *parts = lark.split("%json")
    out = [first]
    for part in parts:
        text = part.lstrip()
        try:
            schema, end = JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):  # no JSON, or a number of more than 4,300 digits
            out.append(part)  # llguidance says what is wrong with it
            continue
        check_keywords(schema, field)
        if isinstance(schema, dict):
            bound = _written({**with_plain_unions(schema), "x-guidance": options}, field)
            part = f" {bound}{text[end:]}"
        out.append(part)
    return "%json".join(out)


def _written(value: Any, field: str) -> str:
    """As JSON. Raises InvalidRequest for what Python reads and JSON has not: msgspec would write
    null in the place of a number that is none."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} {_HALF}", field) from None
    except ValueError:
        raise InvalidRequest(
            f"{field} holds a number that is NaN, or larger than a float holds", field
        ) from None
    return text


def _check_size(params: StructuredOutputsParams) -> None:
    """Before anything walks through it."""
    kind = params.kind
    field = f"structured_outputs.{kind}"
    value = getattr(params, kind)
    try:
        size = len(value.encode() if isinstance(value, str) else msgspec.json.encode(value))
        size += len((params.whitespace_pattern or "").encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{field} {_HALF}", field) from None
    except (RecursionError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{field} cannot be written as JSON: {error}", field) from None
    if size <= MOST_BYTES:
        if not isinstance(value, str):
            _written(value, field)
    else:
        raise InvalidRequest(f"{field} has {size:,} bytes; at most {MOST_BYTES:,} are taken", field)
