"""What the routes share: the engine's client, the model's text side, the server's settings."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import Request

from octavo import __version__
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.replicas import Replicas
from octavo.grammar.vocabulary import Vocabulary
from octavo.server.errors import NotFound
from octavo.server.exposition import kv_cache_usage
from octavo.server.grammars import GrammarChecker
from octavo.server.keys import Keys
from octavo.server.loading import Loading
from octavo.server.metrics import Metrics
from octavo.server.tools.setup import Parsing
from octavo.server.workers import Workers
from octavo.text import sandbox
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import TOO_LONG, EngineDead, InvalidRequest

LONG_TEXT = 8 << 10  # characters; longer prompts are tokenized in a thread
HUGE_TEXT = 1 << 20  # characters; longer ones are refused untokenized when they cannot fit

T = TypeVar("T")


class ServerState:
    """One per server. ``tokenizer`` and ``template`` are set before the engine is ready; both
    may stay None (--skip-tokenizer-init; a model without a chat template). Raises ConfigError for
    an --api-key-file that cannot be used."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig,
        client: Replicas,
        loading: Loading | None = None,
    ) -> None:
        """``loading``: how far the start has come, for those who ask meanwhile."""
        self.config = config
        self.keys = Keys(server.api_key, server.api_key_file)
        self.server = replace(server, api_key=["***"] * len(server.api_key))
        self.client = client
        self.model_names = config.model.served_model_name or [config.model.model]
        self.metrics = Metrics(client, self.model_names[0])
        client.on_step = self.metrics.on_step
        self.workers = Workers()
        self.tokenizer: Tokenizer | None = None
        self.template: ChatTemplate | None = None
        self.parsing: Parsing | None = None  # with a tokenizer
        settings = config.structured_outputs_config
        self.grammars = GrammarChecker(
            self.vocabulary,
            lambda: self.require_tokenizer("structured_outputs").special_texts,
            bool(settings.get("disable_any_whitespace", False)),
        )
        self.byte_table: list[bytes] = []  # of the tokenizer's ids
        self.loading = loading or Loading()
        self.loaded = False  # engine and text side are both there
        self.created = int(time.time())
        self.num_in_flight = 0  # HTTP requests being generated for
        self.metrics.in_flight = lambda: self.num_in_flight
        facts = msgspec.json.encode([config.model, config.enforce_eager])
        digest = hashlib.blake2b(facts, digest_size=6).hexdigest()
        self.fingerprint = f"fp_octavo_{__version__}_{digest}"
        scope = config.cache.prefix_cache_scope
        self._salted = scope == "key" or (scope == "auto" and self.keys.several_tenants)

    def salt(self, key_name: bytes, client_salt: str | None) -> bytes:
        """Who shares cached blocks: blake2b(key's name, the client's own salt); empty = all."""
        name = key_name if self._salted else b""
        if not name and client_salt is None:
            return b""
        own = b"" if client_salt is None else b"\x01" + client_salt.encode()
        return hashlib.blake2b(own, key=name, digest_size=16).digest()

    def check_serving(self) -> None:
        """Raises EngineDead while loading, draining, stalled or dead."""
        if self.client.draining:
            raise EngineDead("the server is shutting down")
        if self.loads:
            raise EngineDead(f"the model is still loading: {self.loading}")
        if problem := self.client.problem():
            raise EngineDead(problem)

    @property
    def loads(self) -> bool:
        """The start is under way."""
        return not self.loaded and self.client.alive and not self.client.draining

    def load(self) -> dict[str, object]:
        """How much there is to do, for load balancers: HTTP requests being generated for (vLLM's
        ``server_load``), sequences in the engines and in each of them, and the share of KV blocks
        that these hold, 0 to 1 (in the whole that of the engines that serve; 0 without one). Of
        several API processes the sum."""
        totals = self.metrics.totals()
        replicas = {replica.index: replica for replica in self.client.replicas}
        return {
            "server_load": totals.num_in_flight,
            "num_running": totals.num_running,
            "num_waiting": totals.num_waiting,
            "kv_cache_usage": kv_cache_usage(*(r for r in replicas.values() if r.serves)),
            "engines": [
                {
                    "engine": index,
                    "serves": replicas[index].serves,
                    "num_running": engine.num_running,
                    "num_waiting": engine.num_waiting,
                    "kv_cache_usage": kv_cache_usage(replicas[index]),
                }
                for index, engine in totals.engines.items()
                if index in replicas
            ],
        }

    def check_model(self, name: str | None) -> str:
        """The name to report. None means the served model; raises NotFound for another."""
        if name is None or name in self.model_names:
            return name or self.model_names[0]
        raise NotFound(
            f"model {name!r} does not exist here; this server serves "
            f"{', '.join(map(repr, self.model_names))}",
            "model",
            "model_not_found",
        )

    def require_tokenizer(self, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{param} needs a tokenizer and this server runs with --skip-tokenizer-init: send "
                "token ids to /v1/completions",
                param,
            )
        return self.tokenizer

    def require_template(self) -> ChatTemplate:
        self.require_tokenizer("messages")
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template: start the server with --chat-template FILE, or "
                "send text to /v1/completions",
                "messages",
            )
        return self.template

    def vocabulary(self) -> Vocabulary:
        """The tokens of the model, as a grammar's matcher knows them. Raises InvalidRequest without
        a tokenizer."""
        tokenizer, info = self.require_tokenizer("structured_outputs"), self.client.info
        return Vocabulary.of_model(
            info.vocab_size, self.byte_table, tokenizer.special_ids, info.eos_ids
        )

    def check_text_length(self, num_chars: int, param: str) -> None:
        """Raises InvalidRequest for a text that cannot fit, before minutes are spent on it."""
        if num_chars <= HUGE_TEXT or self.tokenizer is None:
            return
        least = num_chars // self.tokenizer.longest_token
        limit = self.client.info.max_model_len
        if least > limit:
            raise InvalidRequest(
                f"{param} holds {num_chars} characters, at least {least} tokens; this model's "
                f"maximum context length is {limit} tokens for prompt and output together",
                param,
                TOO_LONG,
            )

    async def encode(
        self, work: Callable[[], T], num_chars: int, request: Request | None = None
    ) -> T:
        """Runs a tokenization or rendering. A long one runs in a thread, so that streams go on
        meanwhile, and so does one that turns out long, from its beginning: what a template takes
        is not known before.

        ``request``, once its body has been read, bounds the length of what it brought (a
        conversation is more than its contents), and ends the wait when the client leaves.
        """
        if request is not None:
            num_chars = max(num_chars, request.scope["octavo.body_size"])
        if num_chars <= LONG_TEXT:
            with contextlib.suppress(sandbox.NotBrief), sandbox.brief():
                return work()
        receive = request.receive if request is not None else None
        return await self.workers.run(work, num_chars, receive)
