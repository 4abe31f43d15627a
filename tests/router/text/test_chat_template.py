"""Chat templates: equal to transformers, bounded, and strict about messages."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.protos.errors import InvalidRequest, UnsupportedField
from quire.router.text.chat_template import ChatTemplate, TemplateOptions

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{%- set ns = namespace(multi_step=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" %}
        {%- set ns.multi_step = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ message['content'] + eos_token }}
{% endif %}
{% endfor %}"""
PARTS = """{% for message in messages %}{{ message.role ~ ': ' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content | selectattr('type', 'equalto', 'text') %}
{{- '[' ~ part.text ~ ']' }}{% endfor %}{% endif %}
{{ {'name': message.name, 'é': dict(a=1)} | tojson(indent=1) if message.name else '' }}
{% endfor %}"""
REAL = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "parts": PARTS}

CONTENT = st.text(st.sampled_from("hi {}%<>&'\"\n\té你</think>"), max_size=20)
ROLES = st.sampled_from(["system", "user", "assistant", "tool"])
TURNS = st.lists(st.tuples(ROLES, CONTENT), min_size=1, max_size=5)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def reference(byte_level):
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<s>", eos_token="</s>"
    )


@pytest.mark.parametrize("name", REAL)
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(turns=TURNS, add_generation_prompt=st.booleans(), named=st.booleans())
def test_text_equals_transformers(name, turns, add_generation_prompt, named, reference):
    messages = [{"role": role, "content": content, "name": None} for role, content in turns]
    if named:
        messages[0]["name"] = "Zoë <b>"
    template = ChatTemplate(REAL[name], {"bos_token": "<s>", "eos_token": "</s>"})
    try:
        expected = reference.apply_chat_template(
            messages,
            chat_template=REAL[name],
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:
        with pytest.raises(InvalidRequest) as caught:
            template.render(messages, TemplateOptions(add_generation_prompt=add_generation_prompt))
        assert str(error) in caught.value.message
        return
    assert (
        template.render(messages, TemplateOptions(add_generation_prompt=add_generation_prompt))
        == expected
    )


@pytest.mark.parametrize("name", REAL)
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(turns=TURNS)
def test_the_last_message_is_continued_as_by_transformers(name, turns, reference):
    messages = [{"role": role, "content": content, "name": None} for role, content in turns]
    template = ChatTemplate(REAL[name], {"bos_token": "<s>", "eos_token": "</s>"})
    try:
        expected = reference.apply_chat_template(
            messages, chat_template=REAL[name], tokenize=False, continue_final_message=True
        )
    except Exception:
        # transformers also refuses text that the template cuts, such as what stands before </think>.
        if messages[-1]["content"] in ("", " ", "\n") or "</think>" in messages[-1]["content"]:
            return
        with pytest.raises(InvalidRequest):
            template.render(
                messages, TemplateOptions(add_generation_prompt=False, continue_final_message=True)
            )
        return
    rendered = template.render(
        messages, TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    )
    assert rendered == expected


def test_the_last_part_of_the_last_message_is_continued():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [*USER, {"role": "assistant", "content": parts}]
    options = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert ChatTemplate(PARTS).render(messages, options).endswith("[a][b")
    assert ChatTemplate(QWEN).render(messages, options).endswith("<|im_start|>assistant\na\nb")
    messages[-1] = {"role": "assistant", "content": []}
    with pytest.raises(InvalidRequest, match="no text to continue") as caught:
        ChatTemplate(PARTS).render(messages, options)
    assert caught.value.field == "continue_final_message"


def test_a_message_that_the_template_does_not_write_cannot_be_continued():
    with pytest.raises(InvalidRequest, match="cannot be continued") as caught:
        ChatTemplate("{{ messages[0].content }}").render(
            [*USER, {"role": "assistant", "content": "I"}],
            TemplateOptions(add_generation_prompt=False, continue_final_message=True),
        )
    assert caught.value.field == "continue_final_message"


@pytest.mark.parametrize("value", [False, 3, "no", ["a", {"b": None}], {"c": 1.5}])
def test_variables_reach_the_template_as_in_transformers(value, reference):
    source = "{{ messages[0].content }} {% if x is defined %}{{ x | tojson }} {{ x }}{% endif %}"
    text = ChatTemplate(source).render(USER, TemplateOptions(kwargs={"x": value}))
    expected = reference.apply_chat_template(USER, chat_template=source, tokenize=False, x=value)
    assert text == expected
    assert ChatTemplate(source).render(USER) == "hi "


def test_text_parts_go_as_a_list_where_the_template_takes_one(reference):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    text = ChatTemplate(PARTS).render(messages)
    assert "[a][b]" in text
    assert text == reference.apply_chat_template(messages, chat_template=PARTS, tokenize=False)
    joined = ChatTemplate(QWEN).render(messages)
    assert joined == ChatTemplate(QWEN).render([{"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        ("{% set c = messages[0].content %}{% for p in c %}{{ p.text }}{% endfor %}", True),
        (
            "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
            "{{ show(messages[0]['content']) }}",
            True,
        ),
        ("{% for w in messages[0].content.split() %}{{ w }}{% endfor %}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
    ],
)
def test_how_a_template_takes_content_is_read_from_it(source, takes_parts):
    messages = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
    text = ChatTemplate(source).render(messages)
    assert text == "ab"
    string = [{"role": "user", "content": "ab"}]
    assert (ChatTemplate(source).render(string) == "ab") != takes_parts


def test_the_clock_is_the_callers():
    day = datetime.datetime(2031, 2, 3)
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: day)
    assert template.render(USER) == "03 Feb 2031"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no tools here') }}", "no tools here"),
        ("{% for i in range(10001) %}x{% endfor %}", r"range\(\) of 10001, the bound is 10000"),
        ("{{ 'x' * 10**12 }}", "a product longer than 1000"),
        ("{{ 10 ** 100000 }}", "a power with an exponent beyond 64"),
        ("{% for i in range(9999) %}x{% endfor %}", "longer than 1000 characters"),
        ("{{ messages[0].content[5000] ~ missing.attribute }}", "missing"),
        ("{{ messages.append(1) }}", "not allowed"),
        ("{{ ''.__class__.__mro__ }}", "."),
        ("{% set ns = namespace(_a=1) %}", "underscore"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_forbidden_operation_of_a_template_is_an_error_of_the_request(source, message):
    template = ChatTemplate(source, max_output_chars=1000)
    with pytest.raises(InvalidRequest, match=message) as caught:
        template.render(USER)
    assert caught.value.field == "messages"


def test_the_output_bound_is_exact():
    template = ChatTemplate("{{ messages[0].content }}", max_output_chars=10)
    assert template.render([{"role": "user", "content": "x" * 10}]) == "x" * 10
    with pytest.raises(InvalidRequest, match="longer than 10 characters"):
        template.render([{"role": "user", "content": "x" * 11}])


def call(**fields: object) -> dict[str, object]:
    """An assistant's message with one call."""
    given = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [{**given, **fields}]}


@pytest.mark.parametrize(
    ("messages", "error", "field"),
    [
        ([], InvalidRequest, "messages"),
        ("hi", InvalidRequest, "messages"),
        (None, InvalidRequest, "messages"),
        ([1], InvalidRequest, "messages[0]"),
        ([*USER, {"content": "x"}], InvalidRequest, "messages[1].role"),
        ([{"role": "", "content": "x"}], InvalidRequest, "messages[0].role"),
        ([{"role": 1, "content": "x"}], InvalidRequest, "messages[0].role"),
        ([{"role": "user"}], InvalidRequest, "messages[0].content"),
        ([{"role": "user", "content": None}], InvalidRequest, "messages[0].content"),
        ([{"role": "user", "content": 5}], InvalidRequest, "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 7}], InvalidRequest, "messages[0].name"),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            InvalidRequest,
            "messages[0].tool_calls[0].id",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{}]}],
            InvalidRequest,
            "messages[0].tool_calls",
        ),
        (
            [{"role": "user", "content": "x", "tool_call_id": "a"}],
            InvalidRequest,
            "messages[0].tool_call_id",
        ),
        (
            [{"role": "assistant", "content": "x", "reasoning": 1}],
            InvalidRequest,
            "messages[0].reasoning",
        ),
        ([{"role": "assistant", "content": None}], InvalidRequest, "messages[0].content"),
        ([call(type="custom")], InvalidRequest, "messages[0].tool_calls[0].type"),
        ([call(custom={})], UnsupportedField, "messages[0].tool_calls[0].custom"),
        ([call(function=[])], InvalidRequest, "messages[0].tool_calls[0].function"),
        ([call(function={"name": ""})], InvalidRequest, "messages[0].tool_calls[0].function.name"),
        *(
            (
                [call(function={"name": "f", "arguments": arguments})],
                InvalidRequest,
                "messages[0].tool_calls[0].function.arguments",
            )
            for arguments in ("{", "[1]", {}, '{"a":' * 300 + "1" + "}" * 300, "\ud800")
        ),
        ([{"role": "user", "content": ["x"]}], InvalidRequest, "messages[0].content[0]"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            UnsupportedField,
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            InvalidRequest,
            "messages[0].content[0].text",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}],
            UnsupportedField,
            "messages[0].content[0].cache",
        ),
    ],
)
def test_bad_messages_are_refused_by_field(messages, error, field):
    with pytest.raises(error) as caught:
        ChatTemplate(QWEN).render(messages)
    assert type(caught.value) is error and caught.value.field == field
    assert field in caught.value.message


