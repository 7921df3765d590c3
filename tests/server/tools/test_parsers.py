"""Every format: what transcripts say, and that it does not matter how they are cut."""

from __future__ import annotations

import json
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.tools.deltas import Arguments, CallEnd, CallStart, Message
from octavo.server.tools.marks import Marks
from octavo.server.tools.parser import AnswerParser
from octavo.server.tools.registry import FORMATS, REASONING
from octavo.text.output import ChoiceText
from octavo.types import SamplingParams
from tests.server.tools.case import TOOLS, Case
from tests.server.tools.transcripts import CASES
from tests.server.tools.transcripts_json import hermes_call
from tests.server.tools.transcripts_other import HARMONY_CALL, deepseek

THINK = ("<think>", "</think>")


def marks_of(case: Case, tokens: bool, special: bool = False) -> Marks:
    """Of a vocabulary that has the marks as tokens (``special`` ones), or has not."""
    texts = (*FORMATS[case.parser].MARKS, *THINK)
    ids = {text: index for index, text in enumerate(texts)} if tokens else {}
    return Marks(texts, ids.get, range(len(ids)) if special else ())


def parser_of(case: Case, marks: Marks, **options: object) -> AnswerParser:
    reasoning = REASONING[case.reasoning_parser] if case.reasoning_parser else None
    return AnswerParser(
        marks, FORMATS[case.parser], reasoning, TOOLS, in_reasoning=case.inside, **options
    )  # type: ignore[arg-type]


def tokenized(case: Case, marks: Marks) -> str:
    """The answer's text with marks as tokens, except those inside of strings, which are text."""
    head, hard, tail = case.text.partition("\\n</tool_call> é")
    return marks.spelled(head) + hard + marks.spelled(tail)


def read(parser: AnswerParser, pieces: list[str]) -> tuple[Message, list[object]]:
    message, deltas = Message(), []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    assert parser.finish() == []
    message.add(deltas)
    check_deltas(deltas)
    return message, deltas


def check_deltas(deltas: list[object]) -> None:
    """Indices count up, arguments belong to the call that is open, and whole ones are objects."""
    texts: list[str] = []
    is_open = False
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert not is_open and delta.index == len(texts) and delta.name
            texts.append("")
            is_open = True
        elif isinstance(delta, Arguments):
            assert is_open and delta.index == len(texts) - 1 and delta.text
            texts[-1] += delta.text
        elif isinstance(delta, CallEnd):
            assert is_open and delta.index == len(texts) - 1
            is_open = False
            if delta.whole:
                assert isinstance(json.loads(texts[-1]), dict)
            else:
                with pytest.raises(ValueError):
                    json.loads(texts[-1])
    assert not is_open


def summary(message: Message) -> object:
    calls = [(call.name, call.arguments) for call in message.calls.values()]
    return calls, message.content, message.reasoning


def pieces_of(text: str, rng: random.Random) -> list[str]:
    num = rng.choice((1, 2, 3, 8, len(text)))
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(num))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]


VOCABULARIES = {"as text": (False, False), "tokens": (True, False), "special": (True, True)}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.parser}-{case.text[:24]!r}")
def test_transcript_says_the_same_however_it_is_cut(case: Case, vocabulary: str) -> None:
    tokens, special = VOCABULARIES[vocabulary]
    marks = marks_of(case, tokens, special)
    text = tokenized(case, marks)
    whole, deltas = read(parser_of(case, marks), [text])
    assert [(c.name, json.loads(c.arguments)) for c in whole.calls.values()] == case.calls
    content = case.content
    if special:  # left out of text, as special tokens are
        for mark in marks_of(case, tokens)._chars:
            content = content.replace(mark, "")
    assert whole.content == content
    assert whole.reasoning == case.reasoning
    assert sum(isinstance(d, CallEnd) and not d.whole for d in deltas) == case.num_broken
    rng = random.Random(len(text))
    for _ in range(1000 if vocabulary == "as text" else 100):
        streamed, _ = read(parser_of(case, marks), pieces_of(text, rng))
        assert summary(streamed) == summary(whole)
    by_character, _ = read(parser_of(case, marks), list(text))
    assert summary(by_character) == summary(whole)


