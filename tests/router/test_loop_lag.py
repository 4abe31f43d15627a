"""No request holds the event loop of a router for more than 50 ms of processor time, whatever is in it.

The real front ends and the real service up to the point where a replica is needed. The lag is the most that the process
computes between two turns of a task that does nothing else than to come again.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import orjson
import pytest

from quire.cluster import grpc_servicers
from quire.cluster.grpc_api import GrpcApi
from quire.cluster.http_api import build_app
from quire.protos import generation_pb2
from quire.protos.errors import Unavailable
from quire.replica.embedded import CHECKPOINT
from quire.router.chat_template import ChatTemplate
from quire.router.params import GenerationDefaults, Limits
from quire.router.policy import make_policy
from quire.router.service import ModelFacts, RouterService
from quire.router.tokenizer import AsyncTokenizer, TextTokenizer

MAX_LAG_S = 0.050
BODY = 8 << 20
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = SimpleNamespace(
    model_name="quire", revision="r", max_model_len=1 << 20, max_cache_tokens=1 << 20,
    vocab_size=1 << 20, weights="w", eos_token_ids=(0,), dtype="float32", block_size=16,
)  # fmt: skip


class Cut(RouterService):
    """The service without replicas: a request ends where it would be sent to one."""

    def _origin(self, *args: Any) -> Any:
        super()._origin(*args)
        raise Unavailable("as far as this test goes")


@pytest.fixture(scope="module")
def service() -> Iterator[Cut]:
    # As a router does at its start: what other tests have loaded is no part of a request's time.
    gc.collect()
    gc.freeze()
    yield Cut(
        ModelFacts(name="quire", created_s=0, defaults=GenerationDefaults(), limits=Limits()),
        router_id="router",
        tokenizer=AsyncTokenizer(TextTokenizer.load(CHECKPOINT), num_threads=1),
        template=ChatTemplate.load(CHECKPOINT),
        table=SimpleNamespace(is_mixed=False),
        policy=make_policy("slo"),
        transport=SimpleNamespace(hellos={"replica": HELLO}),
    )
    gc.unfreeze()


def lag_beside(work: Callable[[], Awaitable[int]]) -> tuple[float, int]:
    """The longest turn of the event loop in processor seconds, and what `work` returns."""

    async def main() -> tuple[float, int]:
        longest = 0.0
        task = asyncio.ensure_future(work())
        while not task.done():
            began = time.process_time()
            await asyncio.sleep(0)
            longest = max(longest, time.process_time() - began)
        return longest, task.result()

    return asyncio.run(main())


def check(work: Callable[[], Awaitable[int]]) -> int:
    # The first time pages are new; a slow machine is no fault either.
    lags, results = zip(*(lag_beside(work) for _ in range(3)), strict=True)
    assert min(lags) <= MAX_LAG_S, f"{min(lags) * 1000:.0f} ms"
    return results[0]


def post(service: Cut, path: str, body: bytes) -> Callable[[], Awaitable[int]]:
    app = build_app(lambda: service, max_body_bytes=BODY)
    parts = [body[i : i + 65536] for i in range(0, len(body), 65536)]

    async def call() -> int:
        sent: list[dict] = []
        waiting = list(reversed(parts))

        async def receive() -> dict:
            if waiting:
                part = waiting.pop()
                return {"type": "http.request", "body": part, "more_body": bool(waiting)}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: dict) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": headers,
        }
        await app(scope, receive, send)
        assert sum(len(message.get("body", b"")) for message in sent) < 4096
        return sent[0]["status"]

    return call


def filled(before: str, item: str, after: str) -> bytes:
    """As many items as a body takes."""
    number = (BODY - len(before) - len(after)) // len(item.encode())
    return (before + item * number).encode().rstrip(b",") + after.encode()


def listed(before: str, item: str, number: int, after: str) -> bytes:
    return (before + ",".join([item] * number) + after).encode()


USER = '{"role":"user","content":"a"}'
PART = '{"type":"text","text":"a"}'
PARTS = '{"messages":[{"role":"user","content":['
KEYS = ",".join(f'"k{i}":1' for i in range(600_000))
FEW_KEYS = ",".join(f'"k{i}":1' for i in range(30_000))
HOSTILE = {
    "messages": (CHAT, filled('{"messages":[', USER + ",", "]}")),
    "as many messages as pass the count": (CHAT, listed('{"messages":[', USER, 13_000, "]}")),
    "messages that are not": (CHAT, filled('{"messages":[', "{},", "]}")),
    "parts": (CHAT, filled(PARTS, PART + ",", "]}]}")),
    "parts that pass the count": (CHAT, listed(PARTS, PART, 12_000, "]}]}")),
    "lists in a message": (CHAT, filled('{"messages":[{"role":"user","content":[', "[],", "]}]}")),
    "deep": (CHAT, b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}"),
    "deeper": (CHAT, b"[" * BODY),
    "deep objects": (CHAT, b'{"a":' * (BODY // 5)),
    "unknown keys": (CHAT, ("{" + KEYS + "}").encode()),
    "few unknown keys": (CHAT, ("{" + FEW_KEYS + "}").encode()),
    "keys of a message": (CHAT, ('{"messages":[{"role":"user","content":"",' + FEW_KEYS + "}]}").encode()),
    "a long key of a message": (CHAT, filled('{"messages":[{"role":"user","content":"","', "k", '":1}]}')),
    "tools": (CHAT, filled('{"messages":[],"tools":[', '{"type":"function"},', "]}")),
    "metadata": (CHAT, ('{"messages":[],"metadata":{' + FEW_KEYS + "}}").encode()),
    "stop": (TEXT, filled('{"prompt":"x","stop":[', '"a",', "]}")),
    "stop that passes the count": (TEXT, listed('{"prompt":"x","stop":[', '"a"', 65_000, "]}")),
    "numbers as stop": (TEXT, listed('{"prompt":"x","stop":[', "1", 500_000, "]}")),
    "bad words": (TEXT, listed('{"prompt":"x","bad_words":[', '"a"', 60_000, "]}")),
    "logit_bias": (TEXT, ('{"prompt":"x","logit_bias":{' + KEYS + "}}").encode()),
    "wrong logit_bias": (TEXT, ('{"prompt":"x","logit_bias":{' + FEW_KEYS.replace(":1", ':"x"') + "}}").encode()),
    "stream_options": (TEXT, ('{"prompt":"x","stream_options":{' + FEW_KEYS + "}}").encode()),
    "structured_outputs": (TEXT, ('{"prompt":"x","structured_outputs":{' + FEW_KEYS + "}}").encode()),
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
    "brackets in a text": (TEXT, filled('{"prompt":1,"x":"', "[{,", '"}')),
    "not JSON": (TEXT, filled("", "\\", "")),
    # Longer words of one letter take longer: the library frees a text for each token, 20 ns each.
    "a long word": (TEXT, b'{"prompt":"' + b"a" * (3 << 20) + b'"}'),
    "a long chat": (CHAT, filled('{"messages":[{"role":"user","content":"', "a b ", '"}]}')),
    "special tokens": (CHAT, filled('{"messages":[{"role":"user","content":"', "<|end|>", '"}]}')),
    "as many messages as are served": (CHAT, listed('{"messages":[', USER, 4096, "]}")),
    "as many parts as are served": (CHAT, listed(PARTS, PART, 4096, "]}]}")),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_no_body_holds_the_loop(name: str, service: Cut) -> None:
    path, body = HOSTILE[name]
    assert len(body) <= BODY
    assert check(post(service, path, body)) in (400, 404, 503)


def test_no_chat_template_holds_the_loop(service: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    for source, number in (
        (
            "{% for m in messages %}{% for n in messages %}{{ n.role }}{% endfor %}{% endfor %}",
            4096,
        ),
        ("{% for i in range(9999) %}{% for j in range(40) %}{% endfor %}{% endfor %}", 1),
    ):
        monkeypatch.setattr(service, "_template", ChatTemplate(source))
        body = listed('{"messages":[', USER, number, "]}")
        assert check(post(service, CHAT, body)) == 400


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


def field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(value)) + value


TURN = generation_pb2.ChatMessage(role="user", content="a").SerializeToString()
MESSAGES = {
    "messages": field(4, field(1, TURN) * 400_000),
    "empty messages": field(4, field(1, b"") * 4_000_000),
    "messages that pass the count": field(4, field(1, TURN) * 5_000),
    "as many messages as are served": field(4, field(1, TURN) * 4_096),
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
}


@pytest.mark.parametrize("name", MESSAGES)
def test_no_message_holds_the_loop(name: str, service: Cut) -> None:
    """Over a real channel; the client compresses, so that little is on the wire."""
    api = GrpcApi()
    api.service = service

    class Context(SimpleNamespace):
        def set_code(self, code: grpc.StatusCode) -> None:
            self.code = code

        def set_details(self, details: str) -> None:
            pass

        def set_trailing_metadata(self, metadata: Any) -> None:
            pass

        def invocation_metadata(self) -> Any:
            return ()

    taken: dict[str, grpc.RpcMethodHandler] = {}
    server = SimpleNamespace(
        add_generic_rpc_handlers=lambda handlers: None,
        add_registered_method_handlers=lambda name, handlers: taken.update(handlers),
    )
    grpc_servicers.add_GenerationServicer_to_server(api, server)
    parse = taken["GenerateOnce"].request_deserializer

    async def call() -> int:
        context = Context()
        try:
            request = parse(MESSAGES[name])
        except Exception:  # no protobuf: gRPC answers INTERNAL
            return grpc.StatusCode.INTERNAL.value[0]
        await asyncio.sleep(0)  # gRPC calls the method in a task of its own
        await api.GenerateOnce(request, context)
        return context.code.value[0]

    names = {status.value[0]: status.name for status in grpc.StatusCode}
    status = names[check(call)]
    few = name.startswith(("messages that", "allowed", "stop ids", "ids", "as many"))
    expected = ("INVALID_ARGUMENT", "UNAVAILABLE") if few else ("RESOURCE_EXHAUSTED", "INTERNAL")
    assert status in expected


def test_the_bodies_are_what_they_say() -> None:
    """A body that is refused for a slip in this file would prove nothing."""
    for name in ("messages", "parts", "stop", "ids", "unknown keys", "a long chat"):
        orjson.loads(HOSTILE[name][1])
