"""Encodes the prompt of a request: chat template → text → token ids → routing hashes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from quire.protos.errors import ContextLengthExceeded, InvalidRequest, UnsupportedField
from quire.protos.field_checks import check_ids
from quire.protos.routing_hash import RoutingHasher
from quire.protos.wire import Hello
from quire.router.chat.chat_format import AnswerFormat, ChatFormat
from quire.router.index.prefix_hashes import prefix_hashes
from quire.router.question_types import Question
from quire.router.request.context import ModelFacts
from quire.router.request.params import check_prompt
from quire.router.scoring import question_prompts
from quire.router.scoring.question_prompts import QuestionPrompts
from quire.router.text.chat_messages import num_chars
from quire.router.text.chat_template import ChatTemplate, TemplateOptions
from quire.router.text.special_tokens import GUARD, SpecialTokens
from quire.router.text.tokenizer import MAX_BYTES_PER_TOKEN, AsyncTokenizer, check_prompt_len
from quire.router.types import EncodedPrompt, GenerationRequest

# For prompts with more tokens, other tasks of the event loop may run between two passes over the ids.
_LONG_PROMPT_TOKENS = 16 * 1024
# Most hashers to keep, one for each tenant. Beyond it all are dropped, because a hasher is cheap to make again.
_MAX_HASHERS = 1024


class PromptEncoder:
    """Encodes prompts for one model.

    Parameters
    ----------
    template
        The chat template; None: the checkpoint has none, and requests with messages are refused.
    """

    def __init__(self, tokenizer: AsyncTokenizer, template: ChatTemplate | None):
        self._tokenizer = tokenizer
        self._template = template
        # How the model writes reasoning and calls; None without a chat template.
        self.chat = None if template is None else ChatFormat(template, tokenizer.tokenizer)
        self._hashers: dict[str, RoutingHasher] = {}

    async def encode(
        self, request: GenerationRequest, hello: Hello, facts: ModelFacts
    ) -> EncodedPrompt:
        """Encode the prompt of a request with one prompt.

        Raises
        ------
        InvalidRequest
            The prompt is not valid, too long, or refused by the chat template.
        """
        text = None
        if request.messages is not None:
            ids, text = await self._encode_messages(request, hello, facts)
        elif isinstance(request.prompt, str):
            text = request.prompt
            ids = await self._encode_text(request, text, hello)
        else:
            ids = await _id_array(request.prompt or (), hello)
        _check_len(len(ids), facts)
        return EncodedPrompt(ids, text, min(hello.max_model_len, hello.max_cache_tokens))

    async def encode_prediction(
        self, request: GenerationRequest, hello: Hello
    ) -> np.ndarray | None:
        """Encode the client's guess of the answer, [tokens] int32; None: there is none. Raises as `encode` does."""
        if not request.prediction:
            return None
        ids = await self._tokenizer.encode(
            request.prediction,
            False,
            max_model_len=hello.max_model_len,
            field="prediction",
            tenant=request.tenant,
            num_output=0,
        )
        if len(ids) > hello.max_model_len:
            raise ContextLengthExceeded(
                f"prediction: {len(ids)} tokens; the model takes at most {hello.max_model_len}",
                field="prediction",
            )
        return ids

    async def encode_inputs(
        self, request: GenerationRequest, hello: Hello, facts: ModelFacts
    ) -> list[np.ndarray]:
        """Check and encode each prompt of a request that generates nothing, [tokens] int32; raises as `encode` does."""
        encoded = []
        for index, single in enumerate(request.for_each_prompt()):
            try:
                check_prompt(single, facts.limits)
                encoded.append(await self._encode_input(single, hello, facts))
            except InvalidRequest as error:
                raise (of_prompt(error, index) if request.prompts else error) from None
            # Let other tasks run between two inputs.
            await asyncio.sleep(0)
        return encoded

    async def _encode_input(
        self, request: GenerationRequest, hello: Hello, facts: ModelFacts
    ) -> np.ndarray:
        prompt = request.prompt or ()
        if isinstance(prompt, str):
            text = facts.embedding.prompt + prompt
            ids = await self._encode_text(request, text, hello, num_output=0)
        else:
            check_ids("prompt", prompt, hello.vocab_size)
            ids = await _id_array(prompt, hello)
        _check_len(len(ids), facts)
        check_prompt_len(len(ids), min(hello.max_model_len, hello.max_cache_tokens), num_output=0)
        return ids

    async def encode_questions(
        self,
        request: GenerationRequest,
        questions: Sequence[Question],
        hello: Hello,
        facts: ModelFacts,
    ) -> QuestionPrompts:
        """Encode the sequences of all replies to questions about the request's messages.

        Raises
        ------
        InvalidRequest
            The messages are refused by the chat template, or there is too much text.
        """
        places = question_prompts.new_places()
        messages = question_prompts.framed_messages(request.messages or (), places)
        asked = replace(request, messages=tuple(messages), add_generation_prompt=False)
        tokenizer = self._tokenizer.tokenizer
        text, special = await self._render_messages(asked, hello, facts)

        def encode() -> QuestionPrompts:
            frame = question_prompts.make_frame(
                text, places, hello.eos_token_ids, tokenizer, special
            )
            return question_prompts.encode_questions(
                frame, questions, tokenizer, min(hello.max_model_len, hello.max_cache_tokens)
            )

        prompts = await self._tokenizer.in_thread(encode)
        _check_len(prompts.max_len, facts)
        return prompts

    @property
    def marker_ids(self) -> frozenset[int]:
        """The special tokens that a parser of answers must see in the text."""
        return frozenset() if self.chat is None else self.chat.marker_ids

    async def load_parser(self) -> None:
        """Load the parser of answers before the first request needs it, without a thread of the tokenizer."""
        if self.chat is not None:
            await self.chat.load(asyncio.to_thread)

    async def answer_format(self, request: GenerationRequest, prompt: str) -> AnswerFormat | None:
        """Return the format of the answers; None if they are text only. Tools are prepared in a thread."""
        if self.chat is None or not self.chat.parses(request):
            return None
        await self.chat.load(self._tokenizer.in_thread)
        if request.tools:
            return await self._tokenizer.in_thread(self.chat.answer_format, request, prompt)
        return self.chat.answer_format(request, prompt)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of some token ids."""
        tokenizer = self._tokenizer.tokenizer

        def decode() -> str:
            ids = list(token_ids)
            check_ids("tokens", ids, tokenizer.vocab_size)
            return tokenizer.decode(ids, skip_special_tokens)

        return await self._tokenizer.in_thread(decode)

    async def tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it."""
        return await self._tokenizer.in_thread(self._tokenizer.tokenizer.tokens, token_ids)

    async def hashes(self, prompt_ids: np.ndarray, hello: Hello, tenant: str) -> np.ndarray:
        """Return the routing hashes of a prompt's whole blocks, [tokens // 64] uint64."""
        await _yield_if_long(prompt_ids)
        return prefix_hashes(self._hasher(hello, tenant), prompt_ids)

    def bad_word_ids(self, request: GenerationRequest) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of a request's bad words."""
        return self._tokenizer.tokenizer.bad_word_ids(request.bad_words)

    def special_stops(self, request: GenerationRequest) -> dict[int, str]:
        """Return the stop strings that are special tokens, by token id.

        With `skip_special_tokens` they are not part of the text, so only the token id shows that one was generated.
        """
        if not request.skip_special_tokens:
            return {}
        special = self._tokenizer.tokenizer.special
        found = ((special.id_of(stop.strip()), stop) for stop in request.stop)
        return {token_id: stop for token_id, stop in found if token_id is not None}

    async def _encode_messages(
        self, request: GenerationRequest, hello: Hello, facts: ModelFacts
    ) -> tuple[np.ndarray, str]:
        text, special = await self._render_messages(request, hello, facts)
        ids = await self._tokenizer.encode(
            text,
            # By default the template has written the special tokens itself.
            bool(request.add_special_tokens),
            max_model_len=hello.max_model_len,
            field="messages",
            tenant=request.tenant,
            is_guarded=special is not None,
        )
        return ids, text.replace(GUARD, "")

    async def _render_messages(
        self, request: GenerationRequest, hello: Hello, facts: ModelFacts
    ) -> tuple[str, SpecialTokens | None]:
        """Return the prompt text of the request's messages, and what has protected their texts."""
        if self._template is None or self.chat is None:
            raise UnsupportedField(
                "the checkpoint has no chat template named default, as base models have none, so messages are not "
                "served: use /v1/completions, or name the file of a template in the option chat_template",
                field="messages",
            )
        special: SpecialTokens | None = self._tokenizer.tokenizer.special
        if facts.special_tokens_in_messages:
            special = None
        options = _template_options(request, facts, self.chat)
        messages = request.messages or ()
        return await self._render(self._template, messages, options, special, hello), special

    async def _encode_text(
        self, request: GenerationRequest, prompt: str, hello: Hello, num_output: int = 1
    ) -> np.ndarray:
        ids = await self._tokenizer.encode(
            prompt,
            request.add_special_tokens is not False,
            max_model_len=hello.max_model_len,
            field="prompt",
            tenant=request.tenant,
            num_output=num_output,
        )
        return ids if len(ids) or prompt else self._empty_prompt(hello)

    def _empty_prompt(self, hello: Hello) -> np.ndarray:
        """Return one token, BOS or EOS, for an empty prompt without BOS, because a model needs a first token."""
        start = self._tokenizer.tokenizer.start_id()
        known = [*(() if start is None else (start,)), *hello.eos_token_ids]
        if not known:
            raise InvalidRequest(
                "the checkpoint has neither a BOS nor an EOS token: prompt must have at least 1 character, got 0",
                field="prompt",
            )
        return np.array(known[:1], np.int32)

    async def _render(
        self,
        template: ChatTemplate,
        messages: tuple[dict[str, Any], ...],
        options: TemplateOptions,
        special: SpecialTokens | None,
        hello: Hello,
    ) -> str:
        """Return the prompt text of a conversation. Long conversations are rendered in a thread."""
        length, bound = num_chars(messages), MAX_BYTES_PER_TOKEN * hello.max_model_len
        if length > bound:
            raise ContextLengthExceeded(
                f"messages have {length} characters; at most {bound} can be served"
                f" ({MAX_BYTES_PER_TOKEN} for each of the model's {hello.max_model_len} tokens)",
                field="messages",
            )
        text = template.render_quickly(messages, options, special=special)
        if text is None:
            render = functools.partial(template.render, messages, options, special=special)
            text = await self._tokenizer.in_thread(render)
        return text

    def _hasher(self, hello: Hello, tenant: str) -> RoutingHasher:
        key = f"{hello.model_name}\x00{hello.revision}\x00{tenant}"
        hasher = self._hashers.get(key)
        if hasher is None:
            if len(self._hashers) >= _MAX_HASHERS:
                self._hashers.clear()
            hasher = RoutingHasher(hello.model_name, hello.revision, tenant)
            self._hashers[key] = hasher
        return hasher


