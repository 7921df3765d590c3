"""Templates and tokenizer files that are made to do harm: a chat template computes only so much,
and what is no tokenizer is refused in one line."""

from __future__ import annotations

import json
import time

import pytest

from octavo.text import bounds
from octavo.text.chat import ChatTemplate, load_chat_template
from octavo.text.tokenizer import load_tokenizer
from octavo.types import ConfigError, InvalidRequest
from tests.fixtures.tokenizers import small_vocabulary, tokenizer_json

MESSAGES = [{"role": "user", "content": "hello"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}"
GROWN = "{% set n = namespace(x='aaaaaaaaaa') %}{% for i in range(40) %}"
TOO_MUCH = {
    "loops": LOOPS + ENDS,
    "loops that write": LOOPS + "x" * 1000 + ENDS,
    "loops that write values": LOOPS + "{{ messages[0].content }}" + ENDS,
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubled by ~": GROWN + "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "doubled by +": GROWN + "{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "powers": "{% set n = namespace(x=99) %}{% for i in range(40) %}{% set n.x = n.x ** 2 %}"
    "{% endfor %}{{ n.x }}",
    "a list": "{{ [0] * 10**10 }}",
    "parts that are kept": "{% set n = namespace(x=[]) %}{% set t = 'a' * 10**6 %}"
    "{% for i in range(99999) %}{% set n.x = n.x + [t[1:]] %}{% endfor %}",
    "lists that are kept": "{% set n = namespace(x=[]) %}{% set t = [1] * 10**5 %}"
    "{% for i in range(99999) %}{% set n.x = n.x + [t[:]] %}{% endfor %}",
    "copies that are kept": "{% set n = namespace(x=[]) %}{% set t = {}.fromkeys(range(99999)) %}"
    "{% for i in range(99999) %}{% set n.x = n.x + [t.copy()] %}{% endfor %}",
    "a list of itself": "{% set n = namespace(x=['a'] * 1000) %}{% for i in range(60) %}"
    "{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    **{
        text: "{{ " + text + " }}"
        for text in (
            *("'a' * 10**10", "10**10 * 'a'", "'%10000000000d' % 1", "'%*d' % (10**10, 1)"),
            *("'{:>10000000000}'.format(1)", "'{:>{}}'.format(1, 10**10)"),
            *("'%10000000000d'|format(1)", "'a'|center(10**10)", "'a'|center(10000000000)"),
            *("'a\n\na'|indent(10**10)", "'a'.ljust(10**10)", "'a'.zfill(width=10**10)"),
            *("range(99999)|join('a' * 99999)", "('a' * 99999).join(range(99999)|list)"),
            *("('a' * 99999).replace('a', 'a' * 99999)", "('a' * 99999)|replace('a', 'a' * 99999)"),
            *(
                "'ab'.join(['x' * 10**5] * 10**5)",
                "['x' * 10**5] * 10**5",
                "['x' * 10**5]|list * 9**9",
            ),
            *("(['x' * 10**5] * 10**5)|join", "(['x' * 10**5] * 10**5)|map('upper')|join('a')"),
            *(
                "(['x' * 10**5] * 10**5)|tojson",
                "(['x' * 10**5] * 10**5) ~ 1",
                "[[messages] * 10**5] * 10**5",
            ),
            *("'a'.join((['x' * 10**5] * 10**5)|map('upper'))", "(['x' * 10**5] * 10**5)|string"),
            *(
                "(['x' * 10**5] * 10**5)|map('upper')|list|length",
                "([[1] * 10**5] * 10**5)|sum(start=[])|length",
            ),
            *("('%s' * 10**4) % (('a' * 10**6,) * 10**4)", "('{0}' * 10**4).format('a' * 10**6)"),
            *(
                "('\n' * 10**6)|indent(10**6)",
                "('\t' * 10**6).expandtabs(10**6)",
                "(1).to_bytes(10**10, 'big')",
            ),
            *("('a' * 10**6).translate({97: 'b' * 10**6})", "[1] * 10**5|tojson(indent=10**6)"),
            *(
                "(range(99999)|list)|tojson(indent=10**6)",
                "[1, 2]|tojson(separators=('a' * 10**6, ':'))",
            ),
            *(
                "('a' * 10**6)|wordwrap(1)",
                "('(' * 10**6)|urlize",
                "('b a' * 10**7).split()|sort|length",
            ),
            *(
                "('ba' * 10**6)|sort|length",
                "('a,' * 10**6).split(',')|length",
                "dict(a=['x' * 10**5] * 10**5)",
            ),
            *("namespace(a=['x' * 10**5] * 10**5)", "dict(a=['x' * 10**5] * 10**5).items()"),
            *("1|tojson(indent=10**9)", "[1]|slice(10**9)|list", "[1]|batch(10**9, 0)|list"),
        )
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write(path)
    return path


def content():
    specials, tokens, merges = small_vocabulary()
    vocabulary = {text: index + len(specials) for index, text in enumerate(tokens)}
    ids = {text: index for index, text in enumerate(specials)}
    return tokenizer_json(ids, vocabulary, merges)


def write(path, tokenizer=None, **settings):
    (path / "tokenizer.json").write_text(json.dumps(tokenizer or content()))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_that_takes_too_much_is_stopped(directory, monkeypatch, source):
    monkeypatch.setattr(bounds, "MOST_TURNS", 100_000)
    template = ChatTemplate(source, load_tokenizer(directory))
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match="chat template"):
        template.encode(MESSAGES)
    assert time.monotonic() - start < bounds.MOST_SECONDS + 30  # unbounded: hours


def test_what_may_be_made_grows_with_what_was_sent(directory):
    source = "{% for m in messages %}{{ m.content|trim }}{{ m.content + 'x' }}{% endfor %}"
    template = ChatTemplate(source, load_tokenizer(directory))
    long = "ab" * (3 * bounds.MOST_CHARACTERS // 2)
    assert template.render([{"role": "user", "content": long}]) == f"{long}{long}x"
    grown = ChatTemplate("{{ messages[0].content * 3 }}", load_tokenizer(directory))
    with pytest.raises(InvalidRequest, match="makes a text of"):
        grown.render([{"role": "user", "content": long}])


@pytest.mark.parametrize(
    "text",
    [
        *("''.__class__", "cycler.__init__.__globals__", "raise_exception.__globals__['os']"),
        *("(messages|attr('__class__')).x", "'{0.__globals__[os]}'.format(raise_exception)"),
        *("messages.append(1)", "messages.clear()", "messages[0].update(a=1)"),
    ],
)
def test_python_is_out_of_reach(directory, text):
    template = ChatTemplate("{{ " + text + " }}{{ messages[0].x.y }}", load_tokenizer(directory))
    with pytest.raises(InvalidRequest, match="chat template"):
        template.encode(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        *("{% for %}", "{{", "{% break %}", "{{ " + "9" * 10_000 + " }}", "{{ x|octavo }}"),
        *(
            "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
            "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        ),
    ],
    ids=lambda source: source[:12],
)
def test_what_is_no_template_is_refused_when_it_is_loaded(directory, source):
    with pytest.raises(ConfigError, match="the chat template 'default'"):
        ChatTemplate(source, load_tokenizer(directory))


def test_counting_leaves_what_a_template_writes_as_it_is(directory):
    source = (
        "{% macro twice(x) %}{{ x ~ 1 ~ none }}{{ '%s-%d' % (x, 1234567890) }}{% endmacro %}"
        "{% for m in messages %}{{ loop.index }}{{ twice(m.content) }}{% else %}no{% endfor %}"
        "{{ '{} {{}} {:>3}'.format(20240101123, 2) }}{{ [1, 2]|join(', ') }}{{ 2 ** 10 }}"
        "{{ [1] + [2] }}{{ 'a'|indent(2, true) }}{{ {'b': [1]}|tojson(indent=1) }}"
    )
    found = ChatTemplate(source, load_tokenizer(directory)).render(MESSAGES)
    assert found == (
        '1hello1Nonehello-123456789020240101123 {}   21, 21024[1, 2]  a{\n "b": [\n  1\n ]\n}'
    )
    assert ChatTemplate(
        "{{ a }}{% for m in b %}{% endfor %}", load_tokenizer(directory)
    ).variables == {*("a", "b")}


def test_ids_that_would_take_gigabytes_are_refused(tmp_path):
    tokenizer = content()
    tokenizer["model"]["vocab"]["far"] = 2**31
    write(tmp_path, tokenizer)
    with pytest.raises(ConfigError, match="token 'far' has id 2,147,483,648"):
        load_tokenizer(tmp_path)


def test_templates_by_name_are_texts(tmp_path):
    write(tmp_path, chat_template=[{"name": "default", "template": 2}])
    with pytest.raises(ConfigError, match="no text"):
        load_chat_template(load_tokenizer(tmp_path))


def test_a_letter_that_is_called_special_does_not_break_guarded_texts(tmp_path):
    write(tmp_path, added_tokens_decoder={"4": {"content": "t", "special": True}})
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(InvalidRequest, match="--allow-special-tokens-in-content"):
        tokenizer.encode("the cat", allow_special=False)
