"""Samples texts from a grammar, with the tokenizer of the embedded model and further special tokens."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer

from quire.protos.sampling_params import Grammar
from quire.replica.builtin_model import CHECKPOINT
from quire.replica.grammar.grammar_source import to_source
from quire.router.chat.added_tokens import AddedTokens

EOS = 2


class Sampler:
    """Samples random tokens that a grammar allows, with a preference for those that end something."""

    def __init__(self, tokens: list[str], is_special: bool):
        self.tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
        added = [AddedToken(token, special=is_special) for token in tokens]
        (self.tokenizer.add_special_tokens if is_special else self.tokenizer.add_tokens)(added)
        self.added = AddedTokens(
            {
                t.content: (i, t.special)
                for i, t in self.tokenizer.get_added_tokens_decoder().items()
            }
        )
        self._ll = LLTokenizer(self.tokenizer.to_str())
        size = self._ll.vocab_size
        texts = [self.tokenizer.id_to_token(i) or "" for i in range(size)]
        self._is_end = np.array(
            [any(c in text for c in '"}]<>,') or text == "[ARGS]" for text in texts]
        )
        self._mask = allocate_token_bitmask(1, size)

    def refused(self, grammar: Grammar, texts: list[str]) -> list[str]:
        """Return the texts that are not in the grammar's language."""
        matcher, _ = self.matcher(grammar)
        found = []
        for text in texts:
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            if not (matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()):
                found.append(text)
            matcher.reset()
        return found

    def accepts(self, grammar: Grammar, text: str) -> bool:
        """Whether a text is in the grammar's language."""
        return not self.refused(grammar, [text])

    def allowed(self, matcher: LLMatcher) -> np.ndarray:
        fill_next_token_bitmask(matcher, self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._ll.vocab_size])

    def matcher(self, grammar: Grammar, start: str = "") -> tuple[LLMatcher, list[int]]:
        matcher = LLMatcher(self._ll, to_source(grammar.kind, grammar.text, "one_space"))
        assert not matcher.get_error(), matcher.get_error()
        ids = self.tokenizer.encode(start, add_special_tokens=False).ids if start else []
        assert matcher.validate_tokens(ids) == len(ids)
        matcher.consume_tokens(ids)
        return matcher, ids

    def sample(self, grammar: Grammar, rng: random.Random, start: str = "") -> str | None:
        """Return a text of the grammar's language; None if it became too long."""
        matcher, ids = self.matcher(grammar, start)
        for _ in range(160):
            found = self.allowed(matcher)
            if matcher.is_accepting() and rng.random() < 0.4:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            found = found[found > EOS]
            ends = found[self._is_end[found]]
            if len(found) == 0:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            token = int(rng.choice(ends if len(ends) and rng.random() < 0.7 else found))
            assert matcher.consume_token(token)
            ids.append(token)
        return None

    def texts(
        self, grammar: Grammar, rng: random.Random, number: int, start: str = ""
    ) -> list[str]:
        """Return some texts of the grammar's language that begin with `start`."""
        tries = (self.sample(grammar, rng, start) for _ in range(10 * number))
        found = list(islice((text for text in tries if text is not None), number))
        assert len(found) == number
        return found