async def _id_array(token_ids: Sequence[int], hello: Hello) -> np.ndarray:
    await _yield_if_long(token_ids)
    try:
        ids = np.asarray(token_ids, dtype=np.int32)
    except OverflowError:
        check_ids("prompt", token_ids, hello.vocab_size)
        raise
    await _yield_if_long(ids)
    return ids


def _check_len(num_tokens: int, facts: ModelFacts) -> None:
    bound = facts.max_prompt_tokens
    if bound is not None and num_tokens > bound:
        raise ContextLengthExceeded(
            f"prompt has {num_tokens} tokens; this server takes at most {bound}", field="prompt"
        )


async def _yield_if_long(ids: Sequence[int] | np.ndarray) -> None:
    """Let other tasks run before the next pass over many ids."""
    if len(ids) > _LONG_PROMPT_TOKENS:
        await asyncio.sleep(0)


def _template_options(
    request: GenerationRequest, facts: ModelFacts, chat: ChatFormat
) -> TemplateOptions:
    """Return the options for the chat template.

    The request's own variables take precedence over those of its reasoning effort, and these over the application's.
    """
    continues, add_prompt = request.continue_final_message, request.add_generation_prompt
    return TemplateOptions(
        add_generation_prompt=not continues if add_prompt is None else add_prompt,
        continue_final_message=continues,
        kwargs={
            **facts.chat_template_kwargs,
            **chat.variables(request),
            **(request.chat_template_kwargs or {}),
        },
        tools=chat.tools(request),
        reasoning_field=chat.reasoning_field,
    )


def of_prompt(error: InvalidRequest, index: int) -> InvalidRequest:
    """Return the error for prompt `index` of a list, with the index in its field and message."""
    message, field = error.message, error.field
    if field is not None and field.startswith("prompt") and not field.startswith("prompt_"):
        field = f"prompt[{index}]{field.removeprefix('prompt')}"
        if message.startswith("prompt"):
            message = f"prompt[{index}]{message.removeprefix('prompt')}"
    return type(error)(message, field=field)
