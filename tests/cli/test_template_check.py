"""``octavo template-check``: templates of the usual kinds, and broken ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.text import vocabularies
from tests.text.templates import TEMPLATES

CALLS = ("a tool's call and result", "an answer after the result", "two calls at once")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference = vocabularies.trained_byte_level("gpt-2", bos=True)
    directory = vocabularies.write_directory(reference, tmp_path_factory.mktemp("checked"))
    (directory / "config.json").write_text("{}")
    return directory


def check(
    model: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, str]]:
    """The exit code, and what is wrong with each case that fails."""
    code = main(["template-check", str(model), "--json", "--chat-template", source])
    findings = json.loads(capsys.readouterr().out)
    return code, {f["name"]: f["problem"] for f in findings if f["problem"]}


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        ("chatml", ["BOS where the tokenizer has one", "tools", *CALLS]),
        ("hermes", ["BOS where the tokenizer has one"]),
        ("llama3", ["two calls at once"]),
        ("mistral", []),
        ("gemma", ["system message", "tools", *CALLS]),
        ("deepseek", ["tools"]),
        ("parts", ["BOS where the tokenizer has one", "tools", *CALLS]),
    ],
)
def test_the_usual_kinds_pass_what_they_are_made_for(
    model: Path, kind: str, fails: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, problems = check(model, TEMPLATES[kind], capsys)
    assert (code, sorted(problems)) == (0, sorted(fails)), problems


def test_what_a_template_raises_is_the_reason(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, problems = check(model, TEMPLATES["gemma"], capsys)
    assert problems["system message"] == "chat template: System role not supported"
    _, problems = check(model, TEMPLATES["chatml"], capsys)
    assert problems["tools"] == "does not show get_weather"


@pytest.mark.parametrize(
    ("source", "name", "problem"),
    [
        ("{{ messages[0].content.nothing.at.all }}", "one user message", "nothing"),
        ("{{ messages[-1].content }}", "several turns", "does not show marmalade"),
        ("{{ bos_token }}{{ bos_token }}" + TEMPLATES["chatml"], "BOS not twice", "comes twice"),
        (
            TEMPLATES["chatml"].replace("if add_generation_prompt", "if not add_generation_prompt"),
            "generation prompt",
            "changes what comes before",
        ),
    ],
)
def test_basic_failures_end_with_code_1(
    model: Path, source: str, name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, problems = check(model, source, capsys)
    assert code == 1 and problem in problems[name]


def test_people_get_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ["template-check", str(model), "--chat-template", TEMPLATES["gemma"], "--show"]
    assert main(tokens) == 0
    text = capsys.readouterr().out
    assert "  no  system message" in text and "  ok  several turns" in text
    assert "<start_of_turn>user\nmarmalade<end_of_turn>" in text
    assert "9 of 14 pass; 0 of those that fail are basic" in text


def test_without_a_template_it_says_how_to_give_one(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["template-check", str(model)]) == 1
    assert "--chat-template FILE" in capsys.readouterr().err
    assert main(["template-check", str(model), "--chat-template", "{% for %}"]) == 2
