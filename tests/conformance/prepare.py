"""Builds the models of the conformance tests and prints where they are, as JSON.

Run by the server's Python: the clients' environment has neither torch nor safetensors.
"""

from __future__ import annotations

import json
import random
import sys

from tests.cases.scripts import random_split
from tests.fixtures import models
from tests.fixtures.scripted import scripted_model

# What the scripted model says: a call of the tool, what it makes of the tool's result, the call by
# which some clients ask for a structured answer, and the structured answer itself.
CALL = '<tool_call>\n{"name": "%s", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
SAYINGS = [
    CALL % "get_weather",
    "It will rain in Zürich ☔, 11 degrees.",
    CALL % "Weather",
    '{"city": "Zürich", "days": 2}',
]
# Which of them is chosen by what a real model would look at.
TEMPLATE = """
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}
{{- message['content'] or '' }}
{%- for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if messages[-1]['role'] == 'tool' and 'rain' in messages[-1]['content'] %}<|go1|>
{%- elif tools and tools[0]['function']['name'] == 'Weather' %}<|go2|>
{%- elif tools %}<|go0|>
{%- else %}<|go3|>
{%- endif %}{% endif %}"""


def main() -> None:
    rng = random.Random(7)
    sequences = [[*random_split(text.encode(), rng)] for text in SAYINGS]
    scripted = scripted_model("clients", sequences, chat_template=TEMPLATE)
    places = {name: str(models.path(name)) for name in ("G", "G-bf16")}
    json.dump({**places, "S": str(scripted.path)}, sys.stdout)


if __name__ == "__main__":
    main()
