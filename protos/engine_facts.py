"""Formats facts about a started engine, for the log, `/ready` and `quire serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.protos.wire import Hello


def engine_facts(hello: Hello) -> dict[str, Any]:
    """Return the facts as plain data, for `/ready`."""
    return {
        "model": hello.model_name,
        "dtype": hello.dtype,
        "device": hello.device,
        "threads": hello.num_threads,
        "max_model_len": hello.max_model_len,
        "kv_cache_tokens": hello.cache_tokens,
        "request_tokens": hello.typical_len,
        "concurrent_requests": hello.typical_requests,
    }


def describe(facts: Mapping[str, Any]) -> str:
    """Return the result of `engine_facts` as one sentence."""
    threads = f" with {_count(facts['threads'], 'thread')}" if facts["threads"] else ""
    return (
        f"model {facts['model']}, {facts['dtype']} on {facts['device']}{threads}; "
        f"KV cache {facts['kv_cache_tokens']:,} tokens: "
        f"{_count(facts['concurrent_requests'], 'request')} of {facts['request_tokens']:,} tokens at a time; "
        f"a request may have {facts['max_model_len']:,} tokens"
    )


def describe_phases(startup_s: Mapping[str, float]) -> str:
    """Return the seconds of each start-up phase as text: `imports 6.0 s, load 0.3 s`."""
    return ", ".join(f"{name.replace('_', ' ')} {s:.1f} s" for name, s in startup_s.items())


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