def test_every_format_has_transcripts_with_two_calls_and_broken_ones() -> None:
    for name in {kind.name for kind in FORMATS.values()}:
        cases = [case for case in CASES if case.parser == name]
        assert any(len(case.calls) > 1 for case in cases), name
        assert any(case.content for case in cases), name


# What of a transcript may be cut, joined and repeated.
FRAGMENTS = sorted(
    {mark for kind in FORMATS.values() for mark in kind.MARKS}
    | {
        *THINK,
        '{"name": "now"',
        ', "arguments": {}}',
        '{"a": "',
        "\\",
        '"',
        "}",
        "]",
        "[now(",
        "\n",
    }
    | {"<function=now>", "<parameter=a>", "</parameter>", "</function>", "assistant", "é😀", " "}
    | {"Here is my thought process:", "<|", "functions.now", "to=", "`" * 3, "name", "12", "null"}
)


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(FORMATS)),
    st.sampled_from([None, *sorted(REASONING)]),
    st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=24),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_hostile_text_never_raises_and_cuts_do_not_matter(
    name: str, reasoning: str | None, parts: list[str], tokens: bool, rng: random.Random
) -> None:
    case = Case(name, "", reasoning_parser=reasoning)
    marks = marks_of(case, tokens)
    text = "".join(marks.spelled(part) if rng.random() < 0.8 else part for part in parts)
    text = "".join(c for c in text if not "\ud800" <= c <= "\udbff")
    whole, _ = read(parser_of(case, marks), [text])
    streamed, _ = read(parser_of(case, marks), pieces_of(text, rng))
    assert summary(streamed) == summary(whole)
    for call in whole.calls.values():
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()
    (whole.content + whole.reasoning).encode()


UNITS = ["{", "<", "[", '"', "\\", "\n", "<tool_call>", "[TOOL_CALLS]", '{"name": "now", ', "[now("]


@pytest.mark.parametrize("name", sorted({kind.name for kind in FORMATS.values()}))
def test_time_is_linear_in_hostile_text(name: str) -> None:
    """A megabyte of openers, and less of others, fed in pieces, costs no more than a few seconds
    of CPU, which anything quadratic would multiply by hundreds."""
    for unit in UNITS:
        size = 1_000_000 if unit in "{<" else 100_000
        text = unit * (size // len(unit))
        parser = parser_of(Case(name, ""), marks_of(Case(name, ""), False))
        before = time.process_time()
        deltas = parser.feed("".join(FORMATS[name].BEGINS[:1]))
        step = 256 if unit != '"' else len(text)  # one of them at once
        for start in range(0, len(text), step):
            deltas += parser.feed(text[start : start + step])
        deltas += parser.finish()
        assert time.process_time() - before < 5, unit
        message = Message()
        message.add(deltas)
        assert len(message.content) + len(message.reasoning) <= len(text) + 20


@pytest.mark.parametrize(
    "arguments, valid",
    [
        ('{"a": 1}', True),
        ('{"a": 1.5e-3, "b": -0.0, "c": [], "d": [[{}]]}', True),
        ('{"a": "\\u00e9\\n\\"\\\\"}', True),
        ('{"a": 01}', False),
        ('{"a": +1}', False),
        ('{"a": .5}', False),
        ('{"a": NaN}', False),
        ('{"a": "\\x"}', False),
        ('{"a": "\\u12"}', False),
        ('{"a" 1}', False),
        ('{"a": 1,}', False),
        ('{"a": [1 2]}', False),
        ("{'a': 1}", False),
        ("{" * 1000, False),
        ('{"a": ' + "[" * 199 + "]" * 199 + "}", True),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", False),
    ],
)
def test_arguments_are_json_or_no_call(arguments: str, valid: bool) -> None:
    case = Case("hermes", "")
    text = hermes_call("now", arguments)
    message, _ = read(parser_of(case, marks_of(case, False)), [text])
    if valid:
        assert [call.arguments for call in message.calls.values()] == [arguments]
        assert message.content == ""
    else:
        assert not message.calls and message.content == text


@settings(max_examples=200)
@given(st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=12,
), st.randoms(use_true_random=False))  # fmt: skip
def test_any_arguments_come_through(value: object, rng: random.Random) -> None:
    """Verbatim in a format of JSON, by value in one of Python, where texts are typed by schema."""
    if any("\ud800" <= char <= "\udfff" for char in json.dumps(value, ensure_ascii=False)):
        return
    arguments = json.dumps({"meta": value}, ensure_ascii=rng.random() < 0.5)
    case = Case("hermes", "")
    pieces = pieces_of(hermes_call("write", arguments), rng)
    message, _ = read(parser_of(case, marks_of(case, False)), pieces)
    assert [call.arguments for call in message.calls.values()] == [arguments]
    case = Case("pythonic", "")
    pieces = pieces_of(f"[write(meta={value!r})]", rng)
    message, _ = read(parser_of(case, marks_of(case, False)), pieces)
    assert [json.loads(call.arguments) for call in message.calls.values()] == [{"meta": value}]


