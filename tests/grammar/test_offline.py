"""``LLM`` with constraints on a CPU: random weights, and the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from tests.fixtures import models
from tests.fixtures.scripted import scripted_model
from tests.grammar import offline

SMALL: dict[str, Any] = {"max_model_len": 256, "cpu_threads": 1}


@pytest.fixture(scope="module")
def expected(model_r: Path) -> Iterator[list[Any]]:
    with closing(LLM(str(model_r), **SMALL, enable_prefix_caching=False)) as llm:
        yield offline.one_by_one(llm, 320)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False},
        {"num_gpu_blocks_override": 20, "max_num_seqs": 16},
        {"max_num_batched_tokens": 20, "max_num_seqs": 5},
    ],
    ids=["default", "no-overlap", "few-blocks", "small-steps"],
)
def test_answers_match_and_are_those_of_requests_served_alone(
    model_r: Path, expected: list[Any], settings: dict[str, Any]
) -> None:
    with closing(LLM(str(model_r), **SMALL, **settings)) as llm:
        found = offline.together(llm, 320)
        if "num_gpu_blocks_override" in settings:
            assert llm.stats.num_preemptions > 0
        llm.engine.scheduler.check()
        assert llm.engine.grammars.num_used == 0
    assert offline.check_answers(found) > 9
    assert offline.tokens(found) == offline.tokens(expected)


@pytest.mark.parametrize("name", ["R-eos2", "R-vpad", "R-Q8_0"])
def test_other_vocabularies(name: str) -> None:
    """Two EOS ids; more logits than tokens; a GGUF file's tokenizer."""
    with closing(LLM(str(models.path(name)), **SMALL)) as llm:
        assert offline.check_answers(offline.together(llm, 320)) > 7


def test_what_cannot_be_followed_is_refused_before_anything_runs(model_r: Path) -> None:
    with closing(LLM(str(model_r), **SMALL)) as llm:
        for constraint in ({"regex": "([a"}, {"json": {"minLenght": 1}}, {"grammar": "start: x"}):
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
            with pytest.raises(InvalidRequest, match="structured_outputs"):
                llm.generate("hello", params, use_tqdm=False)
        fine = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
        assert llm.generate("hello", fine, use_tqdm=False)[0].outputs[0].text == "a"


def test_without_a_tokenizer_it_is_refused(model_r: Path) -> None:
    with closing(LLM(str(model_r), **SMALL, skip_tokenizer_init=True)) as llm:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate([5], params, use_tqdm=False)


def test_the_setting_for_white_space_holds(model_r: Path) -> None:
    tight = {"structured_outputs_config": {"disable_any_whitespace": True}, **SMALL}
    with closing(LLM(str(model_r), **tight)) as llm:
        schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
        constraint = StructuredOutputsParams(json=schema)
        params = SamplingParams(temperature=1, n=8, structured_outputs=constraint)
        for answer in llm.generate("hello", params, use_tqdm=False)[0].outputs:
            assert answer.text in ("[1,1]", "[1,2]", "[2,1]", "[2,2]")


def test_a_model_that_keeps_to_its_schema_is_left_alone_until_its_end() -> None:
    """Tokens across the parts of JSON are not taken from it, and nothing is forced on it."""
    says = ['{"ci', 'ty": "P', "aris", '", "n"', ": 1", "2}", " And", " more", "."]
    scripted = scripted_model("schema", [says, ["Sure", ": ", '{"n', '":', " 7}", "!"]])
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["n"],
    }
    bound = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema)
    )
    with closing(LLM(str(scripted.path), **SMALL)) as llm:
        first, second = llm.generate(["<|go0|>", "<|go1|>"], bound, use_tqdm=False)
        free = llm.generate("<|go0|>", bound.clone(structured_outputs=None), use_tqdm=False)[0]
    assert free.outputs[0].text.startswith(first.outputs[0].text)
    assert first.outputs[0].text == '{"city": "Paris", "n": 12}'
    assert first.outputs[0].finish_reason == "stop"
    assert not second.outputs[0].text.startswith("Sure")
    if second.outputs[0].finish_reason == "stop":
        json.loads(second.outputs[0].text)


@pytest.mark.slow
def test_the_demo_model_fills_a_schema(model_g: Path) -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 40},
            "country": {"type": "string", "maxLength": 40},
            "capital": {"type": "boolean"},
        },
        "required": ["city", "country", "capital"],
        "additionalProperties": False,
    }
    question = f"Describe Paris as JSON with this schema: {json.dumps(schema)}"
    with closing(LLM(str(model_g), max_model_len=512)) as llm:
        params = SamplingParams(
            temperature=0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=schema)
        )
        (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
    answer = json.loads(output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"
    assert "Paris" in answer["city"] and isinstance(answer["capital"], bool)
