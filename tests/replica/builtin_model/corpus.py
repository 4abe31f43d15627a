"""The training text of the embedded model, generated from a seed.

Source and licence: every sentence comes from the grammar in this folder (`world`, `knowledge`, `stories`, `dialogues`),
which was written for this project under its licence, Apache-2.0. No other text is used.

A document is plain prose or a conversation in the chat template. `<|endoftext|>` ends a document, and `<|im_end|>` ends
each turn of a conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from random import Random

from tests.replica.builtin_model import dialogues, stories
from tests.replica.builtin_model.dialogues import Message
from tests.replica.builtin_model.knowledge import FACTS
from tests.replica.builtin_model.world import DAYS, MONTHS, NUMBERS, PEOPLE, TOPICS, cap

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

PLAIN_FRACTION = 0.3


def render_chat(messages: list[Message]) -> str:
    """Render `messages` as the checkpoint's chat template does (a test compares the two)."""
    return "".join(f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)


def plain(rng: Random) -> str:
    """A plain document: a story with or without a title, a fact, a letter, a logbook or a list."""
    kind = rng.choices(
        ("story", "titled", "facts", "letter", "logbook", "list", "people"),
        weights=(10, 4, 4, 2, 2, 1, 1),
    )[0]
    if kind == "story":
        return stories.story(rng, rng.choice(TOPICS))
    if kind == "titled":
        topic = rng.choice(TOPICS)
        title = " ".join(cap(word) for word in topic.noun.split())
        if topic.kind != "idea":
            title = f"The {title}"
        return f"{title}\n\n{stories.story(rng, topic)}"
    if kind == "facts":
        return " ".join(answer for _, answer in rng.sample(FACTS, rng.randint(1, 3)))
    if kind == "letter":
        return stories.letter(rng)
    if kind == "logbook":
        return stories.logbook(rng)
    if kind == "list":
        names = rng.choice((DAYS, MONTHS, NUMBERS[1:]))
        return cap(", ".join(names)) + "."
    return "The choir of Port Corvel\n\n" + "\n".join(
        f"— {person.name}" for person in rng.sample(PEOPLE, rng.randint(3, 8))
    )


def document(seed: int, index: int) -> str:
    """Document `index` of the corpus with this seed, with its special tokens."""
    rng = Random(f"{seed}:{index}")  # seeded by SHA-512 of the text: the same on every machine
    if rng.random() < PLAIN_FRACTION:
        return plain(rng) + END_OF_TEXT
    return render_chat(dialogues.conversation(rng)) + END_OF_TEXT


def documents(seed: int, first: int = 0) -> Iterator[str]:
    """The endless corpus with this seed, from document `first` on."""
    index = first
    while True:
        yield document(seed, index)
        index += 1


def digest(seed: int, count: int) -> str:
    """SHA-256 of the first `count` documents, in hexadecimal."""
    sha = hashlib.sha256()
    for index in range(count):
        sha.update(document(seed, index).encode())
        sha.update(b"\0")
    return sha.hexdigest()
