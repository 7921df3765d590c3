"""Offline work over a Ray cluster: a pipeline of Ray Data whose workers hold an ``octavo.LLM``.

    import ray
    from octavo.ray import batch_generate
    from octavo import SamplingParams

    questions = ray.data.read_json("questions.jsonl")  # rows with a column "prompt"
    params = SamplingParams(max_tokens=64)
    answers = batch_generate(
        questions, model="smollm2-135m", sampling_params=params, concurrency=4
    )
    answers.write_json("answers")

Needs ``pip install 'octavo[ray]'``. Uses the cluster that the program is connected to, or that
``ray.init`` finds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.types import ConfigError, EngineDead, InvalidRequest, OctavoError, SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

Row = dict[str, Any]

# Columns that are added, beside the row's own: of a row with an error the text is "".
COLUMNS = ("generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens", "error")


def batch_generate(
    dataset: Any,
    *,
    model: str,
    sampling_params: SamplingParams | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 256,
    num_gpus: float | None = None,
    num_cpus: float | None = None,
    column: str | None = None,
    **settings: Any,
) -> Any:
    """Answers every row of a ``ray.data.Dataset``; returns the dataset with further columns.

    A row is asked by its column "messages" (a conversation: dicts with role and content), else
    "prompt" (text, or a list of token ids); ``column`` names another one: a list of dicts is a
    conversation. Added: "generated_text", "finish_reason", "num_prompt_tokens",
    "num_generated_tokens", and "error": None, or why this row has no answer (too long, empty …);
    the others go on. Rows keep their own columns; like Ray Data itself it promises no order among
    blocks unless ``DataContext.execution_options.preserve_order`` is set.

    Args:
        model: as ``octavo.LLM`` takes it; every node must find it.
        sampling_params: for all rows; None: the checkpoint's defaults.
        concurrency: actors, each with the whole model, or (least, most) of them.
        batch_size: rows that an actor is given at a time; its engine batches them continuously.
        num_gpus, num_cpus: of one actor. Default: as many GPUs as ``tensor_parallel_size`` ×
            ``pipeline_parallel_size`` where the cluster has any, else as many CPUs as
            ``cpu_threads`` (1).
        settings: of ``octavo.LLM`` (``max_model_len=4096``).

    Raises ConfigError where Ray is not installed. The pipeline fails where an engine cannot start
    or dies, not for a row.
    """
    ray = _ray()
    if not ray.is_initialized():
        ray.init(address="auto")  # never a cluster of its own
    least, most = (concurrency,) * 2 if isinstance(concurrency, int) else concurrency
    return dataset.map_batches(
        _Generator,
        fn_constructor_args=(model, sampling_params, column, settings),
        compute=ray.data.ActorPoolStrategy(min_size=least, max_size=most),
        batch_size=batch_size,
        batch_format="pyarrow",
        **_resources(ray, num_gpus, num_cpus, settings),
    )


def _ray() -> Any:
    """The package, not this module; with ``ray.data``."""
    try:
        return importlib.import_module("ray.data") and importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"octavo.ray: Ray Data cannot be imported ({error}): pip install 'octavo[ray]'"
        ) from None


def _resources(
    ray: Any, num_gpus: float | None, num_cpus: float | None, settings: Row
) -> dict[str, float]:
    """What Ray has to keep free for one actor."""
    world = int(settings.get("tensor_parallel_size", 1)) * int(
        settings.get("pipeline_parallel_size", 1)
    )
    if num_gpus is None and num_cpus is None:
        if ray.cluster_resources().get("GPU", 0):
            num_gpus = world
        else:
            num_cpus = world * int(settings.get("cpu_threads") or 1)
    asked = {"num_gpus": num_gpus, "num_cpus": num_cpus}
    return {name: count for name, count in asked.items() if count is not None}


class _Generator:
    """One actor: an engine, and the way from rows to answers."""

    def __init__(
        self, model: str, params: SamplingParams | None, column: str | None, settings: Row
    ) -> None:
        from octavo.llm import LLM

        self._llm: LLM = LLM(model, **settings)
        self._params = params or self._llm.get_default_sampling_params()
        self._column = column

    def __call__(self, table: Any) -> Any:
        """A ``pyarrow.Table`` with the columns of ``COLUMNS`` added."""
        import pyarrow

        answers = self.answer(table.to_pylist())
        types = (pyarrow.string(), pyarrow.string(), pyarrow.int64(), pyarrow.int64())
        for name, kind in zip(COLUMNS, (*types, pyarrow.string())):
            values = pyarrow.array([answer[name] for answer in answers], type=kind)
            if name in table.column_names:
                table = table.set_column(table.column_names.index(name), name, values)
            else:
                table = table.append_column(name, values)
        return table

    def answer(self, rows: list[Row]) -> list[Row]:
        """Of each row its further columns, in the same order."""
        answers: list[Row] = [_failed("") for _ in rows]
        asked: list[tuple[int, list[int]]] = []
        for index, row in enumerate(rows):
            try:
                asked.append((index, self._prompt(row)))
            except InvalidRequest as error:
                answers[index] = _failed(str(error))
        try:
            outputs = self._llm.generate([ids for _, ids in asked], self._params, use_tqdm=False)
        except OctavoError:  # of one row: the others are answered without it
            for index, ids in asked:
                answers[index] = self._alone(ids)
        else:
            for (index, _), output in zip(asked, outputs):
                answers[index] = _answered(output)
        return answers

    def _alone(self, ids: list[int]) -> Row:
        try:
            return _answered(self._llm.generate(ids, self._params, use_tqdm=False)[0])
        except EngineDead:  # no row's fault: Ray starts the actor again
            raise
        except OctavoError as error:
            return _failed(str(error))

    def _prompt(self, row: Row) -> list[int]:
        """Its token ids. Raises InvalidRequest for what can never run."""
        column = self._column or ("messages" if row.get("messages") is not None else "prompt")
        value = row.get(column)
        if value is None:
            raise InvalidRequest(f"the row has no {column!r}; its columns are {sorted(row)}")
        if isinstance(value, str):
            ids = self._llm.get_tokenizer().encode(value)
        elif value and isinstance(value[0], dict):
            # Arrow gives every message the fields that any of them has.
            messages = [{k: v for k, v in m.items() if v is not None} for m in value]
            ids = self._llm.encode_chat(messages)
        else:
            ids = list(value)
        self._llm._answer(ids, self._params, None)  # raises where it can never run
        return ids


def _answered(output: Any) -> Row:
    choice = output.outputs[0]
    return {
        "generated_text": choice.text,
        "finish_reason": str(choice.finish_reason),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_generated_tokens": len(choice.token_ids),
        "error": None,
    }


def _failed(why: str) -> Row:
    return dict(zip(COLUMNS, ("", None, 0, 0, why)))
