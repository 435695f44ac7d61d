"""Constructions of one clause: statements, negations, wishes, orders, places, likes."""

from __future__ import annotations

from demo_corpus import lexicon, nouns, verbs
from demo_corpus.choose import (
    ANIMAL_FOOD,
    EVERYONE,
    OWNERS,
    PETS,
    animal,
    at_home,
    in_city,
    in_room,
    kin,
    scene,
    several,
    somebody,
    subject,
    target,
    tense_of,
    thing,
    third,
    when,
)
from demo_corpus.italian import adjective
from demo_corpus.phrase import EMPTY, Phrase, chain, link, pair, tokens, unit
from demo_corpus.syntax import Dice, clause, group, np, object_pronoun, of_owner, predicate, pronoun
from demo_corpus.verbs import BE, Verb

STOP = unit(".", ".")
ASK = unit("?", "?")
SHOUT = unit("!", "!")
PLEASE = pair(",/1 please/2", ",/1 per/2 favore/2")
ACTIONS = tuple(v for v in verbs.TRANSITIVE if not v.flags & {"state", "event"})
PERSONAL = tuple(
    v for v in verbs.TRANSITIVE if any("person" in n.classes for n in v.objects) and v.lemma != "photograph"
)
BELONGINGS = nouns.of("printed", "clothes", "small", "device", "instrument", "pet")
SMALL = nouns.of("small")
JOBS = nouns.of("job")
MASCULINE_OF = {"waitress": "waiter", "actress": "actor"}
FEMININE_OF = {"waiter": "waitress", "actor": "actress"}
DESCRIBED = tuple(n for n in nouns.NOUNS if "person" not in n.classes and lexicon.FITTING[n.en])
SINGLE = tuple(n for n in DESCRIBED if n.classes.isdisjoint(("mass", "pair")) and lexicon.ATTRIBUTES[n.en])
BEASTLY = verbs.transitive("eat, see, follow, look for, find")
FINDS = nouns.of("ball", "toy", "shoe", "mouse", "bread", "meat")
HELPFUL = tuple(v for v in ACTIONS if "skill" not in v.flags)
TONIC = {"I": "me", "you": "te", "he": "lui", "she": "lei", "we": "noi", "they": "loro"}


def end(body: Phrase, ask: bool = False) -> Phrase:
    return chain(body, ASK if ask else STOP)


def mode(d: Dice) -> tuple[bool, bool]:
    """Whether a clause is negative, or a question; seldom, and never both."""
    x = d.random()
    return x < 0.2, 0.2 <= x < 0.38


def clear(d: Dice, verb: Verb, tense: str, plain: bool) -> Phrase:
    """A time for the clause, needed where the English past equals the present (I read the book yesterday)."""
    if "state" in verb.flags:
        return EMPTY
    vague = tense == "past" and plain and not verb.past_is_plain()
    return when(d, tense, 1.0 if vague else 0.25)


def transitive(d: Dice) -> Phrase:
    """The girl buys an apple."""
    verb = d.pick(verbs.TRANSITIVE)
    negative, ask = mode(d)
    tense = tense_of(d, verb)
    s = subject(d, ask)
    o = target(d, verb, free=not negative and not ask)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), o.phrase,
                      clear(d, verb, tense, not negative and not ask), ask=ask), ask)  # fmt: skip


def intransitive(d: Dice) -> Phrase:
    """My brother is sleeping in the garden."""
    verb = d.pick(verbs.INTRANSITIVE)
    negative, ask = mode(d)
    tense = tense_of(d, verb)
    beast = "animal" in verb.flags and d.chance(0.35)
    s = animal(d) if beast else subject(d, ask)
    where = EMPTY
    if d.chance(0.6) and (not beast or s.noun in PETS or verb.lemma == "swim"):
        where = in_room(d) if beast and verb.lemma != "swim" else scene(d, verb)
    time = clear(d, verb, tense, not negative and not ask)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), where, time, ask=ask), ask)


def animal_acts(d: Dice) -> Phrase:
    """The dog follows the girl."""
    verb = d.pick(BEASTLY)
    s = animal(d)
    negative, ask = mode(d)
    tense = tense_of(d, verb)
    if verb.lemma == "eat":
        o = thing(d, d.pick(ANIMAL_FOOD), free=not negative and not ask)
    elif verb.lemma in ("see", "follow"):
        o = third(d) if d.chance(0.5) else animal(d)
    else:
        o = np(d.pick(FINDS), d.pick(("the", "a")))
    if o.noun is s.noun:
        o = somebody(d)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), o.phrase, ask=ask), ask)


def with_pronoun(d: Dice) -> Phrase:
    """I saw her yesterday; l'ho vista."""
    verb = d.pick(PERSONAL)
    negative, ask = mode(d)
    tense = d.pick((tense_of(d, verb), tense_of(d, verb), "want", "must", "can"))
    if "state" in verb.flags:
        tense = "present"
    s = subject(d, ask)
    me = d.pick([p for p in EVERYONE if p != s.pronoun and not (p in ("I", "we") and s.pronoun in ("I", "we"))])
    o, clitic, agree = object_pronoun(me)
    g = group(verb, s, tense, negative=negative, ask=ask, clitic=clitic, agree=agree)
    much = unit("very much", "molto") if verb.lemma == "love" and not negative and d.chance(0.6) else EMPTY
    return end(clause(s, g, o, much, clear(d, verb, tense, False), ask=ask), ask)


