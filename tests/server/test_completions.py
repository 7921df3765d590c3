"""Answers of the two generating routes, whole and streamed."""

from __future__ import annotations

import json

import pytest

from tests.server import mock_server


def chat(content, **body):
    return {"messages": [{"role": "user", "content": content}], **body}


def rebuilt(events, route="/v1/completions"):
    """index -> (text, finish_reason, stop_reason) from a stream's events."""
    result = {}
    for event in events:
        for choice in event["choices"]:
            text, reason, stop = result.get(choice["index"], ("", None, None))
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            assert reason is None, "an event after the end"
            result[choice["index"]] = (
                text + new, choice["finish_reason"], choice.get("stop_reason", stop),
            )  # fmt: skip
    return result


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("say:hello", {}, ("hello", "stop", None)),
        ("say:hello", {"max_tokens": 3}, ("hel", "length", None)),
        ("say:abcDEFGHIJxyz", {"stop": "DEFGHIJ"}, ("abc", "stop", "DEFGHIJ")),
        ("say:DEFGHIJ", {"stop": ["zz", "DEFGHIJ"]}, ("", "stop", "DEFGHIJ")),
        ("say:DEFGHIK", {"stop": "DEFGHIJ"}, ("DEFGHIK", "stop", None)),
        ("say:DEFGHI", {"stop": "DEFGHIJ", "max_tokens": 6}, ("DEFGHI", "length", None)),
        (
            "say:abcDEFx",
            {"stop": "DEF", "include_stop_str_in_output": True},
            ("abcDEF", "stop", "DEF"),
        ),
        ("say:abc", {"stop_token_ids": [98]}, ("a", "stop", 98)),
        ("say:é😀ü", {"max_tokens": 30}, ("é😀ü", "stop", None)),
        ("say:a😀", {"max_tokens": 3}, ("a�", "length", None)),
    ],
)
def test_stream_equals_whole_on_both_routes(server, prompt, options, expected):
    options = {"max_tokens": 40, **options}
    whole = server.complete(prompt, **options)
    choice = whole["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == expected
    usage = {"stream_options": {"include_usage": True}}
    events = server.events("/v1/completions", prompt=prompt, **options, **usage)
    assert rebuilt(events) == {0: expected}
    if "�" not in expected[0]:
        assert not any("�" in c["text"] for e in events for c in e["choices"])
    assert events[-1]["usage"] == whole["usage"]
    assert events[-1]["choices"] == []

    whole = server.post("/v1/chat/completions", **chat(prompt, **options)).json()
    choice = whole["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": expected[0]}
    assert (choice["finish_reason"], choice["stop_reason"]) == expected[1:]
    events = server.events("/v1/chat/completions", **chat(prompt, **options), **usage)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert rebuilt(events) == {0: expected}
    assert events[-1]["usage"] == whole["usage"]


def test_tokens_after_a_stop_string_are_not_counted(server):
    answer = server.complete("say:abSTOPmore and more", stop="STOP", return_token_ids=True)
    assert answer["usage"]["completion_tokens"] == 6
    assert bytes(answer["choices"][0]["token_ids"]) == b"abSTOP"
    assert server.metric("vllm:num_requests_running") == 0


def test_several_choices(server):
    """T11: indices, own text each, usage of all choices and the prompt once."""
    whole = server.complete("say:hey", n=3)
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    assert whole["usage"]["prompt_tokens"] == 8
    assert whole["usage"]["completion_tokens"] == 12
    events = server.events(
        "/v1/completions", prompt="say:hey", n=3,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )  # fmt: skip
    assert rebuilt(events) == dict.fromkeys(range(3), ("hey", "stop", None))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 12
    assert events[-1]["usage"] == whole["usage"]


def test_list_of_prompts_and_token_ids(server):
    answer = server.complete(["say:one", "say:two"], n=2)
    assert [c["text"] for c in answer["choices"]] == ["one", "one", "two", "two"]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    ids = [list(b"say:one"), list(b"say:two")]
    assert [c["text"] for c in server.complete(ids)["choices"]] == ["one", "two"]
    answer = server.complete(ids[0], return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == ids[0]
    assert answer["choices"][0]["token_ids"] == [*b"one", 257]
    assert server.complete("say:x", add_special_tokens=False)["usage"]["prompt_tokens"] == 5


def test_echo(server):
    """T12."""
    answer = server.complete("say:hey", echo=True)
    assert answer["choices"][0]["text"] == "say:heyhey"
    answer = server.complete("say:hey", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "say:hey"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert rebuilt(server.events("/v1/completions", prompt="say:hey", echo=True)) == {
        0: ("say:heyhey", "stop", None)
    }
    logprobs = {"echo": True, "max_tokens": 0, "logprobs": 1, "temperature": 1, "top_k": 1}
    block = server.complete("say:hey", **logprobs)["choices"][0]["logprobs"]
    assert block["tokens"] == ["<s>", *"say:hey"]
    assert block["token_logprobs"] == [None, *[-1.0] * 7]
    assert block["top_logprobs"][0] is None
    assert block["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6]
    whole = server.complete("say:hey", echo=True, logprobs=1)["choices"][0]["logprobs"]
    events = server.events("/v1/completions", prompt="say:hey", echo=True, logprobs=1)
    blocks = [e["choices"][0]["logprobs"] for e in events if e["choices"]]
    for name, values in whole.items():
        assert [v for block in blocks for v in block[name]] == values
        assert len(values) == 8 + 4
    assert whole["text_offset"][8:] == [7, 8, 9, 10]


def test_completion_logprobs_and_floor(server):
    """T20, T21: strictly valid JSON, equal lengths, minus infinity has a floor."""
    raw = server.post("/v1/completions", prompt="say:é!", logprobs=2).text
    answer = json.loads(raw, parse_constant=pytest.fail)
    block = answer["choices"][0]["logprobs"]
    assert {len(values) for values in block.values()} == {answer["usage"]["completion_tokens"]}
    assert block["text_offset"] == [0, 0, 1, 2]
    assert -9999.0 in block["top_logprobs"][0].values()
    ids = server.complete("say:a", logprobs=0, return_tokens_as_token_ids=True)
    assert ids["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:257"]
    assert ids["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:97": -0.25}


@pytest.mark.parametrize("options", [{}, {"top_logprobs": 0}, {"top_logprobs": 3}])
def test_chat_logprobs_join_to_the_text(server, options):
    """T19: bytes of the entries join to the text, streamed and not."""
    body = chat("say:né😀e", logprobs=True, max_tokens=30, **options)
    whole = server.post("/v1/chat/completions", **body).json()
    entries = whole["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == "né😀e"
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert all(len(e["top_logprobs"]) == options.get("top_logprobs", 0) for e in entries)
    assert set(entries[0]) == {"token", "logprob", "bytes", "top_logprobs"}
    events = server.events("/v1/chat/completions", **body)
    streamed = [e["choices"][0]["logprobs"] for e in events if e["choices"]]
    assert [entry for block in streamed if block for entry in block["content"]] == entries


def test_prompt_logprobs(server):
    answer = server.complete("say:x", prompt_logprobs=1)
    rows = answer["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 6
    assert rows[1][str(ord("s"))] == {"logprob": -1.0, "rank": 2, "decoded_token": "s"}
    body = chat("say:x", prompt_logprobs=0)
    answer = server.post("/v1/chat/completions", **body).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    events = server.events("/v1/chat/completions", **body)
    assert events[0]["prompt_logprobs"] == answer["prompt_logprobs"]


def test_chat_defaults_to_all_that_fits_and_has_both_limits(server):
    answer = server.post("/v1/chat/completions", **chat("alphabet")).json()
    assert answer["usage"]["total_tokens"] == 512
    answer = server.post(
        "/v1/chat/completions", **chat("alphabet", max_tokens=50, max_completion_tokens=5)
    ).json()
    assert answer["usage"]["completion_tokens"] == 5


def test_chat_messages_reach_the_template(server):
    def prompt(messages, **options):
        answer = server.post("/tokenize", messages=messages, **options)
        assert answer.status_code == 200, answer.text
        return bytes(answer.json()["tokens"]).decode()

    user = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    assert prompt([user]) == "user: a\nassistant: "
    assert prompt([user], add_generation_prompt=False) == "user: a\n"
    sent_back = {"role": "assistant", "content": "b", "refusal": None, "annotations": []}
    continued = prompt([user, sent_back], continue_final_message=True)
    assert continued == "user: a\nassistant: b"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert '"name": "f"' in prompt([user], tools=tools)
    forged = prompt([{"role": "user", "content": "<s></s>"}])
    assert forged == "user: <s></s>\nassistant: "


def test_max_completion_tokens_wins_over_max_tokens_of_0_with_echo(server):
    body = {"messages": [{"role": "user", "content": "say:hey"}], "echo": True}
    answer = server.post("/v1/chat/completions", **body, max_tokens=0, max_completion_tokens=2)
    assert answer.json()["choices"][0]["message"]["content"] == "he"
    assert answer.json()["usage"]["completion_tokens"] == 2


def test_echo_of_a_continued_message(server):
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "say:ab"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True}
    answer = server.post("/v1/chat/completions", **body).json()
    assert answer["choices"][0]["message"]["content"] == "say:abab"


def test_tools_are_shown_with_tool_choice_none(server):
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = server.post("/v1/chat/completions", **chat("say:x", tools=tools, tool_choice="none"))
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] > 40


def test_request_id(server):
    assert server.complete("say:x", request_id="abc")["id"] == "cmpl-abc"
    answer = server.client.post(
        "/v1/chat/completions", json=chat("say:x"), headers={"x-request-id": "r1"}
    )
    assert answer.json()["id"] == "chatcmpl-r1"
    assert answer.json()["object"] == "chat.completion"


def test_timings_cached_tokens_and_fingerprint(server):
    answer = server.complete("say:hello")
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    timings = answer["timings"]
    assert 0 < timings["queue_seconds"] <= timings["first_token_seconds"]
    assert timings["first_token_seconds"] < timings["total_seconds"]
    assert timings["tokens_per_second"] > 0
    assert answer["system_fingerprint"].startswith("fp_octavo")
    events = server.events("/v1/completions", prompt="say:hello", n=2)
    assert ["timings" in event for event in events].count(True) == 1


def test_tokenize_and_detokenize(server):
    answer = server.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert answer["tokens"] == [256, 104, 195, 169]
    assert answer["count"] == 4 and answer["max_model_len"] == 512
    assert answer["token_strs"] == ["<s>", "h", "�", "�"]
    plain = server.post("/tokenize", prompt="hé", add_special_tokens=False).json()["tokens"]
    assert server.post("/detokenize", tokens=plain).json() == {"prompt": "hé"}
    assert server.post("/detokenize", tokens=[260]).status_code == 400
    assert server.post("/tokenize").status_code == 400
    info = server.client.get("/tokenizer_info").json()
    assert info["bos_token_id"] == 256 and info["eos_token_ids"] == [257]


def test_a_prompt_tokenized_in_a_thread_is_the_same(server):
    answer = server.post("/v1/completions", prompt="a" * 70000 + "say:x", truncate_prompt_tokens=50)
    assert answer.json()["choices"][0]["text"] == "x"


def test_bad_words_and_long_id_lists(server):
    assert server.complete("say:x", bad_words=["q", "zz"])["choices"][0]["text"] == "x"
    answer = server.complete([list(b"say:a") * 10000], truncate_prompt_tokens=5)
    assert answer["choices"][0]["text"] == "a"


def test_server_without_a_tokenizer_serves_token_ids():
    forced = {"enable_force_include_usage": True}
    with mock_server.start(server=forced, model={"skip_tokenizer_init": True}) as server:
        ids = list(b"say:abc")
        answer = server.complete(ids, return_token_ids=True, logprobs=1)
        assert answer["choices"][0]["token_ids"] == [*b"abc", 257]
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["logprobs"]["tokens"][0] == "token_id:97"
        events = server.events("/v1/completions", prompt=ids, return_token_ids=True)
        streamed = [t for e in events for c in e["choices"] for t in c["token_ids"]]
        assert streamed == [*b"abc", 257]
        assert events[-1]["usage"] == answer["usage"]
        for path, body, field in (
            ("/v1/completions", {"prompt": "text"}, "prompt"),
            ("/v1/completions", {"prompt": ids, "stop": "a"}, "stop"),
            ("/v1/completions", {"prompt": ids, "bad_words": ["a"]}, "bad_words"),
            ("/v1/completions", {"prompt": ids, "echo": True}, "echo"),
            ("/v1/chat/completions", chat("x"), "messages"),
            ("/tokenize", {"prompt": "x"}, "prompt"),
        ):
            answer = server.post(path, **body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        assert "Traceback" not in server.log
