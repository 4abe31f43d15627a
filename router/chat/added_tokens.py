"""Grammar symbols of texts in which a tokenizer finds tokens of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping


class AddedTokens:
    """The tokens that a tokenizer finds in a text before anything else.

    Parameters
    ----------
    tokens
        Text to id, and whether the token is special.
    """

    def __init__(self, tokens: Mapping[str, tuple[int, bool]]):
        self._tokens = {text: found for text, found in tokens.items() if text.strip()}
        words = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, words))) if words else None

    def symbols(self, text: str) -> list[str]:
        """Return the grammar's symbols for a text."""
        found: list[str] = []
        end = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            found += quoted(text[end : match.start()])
            token_id, is_special = self._tokens[match[0]]
            by_id = f"<[{token_id}]>"
            found.append(by_id if is_special else f"({by_id} | {quoted(match[0])[0]})")
            end = match.end()
        return found + quoted(text[end:])

    def text_until(self, mark: str, rule: str) -> tuple[str, str]:
        """Return a symbol for any text up to a mark, and the rule that it needs.

        Parameters
        ----------
        rule
            Name for the new rule.
        """
        first, *rest = self.symbols(mark)
        if first.startswith("<["):
            return " ".join(["TEXT", first, *rest]), ""
        text = f"{rule}[lazy]: TEXT {quoted(mark)[0]}\n"
        if first.startswith("("):
            by_id = first[1:].split(" ")[0]
            return f"(TEXT {' '.join([by_id, *rest])} | {rule})", text
        return rule, text


def quoted(text: str) -> list[str]:
    """Return the grammar's symbol for a text without such tokens; none for an empty text."""
    return [json.dumps(text, ensure_ascii=False)] if text else []
