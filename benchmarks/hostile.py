"""Hostile HTTP requests, made from a seed: bodies that lie, and requests that are hardly HTTP.

``Hostile(document)`` knows the POST routes from the server's own OpenAPI document, so that a new
route or field is attacked without being told; ``attack(route, rng)`` makes the bytes to send.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hostile_values import EXTREMES, SEEDS, value

JSON = b"content-type: application/json"
DEEP = (3, 50, 190, 210, 5000, 200_000)


@dataclass
class Attack:
    """``parts`` are sent one after the other. ``incomplete``: the server may wait for more, so no
    answer is no hang; all others must be answered. ``most_answers``: more HTTP answers than this
    are a request smuggled in."""

    kind: str
    parts: list[bytes] = field(default_factory=list)
    incomplete: bool = False
    most_answers: int = 1


class Hostile:
    """Attacks on the POST routes of an OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.routes = sorted(path for path, ways in document["paths"].items() if "post" in ways)
        schemas = document.get("components", {}).get("schemas", {})
        self._fields = {path: _fields(document["paths"][path]["post"], schemas)
                        for path in self.routes}  # fmt: skip

    def attack(self, route: str, rng: random.Random) -> Attack:
        """Two of three have a hostile body in good HTTP; the others are hostile HTTP."""
        if rng.random() < 0.67:
            kind = rng.choice([*_BODIES, "extremes", "extremes", "one extreme", "one extreme"])
            if kind.startswith(("extreme", "one extreme")):
                extremes = self.extremes(route, rng, most=1 if kind == "one extreme" else 6)
                return Attack(kind, [request(route, json.dumps(extremes).encode())])
            return Attack(kind, [request(route, _BODIES[kind](self.body(route, rng), rng))])
        kind = rng.choice([*_REQUESTS])
        raw = json.dumps(self.body(route, rng)).encode()
        made = _REQUESTS[kind](route, raw, rng)
        made.kind = kind
        return made

    def body(self, route: str, rng: random.Random) -> dict[str, Any]:
        """A valid body with up to four of the schema's fields set to something."""
        body = dict(SEEDS.get(route, {}))
        known = self._fields[route]
        for name in rng.sample(known, min(len(known), rng.randint(0, 4))):
            body[name] = value(rng)
        return body

    def extremes(self, route: str, rng: random.Random, most: int) -> dict[str, Any]:
        """A body with up to ``most`` values that reach far into the server."""
        body = dict(SEEDS.get(route, {}))
        known = [name for name in self._fields[route] if name in EXTREMES]
        for name in rng.sample(known, min(len(known), rng.randint(1, most))):
            body[name] = rng.choice(EXTREMES[name])
        return body


def _fields(operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    content = operation.get("requestBody", {}).get("content", {})
    reference = content.get("application/json", {}).get("schema", {}).get("$ref", "")
    return sorted(schemas.get(reference.rpartition("/")[2], {}).get("properties", {}))


def request(
    route: str,
    body: bytes,
    *headers: bytes,
    method: bytes = b"POST",
    version: bytes = b"HTTP/1.1",
    kind: bytes = JSON,
) -> bytes:
    """One request that closes its connection; a content-length unless ``headers`` frame it."""
    head = [b"%b %b %b" % (method, route.encode(), version), b"host: x", kind, *headers]
    if not any(h.lower().startswith((b"content-length", b"transfer")) for h in headers):
        head.append(b"content-length: %d" % len(body))
    head.append(b"connection: close")
    return b"\r\n".join(line for line in head if line) + b"\r\n\r\n" + body


# ---- bodies ----


def _dumped(body: dict[str, Any], rng: random.Random) -> bytes:
    return json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")


def _with_raw(body: dict[str, Any], rng: random.Random, raw: bytes) -> bytes:
    """The body with one more member, or one of its values, replaced by raw bytes."""
    name = rng.choice([*body, "temperature", "max_tokens", "no_such_field"])
    rest = {key: val for key, val in body.items() if key != name}
    text = _dumped(rest, rng)[:-1]
    return text + (b", " if rest else b"") + json.dumps(name).encode() + b": " + raw + b"}"


def _numbers(body: dict[str, Any], rng: random.Random) -> bytes:
    raw = rng.choice(
        (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"0x10", b"01", b"+1",
         b".5", b"1.", b"1e", b"--1", b"0." + b"0" * 400 + b"1", b"-0", b"9" * 20)
    )  # fmt: skip
    return _with_raw(body, rng, raw)


def _nesting(body: dict[str, Any], rng: random.Random) -> bytes:
    depth = rng.choice(DEEP)
    begin, end = rng.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"[[", b"]")))
    return _with_raw(body, rng, begin * depth + b"1" + end * rng.choice((depth, depth, 0)))


def _encodings(body: dict[str, Any], rng: random.Random) -> bytes:
    text = json.dumps({**body, "user": "né😀"}, ensure_ascii=False)
    way = rng.randrange(5)
    if way == 0:
        return text.encode(rng.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "utf-7")))
    if way == 1:
        return text.encode("latin-1", "replace")
    if way == 2:
        return gzip.compress(text.encode(), mtime=0)
    raw = bytearray(text.encode())
    for _ in range(rng.randint(1, 3)):
        raw.insert(rng.randrange(len(raw)), rng.choice((0x80, 0xC0, 0xED, 0xF5, 0xFF, 0)))
    return bytes(raw)