def test_null_fields_are_absent():
    messages = [
        {"role": "user", "content": "hi", "tool_calls": None, "name": None, "annotations": []}
    ]
    assert ChatTemplate(QWEN).render(messages) == ChatTemplate(QWEN).render(USER)


def test_the_template_comes_from_a_file_the_checkpoint_or_its_configuration(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"bos_token": "<s>", "chat_template": "config {{ bos_token }}"}))
    assert ChatTemplate.load(tmp_path).render(USER) == "config <s>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(USER) == "d"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert ChatTemplate.load(tmp_path).render(USER) == "jinja"
    (tmp_path / "mine.jinja").write_text("mine")
    assert ChatTemplate.load(tmp_path, tmp_path / "mine.jinja").render(USER) == "mine"
    with pytest.raises(FileNotFoundError):
        ChatTemplate.load(tmp_path, tmp_path / "none.jinja")


def test_templates_with_names_are_chosen_as_by_transformers(tmp_path, byte_level):
    """In `tokenizer_config.json`, or in files of their own, which replace it."""
    transformers = pytest.importorskip("transformers")
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    def compare() -> list[str]:
        own = ChatTemplate.load(tmp_path)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        texts = []
        for offered in (None, tools):
            texts.append(own.render(USER, TemplateOptions(tools=offered)))
            assert texts[-1] == theirs.apply_chat_template(USER, tools=offered, tokenize=False)
        return texts

    named = [{"name": "tool_use", "template": "t{{ tools[0].function.name }}"}]
    named += [{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert compare() == ["d", "tf"]
    (tmp_path / "chat_template.jinja").write_text("file")
    assert compare() == ["file", "file"]
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("further")
    assert compare() == ["file", "further"]


def test_without_a_default_template_there_is_none(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "rag", "template": "r"}]})
    )
    assert ChatTemplate.load(tmp_path) is None


def test_the_text_of_all_templates_shows_the_family(tmp_path):
    """Marks of calls stand in the template for tools only."""
    named = [{"name": n, "template": f"<{n}>"} for n in ("default", "tool_use")]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).source == "<default>\n<tool_use>"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (5, "chat_template must be a string or a list of named templates, got int"),
        ([{"name": "default"}], r"chat_template\[0\] must be .* name and template, got .*default"),
        ([{"name": "a", "template": "x"}, "b"], r"chat_template\[1\] must be an object"),
        ([{"name": 1, "template": "x"}], r"chat_template\[0\] must be"),
    ],
)
def test_a_template_of_another_form_is_refused_by_file_and_entry(tmp_path, entry, message):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {message}"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_is_not_text_is_refused_by_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja: must be UTF-8"):
        ChatTemplate.load(tmp_path)


def test_a_template_that_does_not_compile_is_refused_at_load():
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}")
