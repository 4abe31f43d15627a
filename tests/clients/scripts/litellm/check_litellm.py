"""LiteLLM: the SDK with its providers `openai/` and `hosted_vllm/`, and its bridge from Anthropic's messages."""

from __future__ import annotations

import asyncio

import litellm
from checks import Target, run

QUESTION = [{"role": "user", "content": "Name three colours."}]


def _chat(target: Target, provider: str, **options):
    return litellm.completion(
        model=f"{provider}/{target.model}",
        messages=QUESTION,
        api_base=target.api,
        api_key="none",
        max_tokens=16,
        temperature=0,
        num_retries=0,
        **options,
    )


def _check_chat(target: Target, provider: str) -> None:
    whole = _chat(target, provider)
    chunks = list(_chat(target, provider, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content != ""
    assert whole.usage.completion_tokens == 16


def openai_chat(target: Target) -> None:
    _check_chat(target, "openai")


def hosted_vllm_chat(target: Target) -> None:
    _check_chat(target, "hosted_vllm")


def text_completion(target: Target) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{target.model}",
        prompt="One, two,",
        api_base=target.api,
        api_key="none",
        max_tokens=8,
    )
    assert answer.choices[0].text


def anthropic_messages(target: Target) -> None:
    """Anthropic's API at the caller's side, OpenAI's at the server's."""
    answer = asyncio.run(
        litellm.anthropic.messages.acreate(
            model=f"hosted_vllm/{target.model}",
            messages=QUESTION,
            max_tokens=16,
            api_base=target.api,
            api_key="none",
        )
    )
    assert answer["content"][0]["text"]
    assert answer["stop_reason"] == "max_tokens"


run([openai_chat, hosted_vllm_chat, text_completion, anthropic_messages])
