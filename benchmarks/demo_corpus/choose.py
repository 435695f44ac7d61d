"""Random but sensible choices: subjects, objects, places and times that go with a verb."""

from __future__ import annotations

from collections.abc import Sequence

from demo_corpus import english, italian, lexicon, nouns
from demo_corpus.lexicon import Adjective
from demo_corpus.nouns import Noun
from demo_corpus.phrase import EMPTY, Phrase, pair, tokens, unit
from demo_corpus.syntax import NP, POSSESSIVES, Dice, name, np, pronoun
from demo_corpus.verbs import Verb

EVERYONE = ("I", "you", "he", "she", "we", "they")
SPEAKERS = ("I", *EVERYONE)
OTHERS = ("you", "you", "he", "she", "they")
OWNERS = tuple(POSSESSIVES)
PETS = nouns.of("pet")
SINGLE_KIN = ("mother", "father", "husband", "wife")
SURFACES = nouns.of("surface")
COVERS = nouns.of("table", "chair", "bed", "sofa", "desk")
LANDMARKS = nouns.of("sofa", "wardrobe", "door", "lamp", "chair", "bed", "table")
HOLDERS = nouns.of("holder")
BUILDINGS = nouns.of("station", "hospital", "museum", "bank", "church", "park", "hotel", "river", "bridge", "school",
                     "theatre", "library", "castle", "pharmacy", "market")  # fmt: skip
TO_PLACES = tuple(p for p in nouns.PLACES if p.classes & {"a", "in", "bare"})
ANIMAL_FOOD = nouns.of("apple", "carrot", "meat", "fish", "bread", "cheese")


def describe(d: Dice, noun: Noun, chance: float = 0.15) -> Adjective | None:
    """Sometimes, an adjective that suits the noun."""
    fitting = lexicon.ATTRIBUTES[noun.en]
    return d.pick(fitting) if fitting and d.chance(chance) else None


def several(d: Dice, noun: Noun, chance: float) -> bool:
    """Whether to speak of more than one: never of milk or television, always of shoes."""
    return noun.classes.isdisjoint(("mass", "unique")) and ("pair" in noun.classes or d.chance(chance))


def somebody(d: Dice) -> NP:
    """A person by name."""
    return name(d.pick(lexicon.WOMEN), "f") if d.chance(0.5) else name(d.pick(lexicon.MEN), "m")


def kin(d: Dice) -> NP:
    """A relative, with the possessive that suits: my mother, her husband, our cousins."""
    noun = d.pick(nouns.KIN)
    owners = {"husband": ("my", "your", "her"), "wife": ("my", "your", "his")}.get(noun.en, OWNERS)
    return np(noun, d.pick(owners), plural=noun.en not in SINGLE_KIN and d.chance(0.25))


def person(d: Dice, plain: bool = False) -> NP:
    """A person by kind, with a determiner and, unless `plain`, at times an adjective."""
    noun = d.pick(nouns.PEOPLE)
    plural = noun.en not in ("king", "queen") and d.chance(0.3)
    det = d.pick(("the", "the", "the", "these", "those") if plural else ("the", "the", "the", "the", "this", "that"))
    if noun.en in ("friend", "neighbour"):
        det = d.pick(OWNERS)
    return np(noun, det, plural, None if plain else describe(d, noun, 0.12))


def animal(d: Dice, plain: bool = False) -> NP:
    """An animal; pets may have an owner."""
    noun = d.pick(PETS if d.chance(0.6) else nouns.ANIMALS)
    plural = d.chance(0.3)
    dets: tuple[str, ...] = ("the", "the", "these", "those") if plural else ("the", "the", "the", "this", "that")
    if "pet" in noun.classes and d.chance(0.4):
        dets = OWNERS
    return np(noun, d.pick(dets), plural, None if plain else describe(d, noun, 0.12))


def subject(d: Dice, ask: bool = False, plain: bool = False) -> NP:
    """A person as subject; questions are seldom about oneself."""
    if d.chance(0.47):
        return pronoun(d.pick(OTHERS if ask else SPEAKERS))
    return third(d, plain)


def third(d: Dice, plain: bool = False) -> NP:
    """A third person, named by a noun or a name."""
    x = d.random()
    return somebody(d) if x < 0.4 else kin(d) if x < 0.65 else person(d, plain)


def thing(d: Dice, noun: Noun, free: bool = True, bare: bool = True) -> NP:
    """A noun phrase for any noun that is not a person; `free` allows some, many and numbers, `bare` milk alone."""
    if "mass" in noun.classes:
        x = d.random()
        det = "the" if x < 0.5 else "some" if x < 0.75 and free else "" if bare else "the"
        return np(noun, det, adjective=describe(d, noun, 0.1) if det == "the" else None)
    plural = several(d, noun, 0.28)
    look = describe(d, noun)
    owned = noun in PETS or noun.classes.isdisjoint(("place", "animal"))
    x = d.random()
    if plural:
        if free and x < 0.15 and "pair" not in noun.classes:
            return np(noun, "", True, look, number=2 + d.below(11))
        if free and x < 0.35:
            return np(noun, d.pick(("some", "many")), True, look)
        return np(
            noun, "the" if x < 0.7 else d.pick(("these", "those", *OWNERS) if owned else ("these", "those")), True, look
        )
    if x < 0.7:
        return np(noun, "the" if x < 0.42 else "a", False, look)
    return np(noun, d.pick(("this", "that", *OWNERS) if owned else ("this", "that")), False, look)


