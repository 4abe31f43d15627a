"""Stories about Port Corvel: one plot or two for each kind of topic, filled from `world`.

Every function takes the random generator first and returns finished, grammatical text. What varies
is chosen before it is used twice, so that names, pronouns, colours and counts agree to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.replica.builtin_model.world import (
    COLOURS,
    CREATURES,
    NUMBERS,
    SIZES,
    SPOTS,
    TIMES,
    TRADES,
    WEATHERS,
    Topic,
    a,
    cap,
    plural,
    two_people,
)

TOWN = "Port Corvel"


def _opening_day(rng: Random) -> str:
    return f"One {rng.choice(WEATHERS)} {rng.choice(TIMES)}"


def _ending(rng: Random) -> str:
    return rng.choice((
        "From that day on, nobody in the town was ever alone at supper.",
        f"And if you go to {TOWN} today, somebody will tell you this story again.",
        "That evening the whole choir sang, and the windows stayed open until late.",
        "They put it all down in a book — eight pages, one for each of them.",
        "And that is the end of the story.",
        "It was a small thing, but small things hold a book together.",
    ))  # fmt: skip


def lost_and_found(rng: Random, thing: str) -> str:
    """A thing is lost, looked for in three spots, and found in a fourth."""
    who, friend = two_people(rng)
    trade, adjective = rng.choice(TRADES), rng.choice((*COLOURS, *SIZES))
    home, second, third, last = rng.sample(SPOTS, 4)
    finder = rng.choice(CREATURES)
    return (
        f"Once upon a time there was a {trade} called {who.name}, who had {a(adjective)} {thing}. "
        f"{cap(who.she)} kept it {home} and looked at it every {rng.choice(TIMES)}. "
        f"{_opening_day(rng)}, the {thing} was gone. {who.name} looked {second}. It was not there. "
        f"{cap(who.she)} looked {third}. It was not there. "
        + rng.choice((
            f"“Do not worry,” said {friend.name}. “We will find it together.” ",
            f"“I have lost my {thing},” {who.she} said. “Then let us look for it,” said "
            f"{friend.name}. ",
            f"{friend.name} heard of it and came to help at once. ",
        ))
        + f"They found the {adjective} {thing} {last}, where {a(finder)} was sleeping beside it. "
        + rng.choice((
            f"{who.name} laughed, and let the {finder} sleep. ",
            f"“Thank you for keeping it warm,” said {who.name} to the {finder}. ",
        ))
        + _ending(rng)
    )  # fmt: skip


def the_gift(rng: Random, thing: str) -> str:
    """A thing is made with patience and given away."""
    who, friend = two_people(rng)
    trade, days, colour = rng.choice(TRADES), rng.randint(2, 9), rng.choice(COLOURS)
    return (
        f"{who.name} was a {trade} in {TOWN}. {_opening_day(rng)}, {who.she} began to make "
        f"{a(colour)} "
        f"{thing} for {friend.name}. On the first day it was too small. On the second day it was "
        f"too big. But {who.name} was patient, and after {NUMBERS[days]} days the {colour} "
        f"{thing} was "
        f"ready. {friend.name} held it up to the light. "
        + rng.choice((
            f"“I have never had {a(thing)} like this,” {friend.she} said. ",
            f"“It is the best {thing} in the town,” {friend.she} said. ",
            f"{cap(friend.she)} did not say a word, but {friend.her} eyes were bright. ",
        ))
        + f"In return {friend.name} gave {who.obj} {NUMBERS[days]} "
          f"{plural(rng.choice(('loaf', 'apple', 'song')), days)}. "
        + _ending(rng)
    )  # fmt: skip


def light_in_the_storm(rng: Random, place: str) -> str:
    """A storm comes, and a light or a bell at the place brings a boat home."""
    who, friend = two_people(rng)
    waves, colour = rng.randint(3, 9), rng.choice(COLOURS)
    signal, signalled = rng.choice((
        ("light a lantern", "lit a lantern"),
        ("ring the bell", "rang the bell"),
        ("wave a white flag", "waved a white flag"),
    ))  # fmt: skip
    return (
        f"At the edge of {TOWN} there was {a(place)}, and {who.name} took care of it. One night a "
        f"great storm came in from the sea. Out on the water was a little {colour} boat, and in "
        "the "
        f"boat was {friend.name}. The waves came in, {NUMBERS[waves]} at a time, and it was very "
        "dark. "
        f"{who.name} climbed to the top of the {place} to {signal}. "
        + rng.choice((
            f"“This way!” {who.she} called. “This way home!” ",
            f"All night {who.she} did not sleep. ",
        ))
        + f"{friend.name} saw the {place} through the rain and turned the {colour} boat around. "
        f"In the morning the sea was calm, and {friend.name} came up from the harbour with wet "
        "shoes. "
        f"“You {signalled} for me,” {friend.she} said, and they had hot bread and tea. "
        + _ending(rng)
    )  # fmt: skip


def the_forgotten_place(rng: Random, place: str) -> str:
    """A forgotten place is cleaned, painted and opened again."""
    who, friend = two_people(rng)
    colour, children = rng.choice(COLOURS), rng.randint(3, 9)
    return (
        f"Nobody went to the old {place} any more. The door was broken, and only "
        f"{plural(rng.choice(CREATURES))} "
        f"lived there. {_opening_day(rng)}, {who.name} said, “Let us make it new.” {friend.name} "
        "brought "
        f"a broom, and {NUMBERS[children]} children came from the school with brushes and "
        f"{colour} paint. "
        f"They washed the floor, they mended the door, and they painted the walls {colour}. "
        + rng.choice((
            f"On Sunday the {place} was open again, and the whole town came to see it. ",
            f"When it was done, {who.name} opened the {colour} door and everybody came in. ",
        ))
        + f"“I had forgotten how beautiful the {place} is,” said {friend.name}. " + _ending(rng)
    )  # fmt: skip


def the_new_voice(rng: Random, creature: str) -> str:
    """A creature wants to sing in the choir and finds the part that fits its voice."""
    who, friend = two_people(rng)
    voice, part = rng.choice((
        ("too low", "the lowest note"), ("too high", "the highest note"),
        ("too quiet", "the softest part"), ("too loud", "the last note"),
    ))  # fmt: skip
    size = rng.choice(SIZES)
    return (
        f"There was once {a(size)} {creature} who wanted to sing in the choir of {TOWN}. Every "
        f"evening the {creature} sat by the window of the chapel and listened. "
        f"{_opening_day(rng)}, the "
        f"{creature} came in and sang. But its voice was {voice}, and some of the singers laughed. "
        f"The {creature} was sad and went away. "
        f"Then {who.name} said, “Our song has no one for {part}.” {friend.name} ran after the "
        f"{creature} and found it by the sea. “Come back,” said {friend.name}. “We need you.” "
        f"So the {creature} sang {part}, and the song was complete. "
        + rng.choice((
            f"After that, the {creature} sang with them every Sunday. ",
            "Many voices, one song. ",
        ))
        + _ending(rng)
    )  # fmt: skip


def the_guest(rng: Random, creature: str) -> str:
    """A hurt creature is cared for, leaves, and returns with a present."""
    who, friend = two_people(rng)
    colour, days = rng.choice(COLOURS), rng.randint(3, 9)
    found, present = rng.choice(SPOTS), rng.choice(("shell", "stone", "feather", "key", "button"))
    return (
        f"{_opening_day(rng)}, {who.name} found {a(creature)} {found}. It was hurt and could not "
        "go on. "
        f"“Poor {creature},” said {who.name}, and took it home in a "
        f"{rng.choice(('basket', 'coat', 'box'))}. "
        f"{friend.name} brought warm milk, and they made it a bed of old paper. For "
        f"{NUMBERS[days]} days the "
        f"{creature} slept and ate. Then it was well again, and {who.name} opened the door. "
        f"The {creature} looked back once and was gone. "
        f"A year later, there was a knock at the window. It was the {creature}, and it had "
        f"brought {a(colour)} "
        f"{present}. {who.name} still has the {colour} {present} today. " + _ending(rng)
    )  # fmt: skip


def the_book(rng: Random, role: str) -> str:
    """A person writes a book, quire by quire, with the help of the bookbinder."""
    who, friend = two_people(rng)
    quires, time = rng.randint(2, 10), rng.choice(TIMES)
    pages = NUMBERS[quires * 8] if quires * 8 <= 20 else "many"
    return (
        f"Once there was {a(role)} who wanted to write a book. “I do not know how to begin,” said "
        "the "
        f"{role}. {who.name}, the bookbinder, gave the {role} four sheets of paper. “Fold them,” "
        "said "
        f"{who.name}, “and you have a quire. Begin with one page.” So every {time} the {role} "
        "wrote one "
        "page about "
        f"{rng.choice(('the sea', 'the birds', 'the town', 'the harbour', 'the choir'))}. After a "
        f"year there were {NUMBERS[quires]} quires — {pages} pages. {who.name} sewed them "
        "together with "
        f"{rng.choice(COLOURS)} thread, and {friend.name} was the first to read the book. "
        f"“It is a good book,” said {friend.name}, “because you did not stop.” " + _ending(rng)
    )  # fmt: skip


def the_sleepless(rng: Random, role: str) -> str:
    """A person cannot sleep, walks through the town and meets a friend."""
    who, friend = two_people(rng)
    count, animal = rng.randint(3, 12), rng.choice(CREATURES)
    return (
        f"There was once {a(role)} in {TOWN} who could not sleep. The {role} counted "
        f"{plural(animal)}: "
        f"one, two, three, and so on to {NUMBERS[count]}. It did not help. So the {role} got up "
        "and walked "
        f"down to the harbour. {who.name} was there, mending a net by the light of a lantern. “I "
        "cannot "
        f"sleep,” said the {role}. “Then sit with me,” said {who.name}. They listened to the "
        "water, "
        f"and {who.name} told the {role} about {friend.name}, who had once sailed around the "
        "world with "
        f"{a(rng.choice(COLOURS))} {rng.choice(('cat', 'dog', 'goat'))}. Before the story was "
        f"over, the {role} "
        f"was asleep. {who.name} put a blanket over the {role} and went on with the net. "
        + _ending(rng)
    )  # fmt: skip


def the_meaning(rng: Random, idea: str) -> str:
    """A child asks about a thing, and three people answer in turn."""
    who, friend = two_people(rng)
    first, second, third = rng.sample(TRADES, 3)
    answers = rng.sample((
        "It is what you hear when you are quiet",
        "It is something you share",
        "It is as old as the stones of the harbour",
        "It comes when you do not wait for it",
        "It is a page that nobody has read yet",
        "It is like bread: better when it is warm",
    ), 3)  # fmt: skip
    return (
        f"{_opening_day(rng)}, {who.name} wanted to know everything about {idea}. {cap(who.she)} "
        "asked the "
        f"{first}. “{answers[0]},” said the {first}. {cap(who.she)} asked the {second}. "
        f"“{answers[1]},” said "
        f"the {second}. {cap(who.she)} asked the {third}. “{answers[2]},” said the {third}. Then "
        f"{who.she} "
        f"sat down beside {friend.name} and looked out at the sea. “Now I have three answers,” "
        "said "
        f"{who.name}. “Good,” said {friend.name}. “Keep them all.” So {who.name} wrote a song "
        f"about {idea}, "
        f"with three verses, and the choir still sings it. " + _ending(rng)
    )  # fmt: skip


_PLOTS: dict[str, tuple[Callable[[Random, str], str], ...]] = {
    "thing": (lost_and_found, the_gift),
    "place": (light_in_the_storm, the_forgotten_place),
    "creature": (the_new_voice, the_guest),
    "person": (the_book, the_sleepless),
    "idea": (the_meaning,),
}


def story(rng: Random, topic: Topic) -> str:
    """A story of 100 to 200 words about `topic`."""
    return rng.choice(_PLOTS[topic.kind])(rng, topic.noun)


def letter(rng: Random) -> str:
    """A short letter from one person to another."""
    who, friend = two_people(rng)
    size, colour = rng.choice(SIZES), rng.choice(COLOURS)
    creature = rng.choice(CREATURES)
    return (
        "Dear "
        f"{friend.name},\n\n{rng.choice(('Thank you for your letter.', 'I hope you are well.'))} "
        f"It is {rng.choice(WEATHERS)} here in {TOWN}, and yesterday I saw {a(size)} {creature} "
        f"{rng.choice(SPOTS)}. I have finished the {colour} book, and the {creature} is on the "
        "first page. "
        f"Please come and see it on {rng.choice(('Monday', 'Friday', 'Sunday'))}.\n\nYour "
        f"friend,\n{who.name}"
    )


def logbook(rng: Random) -> str:
    """A page of the harbour's logbook; the sum at the end is right."""
    counts = [rng.randint(1, 6) for _ in range(3)]
    days = rng.sample(("Monday", "Tuesday", "Wednesday", "Thursday", "Friday"), 3)
    lines = [
        f"{day}: {rng.choice(WEATHERS)}, {NUMBERS[n]} {plural('boat', n)} came in."
        for day, n in zip(days, counts, strict=True)
    ]
    total = sum(counts)
    return "Logbook of the harbour\n\n" + "\n".join(lines) + f"\nIn all: {NUMBERS[total]} boats."
