"""The JSON that clients may send: one schema per route, unknown fields refused.

None means "not sent" everywhere: OpenAI's clients send explicit nulls. Ranges are checked where
they belong (``SamplingParams.validate``, ``engine.admission``); here only types are. Fields that a
later version brings are listed in ``LATER_FIELDS`` and refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _integer(value: Any) -> Any:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ValueError("must be an integer")


def _number(value: Any) -> Any:
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise ValueError("must be a number")


def _only(value: str, why: str) -> BeforeValidator:
    """Refuses any other value, saying why."""

    def check(given: Any) -> Any:
        if given != value:
            raise ValueError(f"is {given!r}: {why}")
        return given

    return BeforeValidator(check)


_MEDIA = "only text is served in this version"

Int = Annotated[int, BeforeValidator(_integer), Field(ge=-(2**63), lt=2**64)]
Float = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Seconds = Annotated[Float, Field(gt=0, le=1e6)]
Bool = Annotated[bool, Field(strict=True)]
# Lists of ids may be long: they are checked without Python, and given up at the first fault.
TokenId = Annotated[int, Field(strict=True)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ForModel(Body):
    """The body of a route of the model; None: the one that is served."""

    model: str | None = None


class StreamOptions(Body):
    include_usage: Bool | None = None
    continuous_usage_stats: Bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """``strict`` changes nothing: a schema is always enforced."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    # Of structural_tag: the older form, or the newer one.
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(Body):
    """Exactly one constraint."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: Bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: Bool | None = None
    whitespace_pattern: str | None = None


class GenerationRequest(ForModel):
    """Fields shared by both generating routes."""

    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: Float | None = None
    top_p: Float | None = None
    top_k: Int | None = None
    min_p: Float | None = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    repetition_penalty: Float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: Bool | None = None
    ignore_eos: Bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    skip_special_tokens: Bool | None = None
    spaces_between_special_tokens: Bool | None = None
    truncate_prompt_tokens: Int | None = None
    logit_bias: dict[str, Float] | None = None
    allowed_token_ids: TokenIds | None = None
    add_special_tokens: Bool | None = None
    echo: Bool | None = None
    use_beam_search: Bool | None = None
    length_penalty: Float | None = None
    early_stopping: Bool | None = None
    priority: Int | None = None
    timeout: Seconds | None = None
    request_id: str | None = Field(None, max_length=256)
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    # Accepted because they ask for nothing that could be missed.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: Bool | None = None  # of chat; a completion calls nothing
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Older names of the same.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] = Field(
        description="text, a list of texts, token ids, or a list of token id lists"
    )
    logprobs: Int | None = None
    best_of: Int | None = None


class TextPart(Body):
    type: Annotated[Literal["text"], _only("text", _MEDIA)]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Int | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # Parts of OpenAI's own answers that clients send back; they carry nothing here.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = Field(None, max_length=0)


class ChatFields(Body):
    """How messages become a prompt; shared with /tokenize."""

    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = Field(None, max_length=1 << 20)


class ChatRequest(GenerationRequest, ChatFields):
    messages: list[Message] = Field(min_length=1)
    logprobs: Bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    tool_choice: str | dict[str, Any] | None = None
    include_reasoning: Bool | None = None


class TokenizeRequest(ForModel, ChatFields):
    """Exactly one of ``prompt`` and ``messages``."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: Bool | None = None
    return_token_strs: Bool | None = None


class EmbeddingRequest(ForModel, ChatFields):
    """Exactly one of ``input`` and ``messages``."""

    input: str | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = Field(
        None, description="text, a list of texts, token ids, or a list of token id lists"
    )
    messages: list[Message] | None = Field(None, min_length=1)
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: Bool | None = None
    use_activation: Bool | None = None  # vLLM's name of normalize
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Int | None = None
    priority: Int | None = None
    request_id: str | None = Field(None, max_length=256)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    timeout: Seconds | None = None
    user: str | None = None


class DetokenizeRequest(ForModel):
    tokens: TokenIds
    skip_special_tokens: Bool | None = None


class NoFields(Body):
    """A POST route whose body may be empty or {}."""


# Known fields of OpenAI's and vLLM's APIs that this version refuses by name: field -> why.
LATER_FIELDS: dict[str, str] = {
    "guided_decoding_backend": "llguidance is the only backend; leave it out",
    "suffix": "fill-in-the-middle is not in this version",
    "prompt_embeds": "prompts as embeddings are not in this version",
    "functions": "functions are not in this version (nor in OpenAI's: use tools)",
    "function_call": "functions are not in this version (nor in OpenAI's: use tools)",
    "modalities": _MEDIA,
    "audio": _MEDIA,
    "mm_processor_kwargs": _MEDIA,
    "prediction": "predicted outputs are not in this version",
    "web_search_options": "web search is not in this version",
    "verbosity": "verbosity is not in this version",
    "thinking_token_budget": "reasoning budgets are not in this version",
    "logits_processors": "logits processors are not in this version",
    "repetition_detection": "repetition detection is not in this version",
    "kv_transfer_params": "KV transfer is not in this version",
    "vllm_xargs": "extra arguments of vLLM plug-ins are not in this version",
}
# Values that ask for nothing, so that a client's spelled-out default is no error.
HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "modalities": (["text"],),
    "guided_decoding_backend": ("auto", "guidance", "llguidance"),
}
