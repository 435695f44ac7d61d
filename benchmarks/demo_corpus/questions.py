"""Questions with a question word: what, who, where, when, why, how many, how much, which, how old."""

from __future__ import annotations

from demo_corpus import lexicon, nouns, verbs
from demo_corpus.choose import (
    OWNERS,
    animal,
    describe,
    kin,
    scene,
    several,
    somebody,
    subject,
    target,
    tense_of,
    third,
    when,
)
from demo_corpus.phrase import EMPTY, Phrase, chain, pair, unit
from demo_corpus.simple import ACTIONS, ASK, SMALL, clear, end, mode
from demo_corpus.syntax import NP, Dice, clause, group, having, np, pronoun, wh
from demo_corpus.verbs import BE, COST, Verb

EVENTS = nouns.of("concert", "film")
TRANSIT = nouns.of("train", "bus", "ship")
SHOPS = nouns.of("shop", "market", "museum", "library", "bank", "pharmacy", "school", "zoo", "office")
PRICED = tuple(n for n in nouns.of("printed", "clothes", "furniture", "device", "instrument", "fruit", "car", "ticket",
                                   "ring", "umbrella", "toy", "pen", "bag", "suitcase", "pizza", "sandwich", "plant")
               if n.en != "tree")  # fmt: skip
SOMEWHERE = tuple(
    verbs.BY_LEMMA[v] for v in "sleep eat run swim work study sing dance cook read write play wait".split()
)
SOMEWHERE += (verbs.LIVE, verbs.MOVING[0], verbs.MOVING[0])
WEEKLY = tuple(v for v in verbs.INTRANSITIVE if v.lemma not in ("smile", "laugh", "cry", "shout", "sleep", "wait"))
QUANTIFIED = verbs.transitive("eat, buy, sell, read, write, see, lose, break, wash, choose, receive, visit, draw, want")
SELECTED = verbs.transitive(
    "buy, read, see, choose, want, take, use, visit, open, wear, order, prepare, watch, draw, sing"
)
PLACED = verbs.transitive("buy, find, lose, see, meet, hide, take")
LOST = SMALL + nouns.of("pet", "station", "hospital", "bank", "pharmacy", "museum", "hotel", "bathroom")
BEAST_MOODS = tuple(lexicon.BY_NAME[w] for w in ("happy", "tired", "nervous", "calm"))
BEAST_VERBS = tuple(v for v in verbs.INTRANSITIVE if "animal" in v.flags)
ASKED = tuple(
    v for v in ACTIONS if not any("person" in n.classes for n in v.objects) and v.lemma not in ("wash", "touch")
)


def _asked(d: Dice) -> NP:
    """The subject of a question: seldom the speaker."""
    return pronoun(d.pick(("you", "you", "he", "she", "they"))) if d.chance(0.5) else third(d)


def what(d: Dice) -> Phrase:
    """What is the girl reading? Che cosa sta leggendo la ragazza?"""
    verb = d.pick(ASKED)
    s = _asked(d)
    tenses = ("past", "past", "future", "must", "want") + (() if "brief" in verb.flags else ("progressive",) * 2)
    tense = d.pick(tenses)
    return chain(wh(unit("what", "che cosa"), s, group(verb, s, tense, ask=True), when(d, tense, 0.3)), ASK)


def who(d: Dice) -> Phrase:
    """Who opened the door? Chi ha aperto la porta?"""
    verb = d.pick(verbs.TRANSITIVE)
    s = NP(unit("who", "chi"))
    tense = tense_of(d, verb)
    o = target(d, verb, free=False)
    return chain(clause(s, group(verb, s, tense), o.phrase, clear(d, verb, tense, True)), ASK)


def who_is(d: Dice) -> Phrase:
    """Who is that man? Chi è quell'uomo?"""
    noun = d.pick(nouns.PEOPLE)
    plural = noun.en not in ("king", "queen") and d.chance(0.35)
    s = np(noun, d.pick(("these", "those") if plural else ("this", "that")), plural, describe(d, noun, 0.4))
    return chain(wh(unit("who", "chi"), s, group(BE, s, ask=True)), ASK)


def where_is(d: Dice) -> Phrase:
    """Where are my keys? Dove sono le mie chiavi?"""
    x = d.random()
    if x < 0.55:
        noun = d.pick(LOST)
        public = noun.classes & {"place", "room"}
        plural = not public and several(d, noun, 0.3)
        s = np(noun, d.pick(("the",) if public else ("the", "the", *OWNERS)), plural, describe(d, noun, 0.15))
    else:
        s = third(d) if d.chance(0.7) else pronoun(d.pick(("you", "he", "she", "they")))
    tense = d.pick(("present", "present", "past"))
    g = group(BE, s, tense, ask=True)
    short = g.it[0][0] in ("è", "era", "eri", "erano")  # dov'è, dov'era
    return chain(
        wh(unit("where", "dov'" if short else "dove"), s, g, when(d, "past", 0.3) if tense == "past" else EMPTY), ASK
    )


