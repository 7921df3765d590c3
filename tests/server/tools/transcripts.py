"""All transcripts."""

from __future__ import annotations

from tests.server.tools.transcripts_json import GRANITE, HERMES, JSON, LLAMA, MISTRAL
from tests.server.tools.transcripts_other import DEEPSEEK, HARMONY, PYTHONIC, QWEN_CODER

CASES = [
    *(HERMES + GRANITE + MISTRAL + LLAMA + JSON),
    *(PYTHONIC + QWEN_CODER + DEEPSEEK + HARMONY),
]