def test_text_that_spells_a_mark_is_text_where_the_mark_is_a_token() -> None:
    case = Case("hermes", "")
    marks = marks_of(case, True)
    text = hermes_call("now", "{}")
    message, _ = read(parser_of(case, marks), [text])
    assert not message.calls and message.content == text
    message, _ = read(parser_of(case, marks), [marks.spelled(text)])
    assert [call.name for call in message.calls.values()] == ["now"] and not message.content


def test_only_so_many_calls_as_are_wanted() -> None:
    case = Case("hermes", "")
    text = "\n".join(hermes_call("now", f'{{"a": {i}}}') for i in range(3)) + "\nend"
    message, _ = read(parser_of(case, marks_of(case, False), most_calls=1), list(text))
    assert [call.arguments for call in message.calls.values()] == ['{"a": 0}']
    assert message.content == "\nend"


def test_a_call_ends_reasoning_that_has_no_end() -> None:
    case = Case("hermes", "", reasoning_parser="qwen3")
    marks = marks_of(case, True)
    text = marks.spelled("<think>hm\n" + hermes_call("now", "{}"))
    message, _ = read(parser_of(case, marks), list(text))
    assert len(message.calls) == 1 and message.reasoning == "hm" and message.content == ""


def test_text_comes_at_once_unless_it_may_be_a_mark() -> None:
    case = Case("hermes", "")
    parser = parser_of(case, marks_of(case, False))
    assert [d.text for d in parser.feed("Hello <")] == ["Hello"]  # type: ignore[union-attr]
    assert [d.text for d in parser.feed("b>")] == [" <b>"]  # type: ignore[union-attr]
    parser.feed('<tool_call>{"name": "write", "arguments": {"text": "')
    assert [d.text for d in parser.feed("abc")] == ["abc"]  # type: ignore[union-attr]


def test_ids() -> None:
    for name, length in (("hermes", 29), ("mistral", 9)):
        ids = {FORMATS[name].new_id("f") for _ in range(100)}
        assert len(ids) == 100 and {len(one) for one in ids} == {length}
        assert all(one.replace("call_", "").isalnum() for one in ids)
    case = Case("mistral", "[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}")
    message, _ = read(parser_of(case, marks_of(case, False)), [case.text])
    assert message.calls[0].id == "abc123XYZ"


# ---- any calls, written as each format writes them ----


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _coder(name: str, arguments: dict[str, object]) -> str:
    lines = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>\n"


