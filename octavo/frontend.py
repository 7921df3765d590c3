"""What LLM and AsyncLLM share: an engine in this process, and the way from prompts to requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from octavo.assembly import Answer
from octavo.checkpoint.locate import ModelFiles, locate, locate_draft
from octavo.config import EngineConfig, require_one_engine
from octavo.engine.admission import prepare
from octavo.engine.messages import EngineInfo, EngineStats
from octavo.flags import from_flags
from octavo.grammar.compile import grammar_text
from octavo.grammar.vocabulary import Vocabulary
from octavo.text.chat import ChatTemplate, load_chat_template
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.types import InvalidRequest, SamplingParams, StructuredOutputsParams

logger = logging.getLogger(__name__)

# Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids} as in vLLM.
Prompt = str | list[int] | dict[str, Any]
Message = dict[str, Any]


class Frontend:
    """An engine in this process, and what it takes to make requests of prompts.

    ``settings``: fields of the configuration. Raises ConfigError when the model or a setting cannot
    be used.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # The engine imports torch, which takes seconds: only when an engine is wanted.
        from octavo.engine.start import start_engine

        config = from_flags(EngineConfig, {"model": model, **settings})
        require_one_engine(config)
        weights = config.model.load_format != "dummy"
        self.files: ModelFiles = locate(model, config.model.revision, weights=weights)
        self.config = replace(
            config,
            model=replace(config.model, model=str(self.files.path)),
            speculative=locate_draft(config.speculative, weights=weights),
        )
        self.tokenizer: Tokenizer | None = None
        self.chat_template: ChatTemplate | None = None
        if not config.model.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(self.files.path, config.model.tokenizer)
            self.chat_template = load_chat_template(self.tokenizer)
        self.engine, self.executor = start_engine(self.config, _log_progress)
        while self.executor.idle():  # offline there is no idle moment before the work
            pass
        self._next_handle = 0
        self._checked_grammar = ""  # the last one: prompts of one call mostly share it

    @property
    def info(self) -> EngineInfo:
        """What was found while loading: lengths, blocks, dtype, seconds per phase."""
        return self.engine.info

    @property
    def stats(self) -> EngineStats:
        """Live state and running totals of the engine."""
        return self.engine.stats()

    def get_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer (skip_tokenizer_init)")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config values over octavo's defaults."""
        return SamplingParams(**self.info.default_sampling)

    def encode_chat(self, messages: list[Message], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template."""
        if self.chat_template is None:
            raise InvalidRequest("the model has no chat template: use generate, or send token ids")
        return self.chat_template.encode(messages, **options)

    def _answer(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> Answer:
        """A prompt's request, not sent yet. Raises InvalidRequest where it can never run."""
        text, ids = self._tokenized(prompt)
        handle = self._next_handle
        request = prepare(
            self.info,
            params,
            ids,
            handle=handle,
            request_id=request_id or str(handle),
            arrival=time.monotonic(),
            max_logprobs=self.config.model.max_logprobs,
            bad_words=self._bad_words(params),
            grammar=self._grammar(params.structured_outputs),
        )
        self._next_handle += params.n
        return Answer(request, text, ids, self.tokenizer, self.info.eos_ids)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        return self.get_tokenizer().bad_word_ids(params.bad_words) if params.bad_words else []

    def _grammar(self, structured: StructuredOutputsParams | None) -> str:
        """The checked text of what the output must match; "" for anything."""
        if structured is None:
            return ""
        grammars = self.engine.grammars
        if not grammars.has_vocabulary:
            tokenizer, size = self.get_tokenizer(), self.info.vocab_size
            table = tokenizer.byte_table(size)
            grammars.set_vocabulary(
                Vocabulary.of_model(size, table, tokenizer.special_ids, self.info.eos_ids)
            )
        settings = self.config.structured_outputs_config
        text = grammar_text(
            structured,
            self.get_tokenizer().special_texts,
            bool(settings.get("disable_any_whitespace", False)),
        )
        if text != self._checked_grammar:
            grammars.check(text)
            self._checked_grammar = text
        return text

    def _tokenized(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its ids. Raises InvalidRequest."""
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), _ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidRequest(
                    f"a prompt has keys {sorted(prompt)}; it needs prompt or prompt_token_ids"
                )
            return self._tokenized(prompt["prompt"])
        if isinstance(prompt, str):
            return prompt, self.get_tokenizer().encode(prompt)
        return None, _ids(prompt)


_PROMPTS = "a text, a list of token ids, or a dict with prompt or prompt_token_ids"


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a list of ints is one prompt."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise InvalidRequest(f"a prompt is {prompts!r}; it must be {_PROMPTS}")
    entries: list[Any] = list(prompts)
    return [entries] if entries and isinstance(entries[0], int) else entries


def _ids(prompt: Any) -> list[int]:
    """A copy: the caller may change its own."""
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if not isinstance(prompt, Iterable):
        raise InvalidRequest(f"a prompt is {prompt!r}; it must be {_PROMPTS}")
    return list(prompt)


def _log_progress(phase: str, share: float, num_bytes: int = 0) -> None:
    if share <= 0:
        logger.info("starting: %s", phase)