def where_does(d: Dice) -> Phrase:
    """Where does your brother work? Dove lavora tuo fratello?"""
    verb = d.pick(SOMEWHERE)
    s = animal(d) if verb.lemma in ("sleep", "eat", "play") and d.chance(0.4) else _asked(d)
    tense = "present" if "state" in verb.flags else d.pick(("present", "progressive", "past", "future", "want"))
    if tense == "progressive" and verb.lemma != "go":
        tense = "present"
    return chain(wh(unit("where", "dove"), s, group(verb, s, tense, ask=True), when(d, tense, 0.15)), ASK)


def _departure(d: Dice) -> tuple[NP, Verb]:
    x = d.random()
    if x < 0.4:
        return np(d.pick(TRANSIT), d.pick(("the", "the", "this"))), d.pick(verbs.LEAVING)
    if x < 0.6:
        return np(d.pick(SHOPS)), d.pick((verbs.OPEN, verbs.CLOSE))
    if x < 0.7:
        return np(d.pick(EVENTS)), verbs.BEGIN
    return _asked(d), d.pick((*verbs.LEAVING, verbs.MOVING[2]))


def when_does(d: Dice) -> Phrase:
    """When does the train leave? Quando parte il treno?"""
    s, verb = _departure(d)
    word = d.pick((("when", "quando"), ("what time", "a che ora")))
    tense = d.pick(("present", "past", "future"))
    return chain(
        wh(unit(*word), s, group(verb, s, tense, ask=True), when(d, tense, 0.15) if tense != "present" else EMPTY), ASK
    )


def why(d: Dice) -> Phrase:
    """Why is the child sad? Perché il bambino è triste?"""
    s = animal(d, True) if d.chance(0.15) else subject(d, True, True)
    word = unit("why", "perché")
    is_animal = s.noun is not None and "animal" in s.noun.classes
    if d.chance(0.5):
        a = d.pick(BEAST_MOODS if is_animal else lexicon.MOODS)
        tense = d.pick(("present", "present", "past"))
        form = unit(a.en, a.form(s.gender, s.plural), a.en)
        return chain(word, clause(s, group(BE, s, tense, ask=True), form, ask=True), ASK)
    verb = d.pick(BEAST_VERBS if is_animal else verbs.INTRANSITIVE)
    tense = d.pick(("progressive", "progressive", "was", "past"))
    negative = d.chance(0.25)
    return chain(word, clause(s, group(verb, s, tense, ask=True, negative=negative), ask=True), ASK)


def how_many(d: Dice) -> Phrase:
    """How many apples did you buy? Quante mele hai comprato?"""
    verb = d.pick(QUANTIFIED)
    noun = d.pick(tuple(n for n in verb.objects if n.classes.isdisjoint(("mass", "kin"))))
    s = _asked(d)
    tense = tense_of(d, verb)
    if tense == "progressive":
        tense = "past"
    return chain(wh(np(noun, "how many", True).phrase, s, group(verb, s, tense, ask=True)), ASK)


def which(d: Dice) -> Phrase:
    """Which dress did she choose? Quale vestito ha scelto?"""
    verb = d.pick(SELECTED)
    noun = d.pick(tuple(n for n in verb.objects if n.classes.isdisjoint(("mass", "kin"))))
    s = _asked(d)
    tense = "present" if "state" in verb.flags else d.pick(("present", "past", "past", "future", "want"))
    o = np(noun, "which", several(d, noun, 0.35))
    return chain(wh(o.phrase, s, group(verb, s, tense, ask=True)), ASK)


def how_old(d: Dice) -> Phrase:
    """How old is your sister? Quanti anni ha tua sorella?"""
    x = d.random()
    s = animal(d) if x < 0.25 else kin(d) if x < 0.55 else somebody(d) if x < 0.8 else _asked(d)
    return chain(wh(unit("how old", "quanti anni", "old"), s, having(s, ask=True)), ASK)


def how_much(d: Dice) -> Phrase:
    """How much do these shoes cost? Quanto costano queste scarpe?"""
    noun = d.pick(PRICED)
    plural = several(d, noun, 0.4)
    s = np(
        noun,
        d.pick(("the", "these", "those") if plural else ("the", "this", "that", "a")),
        plural,
        describe(d, noun, 0.35),
    )
    return chain(wh(unit("how much", "quanto"), s, group(COST, s, ask=True)), ASK)


def meet_where(d: Dice) -> Phrase:
    """Where did you meet Anna? Dove hai incontrato Anna?"""
    verb = d.pick(PLACED)
    s = pronoun(d.pick(("you", "you", "he", "she", "they")))
    o = target(d, verb, free=False)
    g = group(verb, s, "past", ask=True)
    return chain(wh(unit(*d.pick((("where", "dove"), ("when", "quando")))), s, g, o.phrase), ASK)


def weekday(d: Dice) -> Phrase:
    """Does Anna work on Mondays? Anna lavora il lunedì?"""
    en, it = d.pick(lexicon.DAYS)
    article = "@il.fs" if it == "domenica" else "@il.ms"
    verb = d.pick(WEEKLY)
    negative, ask = mode(d)
    s = subject(d, ask)
    where = scene(d, verb) if d.chance(0.5) and verb.lemma != "travel" else EMPTY
    time = pair(f"on/1 {en}s/1", f"{article}/1 {it}/1", lemmas=(en,))
    return end(clause(s, group(verb, s, negative=negative, ask=ask), where, time, ask=ask), ask)
