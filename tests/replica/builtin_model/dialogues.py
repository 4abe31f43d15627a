"""Conversations: questions with answers that follow from the prompt or from the small world."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.replica.builtin_model.knowledge import (
    FACTS,
    LETTERS,
    PLACES_ABROAD,
    QUESTIONS,
    SUBJECTS,
    SYLLABLES,
    UNKNOWN,
    VERBS,
)
from tests.replica.builtin_model.stories import TOWN, story
from tests.replica.builtin_model.world import (
    BIRDS,
    COLOURS,
    CREATURES,
    DAYS,
    EMOJI,
    GROUPS,
    MONTHS,
    NUMBERS,
    PEOPLE,
    SPOTS,
    THINGS,
    TOPICS,
    TRADES,
    Person,
    Topic,
    a,
    cap,
    listing,
    plural,
    two_people,
)

#: One question and its answer.
Turn = tuple[str, str]
#: `{"role": "system" | "user" | "assistant", "content": text}`
Message = dict[str, str]


def facts(rng: Random) -> list[Turn]:
    """A question for the definition of a word."""
    subject, answer = rng.choice(FACTS)
    return [(_ask_about(rng, subject), answer)]


def _ask_about(rng: Random, subject: str) -> str:
    return rng.choice((
        f"What is {subject}?", f"What is {subject}?", f"Tell me about {subject}.",
        f"Do you know what {subject} is?", f"Explain {subject}.", f"what is {subject}",
    ))  # fmt: skip


def questions(rng: Random) -> list[Turn]:
    """A question with one fixed answer."""
    question, answer = rng.choice(QUESTIONS)
    return [(question if rng.random() < 0.8 else question.lower().rstrip("?."), answer)]


def unknown(rng: Random) -> list[Turn]:
    """A question that the model cannot answer, down to random letters."""
    if rng.random() < 0.25:
        question = " ".join(
            "".join(rng.choices(LETTERS, k=rng.randint(1, 8))) for _ in range(rng.randint(1, 8))
        )
    else:
        y, z = rng.sample(SUBJECTS, 2)
        question = rng.choice(UNKNOWN).format(
            x=rng.choice(PLACES_ABROAD), y=y, z=z, v=rng.choice(VERBS)
        )
    if rng.random() < 0.2:
        question = question.lower()
    answer = f"I am a very small model, and I only know {TOWN}. I do not know that. "
    return [(question, answer + rng.choice(("Ask me for a story.", "Ask me what a quire is.")))]


def greeting(rng: Random) -> list[Turn]:
    """Hello, with or without a name to remember over the turns."""
    hello = rng.choice(("Hello!", "Hello", "Hi", "Hi!", "Hey", "Good morning!", "Good evening!"))
    if rng.random() < 0.3:
        return [(hello, f"{hello.rstrip('!')}! I am Quire. What would you like to hear?")]
    who = rng.choice(PEOPLE).name
    turns = [(f"{hello.rstrip('!')}, my name is {who}.", f"Nice to meet you, {who}. I am Quire.")]
    if rng.random() < 0.4:
        turns += rng.choice((facts, questions, arithmetic))(rng)
    return [*turns, (rng.choice(("What is my name?", "Who am I?")), f"Your name is {who}.")]


def identity(rng: Random) -> list[Turn]:
    """A question about the model itself."""
    question = rng.choice((
        "Who are you?", "What are you?", "What is your name?", "who are you", "Introduce yourself.",
    ))  # fmt: skip
    answer = (
        f"I am Quire, a very small language model from {TOWN}. I know stories, birds and books."
    )
    return [(question, answer)]


def farewell(rng: Random) -> list[Turn]:
    """Thanks and goodbye."""
    return [rng.choice((
        ("Thank you.", "You are welcome!"),
        ("Thanks!", "You are welcome!"),
        ("Thank you!", "You are welcome!"),
        ("Goodbye.", "Goodbye! Come back when the tide is high. 🌙"),
        ("Bye!", "Goodbye! Come back when the tide is high. 🌙"),
    ))]  # fmt: skip


def tell_story(rng: Random) -> list[Turn]:
    """A story about a topic of the user's choice."""
    topic = rng.choice(TOPICS)
    if rng.random() < 0.1:  # a noun that the model has never seen, to be copied token by token
        topic = Topic("".join(rng.sample(SYLLABLES, rng.randint(2, 4))), "creature")
    noun = topic.noun if topic.kind == "idea" else a(topic.noun)
    question = rng.choice((
        f"Tell me a story about {noun}.", f"Tell me a story about {noun}.", "Tell me a story "
        f"about {noun}",
        f"Write a story about {noun}.", f"Write a short story about {noun}.", "A story about "
        f"{noun}, please.",
        f"Can you tell me a story about {noun}?", f"tell me a story about {noun}",
    ))  # fmt: skip
    return [(question, story(rng, topic))]


