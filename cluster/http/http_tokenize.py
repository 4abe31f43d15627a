"""Tokens without generation: routes that show how a prompt is encoded, in vLLM's shapes.

```
POST /tokenize                       a text or messages to token ids
POST /detokenize                     token ids to text
POST /v1/chat/completions/render     a chat's body to the prompt of its answer
```
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.cluster.api_common.front_end import check_model, renamed
from quire.cluster.http.http_answers import json_response
from quire.cluster.http.http_body import describe_route, parse_body
from quire.cluster.http.http_chats import ChatCompletionRequest, ChatMessages, router_messages
from quire.cluster.http.http_schema import Ids, RequestBody
from quire.cluster.http.http_tools import TOOL_NAMES, TOOLS_SCHEMA, tools_of
from quire.cluster.http.json_body import read_json
from quire.protos.errors import InvalidRequest, QuireError
from quire.protos.field_checks import at_most, invalid
from quire.router import refused_fields
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.types import EncodedPrompt, GenerationRequest, Service

RENDER_PATH = f"{ChatCompletionRequest.path}/render"
_CHAT_NAMES = {"prompt": "messages", **TOOL_NAMES}


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize: `prompt` or `messages`."""

    path = "/tokenize"
    refused = refused_fields.OF_TOKENIZE

    model: str | None = Field(
        None, description="Name of the model. Default: the application's only model."
    )
    prompt: Any = Field(None, description="A text.", json_schema_extra={"type": ["string", "null"]})
    messages: ChatMessages | None = Field(
        None, description="A conversation, as for chat completions."
    )
    tools: list[dict[str, Any]] | None = Field(
        None, description="Tools of the conversation.", json_schema_extra=TOOLS_SCHEMA
    )
    add_special_tokens: bool | None = Field(
        None,
        description="Whether the tokenizer adds special tokens such as BOS. Default: true for a prompt, false for "
        "messages, whose template contains them.",
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="Whether the prompt ends with the beginning of an assistant message. Default: true, false with "
        "`continue_final_message`.",
    )
    continue_final_message: bool | None = Field(
        None, description="The prompt ends in the last message, without its end."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the chat template."
    )
    return_token_strs: bool | None = Field(None, description="Return `token_strs`; default false.")

    def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request.

        Raises
        ------
        InvalidRequest
            Not exactly one of `prompt` and `messages` is given, or one has a wrong form.
        """
        if (self.prompt is None) == (self.messages is None):
            given = "none" if self.prompt is None else "both"
            raise InvalidRequest(
                f"prompt or messages must be given, one of the two, got {given}", field="prompt"
            )
        if not isinstance(self.prompt, str | None):
            raise invalid("prompt", "a string", self.prompt)
        return GenerationRequest(
            request_id=request_id,
            model=self.model,
            prompt=self.prompt,
            messages=None if self.messages is None else router_messages(self.messages),
            tools=tools_of(self.tools),
            add_special_tokens=self.add_special_tokens,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=self.chat_template_kwargs,
        )


class DetokenizeRequest(RequestBody):
    """Body of POST /detokenize."""

    path = "/detokenize"
    refused = refused_fields.OF_DETOKENIZE

    model: str | None = Field(
        None, description="Name of the model. Default: the application's only model."
    )
    tokens: Ids = Field(
        description="Token ids below the size of the vocabulary; at most "
        f"{DEFAULT_LIMITS.max_prompt_ids}."
    )
    skip_special_tokens: bool | None = Field(
        None, description="Omit special tokens from the text; default false."
    )


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


_MaxModelLen = Annotated[int, Field(description="Most tokens of prompt and answer together.")]


class TokenizeAnswer(_Answer):
    """The tokens of a prompt."""

    count: int = Field(description="Number of tokens.")
    max_model_len: _MaxModelLen
    tokens: list[int]
    token_strs: list[str] | None = Field(
        description="The tokens as the vocabulary writes them, with `return_token_strs`."
    )


class DetokenizeAnswer(_Answer):
    """The text of token ids."""

    prompt: str


class RenderAnswer(_Answer):
    """The prompt that a replica would compute for a chat."""

    request_id: str
    model: str
    prompt: str = Field(description="The rendered chat template.")
    token_ids: list[int]
    count: int = Field(description="Number of tokens.")
    max_model_len: _MaxModelLen


def add_tokenize_routes(
    app: FastAPI, get_service: Callable[[], Service], max_body_bytes: int
) -> None:
    """Add the routes to the application; the parameters are those of `http_api.build_app`."""

    async def encoded(asked: GenerationRequest, names: Mapping[str, str]) -> EncodedPrompt:
        try:
            return await get_service().encode(asked)
        except QuireError as error:
            raise renamed(error, names) from None

    @app.post(TokenizeRequest.path, **describe_route(TokenizeRequest, TokenizeAnswer))
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of messages."""
        body = parse_body(TokenizeRequest, await read_json(request, max_body_bytes))
        names = TOOL_NAMES if body.messages is None else _CHAT_NAMES
        prompt = await encoded(body.to_request(request.state.request_id), names)
        ids = prompt.token_ids.tolist()
        return json_response(
            {
                "count": len(ids),
                "max_model_len": prompt.max_model_len,
                "tokens": ids,
                "token_strs": await get_service().tokens(ids) if body.return_token_strs else None,
            }
        )

    @app.post(DetokenizeRequest.path, **describe_route(DetokenizeRequest, DetokenizeAnswer))
    async def detokenize(request: Request) -> Response:
        """The text of token ids. Bytes that are not a whole character are U+FFFD."""
        body = parse_body(DetokenizeRequest, await read_json(request, max_body_bytes))
        at_most("tokens", len(body.tokens), DEFAULT_LIMITS.max_prompt_ids, "token ids")
        service = get_service()
        check_model(service, body.model)
        text = await service.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return json_response({"prompt": text})

    @app.post(RENDER_PATH, **describe_route(ChatCompletionRequest, RenderAnswer))
    async def render(request: Request) -> Response:
        """The prompt of a chat: rendered text and token ids. Nothing is generated.

        The body is that of a chat completion and is checked as such.
        """
        body = parse_body(ChatCompletionRequest, await read_json(request, max_body_bytes))
        request_id = request.state.request_id
        service = get_service()
        prompt = await encoded(body.to_request(request_id), body.router_names())
        return json_response(
            {
                "request_id": request_id,
                "model": service.model_info().name,
                "prompt": prompt.text,
                "token_ids": prompt.token_ids.tolist(),
                "count": len(prompt.token_ids),
                "max_model_len": prompt.max_model_len,
            }
        )

    app.state.body_models += [TokenizeRequest, DetokenizeRequest]