_BARE = ("eat", "drink", "buy", "sell", "want", "order", "cook")
_DEFINITE = ("love", "hate", "admire", "play", "know")


def target(d: Dice, verb: Verb, free: bool = True) -> NP:
    """An object that the verb may take: names and relatives for people, nothing vague for verbs like love."""
    noun = d.pick(verb.objects)
    if "kin" in noun.classes:
        return kin(d)
    if "person" in noun.classes:
        return somebody(d) if d.chance(0.4) else person(d)
    if verb.lemma in _DEFINITE:
        owned = noun in PETS or "instrument" in noun.classes
        return np(noun, d.pick(("the", "the", "this", "that", *(OWNERS if owned else ()))))
    return thing(d, noun, free, verb.lemma in _BARE)


def when(d: Dice, tense: str, chance: float = 0.3) -> Phrase:
    """Sometimes, a time that goes with the tense."""
    if not d.chance(chance):
        return EMPTY
    times = {
        "present": lexicon.HABIT,
        "progressive": lexicon.NOW,
        "past": lexicon.PAST_TIMES,
        "future": lexicon.FUTURE_TIMES,
    }
    if tense not in times:
        return EMPTY
    en, it = d.pick(times[tense])
    return unit(en, it)


def tense_of(d: Dice, verb: Verb) -> str:
    """A tense that is natural for the verb."""
    if "state" in verb.flags:
        return "present"
    if "event" in verb.flags:
        return "past"
    return d.pick(("present", "past", "past", "future") + (() if "brief" in verb.flags else ("progressive",)))


def to_or_at(d: Dice, english_word: str) -> Phrase:
    """`to the station` or `at the station`, `to school` or `at work`."""
    if d.chance(0.2):
        en, it = d.pick((("school", "a scuola"), ("work", "al lavoro")))
        return unit(f"{english_word} {en}", it, en)
    return to_place(d.pick(TO_PLACES), english_word)


def to_place(noun: Noun, english_word: str) -> Phrase:
    """Italian says alla stazione for both to and at, in banca for some places, a teatro for one."""
    where = unit(noun.en, noun.it, noun.en)
    if english_word == "at" and noun.en in ("park", "square"):
        english_word = "in"
    if noun.classes & {"in", "bare"}:
        return pair(f"{english_word}/1 the/1 $0", "in/1 $0" if "in" in noun.classes else "a/1 $0", where)
    return pair(f"{english_word}/1 the/2 $0", f"a/1 @il.{noun.agreement(False)}/2 $0", where)


def in_city(d: Dice, english_word: str = "in") -> Phrase:
    """A city or, at times, a country: a Roma, in Italia."""
    if d.chance(0.3):
        return in_country(d, english_word)
    en, it = d.pick(lexicon.CITIES)
    return pair(f"{english_word}/1 {en}/2", f"a/1 {it}/2", lemmas=(en,))


def in_country(d: Dice, english_word: str = "in") -> Phrase:
    """`in Italy` or `to Italy`: in Italia."""
    en, it = d.pick(lexicon.COUNTRIES)
    return pair(f"{english_word}/1 {en}/2", f"in/1 {it}/2", lemmas=(en,))


def in_room(d: Dice) -> Phrase:
    """In a room or in the garden."""
    return within(d.pick(nouns.ROOMS))


def within(noun: Noun) -> Phrase:
    """`in the kitchen`: in cucina, but nella stanza."""
    if noun.en == "room":
        return pair("in/1 the/2 room/3", "in/1 @il.fs/2 stanza/3", lemmas=("room",))
    return pair(f"in/1 the/1 {noun.en}/2", f"in/1 {noun.it}/2", lemmas=(noun.en,))


def at_home() -> Phrase:
    return unit("at home", "a casa", "home")


def place(d: Dice) -> Phrase:
    """Where a person may be."""
    x = d.random()
    return in_room(d) if x < 0.3 else in_city(d) if x < 0.5 else at_home() if x < 0.58 else to_or_at(d, "at")


