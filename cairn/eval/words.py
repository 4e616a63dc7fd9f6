"""Generates English words, sentences and names from a seed, without external data."""

from __future__ import annotations

import random
import string
from collections.abc import Callable

ADJECTIVES = (
    "amber ancient bitter bold brave brief bright broad broken calm careful cheerful clear clever "
    "cold common cool curious daring dark deep distant eager early eastern elder empty even faint "
    "famous fierce final firm fond formal fresh gentle glad golden graceful grand gray great "
    "green hidden hollow honest humble hungry inner jolly keen kind large late lazy light little "
    "lively lonely long loud lovely loyal lucky mellow mighty mild modern modest narrow neat new "
    "noble northern odd old open pale patient plain pleasant polite poor proper proud pure quick "
    "quiet rapid rare ready rich rough round royal rustic sacred scarlet secret serious shallow "
    "sharp short shy silent silver simple sleepy slender slow small smooth soft solid southern "
    "steady steep stern still strange strong sturdy subtle sudden sunny sweet swift tall tame "
    "tender thick thin tidy tiny vast velvet warm weary western wide wild wise worthy young"
).split()

NOUNS = (
    "acorn anchor apple apron arrow attic badger bakery banjo barn basin basket beacon bell bench "
    "blanket boat bottle bowl branch brass bread bridge broom bucket butter button cabin cable "
    "candle canyon canvas carpet castle cedar cellar chair chapel chest chimney cider circle "
    "cliff clock cloud coast coin compass copper cotton cradle crane creek cricket crown cup "
    "curtain dawn desert desk ditch dock donkey door dragon drum dune eagle easel echo elbow "
    "ember engine falcon farm feather fence ferry fiddle field flute forest forge fossil fountain "
    "fox garden garlic gate ginger glacier glass globe goat grain granite grove guitar gull "
    "hammer harbor harp harvest hat hawk hedge helmet heron hill honey horn house island ivory "
    "jacket jar jewel journal jungle kite kettle kitchen knot ladder lagoon lake lamp lantern "
    "lawn lemon letter lily linen lizard loaf loom lumber magnet mango maple marble market marsh "
    "meadow melon mill mirror mountain mule needle nest oasis ocean olive onion orchard otter "
    "oven owl oyster paddle palace paper parade parrot pebble pencil pepper piano pigeon pillar "
    "pine planet plaza plum pocket pond poppy porch pottery prairie pumpkin quarry quill rabbit "
    "raft rail raven reef ribbon river robin rocket roof rope saddle salmon sandal school scroll "
    "shadow shelf shell shore silk sparrow spoon spring stable statue stone stove straw street "
    "summit table teapot temple thread thunder ticket timber tower trail tram trumpet tulip "
    "tunnel turtle valley vase vessel village vine violin wagon walnut wheat wheel willow window "
    "winter yarn"
).split()

PEOPLE = (
    "the baker, the teacher, the gardener, the captain, the doctor, the painter, the old farmer, "
    "the young clerk, the mayor, the librarian, a visitor, a neighbor, the tailor, the engineer, "
    "the student, the judge, the singer, the carpenter, my uncle, my sister, her brother, their "
    "guide, the stranger, the watchman, the traveller, the printer, the nurse, the fisherman"
).split(", ")

DEEDS = (
    "painted, carried, remembered, described, repaired, borrowed, sold, found, admired, forgot, "
    "examined, measured, cleaned, lifted, watched, followed, opened, moved, drew, praised, hid, "
    "counted, looked after, asked about, wrote about, dreamed of, pointed at, walked around"
).split(", ")

WHEN = (
    "in the morning, before noon, after the rain, late in the evening, on the way home, during "
    "the long winter, at the end of the week, when the bells rang, as everyone expected, without "
    "a word, for the first time, once again, to our surprise, with great care, on a windy day, by "
    "mistake"
).split(", ")

OPENERS = (
    "Some say that, It is known that, Nobody doubted that, People still recall how, In those "
    "years, Not far away, Later on, Meanwhile, As the story goes, According to the paper, After a "
    "while, Even so, For that reason, Every now and then"
).split(", ")

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
"""The filler of the passkey task (Mohtashami and Jaggi 2023), which is repeated."""

SENTENCES_PER_PARAGRAPH = 6
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"


def sentence(rng: random.Random) -> str:
    """An English sentence with its full stop."""
    choice = rng.choice
    place = f"{choice(ADJECTIVES)} {choice(NOUNS)}"
    core = f"{choice(PEOPLE)} {choice(DEEDS)} the {place}"
    kind = rng.randrange(4)
    if kind == 0:
        text = f"{choice(OPENERS)} {core}"
    elif kind == 1:
        text = f"{core} {choice(WHEN)}"
    elif kind == 2:
        text = f"{choice(OPENERS)} {core} {choice(WHEN)}"
    else:
        text = f"{core}, and {choice(PEOPLE)} {choice(DEEDS)} the {choice(NOUNS)}"
    return text[0].upper() + text[1:] + "."


def prose(chars: int, rng: random.Random) -> str:
    """Paragraphs of whole sentences, at most `chars` characters."""
    parts: list[str] = []
    length = 0
    while True:
        gap = "\n" if len(parts) % SENTENCES_PER_PARAGRAPH == SENTENCES_PER_PARAGRAPH - 1 else " "
        part = sentence(rng) + gap
        length += len(part)
        if length > chars:
            return "".join(parts)
        parts.append(part)


def noise(chars: int, rng: random.Random) -> str:
    """The five sentences of NOISE repeated, at most `chars` characters."""
    return NOISE * (chars // len(NOISE))


def pseudo_word(rng: random.Random) -> str:
    """A pronounceable invented word of three syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(3))


class Names:
    """Draws distinct names and numbers.

    Args:
        rng: random generator.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._used: set[str] = set()

    def key(self) -> str:
        """A key of two words, such as brave-harbor; of three when all pairs are used."""
        choice = self._rng.choice
        plenty = len(ADJECTIVES) * len(NOUNS) // 2
        middle = f"-{choice(NOUNS)}" if len(self._used) > plenty else ""
        return self._new(lambda: f"{choice(ADJECTIVES)}{middle}-{choice(NOUNS)}")

    def number(self, digits: int = 7) -> str:
        """A number of `digits` decimal digits, the first not 0."""
        return self._new(lambda: str(self._rng.randrange(10 ** (digits - 1), 10**digits)))

    def uuid(self) -> str:
        """A random UUID."""
        return self._new(lambda: _uuid(self._rng))

    def variable(self) -> str:
        """A variable name of five capital letters."""
        return self._new(lambda: "".join(self._rng.choices(string.ascii_uppercase, k=5)))

    def word(self) -> str:
        """A common noun; an invented word when all nouns are used."""
        nouns = [noun for noun in NOUNS if noun not in self._used]
        return self._new(lambda: self._rng.choice(nouns) if nouns else pseudo_word(self._rng))

    def code(self) -> str:
        """An invented word."""
        return self._new(lambda: pseudo_word(self._rng))

    def _new(self, draw: Callable[[], str]) -> str:
        while (name := draw()) in self._used:
            pass
        self._used.add(name)
        return name


def _uuid(rng: random.Random) -> str:
    digits = f"{rng.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
