"""Text of a choice: streamed equals not streamed, stop strings, characters over tokens (T15, T17,
T18). The byte vocabulary of the fixture lets any split of any text be made."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import Detokenizer
from octavo.text.output import ChoiceText
from octavo.text.tokenizer import load_tokenizer
from octavo.types import InvalidRequest, SamplingParams
from tests.cases import scripts
from tests.text import vocabularies


class PieceTokenizer:
    """Tokens are whatever bytes a test says; the last two ids are special."""

    class vocabulary:
        adds_space = False

    def __init__(self, pieces: list[bytes]) -> None:
        self.bytes_of = dict(enumerate([*pieces, b"<eos>", b"<pad>"]))
        self.eos_ids = [len(pieces)]
        self.special_ids = {len(pieces), len(pieces) + 1}
        self.text_bytes_of = {
            i: b"" if i in self.special_ids else raw for i, raw in self.bytes_of.items()
        }


def run(pieces, *, cut=None, ids=None, **params):
    """(chunks, the ChoiceText) with tokens pushed in the groups that ``cut`` says."""
    choice = ChoiceText(PieceTokenizer(pieces), SamplingParams(**params))
    ids = list(range(len(pieces))) if ids is None else ids
    chunks, start = [], 0
    for size in [*(cut or [1] * len(ids)), len(ids)]:
        chunks.append(choice.push(ids[start : start + size]))
        start += size
    chunks.append(choice.finish())
    assert "".join(chunks) == choice.text
    return [chunk for chunk in chunks if chunk], choice


def test_stop_string_over_several_tokens_never_shows():
    chunks, choice = run([b"DEF", b"G", b"HI", b"J", b" more"], stop=["DEFGHIJ"])
    assert chunks == [] and choice.stop_string == "DEFGHIJ" and choice.num_tokens == 4


def test_near_miss_comes_out_whole():
    chunks, choice = run([b"DEF", b"G", b"HI", b"K"], stop=["DEFGHIJ"])
    assert chunks == ["DEFGHIK"] and choice.stop_string is None


def test_text_held_at_the_end_comes_out():
    chunks, choice = run([b"DEF", b"G", b"HI"], stop=["DEFGHIJ"])
    assert chunks == ["DEFGHI"] and choice.num_tokens == 3


def test_only_what_could_begin_a_stop_string_is_held():
    choice = ChoiceText(PieceTokenizer([b"hello E", b"N", b"X"]), SamplingParams(stop=["END"]))
    assert [choice.push([i]) for i in range(3)] == ["hello ", "", "ENX"]


def test_stop_string_inside_one_token_drops_the_rest_of_it():
    _, choice = run([b"one STOP two", b" three"], stop=["STOP"])
    assert (choice.text, choice.num_tokens) == ("one ", 1)
    _, choice = run([b"one STOP two"], stop=["STOP"], include_stop_str_in_output=True)
    assert choice.text == "one STOP"


def test_the_stop_string_that_is_complete_first_wins():
    for pieces in ([b"abcdef"], [b"a", b"bc", b"def"], [b"ab", b"cd", b"ef"]):
        _, choice = run(pieces, stop=["cdef", "bcd", "d"])
        assert (choice.text, choice.stop_string) == ("a", "bcd")  # bcd and d end together


def test_self_overlapping_stop_strings_are_found():
    for stop, text in [("aab", b"aaab"), ("abab", b"ababab"), ("abcabd", b"abcabcabd")]:
        _, choice = run([bytes([byte]) for byte in text], stop=[stop])
        assert choice.stop_string == stop
        assert choice.text == text.decode()[: text.decode().index(stop)]


def test_stop_strings_count_only_after_min_tokens():
    pieces = [b"x", b"END", b"y", b"EN", b"D", b"z"]
    _, choice = run(pieces, stop=["END"], min_tokens=2)
    assert (choice.text, choice.num_tokens) == ("xENDy", 5)
    _, choice = run([b"x", b"EN", b"D"], stop=["END"], min_tokens=2)  # completed by the third
    assert (choice.text, choice.num_tokens) == ("x", 3)
    _, choice = run([b"a", b"a", b"a", b"a"], stop=["aa"], min_tokens=3)
    assert (choice.text, choice.num_tokens) == ("aa", 4)


def test_a_character_over_tokens_comes_out_once_whole():
    family = "👨‍👩‍👧".encode()
    cases = [
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], "😀"),
        ([b" \xe2\x82", b"\xac\xc3", b"\xa9"], " €é"),
        ([family[i : i + 3] for i in range(0, len(family), 3)], "👨‍👩‍👧"),
        ([bytes([byte]) for byte in "漢字かな".encode()], "漢字かな"),
    ]
    for pieces, text in cases:
        for params in ({}, {"stop": ["zzz"]}):
            chunks, _ = run(pieces, **params)
            assert "".join(chunks) == text and not any("\ufffd" in chunk for chunk in chunks)


@pytest.mark.parametrize("params", [{}, {"stop": ["zzz"]}])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_unfinished_character_is_one_replacement_character(size, params):
    pieces = [b"ok ", "😀".encode()[:size]]
    for cut in ([1, 1], [2]):
        _, choice = run(pieces, cut=cut, **params)
        assert choice.text == "ok \ufffd"


def test_the_token_that_ends_a_choice_counts_and_is_not_shown():
    for skip in (True, False):
        for stop in ([], ["zzz"]):
            _, choice = run([b"a", b"b"], ids=[0, 1, 2], skip_special_tokens=skip, stop=stop)
            assert (choice.text, choice.token_ids) == ("ab", [0, 1, 2])
    _, choice = run([b"a", b"."], stop_token_ids=[1])
    assert choice.text == "a"
    _, choice = run([b"a", b"."], stop_token_ids=[1], include_stop_str_in_output=True)
    assert choice.text == "a."


def test_special_tokens_show_when_asked_for():
    ids = [0, 3, 1]
    assert run([b"a", b"b"], ids=ids)[1].text == "ab"
    assert run([b"a", b"b"], ids=ids, skip_special_tokens=False)[1].text == "a<pad>b"
    assert (
        run([b"a"], ids=[0, 1, 0], ignore_eos=True, skip_special_tokens=False)[1].text == "a<eos>a"
    )


def test_ids_are_counted_without_text():
    for choice in (
        ChoiceText(None, SamplingParams()),
        ChoiceText(PieceTokenizer([b"a"]), SamplingParams(detokenize=False)),
    ):
        assert choice.push([0, 0]) == choice.finish() == choice.text == ""
        assert choice.num_tokens == 2
    with pytest.raises(InvalidRequest, match="stop"):
        ChoiceText(None, SamplingParams(stop=["a"]))


def stopped(text: str, ends: list[int], stops: list[str], min_tokens: int, include: bool):
    """The rules again, by looking at every end position: (text, stop string)."""
    for end in range(1, len(text) + 1):
        token = next(index for index, last in enumerate(ends) if end <= last) + 1
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found and token > min_tokens:
            longest = max(found, key=len)
            return text[:end] if include else text[: end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="ab😀漢é\u200d", max_size=24),
    stops=st.lists(st.text(alphabet="ab😀漢", min_size=1, max_size=4), max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=24 * 4, max_size=24 * 4),
    cut=st.lists(st.integers(1, 5), max_size=24),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
def test_streamed_is_not_streamed_is_the_rules(text, stops, sizes, cut, min_tokens, include):
    """Any text, cut into tokens at any byte, pushed in any groups."""
    raw, pieces = text.encode(), []
    while raw:
        size = sizes[len(pieces)]
        pieces.append(raw[:size])
        raw = raw[size:]
    done, ends = b"", []
    for piece in pieces:
        done += piece
        ends.append(len(done.decode(errors="ignore")))
    params = {
        "stop": stops,
        "min_tokens": min_tokens,
        "include_stop_str_in_output": include,
        "max_tokens": None,
    }
    _, single = run(pieces, **params)
    _, grouped = run(pieces, cut=cut, **params)
    _, whole = run(pieces, cut=[len(pieces)], **params)
    assert single.text == grouped.text == whole.text
    assert single.token_ids == grouped.token_ids == whole.token_ids
    assert (single.text, single.stop_string) == stopped(text, ends, stops, min_tokens, include)


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6))
def test_any_bytes_give_the_same_text_however_they_are_cut(raw, cuts):
    bounds = [0, *sorted(cuts), len(raw)]
    pieces = [raw[a:b] for a, b in pairwise(bounds)]
    detokenizer = Detokenizer(PieceTokenizer(pieces))
    text = "".join(detokenizer.push([index]) for index in range(len(pieces)))
    assert text + detokenizer.finish() == raw.decode("utf-8", "replace")


@pytest.mark.parametrize("text", scripts.HARD_TEXTS, ids=scripts.HARD_TEXTS.get)
def test_streamed_is_not_streamed_for_a_thousand_splits(text):
    """T18: every split into tokens, pushed in random groups; with a stop string that ends it."""
    rng = random.Random(text)
    raw, stop = text.encode(), text[-1]
    for _ in range(1000):
        pieces = scripts.random_split(raw, rng)
        cut = [rng.randint(1, 3) for _ in pieces]
        chunks, choice = run(pieces, cut=cut)
        assert choice.text == text and not any("\ufffd" in chunk for chunk in chunks)
        chunks, choice = run(pieces, cut=cut, stop=[stop])
        assert (choice.text, choice.stop_string) == (text[: text.index(stop)], stop)


def test_sentencepiece_space_is_dropped_only_at_the_start_of_a_text(tmp_path):
    pytest.importorskip("sentencepiece")
    vocabularies.train_sentencepiece(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("the thing")
    assert tokenizer.decode(ids) == "the thing"
    answer, start = Detokenizer(tokenizer), Detokenizer(tokenizer, at_start=True)
    assert "".join(answer.push([index]) for index in ids) == " the thing"
    assert "".join(start.push([index]) for index in ids) == "the thing"


@pytest.mark.parametrize("stop, limit", [([], 30e-6), (["XYZ", " was big", "zebra"], 60e-6)])
def test_a_token_costs_microseconds(model_g, stop, limit):
    """Measured at 0.8 and 2.3 microseconds; the bound allows for a busy machine."""
    tokenizer = load_tokenizer(model_g)
    ids = tokenizer.encode("Once upon a time there was a small dog. " * 100)
    choice = ChoiceText(tokenizer, SamplingParams(stop=stop))
    started = time.process_time()
    for index in ids:
        choice.push([index])
    assert (time.process_time() - started) / len(ids) < limit
