"""Questions about a conversation with a list of allowed replies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Question:
    """A question that the user asks at the end of a conversation.

    Attributes
    ----------
    text
        The question, as the model reads it.
    replies
        The allowed replies of the assistant, at least 1 character each, no two equal.
    """

    text: str
    replies: tuple[str, ...]
