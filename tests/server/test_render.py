"""The render routes: the prompt as the model would get it, with the validation of the real ones."""

from __future__ import annotations

import pytest

from tests.server.test_completions import chat

CHAT, PLAIN = "/v1/chat/completions/render", "/v1/completions/render"


def test_a_chat_is_rendered_and_nothing_is_generated(server):
    before = server.metric("octavo_requests_admitted_total")
    body = chat("hi", max_tokens=7, temperature=0.5, stop="x", stream=True)
    answer = server.post(CHAT, **body).json()
    assert answer["prompt"] == "user: hi\nassistant: "
    assert answer["token_ids"] == list(answer["prompt"].encode())
    assert (answer["count"], answer["max_model_len"]) == (20, 512)
    assert answer["model"] == "mock" and answer["request_id"].startswith("chatcmpl-")
    params = answer["sampling_params"]
    assert (params["max_tokens"], params["temperature"], params["stop"]) == (7, 0.5, ["x"])
    told = server.post("/tokenize", messages=body["messages"]).json()
    assert answer["token_ids"] == told["tokens"]
    open_ended = server.post(CHAT, **chat("hi", add_generation_prompt=False)).json()
    assert open_ended["prompt"] == "user: hi\n"
    assert open_ended["sampling_params"]["max_tokens"] == 512 - 9
    assert server.metric("octavo_requests_admitted_total") == before


def test_completions_are_a_list_with_special_tokens_shown(server):
    first, second = server.post(PLAIN, prompt=["ab", "c"]).json()
    assert (first["prompt"], first["token_ids"]) == ("<s>ab", [256, 97, 98])
    assert second["request_id"].endswith("-1")
    (cut,) = server.post(PLAIN, prompt="abcdef", truncate_prompt_tokens=2).json()
    assert (cut["prompt"], cut["token_ids"]) == ("ef", [101, 102])
    (plain,) = server.post(PLAIN, prompt=[5, 6], max_tokens=3).json()
    assert plain["token_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat("hi", temperature=3), "temperature"),
        (CHAT, chat("hi", max_completion_tokens=600), "max_completion_tokens"),
        (CHAT, chat("x" * 600), "messages"),
        (CHAT, chat("hi", tool_choice="auto"), "tool_choice"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, chat("hi", oops=1), "oops"),
        (PLAIN, {"prompt": [260]}, "prompt"),
        (PLAIN, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (PLAIN, {"prompt": "a", "best_of": 2}, "best_of"),
    ],
)
def test_what_the_real_route_refuses_is_refused(server, path, body, param):
    for route in (path, path.removesuffix("/render")):
        answer = server.post(route, **body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_another_model_is_404(server):
    assert server.post(CHAT, **chat("hi", model="other")).status_code == 404
    assert server.post(PLAIN, prompt="a", model="other").status_code == 404


def test_tokenizer_info_shows_the_template(server):
    info = server.client.get("/tokenizer_info").json()
    assert info["chat_template"].startswith("{% for m in messages %}")
    assert (info["bos_token"], info["eos_token"], info["bos_token_id"]) == ("<s>", "</s>", 256)
