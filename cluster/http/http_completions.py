"""Request body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from quire.cluster.http.http_schema import GenerationBody, IdLists, Ids, Texts
from quire.protos.errors import InvalidRequest
from quire.router import refused_fields
from quire.router.request.params import DEFAULT_LIMITS
from quire.router.types import GenerationRequest

# Most prompts of one request, and most choices of all its prompts together.
MAX_PROMPTS = DEFAULT_LIMITS.max_prompt_choices
# JSON schemas of the supported prompts. The router refuses other values with a message that has the bound.
_PROMPTS: list[dict[str, JsonValue]] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
]


_PROMPT_LISTS: list[Any] = [
    {"type": "array", "items": prompt, "minItems": 1, "maxItems": MAX_PROMPTS}
    for prompt in _PROMPTS
]


class CompletionRequest(GenerationBody):
    """Body of POST /v1/completions."""

    path = "/v1/completions"
    refused = refused_fields.OF_COMPLETIONS

    prompt: str | Ids | Texts | IdLists = Field(
        description=f"Text, token ids, or a list of either; at most {MAX_PROMPTS} prompts times choices. Choice j of "
        "prompt i has the index i * n + j.",
        json_schema_extra={"anyOf": [*_PROMPTS, *_PROMPT_LISTS]},
    )
    echo: bool | None = Field(
        None,
        description="Return the prompt before the answer, with its tokens' log-probabilities if `logprobs` is given. "
        "With `max_tokens` 0 only the prompt is returned.",
    )
    best_of: int | None = Field(
        None,
        description="Number of choices to generate for each prompt; the `n` with the highest mean log-probability are "
        "returned. At least `n`; must be `n` with `stream`.",
    )

    logprobs: int | None = Field(
        None,
        description="Return log-probabilities of the tokens and of this many most likely tokens at each position, at "
        "most 20, from the model's own distribution before sampling parameters are applied.",
    )

    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each token.

        At least 0 with `best_of`, which compares the choices' log-probabilities.
        """
        return 0 if self.logprobs is None and self.num_dropped_choices() else self.logprobs

    def num_dropped_choices(self) -> int:
        """Choices of each prompt that are generated but not returned: `best_of` - `n`.

        Raises
        ------
        InvalidRequest
            `best_of` is outside its bounds, or above `n` with `stream`.
        """
        n = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == n or not 1 <= n <= DEFAULT_LIMITS.max_choices:
            return 0
        if not n < self.best_of <= DEFAULT_LIMITS.max_choices:
            raise InvalidRequest(
                f"best_of must be an integer in [{n}, {DEFAULT_LIMITS.max_choices}], from n on, got {self.best_of}",
                field="best_of",
            )
        if self.stream:
            raise InvalidRequest(
                f"the best choices are known only after all have ended: with stream best_of must equal n ({n}), got "
                f"{self.best_of}",
                field="best_of",
            )
        return self.best_of - n

    def num_prompt_logprobs(self) -> int | None:
        """Number of most likely tokens to return with each prompt token, for `prompt_logprobs` or `echo`.

        Log-probabilities include the tokens' texts, so an echoed prompt of token ids always needs them.
        """
        asked = self.prompt_logprobs
        if not self.echo or (asked is not None and asked < 0):
            return asked
        if self.logprobs is None:
            return 0 if asked is None and self.has_ids() else asked
        return max(self.logprobs, asked or 0)

    def has_ids(self) -> bool:
        """Whether the prompts are token ids instead of texts."""
        given: Any = self.prompt
        while isinstance(given, list) and given:
            given = given[0]
        return not isinstance(given, str)

    def prompts(self) -> list[str | tuple[int, ...]]:
        """All prompts."""
        given: Any = self.prompt
        if isinstance(given, str):
            return [given]
        prompts = given if given and isinstance(given[0], (str, list)) else [given]
        return [one if isinstance(one, str) else tuple(one) for one in prompts]

    def to_request(self, request_id: str) -> GenerationRequest:
        """Make the router's request."""
        prompts = self.prompts()
        given = {"prompt": prompts[0]} if len(prompts) == 1 else {"prompts": tuple(prompts)}
        return self.generation_request(request_id, echo=bool(self.echo), **given)
