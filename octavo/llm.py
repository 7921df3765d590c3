"""LLM and AsyncLLM: the engine in this process, for scripts and notebooks. No server, no HTTP."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from octavo.assembly import Answer, Assembler, Pending, Ranking, Vector, candidates
from octavo.engine.admission import prepare_embedding
from octavo.engine.beams import Beam, BeamSearch, no_stop
from octavo.engine.messages import Outputs, unpack_ids
from octavo.frontend import Frontend, Message, Prompt, listed
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    EmbeddingRequestOutput,
    RequestOutput,
)
from octavo.progress import AnswerProgress, InterruptBetweenSteps
from octavo.text.chat import check_template_variables
from octavo.text.output import ChoiceText, stop_string_in
from octavo.types import BeamSearchParams, EngineDead, InvalidRequest, SamplingParams, StepProfile

logger = logging.getLogger(__name__)

# Steps whose tokens are given to their answers in one go.
STEPS_TOGETHER = 32


class LLM(Frontend):
    """Offline inference.

        llm = LLM("smollm2-135m")
        outputs = llm.generate(["The capital of France is"], SamplingParams(temperature=0))

    ``settings`` are the command line's flags with underscores (``max_model_len=4096``).
    Raises ConfigError when the model or a setting cannot be used.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # Nobody reads along, so no request need wait less at the cost of all.
        super().__init__(model, **{"adaptive_chunks": False, **settings})
        self._usable = True

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt. All are queued at once and batched continuously; results come in
        the order of the prompts. ``use_tqdm`` shows a progress bar. Ctrl-C ends it after the step
        that runs, and the engine stays usable; a second one ends it, and the engine, at once.

        Raises InvalidRequest before anything runs if one of them can never run.
        """
        entries = listed(prompts)
        answers = [
            self._answer(prompt, params, None)
            for prompt, params in zip(entries, self._params_for(entries, sampling_params))
        ]
        self._run(answers, use_tqdm)
        return [answer.output() for answer in answers]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt: the hidden states after the final norm, of the "last" token or
        their "mean" over all tokens; ``normalize``: of length 1. Computed like prompts of
        ``generate``, in chunks and mixed batches; "last" also reuses cached prefixes.

        ``output.outputs.embedding`` is the list of floats. ``truncate_prompt_tokens`` keeps the
        last so many tokens of longer prompts (-1: the model's length).

        Raises InvalidRequest before anything runs if one of them can never run.
        """
        vectors = []
        for prompt in listed(prompts):
            _, ids = self._tokenized(prompt)
            request = prepare_embedding(
                self.info,
                ids,
                pooling,
                handle=self._next_handle,
                request_id=str(self._next_handle),
                arrival=time.monotonic(),
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            self._next_handle += 1
            vectors.append(Vector(request, ids, normalize))
        self._run(vectors, use_tqdm)
        return [vector.output() for vector in vectors]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The ``beam_width`` best continuations of each prompt (docs/sampling.md). The searches go
        step by step together, at most ``concurrency_limit`` prompts at a time.

        Raises InvalidRequest before anything runs if one of them can never run.
        """
        searches = [self._search(prompt, params) for prompt in listed(prompts)]
        limit = concurrency_limit or max(1, len(searches))
        with AnswerProgress(len(searches), use_tqdm) as progress:
            for begin in range(0, len(searches), limit):
                live = searches[begin : begin + limit]
                while live:
                    self._advance(live)
                    progress.add(sum(search.done for search in live))
                    live = [search for search in live if not search.done]
        return [
            BeamSearchOutput([self._sequence(search, beam) for beam in search.best()])
            for search in searches
        ]

    def _search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearch:
        params.validate()
        limits = params.sampling_params()
        request = self._answer(prompt, limits, None).request
        return BeamSearch(
            request,
            params,
            self.info,
            partial(stop_string_in, self.get_tokenizer(), limits) if limits.stop else no_stop,
            2 * params.beam_width,
        )

    def _advance(self, searches: Sequence[BeamSearch]) -> None:
        """One step of each."""
        steps = []
        for search in searches:
            steps.append([Ranking(request) for request in search.requests(self._next_handle)])
            self._next_handle += len(steps[-1])
        self._run([ranking for step in steps for ranking in step], False)
        for search, step in zip(searches, steps):
            search.advance([ranking.row for ranking in step if ranking.row is not None])

    def _sequence(self, search: BeamSearch, beam: Beam) -> BeamSearchSequence:
        text = ChoiceText(
            self.tokenizer, search.params.sampling_params(), eos_ids=self.info.eos_ids
        )
        text.push(beam.tokens)
        text.finish()
        return BeamSearchSequence(
            tokens=[*unpack_ids(search.request.prompt_ids).tolist(), *beam.tokens],
            text=text.text,
            cum_logprob=beam.cum_logprob,
            logprobs=[candidates(self.tokenizer, r.ids, r.values, r.rank) for r in beam.rows],
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of them."""
        check_template_variables(chat_template_kwargs or {})
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        prompts: list[Prompt] = [
            self.encode_chat(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def start_profile(self, directory: str | Path = "profile") -> None:
        """Traces all steps from now on. Raises ConfigError if ``directory`` cannot be written."""
        self.executor.start_profile(Path(directory))

    def stop_profile(self) -> StepProfile:
        """Writes the trace (chrome://tracing, ui.perfetto.dev) and tells where the time went."""
        return self.executor.stop_profile()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks. False while requests run."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Ends the worker thread; the model's memory goes with this object."""
        self._usable = False
        self.executor.shutdown()
        self.engine.grammars.close()

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        given: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if len(given) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts but {len(given)} sampling_params: give one for all, or "
                "one for each"
            )
        return list(given)

    def _run(self, answers: Sequence[Pending], show_progress: bool) -> None:
        """Until all are finished. Raises the first one's failure."""
        if not self._usable:
            raise EngineDead("the engine was closed, or stopped in the middle of a step")
        assembler = Assembler()
        # So many steps are assembled at a time: one, where a text may have to stop the engine.
        together = STEPS_TOGETHER if all(a.is_read_at_its_end for a in answers) else 1
        waiting: list[Outputs] = []
        total = sum(answer.request.params.n for answer in answers)
        with (
            InterruptBetweenSteps() as interrupt,
            AnswerProgress(total, show_progress) as progress,
        ):
            try:
                for answer in answers:
                    assembler.add(answer)
                    self.engine.add(answer.request)
                while self.engine.has_work:
                    outputs = self.engine.step()
                    if outputs is not None:
                        progress.update(outputs)
                        if together == 1:
                            self.engine.abort(assembler.apply(outputs))
                        else:
                            waiting.append(outputs)
                    if len(waiting) >= together:
                        assembler.apply_together(waiting)
                        waiting.clear()
                    interrupt.check()
                assembler.apply_together(waiting)
            except BaseException:
                self._abandon(answers)
                raise
        for answer in answers:
            answer.raise_failure()

    def _abandon(self, answers: Sequence[Pending]) -> None:
        """Empties the engine of these; it is usable again once that has gone through."""
        self._usable = False
        self.engine.abort([h for answer in answers for h in answer.open_handles])
        while self.engine.has_work:
            self.engine.step()
        self._usable = True


class AsyncLLM(Frontend):
    """The same engine for asyncio programs; it runs on a thread of its own.

        async for output in llm.generate("Hello", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)

    Each output holds the whole text so far. Leaving the loop early aborts the request.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        super().__init__(model, **settings)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._assembler = Assembler()
        self._waiters: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Queue[Any]]] = {}
        self._end: EngineDead | None = None  # set before those who wait are told
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields the answer as it grows, after each step that added to it."""
        params = sampling_params or self.get_default_sampling_params()
        answer = self._answer(prompt, params, request_id)
        waiting: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._waiters[answer.request.handle] = (asyncio.get_running_loop(), waiting)
        try:
            if self._end is not None:  # after the entry above, so that nobody waits unseen
                raise self._end
            self._inbox.put(lambda: self._add(answer))
            finished = False
            while not finished:
                output = await waiting.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            self._waiters.pop(answer.request.handle, None)
            if not answer.finished:
                self._inbox.put(lambda: self._abort(answer))

    def close(self) -> None:
        """Ends the engine's thread; open requests end with EngineDead."""
        self._inbox.put(None)
        self._thread.join()

    def _add(self, answer: Answer) -> None:
        self._assembler.add(answer)
        self.engine.add(answer.request)

    def _abort(self, answer: Answer) -> None:
        self.engine.abort(answer.open_handles)

    def _run(self) -> None:
        end = EngineDead("the engine was closed")
        try:
            while self._read_inbox():
                outputs = self.engine.step()
                if outputs is not None:
                    self.engine.abort(self._assembler.apply(outputs))
                    for answer in self._assembler.touched:
                        if not self._tell(answer.request.handle, answer.failure or answer.output()):
                            self._abort(answer)
        except Exception as failure:
            logger.exception("the engine cannot go on")
            end = EngineDead(f"the engine failed: {failure}")
        self._end = end
        for handle in list(self._waiters):
            self._tell(handle, end)
        self.executor.shutdown()
        self.engine.grammars.close()

    def _read_inbox(self) -> bool:
        """Carries out what was asked for; waits only when idle. False: close."""
        while not (self.engine.has_work and self._inbox.empty()):
            call = self._inbox.get()
            if call is None:
                return False
            call()
        return True

    def _tell(self, handle: int, news: RequestOutput | Exception) -> bool:
        """False if the event loop that waits for it has been closed."""
        if (waiter := self._waiters.get(handle)) is None:
            return True  # it has left, and said so
        loop, waiting = waiter
        try:
            loop.call_soon_threadsafe(waiting.put_nowait, news)
        except RuntimeError:
            self._waiters.pop(handle, None)
            return False
        return True