def love_much(d: Dice) -> Phrase:
    """I love my mother very much; amo molto mia madre."""
    verb = verbs.BY_LEMMA["love"]
    negative, ask = mode(d)
    s = subject(d, ask)
    o = kin(d) if d.chance(0.6) else somebody(d)
    g = group(verb, s, negative=negative, ask=ask)
    much = link()
    g.it += tokens("molto", much)
    return end(clause(s, g, o.phrase, Phrase(tokens("very much", much)), ask=ask), ask)


def modal(d: Dice) -> Phrase:
    """We must buy the tickets."""
    tense = d.pick(("can", "must", "want", "want"))
    verb = d.pick(HELPFUL if tense == "can" else ACTIONS)
    negative, ask = mode(d)
    if tense == "must":
        ask = False
    s = subject(d, ask and tense != "can")
    o = target(d, verb, free=not negative and not ask)
    time = when(d, "future", 0.2)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), o.phrase, time, ask=ask), ask)


def frequency(d: Dice) -> Phrase:
    """Anna never drinks coffee."""
    verb = d.pick(ACTIONS + verbs.INTRANSITIVE)
    s = subject(d)
    adverb = d.pick((*lexicon.ALWAYS, ("never", "mai")))
    rest = target(d, verb, free=False).phrase if verb.objects else scene(d, verb) if d.chance(0.7) else EMPTY
    return end(clause(s, group(verb, s, adverb=adverb), rest))


def mood(d: Dice) -> Phrase:
    """The boy is very tired."""
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "present", "past"))
    g = group(BE, s, tense, negative=negative, ask=ask)
    very = not negative and d.chance(0.25)
    a = d.pick(lexicon.MOODS + lexicon.CHARACTER)
    time = when(d, "past", 0.4) if tense == "past" and a in lexicon.MOODS else EMPTY
    return end(clause(s, g, predicate(a, s, very), time, ask=ask), ask)


def quality(d: Dice) -> Phrase:
    """The red car is new."""
    noun = d.pick(DESCRIBED)
    negative, ask = mode(d)
    plural = several(d, noun, 0.35)
    s = np(noun, d.pick(("the", "the", "these", "those") if plural else ("the", "the", "this", "that")), plural)
    if noun in BELONGINGS and d.chance(0.4):
        s = np(noun, d.pick(OWNERS), plural) if d.chance(0.6) else of_owner(noun, somebody(d), plural)
    g = group(BE, s, d.pick(("present", "present", "past")), negative=negative, ask=ask)
    a = d.pick(lexicon.FITTING[noun.en])
    very = not negative and a.en not in lexicon.ABSOLUTE and d.chance(0.25)
    return end(clause(s, g, predicate(a, s, very), ask=ask), ask)


def lovely(d: Dice) -> Phrase:
    """Your cat is a lovely cat."""
    noun = d.pick(PETS if d.chance(0.3) else SINGLE)
    a = d.pick(lexicon.ATTRIBUTES[noun.en])
    s = np(noun, d.pick(("this", "that", *OWNERS) if noun in BELONGINGS else ("this", "that")))
    negative, ask = mode(d)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), np(noun, "a", False, a).phrase, ask=ask), ask)


def job(d: Dice) -> Phrase:
    """My sister is a doctor; mia sorella è una dottoressa."""
    noun = d.pick(JOBS)
    negative, ask = mode(d)
    x = d.random()
    s = somebody(d) if x < 0.5 else kin(d) if x < 0.75 else pronoun(d.pick(("I", "you", "he", "she")))
    while s.plural:
        s = kin(d)
    if noun.gender == "f" and (s.gender == "m" or s.person < 3):
        noun = nouns.BY_NAME[MASCULINE_OF[noun.en]]
    if s.gender == "f" and not noun.woman:
        noun = nouns.BY_NAME[FEMININE_OF[noun.en]]
    form = noun.woman if s.gender == "f" else noun.it
    g = group(BE, s, d.pick(("present", "present", "past")), negative=negative, ask=ask)
    return end(clause(s, g, pair(f"@a/1 {noun.en}/2", f"@un.{s.gender}s/1 {form}/2", lemmas=(noun.en,)), ask=ask), ask)


def nationality(d: Dice) -> Phrase:
    """The tourists are French."""
    en, it = d.pick(lexicon.LANGUAGES)
    negative, ask = mode(d)
    s = subject(d, ask)
    g = group(BE, s, negative=negative, ask=ask)
    return end(clause(s, g, unit(en, adjective(it, s.gender, s.plural), en), ask=ask), ask)


def language(d: Dice) -> Phrase:
    """My friends speak French."""
    en, it = d.pick(lexicon.LANGUAGES)
    negative, ask = mode(d)
    verb = d.pick((verbs.SPEAK, verbs.STUDY))
    tense = d.pick(("present", "present", "must", "want")) if verb is verbs.STUDY else "present"
    s = subject(d, ask)
    where = in_city(d) if d.chance(0.3) else at_home() if d.chance(0.2) else EMPTY
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), unit(en, it, en), where, ask=ask), ask)
