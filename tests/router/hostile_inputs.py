"""Requests that are as large, as many or as deep as one client can send: HTTP bodies and gRPC messages.

`tests/router/request/test_loop_lag.py` measures each of them alone, `tests/system/test_hostile.py` sends them to a
cluster.
"""

from __future__ import annotations

import json

from quire.protos import generation_pb2

BODY = 8 << 20  # bytes that an HTTP body or a message may have
CHAT, TEXT, ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
DECISIONS, EMBEDDINGS = "/v1/decisions", "/v1/embeddings"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


USER = '{"role":"user","content":"a"}'
PART = '{"type":"text","text":"a"}'
TOOL = '{"type":"function","function":{"name":"f","description":"","parameters":{}}}'
CALL = '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}}'
TOOLS = '{"messages":[' + USER + '],"tools":['
CHOICE = (
    '{"messages":['
    + USER
    + '],"tool_choice":{"type":"allowed_tools","allowed_tools":{"mode":"auto","tools":['
)
CALLS = '{"messages":[{"role":"assistant","content":"","tool_calls":['
PARTS = '{"messages":[{"role":"user","content":['
QUESTION = '{"type":"predicate","instructions":"{}"}'
CHOICES = '{"type":"choice","instructions":"a","choices":['
ASKED = '{"input":"a","questions":'


def filled(before: str, item: str, after: str) -> bytes:
    """As many items as a body takes."""
    number = (BODY - len(before) - len(after)) // len(item.encode())
    return (before + item * number).encode().rstrip(b",") + after.encode()


def listed(before: str, item: str, number: int, after: str) -> bytes:
    return (before + ",".join([item] * number) + after).encode()