def _broken(body: dict[str, Any], rng: random.Random) -> bytes:
    raw = bytearray(_dumped(body, rng))
    way = rng.randrange(4)
    if way == 0:
        return bytes(raw[: rng.randrange(len(raw))])
    if way == 1:
        return bytes(raw) + rng.choice((b"}", b"{}", b" x", b"\x00", b",", b"/* c */"))
    if way == 2:
        return rng.randbytes(rng.randint(0, 400))
    for _ in range(rng.randint(1, 6)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _huge(body: dict[str, Any], rng: random.Random) -> bytes:
    size = rng.choice((10_000, 100_000, 1_000_000))
    raw = rng.choice(
        (b'"%b"' % (b"a" * size), b'"%b"' % (b"\\n" * size), b"[%b1]" % (b"1," * size),
         b"[%b0]" % (b"[]," * (size // 10)), b'"%b"' % ("漢".encode() * (size // 3)),
         b"{%b}" % b",".join(b'"k%d":1' % i for i in range(size // 20)))
    )  # fmt: skip
    return _with_raw(body, rng, raw)


def _characters(body: dict[str, Any], rng: random.Random) -> bytes:
    raw = rng.choice(
        (b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\ud83d\\ude00"', b'"\\u0000"', b'"a\\u0000b"',
         b'"\x00"', b'"\x1f"', b'"\n"', b'"\\x41"', b'"\\"', b'"\\u12"', b'"\xed\xa0\x80"',
         b'"\xf8\x88\x80\x80\x80"', b"'single'", b'"\xc0\xaf"')
    )  # fmt: skip
    return _with_raw(body, rng, raw)


def _duplicates(body: dict[str, Any], rng: random.Random) -> bytes:
    raw, name = _dumped(body, rng), rng.choice([*body, "stream", "n"])
    again = json.dumps({name: value(rng)}).encode()
    return raw[:-1] + (b"," if body else b"") + again[1:]


def _strangers(body: dict[str, Any], rng: random.Random) -> bytes:
    name = rng.choice(
        ("", "__proto__", "constructor", "a" * 100_000, "\x00", "Prompt", "prompt ", "😀",
         "messages", "self", "model_config", "__init__", "temprature", "\ud800")
    )  # fmt: skip
    return _dumped({**body, name: value(rng)}, rng)


def _confusion(body: dict[str, Any], rng: random.Random) -> bytes:
    if not body or rng.random() < 0.1:
        return json.dumps(value(rng)).encode()
    return _dumped({**body, rng.choice([*body]): value(rng)}, rng)


def _fields_only(body: dict[str, Any], rng: random.Random) -> bytes:
    return _dumped(body, rng)


_BODIES: dict[str, Callable[[dict[str, Any], random.Random], bytes]] = {
    "fields at random": _fields_only,
    "type confusion": _confusion,
    "odd numbers": _numbers,
    "deep nesting": _nesting,
    "wrong encoding": _encodings,
    "broken JSON": _broken,
    "huge values": _huge,
    "odd characters": _characters,
    "duplicate keys": _duplicates,
    "unknown fields": _strangers,
}

# ---- requests ----


def _content_types(route: str, body: bytes, rng: random.Random) -> Attack:
    kind = rng.choice(
        (b"", b"content-type:", b"content-type: text/plain", b"content-type: multipart/form-data",
         b"content-type: application/json; charset=utf-16", b"content-type: APPLICATION/JSON",
         b"content-type: application/json, text/html", b"content-type: \xff\xfe",
         b"content-type: application/" + b"j" * 5000, b"content-type: application/json\r\n" + JSON)
    )  # fmt: skip
    extra = rng.choice(((), (b"content-encoding: gzip",), (b"expect: 100-continue",)))
    return Attack("", [request(route, body, *extra, kind=kind)], most_answers=2)


def _chunked(route: str, body: bytes, rng: random.Random) -> Attack:
    head = request(route, b"", b"transfer-encoding: chunked")
    parts, rest = [head], body
    while rest:
        size = rng.randint(1, max(1, len(body) // 3))
        piece, rest = rest[:size], rest[size:]
        parts.append(b"%x%b\r\n%b\r\n" % (len(piece), rng.choice((b"", b";a=b")), piece))
    return Attack("", [*parts, b"0\r\n\r\n"])


def _bad_chunks(route: str, body: bytes, rng: random.Random) -> Attack:
    size = rng.choice((b"zz", b"-1", b"fffffffffffffffff", b"7fffffffffffffff", b"", b"0x10",
                       b"1 ", b" 1", b"1;" + b"x" * 70_000, b"\x00"))  # fmt: skip
    raw = request(route, size + b"\r\n" + body + b"\r\n0\r\n\r\n", b"transfer-encoding: chunked")
    return Attack("", [raw], incomplete=True, most_answers=2)


def _wrong_length(route: str, body: bytes, rng: random.Random) -> Attack:
    length = rng.choice(
        (b"%d" % (len(body) + 10), b"%d" % max(0, len(body) - 3), b"-1", b"", b"x", b"1e3", b"0x20",
         b"9" * 40, b"+%d" % len(body), b"%d, %d" % (len(body), len(body)), b"0", b"\xb2",
         b"%d\r\ncontent-length: 3" % len(body))
    )  # fmt: skip
    raw = request(route, body, b"content-length: " + length)
    return Attack("", [raw], incomplete=True, most_answers=2)


def _pipelined(route: str, body: bytes, rng: random.Random) -> Attack:
    count = rng.randint(2, 5)
    one = request(route, body).replace(b"connection: close\r\n", b"", 1)
    return Attack("", [one * (count - 1) + request(route, body)], most_answers=count)


def _headers(route: str, body: bytes, rng: random.Random) -> Attack:
    extra = rng.choice(
        ([b"x-%d: y" % i for i in range(rng.choice((100, 2000)))], [b"x: " + b"a" * 100_000],
         [b"b" * 70_000 + b": x"], [b"bad name: x"], [b": x"], [b"x: a\x00b"], [b"x: \xff\xff"],
         [b"x : y"], [b"x: y\r\n folded"], [b"x-request-id: \xc3\x28"],
         [b"x-request-id: " + b"i" * 9000], [b"host: y"], [b"cookie: " + b"a=b;" * 5000],
         [b"authorization: Bearer \xff" + b"k" * 5000],
         [b"origin: null", b"access-control-request-method: \x01"], [b"accept: \x7f"])
    )  # fmt: skip
    return Attack("", [request(route, body, *extra)])


def _versions(route: str, body: bytes, rng: random.Random) -> Attack:
    version = rng.choice((b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"",
                          b"HTTP/1.1 x", b"HTTP/1.11"))  # fmt: skip
    return Attack("", [request(route, body, version=version)])


def _lines(route: str, body: bytes, rng: random.Random) -> Attack:
    """Methods, targets and upgrades that are not for this route."""
    way = rng.randrange(6)
    if way == 0:
        method = rng.choice(
            (b"post", b"PRI", b"GET", b"PUT", b"CONNECT", b"TRACE", b"M" * 5000, b"\x01")
        )
        return Attack("", [request(route, body, method=method)])
    if way == 1:
        target = rng.choice(("http://other" + route, "//" + route, route + "?" + "q=1&" * 9000,
                             route + "/../health", route + "%00", route + "#x", "*", "", "/%ff%fe",
                             route + "/" + "a" * 60_000, route + " x"))  # fmt: skip
        return Attack("", [request(target, body)])
    if way == 2:
        extra = (b"connection: upgrade", b"upgrade: " + rng.choice((b"websocket", b"h2c", b"\x00")))
        return Attack("", [request(route, body, *extra)])
    if way == 3:
        return Attack(
            "", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(60)], incomplete=True
        )
    if way == 4:
        return Attack("", [b"\x16\x03\x01\x02\x00" + rng.randbytes(200)], incomplete=True)
    return Attack("", [rng.randbytes(rng.randint(1, 3000))], incomplete=True)


def _smuggled(route: str, body: bytes, rng: random.Random) -> Attack:
    """Two readings of where the body ends, with a second request in one of them."""
    inner = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    coding = rng.choice(
        (b"transfer-encoding: chunked", b"transfer-encoding: xchunked",
         b"transfer-encoding : chunked", b"transfer-encoding: chunked, identity",
         b"transfer-encoding:\tchunked", b"transfer-encoding: gzip, chunked",
         b"transfer-encoding: identity\r\ntransfer-encoding: chunked",
         b"transfer-encoding: \x0bchunked", b"x: y\ntransfer-encoding: chunked")
    )  # fmt: skip
    length = b"content-length: %d" % rng.choice((len(chunks), len(chunks) + len(inner), 4))
    raw = request(route, chunks + inner, *rng.sample((coding, length), 2))
    return Attack("", [raw])


def _leaving(route: str, body: bytes, rng: random.Random) -> Attack:
    raw = request(route, body)
    return Attack("", [raw[: rng.randrange(1, len(raw))]], incomplete=True)


def _slowly(route: str, body: bytes, rng: random.Random) -> Attack:
    raw = request(route, body)
    cuts = sorted(rng.sample(range(1, len(raw)), 4))
    bounds = zip([0, *cuts], [*cuts, len(raw)])
    return Attack("", [raw[begin:end] for begin, end in bounds])


_REQUESTS: dict[str, Callable[[str, bytes, random.Random], Attack]] = {
    "content types": _content_types,
    "chunks": _chunked,
    "bad chunks": _bad_chunks,
    "wrong length": _wrong_length,
    "pipelined": _pipelined,
    "headers": _headers,
    "versions": _versions,
    "request lines": _lines,
    "smuggled": _smuggled,
    "left in the middle": _leaving,
    "in pieces": _slowly,
}
