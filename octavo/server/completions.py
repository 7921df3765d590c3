"""POST /v1/completions."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from starlette.requests import Request

from octavo.server.answers import Answer
from octavo.server.generation import Choice, Piece
from octavo.server.inputs import listed, token_ids
from octavo.server.logprobs import CompletionLogprobs, joined, prompt_logprobs
from octavo.server.protocol import CompletionRequest
from octavo.server.state import ServerState
from octavo.server.streaming import encode_json, members


async def prompts_of(
    state: ServerState, body: CompletionRequest, request: Request | None = None
) -> tuple[list[list[int]], list[str | None]]:
    """Token ids of each prompt, and its text where the client sent text. Raises InvalidRequest."""
    if body.echo:
        state.require_tokenizer("echo")
    prompts = listed(body.prompt, "prompt")
    state.client.check_queue(len(prompts))  # before thousands of prompts are tokenized
    ids = await token_ids(
        state,
        prompts,
        "prompt",
        add_special_tokens=body.add_special_tokens,
        truncated=body.truncate_prompt_tokens is not None,
        request=request,
    )
    return ids, [prompt if isinstance(prompt, str) else None for prompt in prompts]


class CompletionAnswer(Answer):
    """The response to a completion request, whole or as events."""

    kind = event_kind = "text_completion"
    several = True
    body: CompletionRequest

    @cached_property
    def _shapers(self) -> dict[int, CompletionLogprobs]:
        """By choice: text offsets go on from event to event."""
        return {c.index: CompletionLogprobs(self.names) for c in self.generation.choices}

    # ---- whole ----

    def choice(self, choice: Choice, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        logprobs = None
        if self.body.logprobs is not None:
            shaper = self._shapers[choice.index]
            rows = [row for piece in pieces for row in piece.logprobs]
            if self.body.echo:
                logprobs = self._prompt_block(shaper, choice)
            block = shaper.block(rows, stopped=self.stopped(choice))
            logprobs = joined(logprobs, block) if logprobs else block
        result = {
            "index": choice.index,
            "text": self._echo(choice) + text if self.body.echo else text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self.body.prompt_logprobs is not None:
            prompt = choice.prompt
            result["prompt_logprobs"] = prompt_logprobs(
                self.names, len(prompt.ids), prompt.logprobs
            )
        if self.body.return_token_ids:
            result["token_ids"] = choice.token_ids
            result["prompt_token_ids"] = choice.prompt.ids
        return result

    # ---- events ----

    @cached_property
    def _plain(self) -> bool:
        body = self.body
        reported = body.logprobs is not None or body.prompt_logprobs is not None
        return not (body.echo or reported or body.return_token_ids)

    def events(self, batch: list[Piece]) -> bytes:
        frame, plain = self.frames.frame, self._plain
        return b"".join(
            [
                frame(self._event(piece, plain), self.chunk_tail(piece))
                for piece in batch
                if piece.text or piece.is_last or not plain
            ]
        )

    def _event(self, piece: Piece, plain: bool) -> bytes:
        choice = piece.choice
        text, logprobs, more = piece.text, b"null", b""
        if not plain:
            if self.body.echo and piece.is_first:
                text = self._echo(choice) + text
            if self.body.logprobs is not None:
                logprobs = encode_json(self._streamed_logprobs(piece))
            if self.body.return_token_ids:
                more = members(token_ids=piece.token_ids)
                if piece.is_first:
                    more += members(prompt_token_ids=choice.prompt.ids)
            if self.body.prompt_logprobs is not None and piece.is_first:
                prompt = choice.prompt
                shaped = prompt_logprobs(self.names, len(prompt.ids), prompt.logprobs)
                more += members(prompt_logprobs=shaped)
        end = b"null", b"null"
        if piece.is_last:
            end = encode_json(choice.finish_reason), encode_json(choice.stop_reason)
        return b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b}' % (
            choice.index, encode_json(text), logprobs, *end, more,
        )  # fmt: skip

    def _streamed_logprobs(self, piece: Piece) -> dict[str, Any]:
        shaper = self._shapers[piece.choice.index]
        stopped = piece.is_last and self.stopped(piece.choice)
        first = None
        if self.body.echo and piece.is_first:
            first = self._prompt_block(shaper, piece.choice)
        block = shaper.block(piece.logprobs, stopped=stopped)
        return joined(first, block) if first else block

    # ---- echo ----

    def _echo(self, choice: Choice) -> str:
        prompt = choice.prompt
        if prompt.text is not None:
            return prompt.text
        tokenizer = self.state.require_tokenizer("echo")
        return tokenizer.decode(prompt.ids, self.body.skip_special_tokens is not False)

    def _prompt_block(self, shaper: CompletionLogprobs, choice: Choice) -> dict[str, Any]:
        """Logprobs of the prompt's tokens; an added BOS takes no room in the text."""
        prompt = choice.prompt
        rows = [prompt.logprobs.get(position) for position in range(len(prompt.ids))]
        tokenizer = self.state.tokenizer
        hidden = tokenizer is not None and prompt.ids[0] == tokenizer.bos_id
        return shaper.block(rows, prompt.ids, hidden_first=hidden)
