"""Turns the tokens of one choice into deltas for the client.

Token ids → text → regions (reasoning, calls, content) → stop strings in the content → deltas. Only chats of models that
write regions have a parser; all other answers are content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from quire.protos.wire import NO_FACTS, Hello, SamplingParams, TokenDelta
from quire.router.chat.reply_parser import ReplyParser, ReplyParts
from quire.router.request.resume import KnownPrefix
from quire.router.request.token_scores import PromptParts, TokenScorer
from quire.router.scored_token import TokenScores
from quire.router.text.detokenizer import Detokenizer
from quire.router.text.stop import StopMatcher
from quire.router.transport.transport import OutputGap
from quire.router.types import GenerationRequest, Mark, OutputDelta

# Finish reason and stop reason.
_End = tuple[str, str | int | None]


class AnswerText:
    """The tokens of one answer, and the state that turns them into text.

    It survives the loss of a replica: the attempt on another one continues after `token_ids`.

    Parameters
    ----------
    prompt_ids
        [tokens] int32.
    hello
        The hello of any replica with the weights that the request uses.
    mark
        Number and checksum of the tokens that the client of a resumed stream has; deltas do not repeat them.
    special_stops
        Stop strings that are special tokens, by token id.
    parser
        Finds reasoning and tool calls in the text; None: there are none.

    Attributes
    ----------
    num_reasoning_tokens
        Tokens of the reasoning, with its marks.
    pooled
        The prompt's pooled hidden states, [hidden size] float32; empty until they arrive, and without `pooling`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        hello: Hello,
        detokenizer: Detokenizer,
        scorer: TokenScorer,
        mark: Mark,
        special_stops: Mapping[int, str],
        parser: ReplyParser | None = None,
    ):
        self.token_ids: list[int] = []
        self._prompt_ids = prompt_ids
        self._is_text_prompt = isinstance(request.prompt, str)
        self._sampling = sampling
        self._eos_token_ids = frozenset(hello.eos_token_ids)
        self._detokenizer = detokenizer
        self._scorer = scorer
        self._special_stops = special_stops
        self._parser = parser
        self.num_reasoning_tokens = 0
        self.pooled = np.empty(0, np.float32)
        self._stop = StopMatcher(request.stop, request.include_stop_str_in_output)
        self._known_prefix: KnownPrefix | None = None
        if request.resume_from is not None and mark.num_tokens:
            self._known_prefix = KnownPrefix(mark, request.resume_from.field)
        self._wants_prompt_scores = sampling.prompt_logprobs is not None
        start = sampling.prompt_logprobs_start
        num_scored = max(0, len(prompt_ids) - start) if self._wants_prompt_scores else 0
        self._prompt_parts = PromptParts(start, num_scored)
        # Characters of the text so far, for the text offsets of log-probabilities. `next_tokens` does not count: its
        # deltas have none.
        self._num_chars = 0
        # No stop strings, no resumed prefix, no prompt log-probabilities, no regions: most deltas need `next_tokens`
        # only.
        self.is_plain = not (
            request.stop
            or self._known_prefix is not None
            or self._wants_prompt_scores
            or parser is not None
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the next attempt would have as its prompt."""
        return len(self._prompt_ids) + len(self.token_ids)

    def prompt_ids(self) -> np.ndarray:
        """Return the prompt of the next attempt: the prompt and the tokens emitted so far, [tokens] int32."""
        return np.concatenate([self._prompt_ids, np.asarray(self.token_ids, dtype=np.int32)])

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the next attempt. They omit prompt log-probabilities if all have arrived."""
        if not self._prompt_parts.is_complete:
            return self._sampling
        return dataclasses.replace(self._sampling, prompt_logprobs=None)

    def prompt_scores(self) -> list[TokenScores] | None:
        """Return the prompt's tokens with their log-probabilities; None if the request does not ask for them."""
        if not self._wants_prompt_scores:
            return None
        first_id, parts = int(self._prompt_ids[0]), self._prompt_parts.parts
        return self._scorer.prompt_scores(first_id, parts, skip_special_tokens=self._is_text_prompt)

    def prompt_logprobs(self) -> np.ndarray:
        """Return the log-probabilities of the prompt's tokens from `prompt_logprobs_start` on, [tokens] float32."""
        parts = [part.logprobs for part in self._prompt_parts.parts]
        return np.concatenate([np.empty(0, np.float32), *parts])

    def next_tokens(self, event: TokenDelta) -> OutputDelta | None:
        """Take a delta that consists of the next tokens only. Return None, without effect, for any other delta.

        This is the fast path of plain decoding (`is_plain`), after a first delta went through `take`.
        """
        token_ids = event.token_ids
        if event.facts is not NO_FACTS or event.index != len(self.token_ids) or not token_ids:
            return None
        self.token_ids += token_ids
        return OutputDelta(self._detokenizer.feed(token_ids), token_ids)

    def new_ids(self, event: TokenDelta) -> list[int]:
        """Return the tokens of a delta that did not arrive before, and keep what it has about the prompt.

        Raises
        ------
        OutputGap
            Tokens or log-probabilities before those of the delta are missing.
        """
        expected = len(self.token_ids)
        if event.index > expected:
            raise OutputGap(f"tokens {expected} to {event.index - 1} of the stream are missing")
        if event.facts.prompt_logprobs is not None:
            self._prompt_parts.take(event.facts.prompt_logprobs)
        if event.facts.embedding is not None:
            self.pooled = event.facts.embedding
        new_ids = event.token_ids[expected - event.index :]
        if self._wants_prompt_scores and (new_ids or event.finish_reason is not None):
            self._prompt_parts.check_complete()
        return new_ids

    def take(self, event: TokenDelta, new_ids: list[int]) -> OutputDelta | None:
        """Turn new tokens into a delta; return None if the client has all of it already.

        Raises
        ------
        InvalidRequest
            A resumed answer differs from the tokens that the client has.
        """
        start = len(self.token_ids)
        num_known = 0
        if self._known_prefix is not None:
            num_known = self._known_prefix.take(start, new_ids)
        delta = OutputDelta("", [])
        offsets, end = self._append(event, new_ids, num_known, delta)
        new_ids = new_ids[: len(offsets)]
        if event.facts.logprobs is not None:
            logprobs = event.facts.logprobs[start - event.index :]
            delta.logprobs = self._scorer.output_scores(new_ids, logprobs, offsets)
        if end is None and event.finish_reason is not None:
            end = self._finish(event.finish_reason, delta)
        if end is not None:
            delta.finish_reason, delta.stop_reason = end
            if (
                delta.finish_reason == "stop"
                and self._parser is not None
                and self._parser.num_calls
            ):
                delta.finish_reason = "tool_calls"
        if num_known:
            new_ids = new_ids[num_known:]
            delta.logprobs = None if delta.logprobs is None else delta.logprobs[num_known:]
            if not new_ids and delta.finish_reason is None:
                return None
        delta.token_ids = new_ids
        return delta

    def check_end(self) -> None:
        """Raise `InvalidRequest` if a resumed answer ended before the last token that the client has."""
        if self._known_prefix is not None:
            self._known_prefix.check_end(len(self.token_ids))

    def _append(
        self, event: TokenDelta, new_ids: list[int], num_known: int, delta: OutputDelta
    ) -> tuple[list[int], _End | None]:
        """Append tokens, up to the end of the answer. Add the output of tokens after the first `num_known` to `delta`.

        Returns
        -------
        For each appended token the characters before it; the end, if a stop string or the last call ended the answer.
        """
        offsets: list[int] = []
        for i, token_id in enumerate(new_ids):
            self.token_ids.append(token_id)
            offsets.append(self._num_chars)
            is_last = event.finish_reason == "stop" and i == len(new_ids) - 1
            if is_last and self._ends_answer(token_id):
                # The last token counts as output, but its text is not shown.
                break
            text = self._detokenizer.feed([token_id])
            self._num_chars += len(text)
            # The output of a token that the client of a resumed stream has goes nowhere.
            end = self._add(text, delta if i >= num_known else OutputDelta("", []))
            if end is not None:
                return offsets, end
        return offsets, None

    def _add(self, text: str, delta: OutputDelta) -> _End | None:
        """Add the output of one token to a delta. Return the end if it ends the answer."""
        parser = self._parser
        if parser is None:
            return self._add_content(text, delta)
        was_reasoning = parser.is_reasoning
        end = self._add_parts(parser.feed(text), delta)
        self.num_reasoning_tokens += was_reasoning or parser.is_reasoning
        return end

    def _add_parts(self, parts: ReplyParts, delta: OutputDelta) -> _End | None:
        delta.reasoning += parts.reasoning
        delta.tool_calls += parts.calls
        end = self._add_content(parts.text, delta) if parts.text else None
        if end is None and self._parser is not None and self._parser.is_full:
            return "stop", None
        return end

    def _add_content(self, text: str, delta: OutputDelta) -> _End | None:
        text, stop_string = self._match(text)
        delta.text += text
        return None if stop_string is None else ("stop", stop_string)

    def _match(self, text: str) -> tuple[str, str | None]:
        if len(self.token_ids) <= self._sampling.min_tokens:
            return self._stop.flush() + text, None
        return self._stop.feed(text)

    def _finish(self, finish_reason: str, delta: OutputDelta) -> _End:
        """Add the text held back for a possible stop string or mark. Return the finish reason and the stop reason."""
        text, parser = self._detokenizer.flush(), self._parser
        if parser is None:
            end = self._add_content(text, delta)
        else:
            end = self._add_parts(parser.feed(text), delta)
            end = self._add_parts(parser.finish(), delta) if end is None else end
        if end is not None:
            return end
        delta.text += self._stop.flush()
        if finish_reason != "stop" or not self.token_ids:
            return finish_reason, None
        last = self.token_ids[-1]
        stop_token_id = last if last in self._sampling.stop_token_ids else None
        return finish_reason, self._special_stops.get(last, stop_token_id)

    def _ends_answer(self, token_id: int) -> bool:
        if token_id in self._sampling.stop_token_ids:
            return True
        return token_id in self._eos_token_ids and not self._sampling.ignore_eos