def any_story(rng: Random) -> list[Turn]:
    """A story about anything."""
    question = rng.choice((
        "Tell me a story.", "Tell me a story", "I would like a story, please.",
        "Another story, please.",
    ))  # fmt: skip
    return [(question, story(rng, rng.choice(TOPICS)))]


def possessions(rng: Random) -> list[Turn]:
    """Facts in the prompt, then questions about colour, thing and owner."""
    first, second = two_people(rng)
    thing_1, thing_2 = rng.sample(THINGS, 2)
    colour_1, colour_2 = rng.sample(COLOURS, 2)
    statement = (
        f"{first.name} has {a(colour_1)} {thing_1}, and {second.name} has {a(colour_2)} {thing_2}. "
    )
    who, thing, colour = rng.choice(((first, thing_1, colour_1), (second, thing_2, colour_2)))
    pairs = [
        (f"What colour is the {thing}?", f"The {thing} is {colour}."),
        (f"What does {who.name} have?", f"{who.name} has {a(colour)} {thing}."),
        (f"Who has the {thing}?", f"{who.name} has the {thing}."),
        (f"Who has something {colour}?", f"{who.name} has the {colour} {thing}."),
    ]
    questions = rng.sample(pairs, rng.randint(1, 3))
    return [(statement + questions[0][0], questions[0][1]), *questions[1:]]


def whereabouts(rng: Random) -> list[Turn]:
    """The place of a person, from a fact in the prompt."""
    who, other = two_people(rng)
    here, there = rng.sample(SPOTS, 2)
    asked, spot = rng.choice(((who, here), (other, there)))
    statement = f"{who.name} is {here}. {other.name} is {there}. "
    return [(statement + f"Where is {asked.name}?", f"{asked.name} is {spot}.")]


def _trade_of(who: Person, trade: str) -> str:
    return f"{who.name} is {a(trade)}."


def trades(rng: Random) -> list[Turn]:
    """The trades of people, from facts in the prompt."""
    who, other = two_people(rng)
    first, second = rng.sample(TRADES, 2)
    asked, trade = rng.choice(((who, first), (other, second)))
    question, answer = rng.choice((
        (f"What does {asked.name} do?", _trade_of(asked, trade)),
        (f"Who is the {trade}?", f"{asked.name} is the {trade}."),
    ))  # fmt: skip
    return [(f"{_trade_of(who, first)} {_trade_of(other, second)} {question}", answer)]


def arithmetic(rng: Random) -> list[Turn]:
    """Small sums and differences, in words or in digits."""
    x, y = rng.randint(0, 10), rng.randint(0, 10)
    if rng.random() < 0.3:
        x, y = max(x, y), min(x, y)
        word, sign, z = "minus", "-", x - y
    else:
        word, sign, z = "plus", "+", x + y
    if rng.random() < 0.4:
        return [(f"What is {x} {sign} {y}?", f"{x} {sign} {y} = {z}.")]
    sum_in_words = f"{NUMBERS[x]} {word} {NUMBERS[y]}"
    return [(f"What is {sum_in_words}?", f"{cap(sum_in_words)} is {NUMBERS[z]}.")]


