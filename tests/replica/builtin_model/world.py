"""The small world of the embedded model: people, places and things of an invented town.

Written for this project under its licence, Apache-2.0. Contains only data and the rules of English that the grammar in
`stories` and `dialogues` needs.
"""

from __future__ import annotations

from random import Random
from typing import NamedTuple


class Person(NamedTuple):
    """A name with its pronouns."""

    name: str
    she: str
    her: str  # possessive
    obj: str  # object form


class Topic(NamedTuple):
    """A subject of a story."""

    noun: str
    kind: str  # "thing" | "place" | "creature" | "person" | "idea"


PEOPLE: tuple[Person, ...] = tuple(
    Person(name, "she", "her", "her")
    for name in ("Mara", "Inès", "Zoë", "Anna", "Renée", "Noor", "Elsa", "Ruth", "Hana", "Lucía")
) + tuple(
    Person(name, "he", "his", "him")
    for name in ("Tom", "Léo", "Pavel", "Otto", "Björn", "Sam", "Amir", "Jonas", "Émile", "Finn")
)

TRADES = ("baker", "bookbinder", "fisher", "gardener", "keeper", "miller", "painter", "potter",
          "printer", "sailor", "singer", "teacher", "weaver", "carpenter",
          "clockmaker")  # fmt: skip

THINGS = ("bell", "book", "lantern", "violin", "clock", "map", "key", "kite", "umbrella", "letter",
          "teapot", "boat", "basket", "coat", "drum", "flute", "hat", "mirror", "ladder", "needle",
          "ribbon", "candle", "compass", "blanket", "pen", "page", "quire", "song", "cake",
          "wheel")  # fmt: skip

PLACES = ("lighthouse", "bridge", "bakery", "library", "harbour", "garden", "mill", "school",
          "workshop", "tower", "market", "chapel", "island", "ferry", "café", "castle", "forest",
          "village", "river", "ship")  # fmt: skip

CREATURES = ("gull", "heron", "owl", "wren", "swan", "robin", "goose", "cat", "dog", "fox", "seal",
             "whale", "mouse", "hedgehog", "horse", "bear", "rabbit", "crab", "frog", "snail",
             "dragon", "bird", "wolf", "turtle", "bee", "fish", "robot", "ghost", "goat",
             "duck")  # fmt: skip

ROLES = (*TRADES, "captain", "queen", "king", "princess", "pirate", "doctor", "farmer", "girl",
         "boy", "choir", "librarian", "wizard", "astronaut", "knight", "cook")  # fmt: skip

IDEAS = ("winter", "music", "friendship", "rain", "snow", "courage", "the sea", "the moon",
         "the wind", "a storm", "a birthday", "the night", "love", "spring", "summer", "autumn",
         "a journey", "the stars", "home", "a promise")  # fmt: skip

TOPICS: tuple[Topic, ...] = (
    *(Topic(noun, "thing") for noun in THINGS),
    *(Topic(noun, "place") for noun in PLACES),
    *(Topic(noun, "creature") for noun in CREATURES),
    *(Topic(noun, "person") for noun in ROLES),
    *(Topic(noun, "idea") for noun in IDEAS),
)

BIRDS = ("gull", "heron", "owl", "wren", "swan", "robin", "goose", "duck", "crow", "swift")
FRUIT = ("apple", "pear", "plum", "cherry", "fig", "lemon", "orange", "melon")
TOOLS = ("hammer", "needle", "knife", "brush", "saw", "awl", "press", "ladder")
GROUPS: dict[str, tuple[str, ...]] = {"birds": BIRDS, "fruits": FRUIT, "tools": TOOLS}

COLOURS = ("red", "blue", "green", "yellow", "white", "black", "brown", "silver", "golden", "grey")
SIZES = ("small", "old", "little", "heavy", "quiet", "bright", "strange", "beautiful")
WEATHERS = ("windy", "rainy", "foggy", "cold", "sunny", "stormy", "snowy", "warm")
TIMES = ("morning", "evening", "afternoon", "night")
SPOTS = ("under the stairs", "behind the mill", "in the bakery", "on the bridge", "in the chapel",
         "under the old pear tree", "at the end of the pier", "in the tall tower",
         "beside the river", "in the Café Étoile", "on the roof of the school",
         "between two stones")  # fmt: skip

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
           "eighteen", "nineteen", "twenty")  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September",
          "October", "November", "December")  # fmt: skip

#: Each has three or four bytes and several tokens, which tests partial characters in streams.
EMOJI = ("📖", "🐦", "🌊", "🎶", "🕯", "⛵", "🌙", "🍞", "🌧", "🔔", "🐋", "🦉", "🌻", "☀", "❄")

_PLURALS = {
    "fish": "fish",
    "fox": "foxes",
    "goose": "geese",
    "loaf": "loaves",
    "mouse": "mice",
    "wolf": "wolves",
}


def a(noun: str) -> str:
    """`noun` with its indefinite article ("a quire", "an owl")."""
    return ("an " if noun[0].lower() in "aeiouéè" else "a ") + noun


def plural(noun: str, count: int = 2) -> str:
    """The form of `noun` after the number `count`."""
    return noun if count == 1 else _PLURALS.get(noun, noun + "s")


def cap(text: str) -> str:
    """`text` with a capital first letter."""
    return text[0].upper() + text[1:]


def listing(items: list[str] | tuple[str, ...]) -> str:
    """Join `items` in English: "a, b and c"."""
    if len(items) == 1:
        return items[0]
    return ", ".join(items[:-1]) + " and " + items[-1]


def two_people(rng: Random) -> tuple[Person, Person]:
    """Two different people."""
    first, second = rng.sample(PEOPLE, 2)
    return first, second
