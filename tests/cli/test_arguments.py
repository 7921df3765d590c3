"""The command line: every flag people know is read, or answered with one line that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import chat, serve
from octavo.cli.arguments import Arguments, HelpRequested, kind_of, parse, to_tokens
from octavo.cli.foreign_flags import FLAGS_OF_LATER_VERSIONS, RETIRED_FLAGS, RETIRED_SWITCHES
from octavo.cli.help import command_help
from octavo.config import EngineConfig, ServerConfig
from octavo.flags import flag_fields
from octavo.types import ConfigError

# Every flag that users of vLLM bring, with a value as they write it. "later" ends with exit 2.
VLLM_FLAGS = """
--model m | --served-model-name a b | --host 0.0.0.0 | --port 9000 | --uds /tmp/s | --api-key k
--dtype half | --dtype float16 | --dtype bfloat16 | --dtype float | --dtype float32
--quantization int8 | --quantization gguf | -q int8 | --quantization awq | -q gptq
--quantization fp8 | --quantization compressed-tensors
--load-format bitsandbytes | --quantization-fp8-dynamic
--max-model-len 32k | --max-model-len auto | --max-model-len -1 | --gpu-memory-utilization 0.5
--kv-cache-memory-bytes 4GiB | --max-num-seqs 256 | --max-num-batched-tokens 8192
--enable-chunked-prefill | --no-enable-chunked-prefill | --long-prefill-token-threshold 512
--enable-prefix-caching | --no-enable-prefix-caching | --scheduling-policy priority
--priority-ageing 2.5 | --prefix-cache-scope key | --step-deadline 60
--block-size 16 | --block-size auto | --num-gpu-blocks-override 10 | --kv-cache-dtype bfloat16
--kv-cache-dtype int8 | --kv-cache-dtype fp8 | --kv-cache-dtype fp8_e5m2
--enforce-eager | --tensor-parallel-size 1 | -tp 1
--pipeline-parallel-size 1 | -pp 1
--data-parallel-size 1 | -dp 1 | --distributed-executor-backend uni | --load-format safetensors
--load-format gguf | --load-format dummy | --tokenizer t | --skip-tokenizer-init | --seed 7
--trust-remote-code | --generation-config vllm | --override-generation-config {"top_k":5}
--max-logprobs -1 | --chat-template t.jinja | --chat-template-content-format openai
--enable-log-requests | --disable-log-stats | --uvicorn-log-level warning
--disable-uvicorn-access-log | --ssl-keyfile k | --ssl-certfile c | --ssl-ca-certs a
--root-path /x | --allowed-origins ["a","b"] | --allowed-methods GET | --allowed-headers h
--enable-request-id-headers | --enable-prompt-tokens-details | --enable-force-include-usage
--shutdown-timeout 5 | --drain-timeout 5 | --max-num-queued-reqs 9 | --max-num-queued-tokens 10k
--max-queue-wait 3 | --allow-special-tokens-in-content | --hf-overrides {"rope_theta":1e6}
--structured-outputs-config {"backend":"auto"}
--middleware a.B c.d | --revision main | --async-scheduling | --no-async-scheduling
--deterministic | --headless | --data-parallel-size-local 2 | -dpl 2 | --data-parallel-address h
-dpa h | --data-parallel-rpc-port 9 | -dpp 9 | --data-parallel-backend ray | -dpb ray
--cluster-secret-file f
--speculative-config {} | -sc {} | --spec-method ngram | --spec-model m | --spec-tokens 5
--speculative-model [ngram] | --num-speculative-tokens 5
"""
LATER_FLAGS = """
--otlp-traces-endpoint e
--enable-lora | --lora-modules a=b | --max-lora-rank 8 | --max-loras 2 | --max-cpu-loras 2
--limit-mm-per-prompt {} | --mm-processor-kwargs {} | --allowed-local-media-path /m
--enable-expert-parallel | --enable-eplb | --decode-context-parallel-size 2 | -dcp 2
--kv-transfer-config {} | --kv-events-config {} | --cpu-offload-gb 4 | --enable-sleep-mode
--enable-prompt-embeds | --logits-processors a.b | --tool-parser-plugin p.py
--default-chat-template-kwargs {} | --download-dir /d | --hf-token t
"""
RETIRED = """
--swap-space 4 | --worker-use-ray | --use-v2-block-manager | --num-lookahead-slots 3
--guided-decoding-backend outlines | --disable-frontend-multiprocessing | --disable-log-requests
--device cuda | --num-scheduler-steps 8 | --preemption-mode swap | --task generate
--max-seq-len-to-capture 8192 | --enable-reasoning | --rope-scaling {} | --rope-theta 1e6
--compilation-config 3 | --cuda-graph-sizes 8 | --attention-backend FLASHINFER | --model-impl auto
--tokenizer-mode auto | --runner generate | --convert none | --prefix-caching-hash-algo sha256
--stream-interval 4 | --max-log-len 100 | --max-parallel-loading-workers 2
--disable-custom-all-reduce | --disable-cascade-attn | --enable-server-load-tracking
--enable-tokenizer-info-endpoint | --guided-decoding-disable-fallback | --use-tqdm-on-load
--data-parallel-start-rank 2 | -dpr 2
"""


def cases(text: str) -> list[list[str]]:
    return [part.split() for line in text.splitlines() for part in line.split("|") if part.strip()]


def read(*tokens: str) -> Arguments:
    return parse(serve.COMMAND, list(tokens))


def refused(*tokens: str) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments = read(*tokens)
        arguments.build(EngineConfig)
        arguments.build(ServerConfig)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("tokens", cases(VLLM_FLAGS), ids=" ".join)
def test_a_flag_of_this_version_is_read(tokens: list[str]) -> None:
    arguments = read(*tokens)
    assert len(arguments.values) == 1 and not arguments.notes
    arguments.build(EngineConfig)
    arguments.build(ServerConfig)


@pytest.mark.parametrize("tokens", cases(LATER_FLAGS), ids=" ".join)
def test_a_flag_of_a_later_version_says_so(tokens: list[str]) -> None:
    text = refused(*tokens)
    assert text.startswith(tokens[0]) and "not in this version" in text


@pytest.mark.parametrize("tokens", cases(RETIRED), ids=" ".join)
def test_a_retired_flag_is_accepted_with_a_line(tokens: list[str]) -> None:
    arguments = read(*tokens, "--port", "9")
    assert arguments.values == {"port": 9}
    assert len(arguments.notes) == 1 and arguments.notes[0].startswith(tokens[0])


def test_the_tables_of_foreign_flags_are_walked_in_full() -> None:
    assert {case[0] for case in cases(LATER_FLAGS)} == set(FLAGS_OF_LATER_VERSIONS)
    assert {case[0] for case in cases(RETIRED)} == set(RETIRED_FLAGS)
    assert set(RETIRED_FLAGS) >= RETIRED_SWITCHES


def test_an_unknown_flag_names_its_neighbours() -> None:
    text = refused("--max-modl-len", "5")
    assert "--max-modl-len" in text and "--max-model-len" in text


def test_underscore_is_dash() -> None:
    assert read("--max_model_len=32K").values == {"max_model_len": 32768}
    assert read("--no_enable_prefix_caching").values == {"enable_prefix_caching": False}


@pytest.mark.parametrize(
    ("text", "value"),
    [("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("2m", 2_000_000), ("4_096", 4096)],
)
def test_human_integers(text: str, value: int) -> None:
    assert read("--max-num-batched-tokens", text).values["max_num_batched_tokens"] == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4GiB", 4 << 30),
        ("4GB", 4 * 10**9),
        ("4G", 4 << 30),
        ("4g", 4 * 10**9),
        ("512MiB", 512 << 20),
        ("0.5GiB", 1 << 29),
        ("123456", 123456),
    ],
)
def test_byte_counts(text: str, value: int) -> None:
    assert read("--kv-cache-memory-bytes", text).values["kv_cache_memory_bytes"] == value


@pytest.mark.parametrize(
    "tokens",
    cases(
        "--port 70000 | --port x | --max-num-seqs 0 | --max-num-seqs 2.5 | --max-model-len 0\n"
        "--gpu-memory-utilization 1.5 | --gpu-memory-utilization nan | --dtype int8 | --seed\n"
        "--hf-overrides [1] | --hf-overrides { | --kv-cache-memory-bytes 4QB | --host --port"
    ),
    ids=" ".join,
)
def test_a_bad_value_names_its_flag(tokens: list[str]) -> None:
    assert tokens[0] in refused(*tokens)


def test_dotted_keys_build_json_and_win_over_the_whole() -> None:
    values = read(
        "--hf-overrides.rope_theta",
        "1e6",
        "--hf-overrides",
        '{"rope_theta": 1, "a": {"b": 1, "c": 2}}',
        "--hf_overrides.a.b=true",
    ).values
    assert values == {"hf_overrides": {"rope_theta": 1e6, "a": {"b": True, "c": 2}}}
    assert "not a JSON flag" in refused("--port.x", "1")


def test_lists_take_words_json_and_repetition() -> None:
    assert read("m", "--api-key", "a", "b", "--port", "1").values["api_key"] == ["a", "b"]
    assert read("--api-key", '["a","b"]').values["api_key"] == ["a", "b"]
    assert read("--api-key=a", "--api-key=b").values["api_key"] == ["a", "b"]


def test_model_is_a_word_or_a_flag_but_not_two_models() -> None:
    assert read("--port", "1", "m").values["model"] == "m"
    assert read("m", "--model", "m").values["model"] == "m"
    assert "twice" in refused("m", "--model", "n")
    assert "unexpected argument 'b'" in refused("a", "b")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_gives_what_the_command_line_does_not(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml",
        "model: m\nport: 9000\nmax-model-len: 32k\nenable_prefix_caching: false\n"
        "api-key: [a, 7]\nhf-overrides: {rope_theta: 5}\nswap-space: 4\n",
    )
    arguments = read("--config", file, "--port", "1", "--hf-overrides.x=2")
    assert arguments.values == {
        "model": "m",
        "port": 1,
        "max_model_len": 32000,
        "enable_prefix_caching": False,
        "api_key": ["a", "7"],
        "hf_overrides": {"rope_theta": 5, "x": 2},
    }
    assert len(arguments.notes) == 1


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("prot: 1", "--port"),
        ("port: [1]", "--port"),
        ("port: true", "--port"),
        ("enforce-eager: 5", "--enforce-eager"),
        ("enable-lora: true", "not in this version"),
        ("a: b: c", "not YAML"),
        ("- 1", "flag: value"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    file = write(tmp_path / "c.yaml", text)
    message = refused("--config", file)
    assert file in message and part in message


def test_a_missing_file_is_named() -> None:
    assert "/nowhere.yaml" in refused("--config", "/nowhere.yaml")


@pytest.mark.parametrize("tokens", cases(VLLM_FLAGS), ids=" ".join)
def test_values_written_as_a_command_line_are_read_back(tokens: list[str]) -> None:
    values = read(*tokens).values
    again = [*to_tokens(EngineConfig, values), *to_tokens(ServerConfig, values)]
    assert read(*again).values == values


def test_every_field_has_a_known_kind_and_a_help() -> None:
    for config in (EngineConfig, ServerConfig):
        for name, f in flag_fields(config):
            assert kind_of(f) in (
                *("bool", "int", "int_or_auto", "bytes", "float", "list", "json", "str"),
            ), name
            assert f.metadata["help"], name


def test_help_shows_eleven_flags_and_all_shows_every_one() -> None:
    short = command_help(serve.COMMAND, "")
    everything = command_help(serve.COMMAND, "all")
    assert sum(line.startswith("  --") for line in short.splitlines()) == 11
    for config in (EngineConfig, ServerConfig):
        for name, f in flag_fields(config):
            if not f.metadata.get("positional"):
                assert name.replace("_", "-") in everything, name
    for name in (*FLAGS_OF_LATER_VERSIONS, *RETIRED_FLAGS):
        assert name in everything, name


def test_help_is_asked_for_anywhere() -> None:
    for tokens, topic in ((["m", "--help"], ""), (["--help=all"], "all"), (["-h"], "")):
        with pytest.raises(HelpRequested) as caught:
            read(*tokens)
        assert caught.value.topic == topic


def test_help_of_a_group_or_a_word() -> None:
    assert "--block-size" in command_help(serve.COMMAND, "cache")
    assert "--ssl-keyfile" in command_help(serve.COMMAND, "ssl")
    assert "groups:" in command_help(serve.COMMAND, "nonsense")


def test_chat_takes_engine_flags_too() -> None:
    values = parse(chat.COMMAND, ["m", "-q", "hi", "--dtype", "half"]).values
    assert values == {"model": "m", "quick": "hi", "dtype": "half"}


def test_q_is_the_question_of_chat_and_the_quantization_of_serve() -> None:
    values = parse(chat.COMMAND, ["m", "-q", "hi", "--quantization", "int8"]).values
    assert values == {"model": "m", "quick": "hi", "quantization": "int8"}
    assert read("-q", "int8").values == {"quantization": "int8"}
    for command, name in ((chat.COMMAND, "quick"), (serve.COMMAND, "quantization")):
        lines = command_help(command, "all").splitlines()
        (line,) = (line for line in lines if ", -q " in line)
        assert line.startswith(f"  --{name}, -q ")


@pytest.mark.parametrize(
    "given, says",
    [
        ('{"backend": "xgrammar"}', "backend 'xgrammar'"),
        ('{"backend": "outlines"}', "the only one here is guidance"),
        ('{"disable_any_whitespace": 1}', "must be true or false"),
        ('{"colour": "red"}', "no setting 'colour'"),
    ],
)
def test_other_backends_of_structured_output_are_refused_by_name(given: str, says: str) -> None:
    assert says in refused("--structured-outputs-config", given)
    fine = read("--structured-outputs-config.disable_any_whitespace", "true")
    settings = fine.build(EngineConfig).structured_outputs_config
    assert settings == {"disable_any_whitespace": True}