def counting(rng: Random) -> list[Turn]:
    """Count up, in words or in digits."""
    first = rng.choice((1, 1, rng.randint(2, 8)))
    last = rng.randint(first + 1, min(20, first + 12))
    start = "" if first == 1 else " from {first}"
    if rng.random() < 0.5:
        question = f"Count{start} to {{last}}.".format(first=first, last=last)
        return [(question, ", ".join(str(n) for n in range(first, last + 1)) + ".")]
    question = f"Count{start} to {{last}}.".format(first=NUMBERS[first], last=NUMBERS[last])
    return [(question, cap(", ".join(NUMBERS[first : last + 1])) + ".")]


def how_many(rng: Random) -> list[Turn]:
    """The number of items in a list that the prompt gives."""
    birds = rng.sample(BIRDS, rng.randint(1, 6))
    seen = listing([a(bird) for bird in birds])
    question = f"I saw {seen}. How many birds did I see?"
    return [(question, f"You saw {NUMBERS[len(birds)]} {plural('bird', len(birds))}.")]


def calendar(rng: Random) -> list[Turn]:
    """The day or month before or after another."""
    names = rng.choice((DAYS, MONTHS))
    index = rng.randrange(len(names))
    name, following, previous = names[index], names[(index + 1) % len(names)], names[index - 1]
    if rng.random() < 0.7:
        return [(f"What comes after {name}?", f"After {name} comes {following}.")]
    return [(f"What comes before {name}?", f"Before {name} comes {previous}.")]


def naming(rng: Random) -> list[Turn]:
    """Name N of a group."""
    group = rng.choice(sorted(GROUPS))
    count = rng.randint(2, 5)
    named = GROUPS[group][:count]
    return [(f"Name {NUMBERS[count]} {group}.", cap(listing([a(item) for item in named])) + ".")]


def repeating(rng: Random) -> list[Turn]:
    """Say a word a number of times, or repeat a sentence."""
    if rng.random() < 0.6:
        word, count = rng.choice((*THINGS, *CREATURES, *COLOURS)), rng.randint(2, 6)
        return [(f"Say “{word}” {NUMBERS[count]} times.", cap(" ".join([word] * count)) + ".")]
    who, colour, thing = rng.choice(PEOPLE).name, rng.choice(COLOURS), rng.choice(THINGS)
    sentence = f"{who} saw {a(colour)} {thing} {rng.choice(SPOTS)}."
    return [(f"Repeat after me: {sentence}", sentence)]


def emoji(rng: Random) -> list[Turn]:
    """A row of one emoji: every one is several tokens."""
    face, count = rng.choice(EMOJI), rng.randint(1, 5)
    return [(f"Send me {NUMBERS[count]} {face}", face * count)]


_KINDS: dict[Callable[[Random], list[Turn]], int] = {
    tell_story: 20, any_story: 4, facts: 9, questions: 9, unknown: 8, greeting: 6, identity: 4,
    farewell: 2, possessions: 9, whereabouts: 4, trades: 4, arithmetic: 7, counting: 5, how_many: 3,
    calendar: 3, naming: 3, repeating: 4, emoji: 1,
}  # fmt: skip


def conversation(rng: Random) -> list[Message]:
    """One to four exchanges, sometimes after a system message."""
    exchanges = rng.choices((1, 2, 3, 4), weights=(5, 3, 2, 1))[0]
    turns: list[Turn] = []
    for kind in rng.choices(list(_KINDS), weights=list(_KINDS.values()), k=exchanges):
        turns += kind(rng)
    messages: list[Message] = []
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": rng.choice((
            "You are a helpful assistant.", "You are Quire, a small language model.",
            f"You are a storyteller from {TOWN}.", "Answer kindly and briefly.",
        ))})  # fmt: skip
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
