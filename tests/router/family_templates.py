"""Small chat templates in the style of each family, and the special tokens that they use."""

from __future__ import annotations

from quire.replica.builtin_model import CHECKPOINT

_CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with CALL.<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

HERMES = (CHECKPOINT / "chat_template.jinja").read_text()
QWEN3 = _CHATML.replace("CALL", "<tool_call>")
# The prompt opens the reasoning.
THINKING = QWEN3.partition("{% if enable_thinking")[0] + "<think>\n{% endif %}"
QWEN3_5 = _CHATML.replace("CALL", "<tool_call><function=name><parameter=key>value</parameter>")
SMOLLM2 = _CHATML.replace("CALL", "<tool_call>[a call]</tool_call>").replace("<think>", "<t>")
LLAMA3 = """{{- bos_token }}{%- for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{%- set call = m.tool_calls[0].function %}
{{- ""}}{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- else %}{%- if tools and loop.first %}{{ tools | tojson(indent=4) }}
{% endif %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}{%- if m.role == 'user' %}
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif %}[INST]{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' %}[TOOL_RESULTS]
{{- {'content': m.content, 'call_id': m.tool_call_id} | tojson }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{{ eos_token }}{%- endif %}{%- endfor %}"""
MISTRAL_V11 = """{%- for m in messages %}{%- if m.tool_calls %}
{%- for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}{%- else %}[INST]{{ (tools or []) | tojson }}{{ m.content }}[/INST]{%- endif %}{%- endfor %}"""
# Reasoning is written before calls only. A message with calls has either reasoning or text.
GPT_OSS = """{%- for m in messages %}
{%- if m.role == "tool" %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}
{{- "<|end|>" }}
{%- elif m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception("content and thinking") }}{% endif %}
{%- if m.content or m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content or m.thinking }}<|end|>
{%- endif %}{%- set call = m.tool_calls[0].function %}<|start|>assistant to=
{{- "functions." + call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}
{%- endfor %}Reasoning: {{ reasoning_effort or 'medium' }}
{%- for tool in tools or [] %}type {{ tool.function.name }} = {{ tool.function.parameters | tojson }}
{%- endfor %}<|start|>assistant"""
PHI4_MINI = """{%- for m in messages %}<|{{ m.role }}|>{{ m.content }}
{%- if tools and loop.first %}<|tool|>{{ tools | tojson }}<|/tool|>{%- endif %}
{%- for call in m.tool_calls %}<|tool_call|>[{{ call.function | tojson }}]<|/tool_call|>{%- endfor %}<|end|>
{%- endfor %}<|assistant|>"""
GRANITE = """{%- if tools %}<|start_of_role|>tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>
{%- endif %}{%- for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}
{%- for call in m.tool_calls %}<|tool_call|>[{{ call.function | tojson }}]{%- endfor %}<|end_of_text|>
{%- endfor %}{%- if thinking %}Think in <think></think>.
{%- endif %}<|start_of_role|>assistant<|end_of_role|>"""
GEMMA4 = """{%- for m in messages %}<|turn>{{ m.role }}
{{ m.content }}{%- for call in m.tool_calls %}<|tool_call>call:{{ call.function.name }}{ }<tool_call|>
{%- endfor %}<turn|>{%- endfor %}{%- for tool in tools or [] %}<|tool>{{ tool.function.name }}<tool|>
{%- endfor %}{%- if enable_thinking %}<|think|>{%- endif %}<|turn>model
{# <|channel>thought
#}"""
# A template without tools.
PLAIN = """{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}assistant:"""

TEMPLATES = {
    "hermes": HERMES,
    "qwen3": QWEN3,
    "qwen3_5": QWEN3_5,
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "gpt_oss": GPT_OSS,
    "phi4_mini": PHI4_MINI,
    "granite": GRANITE,
    "gemma4": GEMMA4,
}
# Special tokens of the checkpoints.
SPECIAL = {
    "hermes": [],
    "qwen3": [],
    "qwen3_5": [],
    "gemma4": ["<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>'],
    "smollm2": [],
    "llama3": ["<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["[TOOL_CALLS]", "[INST]", "[/INST]"],
    "mistral_v11": ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"],
    "gpt_oss": [
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "<|end|>",
        "<|call|>",
        "<|constrain|>",
        "<|return|>",
    ],
    "phi4_mini": ["<|tool_call|>", "<|/tool_call|>"],
    "granite": ["<|tool_call|>", "<|start_of_role|>"],
}