WRITERS = {
    "hermes": lambda calls: "\n".join(hermes_call(n, _json(a)) for n, a in calls),
    "granite": lambda calls: (
        "<|tool_call|>" + _json([{"name": n, "arguments": a} for n, a in calls])
    ),
    "mistral": lambda calls: "".join(f"[TOOL_CALLS]{n}[ARGS]{_json(a)}" for n, a in calls),
    "llama3_json": lambda calls: "; ".join(_json({"name": n, "parameters": a}) for n, a in calls),
    "json": lambda calls: _json([{"name": n, "arguments": a} for n, a in calls]),
    "pythonic": lambda calls: (
        "["
        + ", ".join(f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in calls)
        + "]"
    ),
    "qwen3_coder": lambda calls: "".join(_coder(n, a) for n, a in calls),
    "deepseek_v3": lambda calls: deepseek(*((n, _json(a)) for n, a in calls)),
    "openai": lambda calls: "<|start|>assistant".join(
        HARMONY_CALL.format(n, _json(a)) for n, a in calls
    ),
}
_TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=6), max_size=5).map("".join)
_VALUES = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), _TEXTS, st.lists(_TEXTS))


@settings(max_examples=150)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(
        st.tuples(
            st.sampled_from(sorted(TOOLS)),
            st.dictionaries(st.sampled_from(["k", "q_1", "Zahl", "π"]), _VALUES, max_size=3),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["", "I call.\n", "Zwei Zeilen:\n\n", "<b>x</b> {1} [2]\n"]),
    st.randoms(use_true_random=False),
)
def test_any_calls_are_found(
    name: str,
    calls: list[tuple[str, dict[str, object]]],
    preface: str,
    rng: random.Random,
) -> None:
    """Several calls, whose texts hold the marks of all formats."""
    if name == "qwen3_coder":  # its values are texts, which end where another parameter begins
        calls = [
            (n, {k: str(v).replace("</parameter>", "").replace("\r", "") for k, v in a.items()})
            for n, a in calls
        ]
    case = Case(name, "")
    text = WRITERS[name](calls)
    prefix = preface if name != "openai" else ""
    parts = pieces_of(prefix + text, rng)
    message, _ = read(parser_of(case, marks_of(case, False)), parts)
    found = [(call.name, json.loads(call.arguments)) for call in message.calls.values()]
    assert found == [(n, dict(a)) for n, a in calls]
    assert message.content.strip() == prefix.strip()


# ---- from token ids ----


class ByteTokenizer:
    """One id per byte, then the end, then a format's marks."""

    class vocabulary:
        adds_space = False

    eos_ids = (256,)

    def __init__(self, marks: Marks, texts: tuple[str, ...]) -> None:
        self.bytes_of = {index: bytes([index]) for index in range(256)} | {256: b"</s>"}
        self.bytes_of |= {257 + index: text.encode() for index, text in enumerate(texts)}
        self.text_bytes_of = {**self.bytes_of, 256: b""}

    def token_text(self, index: int) -> str:
        return self.bytes_of[index].decode()


@pytest.mark.parametrize("tokens", [False, True])
def test_bytes_in_any_groups_say_the_same(tokens: bool) -> None:
    """Characters and marks that lie across tokens, several tokens at a time."""
    rng = random.Random(5)
    for case in CASES:
        texts = (*FORMATS[case.parser].MARKS, *THINK)
        ids_of = {text: 257 + index for index, text in enumerate(texts)} if tokens else {}
        marks = Marks(texts, ids_of.get)
        ids: list[int] = []
        for char in tokenized(case, marks):
            mark = next((index for index, one in marks.tokens.items() if one == char), None)
            ids += [mark] if mark is not None else char.encode()
        expected, _ = read(parser_of(case, marks), [tokenized(case, marks)])
        for _ in range(20):
            choice = ChoiceText(
                ByteTokenizer(marks, texts),  # type: ignore[arg-type]
                SamplingParams(max_tokens=None),
                marks=marks.tokens,
            )
            cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.choice((0, 3, 40))))
            groups = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)])]
            pieces = [choice.push(group) for group in groups] + [choice.push([256])]
            streamed, _ = read(parser_of(case, marks), [*pieces, choice.finish()])
            assert summary(streamed) == summary(expected)
