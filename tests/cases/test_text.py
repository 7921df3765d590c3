"""Text as clients see it: stop strings, held text, characters over tokens, streamed or not."""

from __future__ import annotations

import pytest

from tests.cases.asking import CHAT, COMPLETIONS, post, question, same_both_ways
from tests.fixtures.scripted import Script, ScriptedModel
from tests.fixtures.server import Server

ROUTES = (COMPLETIONS, CHAT)


def ask(server: Server, route: str, script: int, **fields):
    """What the model says after the script's trigger, streamed, which equals not streamed."""
    prompt = str(script) if route == CHAT else f"<|go{script}|>"
    return same_both_ways(server, route, **question(route, prompt, **{"max_tokens": 60, **fields}))


@pytest.mark.parametrize("route", ROUTES)
def test_a_stop_string_over_several_tokens_never_reaches_the_client(says: Server, route: str):
    """T15."""
    (heard,), usage = ask(says, route, 0, stop="DEFGHIJ")
    assert heard.outcome == ("", "stop", "DEFGHIJ")
    assert usage["completion_tokens"] == 4
    (heard,), _ = ask(says, route, 0, stop=["J and m", "never"])
    assert heard.outcome == ("DEFGHI", "stop", "J and m")


@pytest.mark.parametrize("route", ROUTES)
def test_text_held_for_a_stop_string_that_does_not_come_is_sent(says: Server, route: str):
    """T17: a near miss, and an end by length in the middle of what could be the stop string."""
    (heard,), _ = ask(says, route, 1, stop="DEFGHIJ")
    assert heard.outcome == ("DEFGHIK", "stop", None)
    (heard,), _ = ask(says, route, 0, stop="DEFGHIJ", max_tokens=3)
    assert heard.outcome == ("DEFGHI", "length", None)
    (heard,), _ = ask(says, route, 0, stop="H", include_stop_str_in_output=True)
    assert heard.outcome == ("DEFGH", "stop", "H")


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("fields", [{}, {"stop": "zzz"}, {"n": 2}], ids=["plain", "stop", "n-2"])
def test_characters_over_tokens_arrive_whole(
    says: Server, scripted: ScriptedModel, route: str, fields: dict
):
    """T18: no chunk holds U+FFFD, and what was streamed is what would not have been."""
    num_chunks = 0
    for index, script in enumerate(scripted.scripts):
        choices, _ = ask(says, route, index, **fields)
        assert len(choices) == fields.get("n", 1)
        for heard in choices:
            assert heard.outcome == (script.text, "stop", None)
            assert not any("\ufffd" in chunk for chunk in heard.chunks)
            num_chunks += len(heard.chunks)
    assert num_chunks > 2 * len(scripted.scripts)  # a slow reader gets several tokens in one


def test_an_answer_that_ends_inside_a_character_ends_with_one_replacement(
    says: Server, scripted: ScriptedModel
):
    """T18: cut after every number of tokens, in both ways."""
    for index, script in enumerate(scripted.scripts):
        for count in range(1, len(script.tokens) + 1):
            (heard,), usage = ask(says, COMPLETIONS, index, max_tokens=count)
            said = b"".join(script.tokens[:count])
            assert heard.outcome == (said.decode("utf-8", "replace"), "length", None)
            assert usage["completion_tokens"] == count
            assert all("\ufffd" not in chunk for chunk in heard.chunks[:-1])


def assert_bytes(entries: list[dict], script: Script) -> None:
    """The bytes of the entries are the text's; every alternative is decoded by itself."""
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == script.data
    for entry, raw in zip(entries, script.tokens):
        assert bytes(entry["bytes"]) == raw and entry["token"] == raw.decode("utf-8", "replace")
        assert len(entry["top_logprobs"]) == 5
        for other in entry["top_logprobs"]:
            assert other["token"] == bytes(other["bytes"]).decode("utf-8", "replace")


def test_bytes_of_chat_logprobs_join_to_the_text(says: Server, scripted: ScriptedModel):
    """T19."""
    for index, script in enumerate(scripted.scripts):
        body = question(CHAT, str(index), logprobs=True, top_logprobs=5, max_tokens=60)
        answer = post(says, CHAT, **body)
        entries = answer["choices"][0]["logprobs"]["content"]
        assert len(entries) == answer["usage"]["completion_tokens"]  # EOS has one, too
        assert_bytes(entries, script)
        events = says.events(CHAT, **body)
        blocks = [event["choices"][0]["logprobs"] for event in events]
        assert [entry for block in blocks if block for entry in block["content"]] == entries


def test_offsets_of_completion_logprobs_are_places_in_the_text(
    says: Server, scripted: ScriptedModel
):
    """T21: where a token begins inside a character, that character's place."""
    for script in scripted.scripts:
        body = question(COMPLETIONS, script.trigger, logprobs=1, max_tokens=60)
        block = post(says, COMPLETIONS, **body)["choices"][0]["logprobs"]
        begins = [
            len(b"".join(script.tokens[:count]).decode(errors="ignore"))
            for count in range(len(script.tokens) + 1)
        ]
        assert block["text_offset"] == begins
        assert {len(values) for values in block.values()} == {len(begins)}
