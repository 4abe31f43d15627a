"""The chat format of one checkpoint: which parser, grammar and template variables a request needs."""

from __future__ import annotations

import hashlib
import logging
import re
import string
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.protos.errors import UnsupportedField, described
from quire.protos.sampling_params import Grammar
from quire.router.chat.added_tokens import AddedTokens
from quire.router.chat.argument_schema import with_types
from quire.router.chat.family import Family, load_families, recognise
from quire.router.chat.reply_parser import REASONING_FIELDS, ReplyParser, is_call, load_template
from quire.router.chat.tool_checks import EFFORTS, allowed_tools, openai_form
from quire.router.chat.tool_grammar import make_grammar
from quire.router.text.chat_messages import REASONING
from quire.router.text.chat_template import ChatTemplate, TemplateOptions
from quire.router.text.tokenizer import TextTokenizer
from quire.router.types import GenerationRequest

logger = logging.getLogger(__name__)

_ALPHABET = string.digits + string.ascii_letters
_ID_CHARS = 9  # Mistral's templates refuse ids of another length.
_PROBE = {
    "type": "function",
    "function": {
        "name": "quire_probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {}},
    },
}


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How one request's answers are constrained and parsed.

    Attributes
    ----------
    grammar
        The request's own grammar, one for calls, or None.
    new_parser
        Makes the parser of one choice from the answer's id and the choice, which determine the ids of calls.
    """

    grammar: Grammar | None
    new_parser: Callable[[str, int], ReplyParser]


class ChatFormat:
    """Knows the family of a checkpoint.

    Parameters
    ----------
    template
        The checkpoint's chat template. Its text shows the family. A `response_template` in
        `tokenizer_config.json` replaces the one of the family.
    """

    def __init__(self, template: ChatTemplate, tokenizer: TextTokenizer):
        self._template = template
        self._family: Family | None = recognise(template.source, load_families())
        added = tokenizer.backend.get_added_tokens_decoder()
        self._added = AddedTokens({t.content: (i, t.special) for i, t in added.items()})
        self._special = {t.content: i for i, t in added.items() if t.special}
        self._spec: Mapping[str, Any] | None = template.response_template
        if self._spec is None and self._family is not None:
            self._spec = self._family.response_template
        fields = {} if self._spec is None else self._spec.get("fields", {})
        reasons = any(name in REASONING_FIELDS for name in fields)
        if template.response_template is None and self._family is not None:
            mark = self._family.reasoning
            reasons = mark is not None and mark.open.rstrip() in template.source
        self._has_reasoning = reasons
        self._has_calls = any(map(is_call, fields))
        # Arguments are written as text, so the parser needs their types.
        self._writes_text = any(
            is_call(name) and field.get("content") != "json" for name, field in fields.items()
        )
        self._markers = _markers(fields, self._special)
        # With and without the fields of calls; compiled on first use, because it imports transformers.
        self._compiled: dict[bool, Any] = {}
        self._renders_tools: bool | None = None

    @property
    def marker_ids(self) -> frozenset[int]:
        """The special tokens that the parser must see in the text."""
        return frozenset(self._special[marker] for marker in self._markers)

    def parses(self, request: GenerationRequest) -> bool:
        """Whether the answer to a request may have regions that must be parsed.

        An answer in a response format is text only, unless tools may be called.
        """
        if request.messages is None or self._spec is None:
            return False
        return bool(allowed_tools(request)) or (self._has_reasoning and request.grammar is None)

    def variables(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the template's variables for the request's reasoning effort.

        Raises
        ------
        UnsupportedField
            The model has no such effort.
        """
        effort = request.reasoning_effort
        if effort is None:
            return {}
        reasoning = None if self._family is None else self._family.reasoning
        variable = None if reasoning is None else reasoning.variable
        if reasoning is None or variable is None or variable not in self._template.source:
            neutral = "medium" if self._has_reasoning else "none"
            if effort == neutral or request.fit_to_model:
                return {}
            raise UnsupportedField(
                f"the model's chat template does not control reasoning: reasoning_effort must be {neutral} or null, "
                f"got {effort}",
                field="reasoning_effort",
            )
        if effort not in reasoning.levels and request.fit_to_model:
            effort = _nearest(effort, reasoning.levels)
        if effort not in reasoning.levels:
            raise UnsupportedField(
                f"the model has no such effort: reasoning_effort must be one of {', '.join(reasoning.levels)}, got "
                f"{effort}",
                field="reasoning_effort",
            )
        return {variable: reasoning.levels[effort]}

    def tools(self, request: GenerationRequest) -> list[dict[str, Any]] | None:
        """Return the tools for the chat template; None if there are none.

        Raises
        ------
        UnsupportedField
            The model has no known format of calls, or its template does not render tools.
        """
        if not request.tools:
            return None
        if not self._has_calls:
            raise UnsupportedField(
                "the format in which this model calls tools is unknown: tools must be empty or null, got "
                f"{described(request.tools)}",
                field="tools",
            )
        if self._renders_tools is None:
            self._renders_tools = self._probe()
        if not self._renders_tools:
            raise UnsupportedField(
                "the model's chat template ignores tools: tools must be empty or null, got "
                f"{described(request.tools)}",
                field="tools",
            )
        return openai_form(request.tools)

    @property
    def reasoning_field(self) -> str:
        """The field of a message in which the template reads the reasoning of an earlier answer."""
        reasoning = None if self._family is None else self._family.reasoning
        return REASONING if reasoning is None else reasoning.message_field

    async def load(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        """Prepare for `answer_format`. The first call takes about a second, in a thread."""
        if not self._compiled and self._spec is not None:
            self._compiled = await in_thread(self._compile)

    def answer_format(self, request: GenerationRequest, prompt: str) -> AnswerFormat:
        """Return the format of a request's answers; `load` must have been awaited.

        With as many tools as are served this takes up to 50 ms.

        Parameters
        ----------
        prompt
            The rendered prompt.

        Raises
        ------
        UnsupportedField
            The family's calls cannot be constrained.
        """
        tools = allowed_tools(request)
        compiled = self._compiled[bool(tools)]
        markers = self._markers if request.skip_special_tokens else ()
        max_calls = None if request.parallel_tool_calls else 1
        if self._writes_text:
            tools = tuple(replace(t, parameters=with_types(t.parameters or {})) for t in tools)
        typed = openai_form(tools)

        def new_parser(answer_id: str, choice: int) -> ReplyParser:
            def id_of(index: int) -> str:
                return call_id(answer_id, choice, index)

            return ReplyParser(compiled, prompt, typed, id_of, markers, max_calls)

        is_reasoning = new_parser("", 0).is_reasoning
        return AnswerFormat(self.grammar(request, is_reasoning), new_parser)

    def grammar(self, request: GenerationRequest, in_reasoning: bool) -> Grammar | None:
        """Return the grammar of the answer: the request's own, one for calls, or None.

        Parameters
        ----------
        in_reasoning
            The prompt ends within reasoning.

        Raises
        ------
        UnsupportedField
            The family's calls cannot be constrained.
        """
        tools, choice = allowed_tools(request), request.tool_choice
        is_required = choice is not None and choice.mode == "required"
        is_restricted = choice is not None and bool(choice.names)
        is_strict = any(tool.strict for tool in tools)
        if not tools or not (is_required or is_restricted or is_strict or request.grammar):
            return request.grammar
        if self._family is None or self._family.calls is None:
            raise _unconstrained(request, is_required or is_restricted)
        return make_grammar(
            tools,
            self._family.calls,
            self._added,
            is_required=is_required,
            is_parallel=request.parallel_tool_calls,
            reasoning=self._family.reasoning if self._has_reasoning else None,
            in_reasoning=in_reasoning,
            answer=request.grammar,
        )

    def _compile(self) -> dict[bool, Any]:
        assert self._spec is not None
        try:
            return _compile(self._spec)
        except ValueError as error:
            if self._family is None or self._spec is self._family.response_template:
                raise
            logger.warning(
                "the checkpoint's response_template is not valid, the one of %s is used: %s",
                self._family.name,
                error,
            )
            return _compile(self._family.response_template)

    def _probe(self) -> bool:
        """Whether the template writes tools into the prompt."""
        messages = [{"role": "user", "content": "Hello"}]
        try:
            without = self._template.render(messages)
            return self._template.render(messages, TemplateOptions(tools=[_PROBE])) != without
        except (
            Exception
        ):  # The template refuses the probe's conversation; the request shows its own reason.
            return True


def call_id(answer_id: str, choice: int, index: int) -> str:
    """Return the id of a call: 9 letters and digits, the same whenever the answer is generated again."""
    digest = hashlib.blake2b(f"{answer_id}/{choice}/{index}".encode(), digest_size=16).digest()
    number, chars = int.from_bytes(digest), ""
    for _ in range(_ID_CHARS):
        number, digit = divmod(number, len(_ALPHABET))
        chars += _ALPHABET[digit]
    return chars


def _compile(spec: Mapping[str, Any]) -> dict[bool, Any]:
    fields = spec["fields"]
    text = {name: field for name, field in fields.items() if not is_call(name)}
    return {True: load_template(spec), False: load_template({**spec, "fields": text})}


def _markers(fields: Mapping[str, Any], special: Iterable[str]) -> tuple[str, ...]:
    """Return the special tokens in the marks of a response template."""
    marks: list[str] = []
    for field in fields.values():
        for key in ("open", "close"):
            value = field.get(key, [])
            marks += [value] if isinstance(value, str) else value
            marks.append(re.sub(r"\\(.)", r"\1", field.get(f"{key}_pattern", "")))
    return tuple(token for token in special if any(token in mark for mark in marks))


def _unconstrained(request: GenerationRequest, is_chosen: bool) -> UnsupportedField:
    if is_chosen:
        return UnsupportedField(
            "calls of this model cannot be constrained by a grammar: tool_choice must be auto or none, got "
            f"{described(request.tool_choice)}",
            field="tool_choice",
        )
    if request.grammar is not None:
        return UnsupportedField(
            f"calls of this model cannot be combined with a grammar: {request.grammar.field} must be null while tools "
            "may be called",
            field=request.grammar.field,
        )
    strict = next(i for i, tool in enumerate(request.tools) if tool.strict)
    return UnsupportedField(
        f"calls of this model cannot be constrained by a grammar: tools[{strict}].strict must be false, got true",
        field=f"tools[{strict}].strict",
    )


def _nearest(effort: str, levels: Iterable[str]) -> str:
    """Return the level that is nearest to an effort in the order of `EFFORTS`."""
    wanted = EFFORTS.index(effort)
    return min(levels, key=lambda level: abs(EFFORTS.index(level) - wanted))