def many_tools() -> bytes:
    """As many tools as are served, with as many bytes."""
    small = {"type": "object", "properties": {f"p{i}": {"a": 1} for i in range(200)}}
    tools = [
        {"type": "function", "function": {"name": f"f{i}", "parameters": small}} for i in range(128)
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"}
    return json.dumps({**body, "tools": tools}).encode()


def bodies() -> dict[str, tuple[str, bytes]]:
    """Path and body of each, by what it is: 300 MB in all."""
    keys = ",".join(f'"k{i}":1' for i in range(600_000))
    few_keys = ",".join(f'"k{i}":1' for i in range(30_000))
    return {
        "messages": (CHAT, filled('{"messages":[', USER + ",", "]}")),
        "as many messages as pass the count": (CHAT, listed('{"messages":[', USER, 13_000, "]}")),
        "messages that are not": (CHAT, filled('{"messages":[', "{},", "]}")),
        "parts": (CHAT, filled(PARTS, PART + ",", "]}]}")),
        "parts that pass the count": (CHAT, listed(PARTS, PART, 12_000, "]}]}")),
        "lists in a message": (CHAT, filled('{"messages":[{"role":"user","content":[', "[],", "]}]}")),
        "deep": (CHAT, b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}"),
        "deeper": (CHAT, b"[" * BODY),
        "deep objects": (CHAT, b'{"a":' * (BODY // 5)),
        "unknown keys": (CHAT, ("{" + keys + "}").encode()),
        "few unknown keys": (CHAT, ("{" + few_keys + "}").encode()),
        "keys of a message": (CHAT, ('{"messages":[{"role":"user","content":"",' + few_keys + "}]}").encode()),
        "a long key of a message": (CHAT, filled('{"messages":[{"role":"user","content":"","', "k", '":1}]}')),
        "questions": (DECISIONS, filled(f"{ASKED}[", QUESTION + ",", "]}")),
        "long questions": (DECISIONS, listed(f"{ASKED}[", QUESTION.replace("{}", "ab " * 5000), 20, "]}")),
        "choices of a question": (DECISIONS, filled(f'{ASKED}[{CHOICES}', '{"value":"a"},', "]}]}")),
        "long choices": (DECISIONS, listed(f"{ASKED}[{CHOICES}", '{"value":"' + "ab " * 10_000 + '"}', 255, "]}]}")),
        "parts of a question": (DECISIONS, filled(ASKED + QUESTION.replace('"{}"', "[").replace("{", "[{", 1)[:-1],
                                                  '{"type":"input_text","text":"a"},', "]}]}")),
        "keys of a question": (DECISIONS, (ASKED + '[{"type":"predicate",' + few_keys + "}]}").encode()),
        "json of an input": (DECISIONS, filled('{"questions":[],"input":[{"role":"user","content":'
                                               '[{"type":"input_json","data":[', "{},", "]}]}]}")),
        "inputs": (EMBEDDINGS, filled('{"input":[', '"a",', "]}")),
        "inputs that pass the count, and a long one": (
            EMBEDDINGS, listed('{"input":[', '"' + "ab " * 150 + '"', 600, ',"' + "ab " * 5000 + '"]}')
        ),
        "long inputs": (EMBEDDINGS, listed('{"input":[', '"' + "ab " * 5000 + '"', 500, "]}")),
        "inputs of ids, and a wrong one": (
            EMBEDDINGS, listed('{"input":[', "[" + "7," * 255 + "7]", 2047, ",[99999999]]}")
        ),
        "too many ids of an input": (EMBEDDINGS, listed('{"input":[', "7", 3_000_000, "]}")),
        "inputs of too many ids": (EMBEDDINGS, listed('{"input":[', "[" + "7," * 999 + "7]", 2048, "]}")),
        "tools": (CHAT, filled('{"messages":[],"tools":[', '{"type":"function"},', "]}")),
        "tools that pass the count": (CHAT, listed(TOOLS, TOOL, 4096, "]}")),
        "a large schema": (CHAT, (TOOLS + TOOL.replace("{}", "{" + few_keys + "}") + "]}").encode()),
        "many large tools that must be called": (CHAT, many_tools()),
        "names of tools": (CHAT, listed(CHOICE, '{"type":"function","function":{"name":"f"}}', 9_000, "]}}}")),
        "calls that pass the count": (CHAT, listed(CALLS, CALL, 4_000, "]}]}")),
        "metadata": (CHAT, ('{"messages":[],"metadata":{' + few_keys + "}}").encode()),
        "stop": (TEXT, filled('{"prompt":"x","stop":[', '"a",', "]}")),
        "stop that passes the count": (TEXT, listed('{"prompt":"x","stop":[', '"a"', 65_000, "]}")),
        "numbers as stop": (TEXT, listed('{"prompt":"x","stop":[', "1", 500_000, "]}")),
        "bad words": (TEXT, listed('{"prompt":"x","bad_words":[', '"a"', 60_000, "]}")),
        "logit_bias": (TEXT, ('{"prompt":"x","logit_bias":{' + keys + "}}").encode()),
        "wrong logit_bias": (TEXT, ('{"prompt":"x","logit_bias":{' + few_keys.replace(":1", ':"x"') + "}}").encode()),
        "stream_options": (TEXT, ('{"prompt":"x","stream_options":{' + few_keys + "}}").encode()),
        "structured_outputs": (TEXT, ('{"prompt":"x","structured_outputs":{' + few_keys + "}}").encode()),
        "choices": (TEXT, listed('{"prompt":"x","structured_outputs":{"choice":[', '"a"', 65_000, "]}}")),
        "ids": (TEXT, filled('{"prompt":[', "1,", "]}")),
        "ids that pass the count": (TEXT, listed('{"prompt":[', "123456", 524_000, "]}")),
        "a wrong id at the end": (TEXT, listed('{"prompt":[', "123456", 520_000, ',"x"]}')),
        "lists of ids": (TEXT, filled('{"prompt":[', "[1],", "]}")),
        "lists of ids that pass the count": (TEXT, listed('{"prompt":[', "[1,2]", 65_000, "]}")),
        "texts": (TEXT, filled('{"prompt":[', '"a",', "]}")),
        "texts that pass the count": (TEXT, listed('{"prompt":[', '"a"', 65_000, "]}")),
        "allowed ids": (TEXT, listed('{"prompt":"x","allowed_token_ids":[', "1", 500_000, "]}")),
        "a long number": (TEXT, b'{"prompt":[' + b"1" * (BODY - 20) + b"]}"),
        "long numbers": (TEXT, filled('{"prompt":[', "1.234567890123456789e-200,", "]}")),
        "a long model": (TEXT, filled('{"prompt":"x","model":"', "é", '"}')),
        "a long role": (CHAT, filled('{"messages":[{"content":"x","role":"', "\\n", '"}]}')),
        "a long salt": (TEXT, filled('{"prompt":"x","cache_salt":"', "é", '"}')),
        "escapes that pass the count": (TEXT, b'{"prompt":1,"x":"' + b"\\n" * (2 << 20) + b'"}'),
        "escaped quotes": (TEXT, filled('{"prompt":1,"x":"', '\\"', '"}')),
        "escapes": (TEXT, filled('{"prompt":1,"x":"', '\\\\\\"', '"}')),
        "items": (ITEMS, filled('{"input":[', USER + ",", "]}")),
        "items and functions": (
            ITEMS,
            listed(
                listed('{"input":[', USER, 4096, '],"tools":[').decode(),
                '{"type":"function","name":"f"}', 4096, "]}",
            ),
        ),
        "calls and outputs": (
            ITEMS,
            listed(
                '{"input":[',
                '{"type":"function_call","call_id":"c","name":"f","arguments":"{}"},'
                '{"type":"function_call_output","call_id":"c","output":"x"}',
                2048, "]}",
            ),
        ),
        "parts of an item": (ITEMS, listed('{"input":[{"role":"user","content":[', PART, 12_000, "]}]}")),
        "keys of an item": (ITEMS, ('{"input":[{"role":"user",' + few_keys + "}]}").encode()),
        "keys of a part": (ITEMS, ('{"input":[{"role":"user","content":[{' + few_keys + "}]}]}").encode()),
        "keys of a form": (ITEMS, ('{"input":"x","text":{"format":{' + few_keys + "}}}").encode()),
        "functions": (
            ITEMS,
            listed('{"input":"x","tools":[', '{"type":"function","name":"f"}', 4096, "]}"),
        ),
        "a namespace": (
            ITEMS,
            listed(
                '{"input":"x","tools":[{"type":"namespace","name":"n","tools":[',
                '{"type":"function"}', 16_000, "]}]}",
            ),
        ),
        "many system messages": (
            ITEMS,
            listed('{"input":[', '{"role":"system","content":"' + "a" * 1900 + '"}', 4096, "]}"),
        ),
        "brackets in a text": (TEXT, filled('{"prompt":1,"x":"', "[{,", '"}')),
        "not JSON": (TEXT, filled("", "\\", "")),
        # Longer words of one letter take longer: the library frees a text for each token, 20 ns each.
        "a long word": (TEXT, b'{"prompt":"' + b"a" * (3 << 20) + b'"}'),
        "a long chat": (CHAT, filled('{"messages":[{"role":"user","content":"', "a b ", '"}]}')),
        "special tokens": (CHAT, filled('{"messages":[{"role":"user","content":"', "<|end|>", '"}]}')),
        "as many messages as are served": (CHAT, listed('{"messages":[', USER, 4096, "]}")),
        "as many parts as are served": (CHAT, listed(PARTS, PART, 4096, "]}]}")),
        **messages_api_bodies(few_keys),
    }  # fmt: skip


def messages_api_bodies(few_keys: str) -> dict[str, tuple[str, bytes]]:
    """Those for the Messages API; `few_keys` are fields of an object."""
    path, head = "/v1/messages", '{"model":"quire","max_tokens":9,'
    turns, blocks = f'{head}"messages":[', f'{head}"messages":[{{"role":"user","content":['
    call = '{"type":"tool_use","id":"c","name":"f","input":{}}'
    result = '{"type":"tool_result","tool_use_id":"c","content":[' + PART + "]}"
    round_of_calls = (
        f'{{"role":"assistant","content":[{call}]}},{{"role":"user","content":[{result}]}}'
    )
    tool = '{"name":"f","input_schema":{}}'
    asked = f'{head}"messages":[{USER}],'
    return {
        "turns": (path, filled(turns, USER + ",", "]}")),
        "as many turns as are served": (path, listed(turns, USER, 4096, "]}")),
        "blocks": (path, listed(blocks, PART, 12_000, "]}]}")),
        "as many blocks as are served": (path, listed(blocks, PART, 4096, "]}]}")),
        "results": (path, listed(blocks, result, 4096, "]}]}")),
        "texts of results": (path, listed(blocks, result.replace(PART, ",".join([PART] * 4)), 2500, "]}]}")),
        "rounds of calls": (path, listed(turns, round_of_calls, 2000, f",{USER}]}}")),
        "keys of a turn": (path, (turns + '{"role":"user",' + few_keys + "}]}").encode()),
        "keys of a block": (path, (blocks + '{"type":"text",' + few_keys + "}]}]}").encode()),
        "keys of an input": (
            path,
            (turns + '{"role":"assistant","content":[' + call.replace("{}", "{" + few_keys + "}") + "]}]}").encode(),
        ),
        "system blocks": (path, listed(f'{asked}"system":[', PART, 4096, "]}")),
        "definitions of tools": (path, listed(f'{asked}"tools":[', tool, 4096, "]}")),
        "keys of a tool": (path, (f'{asked}"tools":[{{"name":"f",' + few_keys + "}]}").encode()),
        "keys of a schema": (
            path, (f'{asked}"tools":[{{"name":"f","input_schema":{{' + few_keys + "}}]}").encode()
        ),
        "keys of a hint": (path, (f'{asked}"cache_control":{{' + few_keys + "}}").encode()),
        "long stop sequences": (path, listed(f'{asked}"stop_sequences":[', '"' + "a" * 300 + '"', 4096, "]}")),
        "a long user": (path, filled(f'{asked}"metadata":{{"user_id":"', "é", '"}}')),
    }  # fmt: skip


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


def messages() -> dict[str, bytes]:
    """Each by what it is."""
    turn = generation_pb2.ChatMessage(role="user", content="a").SerializeToString()
    schema = '{"a":[' + ",".join(["1"] * 500) + "]}"
    large_tool = generation_pb2.Tool(name="f", parameters=schema).SerializeToString()
    return {
        "messages": field(4, field(1, turn) * 400_000),
        "empty messages": field(4, field(1, b"") * 4_000_000),
        "messages that pass the count": field(4, field(1, turn) * 5_000),
        "as many messages as are served": field(4, field(1, turn) * 4_096),
        "stop": field(7, b"") * 4_000_000,
        "ids": field(3, field(1, b"\x01" * (BODY - 16))),
        "ids that are served": field(3, field(1, b"\x01" * 520_000)),
        "unpacked ids": field(3, b"\x08\x01" * 4_000_000),
        "logit_bias": field(2, b"x") + field(6, field(11, b"") * 4_000_000),
        "bad words": field(2, b"x") + field(6, field(13, b"a") * 2_000_000),
        "allowed ids": field(2, b"x") + field(6, field(12, b"\x01" * 8_000_000)),
        "stop ids": field(2, b"x") + field(8, b"\x01" * 8_000_000),
        "choices": field(2, b"x") + field(17, field(4, field(1, b"") * 4_000_000)),
        "unknown fields": b"\xf8\x7f\x01" * 2_000_000,
        "a group": b"\xfb\x7f" * 4_000_000,
        "no protobuf": b"\xff" * BODY,
        "too long": field(2, b"x" * BODY),
        "tools": field(4, field(1, turn) + field(5, b"") * 4_000_000),
        "as many tools as are parsed": field(4, field(1, turn) + field(5, large_tool) * 127),
        "as many calls as pass the count": field(4, field(1, turn + field(4, b"") * 16_000)),
    }
