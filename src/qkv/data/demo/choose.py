"""Random but sensible choices: subjects, objects, places and times that go with a verb."""

from __future__ import annotations

from qkv.data.demo import english, italian, nouns, words
from qkv.data.demo.nouns import Noun
from qkv.data.demo.phrase import EMPTY, Phrase, pair, unit
from qkv.data.demo.syntax import NP, POSSESSIVES, Dice, name, np, pronoun
from qkv.data.demo.verbs import Verb
from qkv.data.demo.words import Adjective

SPEAKERS = ("I", "you", "he", "she", "we", "they")
OTHERS = ("you", "you", "he", "she", "they")
OWNERS = tuple(POSSESSIVES)
PETS = nouns.of("pet")
SINGLE_KIN = ("mother", "father", "husband", "wife")
SURFACES = nouns.of("surface")
COVERS = nouns.of("table", "chair", "bed", "sofa", "desk")
LANDMARKS = nouns.of("sofa", "wardrobe", "door", "window", "lamp", "mirror", "chair", "bed", "table")
HOLDERS = nouns.of("holder")
BUILDINGS = nouns.of("station", "hospital", "museum", "bank", "church", "park", "hotel", "river", "bridge", "school",
                     "theatre", "library", "castle", "pharmacy", "market")  # fmt: skip
TO_PLACES = tuple(p for p in nouns.PLACES if p.classes & {"a", "in", "bare"})
ANIMAL_FOOD = nouns.of("apple", "carrot", "meat", "fish", "bread", "cheese")


def describe(d: Dice, noun: Noun, chance: float = 0.15) -> Adjective | None:
    """Sometimes, an adjective that suits the noun."""
    fitting = words.FITTING[noun.en]
    return d.pick(fitting) if fitting and d.chance(chance) else None


def somebody(d: Dice) -> NP:
    """A person by name."""
    return name(d.pick(words.WOMEN), "f") if d.chance(0.5) else name(d.pick(words.MEN), "m")


def kin(d: Dice) -> NP:
    """A relative, with the possessive that suits: my mother, her husband, our cousins."""
    noun = d.pick(nouns.KIN)
    owners = {"husband": ("my", "your", "her"), "wife": ("my", "your", "his")}.get(noun.en, OWNERS)
    return np(noun, d.pick(owners), plural=noun.en not in SINGLE_KIN and d.chance(0.25))


def person(d: Dice) -> NP:
    """A person by kind, with a determiner and at times an adjective."""
    noun = d.pick(nouns.PEOPLE)
    plural = noun.en not in ("king", "queen") and d.chance(0.3)
    det = d.pick(("the", "the", "the", "these", "those") if plural else ("the", "the", "the", "the", "this", "that"))
    if noun.en in ("friend", "neighbour") and d.chance(0.6):
        det = d.pick(OWNERS)
    return np(noun, det, plural, describe(d, noun, 0.12))


def animal(d: Dice) -> NP:
    """An animal; pets may have an owner."""
    noun = d.pick(PETS if d.chance(0.6) else nouns.ANIMALS)
    plural = d.chance(0.3)
    dets = ("the", "the", "these", "those") if plural else ("the", "the", "the", "this", "that")
    if "pet" in noun.classes and d.chance(0.4):
        dets = OWNERS
    return np(noun, d.pick(dets), plural, describe(d, noun, 0.12))


def subject(d: Dice, ask: bool = False) -> NP:
    """A person who does something; questions are seldom about oneself."""
    x = d.random()
    if x < 0.42:
        return pronoun(d.pick(OTHERS if ask else SPEAKERS))
    if x < 0.65:
        return somebody(d)
    return kin(d) if x < 0.8 else person(d)


def third(d: Dice) -> NP:
    """A person who is not speaking or spoken to, said with a noun or a name."""
    x = d.random()
    return somebody(d) if x < 0.4 else kin(d) if x < 0.65 else person(d)


def thing(d: Dice, noun: Noun, free: bool = True, bare: bool = True) -> NP:
    """A noun phrase for any noun that is not a person; `free` allows some, many and numbers, `bare` milk alone."""
    if "mass" in noun.classes:
        x = d.random()
        det = "the" if x < 0.5 else "some" if x < 0.75 and free else "" if bare else "the"
        return np(noun, det, adjective=describe(d, noun, 0.1) if det == "the" else None)
    plural = d.chance(0.28)
    look = describe(d, noun)
    x = d.random()
    if plural:
        if free and x < 0.15:
            return np(noun, "", True, look, number=2 + d.below(11))
        if free and x < 0.35:
            return np(noun, d.pick(("some", "many")), True, look)
        return np(noun, "the" if x < 0.7 else d.pick(("these", "those", *OWNERS)), True, look)
    if x < 0.7:
        return np(noun, "the" if x < 0.42 else "a", False, look)
    owned = "place" not in noun.classes and (noun in PETS or "animal" not in noun.classes)
    return np(noun, d.pick(("this", "that", *OWNERS) if owned else ("this", "that")), False, look)


def thing_of(d: Dice, noun: Noun, free: bool = True) -> NP:
    """A noun phrase for any noun: names and relatives for people."""
    if "kin" in noun.classes:
        return kin(d)
    if "person" in noun.classes:
        return somebody(d) if d.chance(0.4) else person(d)
    return thing(d, noun, free)


def target(d: Dice, verb: Verb, free: bool = True) -> NP:
    """An object that the verb may take."""
    return thing_of(d, d.pick(verb.objects), free)


def when(d: Dice, tense: str, chance: float = 0.3) -> Phrase:
    """Sometimes, a time that goes with the tense."""
    if not d.chance(chance):
        return EMPTY
    times = {"present": words.HABIT, "progressive": words.NOW, "past": words.PAST_TIMES, "future": words.FUTURE_TIMES}
    if tense not in times:
        return EMPTY
    en, it = d.pick(times[tense])
    return unit(en, it)


