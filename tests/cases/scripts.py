"""What the scripted model of the cases says: texts whose characters lie across tokens."""

from __future__ import annotations

import random

from tests.fixtures.scripted import Script, ScriptedModel, scripted_model

# Text -> why it is hard.
HARD_TEXTS = {
    "😀": "four bytes",
    "né €é!": "two and three bytes, next to each other",
    "漢字かな交じり": "three bytes each, no spaces",
    "안녕하세요": "Hangul",
    "𠮷野家": "a CJK character outside the basic plane",
    "👨‍👩‍👧‍👦": "four emoji with zero-width joiners",
    "🏳️‍🌈": "a variation selector and a joiner",
    "👍🏽👍🏿": "skin tones",
    "🇫🇷🇯🇵": "pairs of regional indicators",
    "1️⃣2️⃣": "keycaps",
    "e\u0301a\u0308": "combining accents",
    "नमस्ते": "conjuncts",
    "שלום עולם": "right to left",
    "a😀漢b👩‍🚀c": "all at once",
}
STOP_STRING = ["DEF", "G", "HI", "J", " and", " more"]
NEAR_MISS = ["DE", "FG", "H", "IK"]
FOUR_BYTES = [b"\xf0", b"\x9f", b"\x98", b"\x80"]
SHARED_BYTES = [b" \xe2\x82", b"\xac\xc3", b"\xa9", "!"]


def random_split(raw: bytes, rng: random.Random) -> list[bytes]:
    """``raw`` in pieces of one to four bytes."""
    pieces = []
    while raw:
        size = rng.randint(1, 4)
        pieces.append(raw[:size])
        raw = raw[size:]
    return pieces


def model() -> ScriptedModel:
    """Scripts 0 to 3 are the named ones, the others the hard texts, cut at random."""
    rng = random.Random(20261130)
    hard = [random_split(text.encode(), rng) for text in HARD_TEXTS]
    return scripted_model("cases", [STOP_STRING, NEAR_MISS, FOUR_BYTES, SHARED_BYTES, *hard])


def hard_scripts(scripted: ScriptedModel) -> list[Script]:
    return scripted.scripts[4:]
