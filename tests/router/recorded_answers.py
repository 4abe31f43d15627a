"""Answers as models of each family write them, and the parts that a client gets."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

NESTED = {
    "query": {"all": [1, -2.5, True, None, {"päth": 'C:\\tmp\n"x"'}]},
    "note": "naïve 😀 </tool>",
}


class Recorded(NamedTuple):
    """An answer of a model, and its parts."""

    family: str
    raw: str
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = ()
    prompt: str = ""


def one(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def tagged(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{one(*call)}\n</tool_call>" for call in calls)


def listed(*calls: tuple[str, dict[str, Any]]) -> str:
    return f"[{', '.join(one(*call) for call in calls)}]"


def by_name(*calls: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"
        for name, arguments in calls
    )


def as_xml(*calls: tuple[str, dict[str, Any]]) -> str:
    def value(one: Any) -> str:
        return one if isinstance(one, str) else json.dumps(one, ensure_ascii=False)

    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(f"<parameter={k}>\n{value(v)}\n</parameter>\n" for k, v in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>"
        for name, arguments in calls
    )


def in_harmony(*calls: tuple[str, dict[str, Any]]) -> str:
    ((name, arguments),) = calls
    body = json.dumps(arguments, ensure_ascii=False)
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{body}"


def as_gemma(*calls: tuple[str, dict[str, Any]]) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f'<|"|>{one}<|"|>'
        if isinstance(one, dict):
            items = sorted(one.items(), key=lambda item: item[0].lower())
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in items) + "}"
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return json.dumps(one)

    return "".join(f"<|tool_call>call:{name}{value(args)}<tool_call|>" for name, args in calls)


# How each family writes calls. The value says whether several calls are possible.
WRITERS = {
    "hermes": (tagged, True),
    "qwen3": (tagged, True),
    "qwen3_5": (as_xml, True),
    "smollm2": (lambda *calls: f"<tool_call>{listed(*calls)}</tool_call>", True),
    "llama3": (lambda call: one(*call, key="parameters"), False),
    "mistral": (lambda *calls: f"[TOOL_CALLS]{listed(*calls)}", True),
    "mistral_v11": (by_name, True),
    "gpt_oss": (in_harmony, False),
    "phi4_mini": (lambda *calls: f"<|tool_call|>{listed(*calls)}<|/tool_call|>", True),
    "granite": (lambda *calls: f"<|tool_call|>{listed(*calls)}", True),
    "gemma4": (as_gemma, True),
}
_NOT_JSON = '<tool_call>{"name": "now", "arguments": NaN}</tool_call>'
_EMPTY, _SIMPLE = ("now", {}), ("get_weather", {"city": "Zürich", "unit": "°C"})
_PLAIN_NESTED = (
    "search",
    {"note": "😀", "query": {"all": [1, -2.5, True, None, {"path": 'a "b"'}]}},
)
_HARMONY_END = "<|end|><|start|>assistant"


def _common(family: str) -> list[Recorded]:
    write, is_parallel = WRITERS[family]
    nested = _PLAIN_NESTED if family == "gemma4" else ("search", NESTED)
    found = [Recorded(family, write(call), calls=(call,)) for call in (_EMPTY, _SIMPLE, nested)]
    if is_parallel:
        calls = (_SIMPLE, _EMPTY, nested)
        found.append(Recorded(family, write(*calls), calls=calls))
    if family not in ("gpt_oss",):
        found += [
            Recorded(family, text, text) for text in ("", "Hi!", " \n2 < 3 and {1: [2]} \n\n")
        ]
    if family not in ("gpt_oss", "llama3"):
        found.append(
            Recorded(family, f"Let me see.\n{write(_SIMPLE)}", "Let me see.", "", (_SIMPLE,))
        )
    raw = write(_SIMPLE)
    for length in (len(raw) // 2, raw.index("city") + 3):
        found.append(Recorded(family, raw[:length], raw[:length]))
    return found


def _reasoned(family: str, begin: str, end: str, text_begin: str = "") -> list[Recorded]:
    write, _ = WRITERS[family]
    why = "They ask <b>twice</b>.\n\nSo 2 < 3."
    return [
        Recorded(family, f"{begin}\n{why}\n{end}\n\n{write(_SIMPLE)}", "", why, (_SIMPLE,)),
        Recorded(family, f"{begin}{why}{end}{text_begin}It is 3.", "It is 3.", why),
        Recorded(family, f"{begin}{why}", "", why),
    ]


RECORDED = [
    *(answer for family in WRITERS for answer in _common(family)),
    *_reasoned("qwen3", "<think>", "</think>"),
    *_reasoned("qwen3_5", "<think>", "</think>"),
    *_reasoned("granite", "<think>", "</think>"),
    *_reasoned("mistral_v11", "[THINK]", "[/THINK]"),
    *_reasoned("gemma4", "<|channel>thought\n", "<channel|>"),
    *_reasoned(
        "gpt_oss", "<|channel|>analysis<|message|>", _HARMONY_END, "<|channel|>final<|message|>"
    )[1:],
    Recorded(
        "gpt_oss",
        f"<|channel|>analysis<|message|>One.{_HARMONY_END}<|channel|>analysis<|message|>Two.{_HARMONY_END}"
        f"<|channel|>commentary<|message|>I look.{_HARMONY_END}{in_harmony(_SIMPLE)}<|call|>",
        "I look.",
        "One.\nTwo.",
        (_SIMPLE,),
    ),
    Recorded(
        "gpt_oss",
        ' to=functions.now<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        calls=(("now", {"a": 1}),),
    ),
    # The prompt opens the reasoning, or closes it.
    Recorded(
        "qwen3", "Hm.\n</think>\n\nYes.", "Yes.", "Hm.", prompt="<|im_start|>assistant\n<think>\n"
    ),
    Recorded("qwen3", " Yes.", " Yes.", prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    # Calls that are no calls stay in the text, also between calls.
    Recorded(
        "qwen3",
        f"a <tool_call>{{bad}}</tool_call> b {tagged(_EMPTY)} c <tool_call>[1]</tool_call> ",
        "a <tool_call>{bad}</tool_call> b c <tool_call>[1]</tool_call> ",
        "",
        (_EMPTY,),
    ),
    Recorded(
        "mistral_v11",
        f'[TOOL_CALLS]f[ARGS]{{"a": 1{by_name(_SIMPLE)}',
        '[TOOL_CALLS]f[ARGS]{"a": 1',
        "",
        (_SIMPLE,),
    ),
    Recorded("hermes", '<tool_call>{"name": "now"}</tool_call>', calls=(_EMPTY,)),
    Recorded("hermes", _NOT_JSON, _NOT_JSON),
    Recorded("llama3", f"<|python_tag|>{one(*_SIMPLE, key='parameters')}", calls=(_SIMPLE,)),
    Recorded("llama3", '{"name": "x", "size": 3}', '{"name": "x", "size": 3}'),
    Recorded("phi4_mini", f"functools{listed(_SIMPLE)}", calls=(_SIMPLE,)),
    Recorded("granite", "<think>Hm.</think><response>Yes.</response>", "Yes.", "Hm."),
    Recorded("mistral", f"Sure.{by_name(_SIMPLE)}", "Sure.", "", (_SIMPLE,)),
]
