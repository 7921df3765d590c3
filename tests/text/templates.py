"""Chat templates of the usual kinds, written for these tests, with the tricks that real ones use:
whitespace control, macros, namespaces, loop controls, filters, refusals."""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

# Tools in the system turn, calls and results in tags, reasoning of earlier answers left out.
HERMES = """\
{%- macro shown(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}{{- part.text }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set first = 0 %}
{%- if messages[0].role == 'system' %}
    {%- set first = 1 %}
{%- endif %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if first %}{{- shown(messages[0].content) + '\\n\\n' }}{%- endif %}
    {{- "You may call functions:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif first %}
    {{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last = (messages | length - 1) - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages[first:] %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + shown(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content is string and loop.index0 + first > ns.last %}
            {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {{- shown(message.content).split('</think>')[-1].lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

# A date, tools as indented JSON, one call a message, contents trimmed.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "Answer with a JSON call.\\n\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|im_end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n' }}
        {{- message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- else %}
        {{- "<|im_start|>ipython\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n\\n' }}
{%- endif %}"""

# Strict about who speaks when; the system message goes into the last user turn.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Conversation roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if not tool_call.id is defined or tool_call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be 9 characters!") }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user, assistant and tool roles are supported!") }}
    {%- endif %}
{%- endfor %}"""

# No system role; the assistant is called "model"; contents trimmed.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not \
supported') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != \
(loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must alternate user/assistant/\
user/assistant/...') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' \
%}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model
'}}{% endif %}"""

# Arguments of calls are text; a message of calls is one whose content is null.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{'<|User|>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is none %}\
{%- set ns.is_tool = false -%}{%- set ns.is_first = true -%}\
{%- for tool in message['tool_calls'] %}\
{{'<|Assistant|><|tool_calls_begin|>' + tool['type'] + '<|tool_sep|>' + tool['function']['name'] \
+ '\\n```json\\n' + tool['function']['arguments'] + '\\n```<|tool_call_end|>'}}\
{%- endfor %}{{'<|tool_calls_end|>' + eos_token}}{%- endif %}\
{%- if message['role'] == 'assistant' and message['content'] is not none %}\
{%- if ns.is_tool %}{{'<|tool_outputs_end|>' + message['content'] + eos_token}}\
{%- set ns.is_tool = false -%}{%- else %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<|Assistant|>' + content + eos_token}}{%- endif %}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}\
{{'<|tool_outputs_begin|>' + message['content'] + '<|tool_output_end|>'}}{%- endif %}\
{%- endfor -%}\
{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"""

# Typed parts only, answers marked for training, documents.
PARTS = """\
{%- if documents %}
{%- for document in documents %}
[{{ loop.index0 }}] {{ document['title'] | default('untitled') | upper }}: {{ document['text'] }}
{% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}
{%- for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>
{% endgeneration %}
{%- else %}
<|im_start|>{{ message.role | title }}
{%- for part in message.content %}
{%- if part.type != 'text' %}{% continue %}{% endif %}
 {{ part.text }}
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "hermes": HERMES,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "parts": PARTS,
}