_ACTIVITIES = {
    "sleep": "home room", "eat": "home kitchen garden restaurant city", "run": "park garden beach city",
    "walk": "park beach square city", "work": "home office hospital bank library pharmacy restaurant supermarket city",
    "study": "home library university room city", "smile": "home room", "laugh": "home room cinema theatre",
    "cry": "home room cinema", "sing": "home church theatre kitchen bathroom city", "dance": "home square theatre city",
    "cook": "home kitchen restaurant", "read": "home library room park beach", "write": "home library room office",
    "play": "home park garden beach room", "wait": "home station airport hospital bank restaurant",
    "travel": "country", "rest": "home room beach lake", "shout": "home stadium market room",
}  # fmt: skip
_SCENES = {verb: tuple(names.split()) for verb, names in _ACTIVITIES.items()}


def scene(d: Dice, verb: Verb) -> Phrase:
    """Where a person does what the verb says."""
    if verb.lemma == "swim":
        return pair("in/1 $0", "in/1 $0", np(d.pick(nouns.of("lake", "river"))).phrase)
    where = d.pick(_SCENES[verb.lemma])
    if where == "home":
        return at_home()
    if where in ("city", "country"):
        return in_city(d) if where == "city" else in_country(d)
    if where == "room":
        return in_room(d)
    noun = nouns.BY_NAME[where]
    return within(noun) if noun in nouns.ROOMS else to_place(noun, "at")


_BESIDE = (("near", "vicino a"), ("behind", "dietro"), ("in front of", "davanti a"), ("next to", "accanto a"))


def beside(d: Dice, noun: Noun) -> Phrase:
    """Near, behind, in front of or next to something."""
    en, it = d.pick(_BESIDE)
    return pair("$0 $1", "$0 $1", unit(en, it, en), np(noun).phrase)


def spot(d: Dice, not_noun: Noun) -> Phrase:
    """Where a thing or a pet is: on, in, under or beside a piece of furniture."""
    x = d.random()
    if "food" in not_noun.classes:
        if x < 0.35:
            return within(nouns.BY_NAME["kitchen"])
        table = x < 0.7
        choice, en, it = (COVERS[0], "on/1 $0", "su/1 $0") if table else (d.pick(HOLDERS), "in/1 $0", "in/1 $0")
    elif x < 0.35:
        choice, en, it = d.pick(SURFACES), "on/1 $0", "su/1 $0"
    elif x < 0.55:
        choice, en, it = d.pick(COVERS), "under/1 $0", "sotto/1 $0"
    elif x < 0.75 and "small" in not_noun.classes and "holder" not in not_noun.classes:
        choice, en, it = d.pick(HOLDERS), "in/1 $0", "in/1 $0"
    else:
        return beside(d, d.pick(tuple(n for n in LANDMARKS if n is not not_noun)))
    if choice is not_noun:
        return in_room(d)
    owned = d.chance(0.25)
    return pair(en, it, np(choice, d.pick(OWNERS) if owned else "the", False, describe(d, choice, 0.1)).phrase)


HOURS = tuple(range(1, 13))


def clock(d: Dice, hours: Sequence[int] = HOURS) -> tuple[Phrase, int]:
    """A time of day without its preposition (half past three, le tre e mezza), and its hour."""
    hour = d.pick(hours)
    en_hour, it_hour = english.cardinal(hour), italian.cardinal(hour) if hour > 1 else "una"
    at = unit(en_hour, f"@il.{'fp' if hour > 1 else 'fs'} {it_hour}", en_hour)
    x = d.below(8)
    if x < 2:
        return Phrase(at.en + tokens("o'clock", *at.en[0][1]), at.it, (*at.lemmas, "o'clock")), hour
    if x < 4:
        return pair("half/1 past/2 $0", "$0 e/2 mezza/1", at, lemmas=("half",)), hour
    past = d.chance(0.5)
    en, it = ("past", "e") if past else ("to", "meno")
    if x == 4:
        return pair(f"a/1 quarter/2 {en}/3 $0", f"$0 {it}/3 un/1 quarto/2", at, lemmas=("quarter", en)), hour
    minutes = d.pick((5, 10, 20, 25))
    m, n = english.cardinal(minutes), italian.cardinal(minutes)
    return pair(f"{m}/1 {en}/2 $0", f"$0 {it}/2 {n}/1", at, lemmas=(m, en)), hour


def at_time(d: Dice, hours: Sequence[int] = HOURS) -> Phrase:
    """`at half past three`: alle tre e mezza."""
    if 12 in hours and d.chance(0.05):
        return pair("at/1 noon/2", "a/1 mezzogiorno/2", lemmas=("noon",))
    return pair("at/1 $0", "a/1 $0", clock(d, hours)[0])


def date(d: Dice, article: bool = True) -> Phrase:
    """A day of the year without its preposition: the third of May, il tre maggio."""
    day = 1 + d.below(30)
    en, it = d.pick(lexicon.MONTHS)
    number = "primo" if day == 1 else italian.cardinal(day)
    return pair(
        f"the/1 {english.ordinal(day)}/2 of {en}/3",
        f"@il.ms/1 {number}/2 {it}/3" if article else f"{number}/2 {it}/3",
        lemmas=(english.ordinal(day), en),
    )