def tense_of(d: Dice, verb: Verb) -> str:
    """A tense in which the verb is natural."""
    if "state" in verb.flags:
        return "present"
    if "event" in verb.flags:
        return "past"
    return d.pick(("present", "past", "past", "future") + (() if "brief" in verb.flags else ("progressive",)))


def to_or_at(d: Dice, english_word: str) -> Phrase:
    """`to the station` or `at the station`: Italian says alla stazione for both, and in banca for some places."""
    x = d.random()
    if x < 0.2:
        place = d.pick((("school", "a scuola"), ("work", "al lavoro")))
        return unit(f"{english_word} {place[0]}", place[1], place[0])
    noun = d.pick(TO_PLACES)
    where = unit(noun.en, noun.it, noun.en)
    if noun.classes & {"in", "bare"}:
        return pair(f"{english_word}/1 the/1 $0", "in/1 $0" if "in" in noun.classes else "a/1 $0", where)
    return pair(f"{english_word}/1 the/2 $0", f"a/1 @il.{noun.agreement(False)}/2 $0", where)


def in_city(d: Dice, english_word: str = "in") -> Phrase:
    """A city or a country: a Roma, in Italia."""
    if d.chance(0.7):
        en, it = d.pick(words.CITIES)
        return pair(f"{english_word}/1 {en}/2", f"a/1 {it}/2", lemmas=(en,))
    en, it = d.pick(words.COUNTRIES)
    return pair(f"{english_word}/1 {en}/2", f"in/1 {it}/2", lemmas=(en,))


def in_room(d: Dice) -> Phrase:
    """In a room or in the garden: in cucina, nella stanza."""
    noun = d.pick(nouns.ROOMS)
    if noun.en == "room":
        return pair("in/1 the/2 room/3", "in/1 @il.fs/2 stanza/3", lemmas=("room",))
    return pair(f"in/1 the/1 {noun.en}/2", f"in/1 {noun.it}/2", lemmas=(noun.en,))


def at_home() -> Phrase:
    return unit("at home", "a casa", "home")


def place(d: Dice) -> Phrase:
    """Where a person does something."""
    x = d.random()
    return in_room(d) if x < 0.3 else in_city(d) if x < 0.5 else at_home() if x < 0.58 else to_or_at(d, "at")


_BESIDE = (("near", "vicino a"), ("behind", "dietro"), ("in front of", "davanti a"), ("next to", "accanto a"))


def beside(d: Dice, noun: Noun) -> Phrase:
    """Near, behind, in front of or next to something."""
    en, it = d.pick(_BESIDE)
    return pair("$0 $1", "$0 $1", unit(en, it, en), np(noun).phrase)


def spot(d: Dice, not_noun: Noun) -> Phrase:
    """Where a thing or a pet is: on, in, under or beside a piece of furniture."""
    x = d.random()
    if x < 0.35:
        choice, en, it = d.pick(SURFACES), "on/1 $0", "su/1 $0"
    elif x < 0.55:
        choice, en, it = d.pick(COVERS), "under/1 $0", "sotto/1 $0"
    elif x < 0.75 and "small" in not_noun.classes:
        choice, en, it = d.pick(HOLDERS), "in/1 $0", "in/1 $0"
    else:
        return beside(d, d.pick(tuple(n for n in LANDMARKS if n is not not_noun)))
    if choice is not_noun:
        return in_room(d)
    owned = d.chance(0.25)
    return pair(en, it, np(choice, d.pick(OWNERS) if owned else "the", False, describe(d, choice, 0.1)).phrase)


def clock(d: Dice) -> tuple[Phrase, bool]:
    """A time of day without its preposition (half past three, le tre e mezza), and whether it is one o'clock or so."""
    hour = 1 + d.below(12)
    en_hour, it_hour = english.cardinal(hour), italian.cardinal(hour) if hour > 1 else "una"
    at = unit(en_hour, f"@il.{'fp' if hour > 1 else 'fs'} {it_hour}", en_hour)
    x = d.below(8)
    if x < 2:
        return pair("$0 o'clock", "$0", at, lemmas=("o'clock",)), hour == 1
    if x < 4:
        return pair("half/1 past/2 $0", "$0 e/2 mezza/1", at, lemmas=("half",)), hour == 1
    past = d.chance(0.5)
    en, it = ("past", "e") if past else ("to", "meno")
    if x == 4:
        return pair(f"a/1 quarter/2 {en}/3 $0", f"$0 {it}/3 un/1 quarto/2", at, lemmas=("quarter", en)), hour == 1
    minutes = d.pick((5, 10, 20, 25))
    m, n = english.cardinal(minutes), italian.cardinal(minutes)
    return pair(f"{m}/1 {en}/2 $0", f"$0 {it}/2 {n}/1", at, lemmas=(m, en)), hour == 1


def at_time(d: Dice) -> Phrase:
    if d.chance(0.05):
        return pair("at/1 noon/2", "a/1 mezzogiorno/2", lemmas=("noon",))
    return pair("at/1 $0", "a/1 $0", clock(d)[0])


def date(d: Dice, article: bool = True) -> Phrase:
    """A day of the year without its preposition: the third of May, il tre maggio."""
    day = 1 + d.below(30)
    en, it = d.pick(words.MONTHS)
    number = "primo" if day == 1 else italian.cardinal(day)
    return pair(
        f"the/1 {english.ordinal(day)}/2 of {en}/3",
        f"@il.ms/1 {number}/2 {it}/3" if article else f"{number}/2 {it}/3",
        lemmas=(english.ordinal(day), en),
    )
