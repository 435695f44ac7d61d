"""Constructions of daily life: needs, likes, wishes, gifts, orders, places, possessions."""

from __future__ import annotations

from qkv.data.demo import nouns, verbs, words
from qkv.data.demo.choose import (
    BUILDINGS, OWNERS, PETS, SPEAKERS, at_home, at_time, beside, describe, in_city, in_room, kin, place, somebody, spot,
    subject, target, thing, third, to_or_at, when,
)  # fmt: skip
from qkv.data.demo.italian import Token
from qkv.data.demo.nouns import Noun
from qkv.data.demo.phrase import EMPTY, Phrase, chain, link, pair, tokens, unit
from qkv.data.demo.simple import ACTIONS, BELONGINGS, PLEASE, SHOUT, SMALL, STOP, end, mode
from qkv.data.demo.syntax import (
    NP, PRONOUNS, Dice, clause, group, having, np, of_owner, possessive, predicate, pronoun,
)  # fmt: skip
from qkv.data.demo.verbs import BE, HAVE, NEED, Verb

GENERIC = nouns.of("food", "drink", "pet", "flower", "rose", "book", "novel", "poem", "film", "museum", "snake", "horse")
PASTIMES = tuple(
    v for v in (*verbs.INTRANSITIVE, *verbs.TRANSITIVE) if v.lemma in "read write sing dance cook swim travel".split()
)
_WOULD = ("vorrei", "vorresti", "vorrebbe", "vorremmo", "", "vorrebbero")


def need_state(d: Dice) -> Phrase:
    """I am hungry; ho fame."""
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "present", "past"))
    en, it = d.pick(words.NEEDS)
    time = when(d, "past" if tense == "past" else "progressive", 0.4)
    return end(clause(s, having(s, tense, negative, ask), unit(en, it, en), time, ask=ask), ask)


def generic(noun: Noun) -> NP:
    """A kind of thing: bare in English, with the article in Italian (apples, le mele)."""
    plural = "mass" not in noun.classes
    agreement = noun.agreement(plural)
    phrase = unit(noun.en_plural if plural else noun.en, f"@il.{agreement} {noun.form(plural)}", noun.en)
    return NP(phrase, plural=plural, gender=agreement[0], noun=noun)


def afraid(d: Dice) -> Phrase:
    """The girl is afraid of dogs; la ragazza ha paura dei cani."""
    negative, ask = mode(d)
    s = subject(d, ask)
    noun = d.pick(nouns.of("dog", "mouse", "snake", "wolf", "bear", "lion", "tiger", "horse", "frog", "fox"))
    of_what = generic(noun) if d.chance(0.6) else np(noun, d.pick(("the", "this", "that")))
    fear = pair("afraid/1 of/2 $0", "paura/1 di/2 $0", of_what.phrase, lemmas=("afraid",))
    return end(clause(s, having(s, d.pick(("present", "past")), negative, ask), fear, ask=ask), ask)


def likes(d: Dice) -> Phrase:
    """I like cherries, mi piacciono le ciliegie; Marco likes reading, a Marco piace leggere."""
    negative, ask = mode(d)
    s = subject(d, ask)
    plural = False
    if d.chance(0.25):
        verb = d.pick(PASTIMES)
        what = unit(verb.en_ing, verb.it, verb.lemma)
    elif d.chance(0.3):
        one = np(d.pick(nouns.of("text", "clothes", "media", "furniture", "pet", "place")), d.pick(("this", "that")))
        what = one.phrase
    else:
        kind = generic(d.pick(GENERIC))
        what, plural = kind.phrase, kind.plural
    g = group(verbs.LIKE, s, negative=negative, ask=ask)
    n = g.main[-1][1][0]
    finite: Token = ("piacciono" if plural else "piace", (n,))
    no = g.it[:1] if negative else ()
    if s.pronoun and s.pronoun != "they":
        it = (*no, (PRONOUNS[s.pronoun][6], (s.drop,)), finite)
    elif s.pronoun:
        it = (*tokens("a loro", s.drop), *no, finite)
    else:
        it = (("a", (link(),)), *s.phrase.it, *no, finite)
    g.it = it
    s.phrase = s.phrase._replace(it=())
    return end(clause(s, g, what, ask=ask), ask)


def would_like(d: Dice) -> Phrase:
    """I would like a coffee, please; We would like to visit the museum."""
    s = subject(d)
    n, m = link(), link()
    would = _WOULD[s.index]
    finite: Token = (would, (n, s.drop) if s.drop else (n,))
    if d.chance(0.5):
        verb = d.pick(ACTIONS)
        body = chain(Phrase(tokens("would like", n), (finite,)), Phrase(tokens(f"to {verb.en} {verb.particle}", m),
                     tokens(verb.it, m), (verb.lemma,)), target(d, verb).phrase)  # fmt: skip
        return end(chain(s.phrase, body, when(d, "future", 0.2)))
    noun = d.pick(nouns.of("food", "drink", "text", "clothes", "pet", "instrument", "small", "device"))
    what = thing(d, noun)
    body = chain(s.phrase, Phrase(tokens("would like", n), (finite,), ("would like",)), what.phrase)
    return chain(body, PLEASE, STOP) if s.person == 1 and d.chance(0.5) else end(body)


def needs(d: Dice) -> Phrase:
    """I need a pen; ho bisogno di una penna."""
    negative, ask = mode(d)
    s = subject(d, ask)
    noun = d.pick(NEED.objects)
    what = np(noun, "") if "mass" in noun.classes else np(noun, d.pick(("a", "a", "the", "this", "my")), False,
                                                           describe(d, noun))  # fmt: skip
    if "person" in noun.classes:
        what = np(noun, "a")
    return end(clause(s, group(NEED, s, negative=negative, ask=ask), what.phrase, ask=ask), ask)


def has(d: Dice) -> Phrase:
    """She has two cats and a dog."""
    negative, ask = mode(d)
    s = subject(d, ask)
    noun = d.pick(BELONGINGS)
    plural = d.chance(0.45)
    what = np(noun, "" if plural else "a", plural, describe(d, noun, 0.3), number=2 + d.below(9) if plural else 0)
    if d.chance(0.2):
        relative = d.pick(nouns.of("brother", "sister", "son", "daughter", "cousin", "friend"))
        what = np(relative, "" if plural else "a", plural, None, number=2 + d.below(5) if plural else 0)
    return end(clause(s, group(HAVE, s, negative=negative, ask=ask), what.phrase, ask=ask), ask)


def gives(d: Dice) -> Phrase:
    """Marco gives the flowers to Anna; do il libro a mia madre."""
    verb = d.pick(verbs.GIVING)
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "past", "past", "future", "must", "want"))
    o = target(d, verb, free=not negative and not ask)
    to = third(d)
    if to.phrase.lemmas == s.phrase.lemmas:
        to = np(nouns.BY_NAME["friend"], "a")
    receiver = pair("to/1 $0", "a/1 $0", to.phrase)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), o.phrase, receiver, ask=ask), ask)


def gives_pronoun(d: Dice) -> Phrase:
    """He gives me the key; mi dà la chiave."""
    verb = d.pick(verbs.GIVING)
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "past", "past", "future", "must", "want"))
    to = d.pick([p for p in SPEAKERS if p != s.pronoun and not (p in ("I", "we") and s.pronoun in ("I", "we"))])
    n = link()
    g = group(verb, s, tense, negative=negative, ask=ask, clitic=(PRONOUNS[to][6], n))
    receiver = Phrase(tokens(PRONOUNS[to][0], n), (), ("~" + to,))
    return end(clause(s, g, receiver, target(d, verb, free=not negative and not ask).phrase, ask=ask), ask)


def order(d: Dice) -> Phrase:
    """Open the window, please. Do not touch the piano!"""
    verb = d.pick(tuple(v for v in ACTIONS if v.lemma not in ("see", "meet", "photograph")))
    o = target(d, verb, free=False)
    n = link()
    particle = tokens(verb.particle, n)
    if d.chance(0.35):
        k = link()
        en, it = tokens("do not", k) + tokens(verb.en, n), tokens("non", k) + tokens(verb.it, n)
    else:
        en, it = tokens(verb.en, n), tokens(verb.imperative, n)
    body = chain(Phrase(en + particle, it, (verb.lemma,)), o.phrase)
    if d.chance(0.3):
        called = somebody(d)
        if called.phrase.lemmas != o.phrase.lemmas:
            body = pair("$0 ,/1 $1", "$0 ,/1 $1", called.phrase, body)
    return chain(body, PLEASE, STOP) if d.chance(0.4) else chain(body, SHOUT)


def where_thing(d: Dice) -> Phrase:
    """My keys are on the table."""
    noun = d.pick(SMALL + PETS)
    plural = d.chance(0.35)
    dets = ("the", "the", "these", *OWNERS) if plural else ("the", "the", "the", *OWNERS)
    s = np(noun, d.pick(dets), plural, describe(d, noun, 0.15))
    negative, ask = mode(d)
    tense = d.pick(("present", "present", "past"))
    return end(clause(s, group(BE, s, tense, negative=negative, ask=ask), spot(d, noun), ask=ask), ask)


def where_person(d: Dice) -> Phrase:
    """Anna was at the station yesterday."""
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "past", "future"))
    x = d.random()
    where = beside(d, d.pick(BUILDINGS)) if x < 0.25 else place(d)
    time = when(d, "progressive" if tense == "present" else tense, 0.35)
    return end(clause(s, group(BE, s, tense, negative=negative, ask=ask), where, time, ask=ask), ask)


def building(d: Dice) -> Phrase:
    """The museum is near the station."""
    a, b = d.pick(BUILDINGS), d.pick(BUILDINGS)
    while a is b:
        b = d.pick(BUILDINGS)
    s = np(a, "the", False, describe(d, a, 0.2))
    negative, ask = mode(d)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), beside(d, b), ask=ask), ask)


def there_is(d: Dice) -> Phrase:
    """There is a cat under the table; There are no apples in the kitchen."""
    noun = d.pick(tuple(n for n in SMALL + PETS + nouns.FOOD if "mass" not in n.classes))
    plural = d.chance(0.55)
    where = spot(d, noun) if d.chance(0.7) else in_room(d)
    if not plural:
        what = np(noun, "a", False, describe(d, noun, 0.25)).phrase
        if d.chance(0.25):
            return end(pair("is/2 there/1 $0 $1", "c'/1 è/2 $0 $1", what, where), True)
        return end(pair("there/1 is/2 $0 $1", "c'/1 è/2 $0 $1", what, where))
    x = d.random()
    if x < 0.2:
        none = unit(noun.en_plural, noun.it_plural, noun.en)
        return end(pair("there/1 are/2 no/3 $0 $1", "non/3 ci/1 sono/2 $0 $1", none, where))
    number = 2 + d.below(19) if x < 0.6 else 0
    what = np(noun, "" if number else d.pick(("some", "many")), True, describe(d, noun, 0.2), number).phrase
    if number and d.chance(0.2):
        return end(pair("are/2 there/1 $0 $1", "ci/1 sono/2 $0 $1", what, where), True)
    return end(pair("there/1 are/2 $0 $1", "ci/1 sono/2 $0 $1", what, where))


def goes(d: Dice) -> Phrase:
    """We are going to the station; andiamo in banca."""
    verb = d.pick(verbs.MOVING)
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "progressive", "past", "future", "must", "want"))
    where = in_city(d, "to") if d.chance(0.3) and verb.lemma != "run" else to_or_at(d, "to")
    if verb.lemma == "run" and tense in ("past", "want"):
        tense = "progressive"
    if verb.lemma == "come":
        tense = d.pick(("past", "future", "want"))
    x = d.random()
    company = pair("with/1 $0", "con/1 $0", third(d).phrase) if x < 0.2 else EMPTY
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), where, company, when(d, tense, 0.25),
                      ask=ask), ask)  # fmt: skip


def comes_from(d: Dice) -> Phrase:
    """Paolo comes from Naples; veniamo dall'Italia."""
    negative, ask = mode(d)
    s = subject(d, ask)
    if d.chance(0.6):
        en, it = d.pick(words.CITIES)
        origin = pair(f"from/1 {en}/2", f"da/1 {it}/2", lemmas=(en,))
    else:
        en, it = d.pick(words.COUNTRIES)
        origin = pair(f"from/1 {en}/2", f"da/1 @il.fs/2 {it}/2", lemmas=(en,))
    return end(clause(s, group(verbs.MOVING[1], s, negative=negative, ask=ask), origin, ask=ask), ask)


def lives(d: Dice) -> Phrase:
    """My uncle lives in Florence; abito vicino al parco."""
    negative, ask = mode(d)
    s = subject(d, ask)
    x = d.random()
    where = in_city(d) if x < 0.5 else beside(d, d.pick(BUILDINGS)) if x < 0.7 else EMPTY
    if where is EMPTY:
        noun = d.pick(nouns.of("house", "village", "castle", "island", "hotel", "city"))
        where = pair("in/1 $0" if noun.en != "island" else "on/1 $0", "in/1 $0" if noun.en != "island" else "su/1 $0",
                     np(noun, "a", False, d.pick(words.FITTING[noun.en])).phrase)  # fmt: skip
    return end(clause(s, group(verbs.LIVE, s, negative=negative, ask=ask), where, ask=ask), ask)


def stays(d: Dice) -> Phrase:
    """She stayed at home yesterday; è restata a casa ieri."""
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "past", "past", "future", "must", "want"))
    return end(clause(s, group(verbs.STAY, s, tense, negative=negative, ask=ask), place(d), when(d, tense, 0.4),
                      ask=ask), ask)  # fmt: skip


def rises(d: Dice) -> Phrase:
    """I wake up at seven o'clock; mi sveglio alle sette."""
    verb = d.pick(verbs.REFLEXIVE)
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "past", "past", "future", "must"))
    time = chain(at_time(d), when(d, tense, 0.3)) if d.chance(0.8) else when(d, tense, 0.7)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), time, ask=ask), ask)


def this_is(d: Dice) -> Phrase:
    """This is my book, these are Anna's shoes; questo è il mio libro."""
    noun = d.pick(BELONGINGS + nouns.of("house", "furniture"))
    plural = d.chance(0.35)
    negative, ask = mode(d)
    far = d.chance(0.3)
    en = ("those" if plural else "that") if far else ("these" if plural else "this")
    it = {"ms": "o", "fs": "a", "mp": "i", "fp": "e"}[noun.agreement(plural)]
    s = NP(unit(en, ("quell" if far else "quest") + it), plural=plural, gender=noun.agreement(plural)[0])
    x = d.random()
    what = (
        np(noun, d.pick(OWNERS), plural) if x < 0.5 else of_owner(noun, somebody(d), plural) if x < 0.75
        else of_owner(noun, _relative(d), plural)
    )  # fmt: skip
    return end(clause(s, group(BE, s, negative=negative, ask=ask), what.phrase, ask=ask), ask)


def _relative(d: Dice) -> NP:
    while (k := kin(d)).plural:
        pass
    return k


def mine(d: Dice) -> Phrase:
    """This book is mine; queste scarpe sono tue."""
    noun = d.pick(BELONGINGS)
    plural = d.chance(0.35)
    s = np(noun, d.pick(("these", "those", "the") if plural else ("this", "that", "the")), plural, describe(d, noun, 0.2))
    negative, ask = mode(d)
    owner = d.pick(("my mine", "your yours", "his his", "her hers", "our ours", "their theirs")).split()
    agreement = noun.agreement(plural)
    it = possessive(owner[0], agreement) if owner[0] != "their" else f"@il.{agreement} loro"
    lemma = {"my": "~I", "your": "~you", "his": "~he", "her": "~she", "our": "~we", "their": "~they"}[owner[0]]
    return end(clause(s, group(BE, s, negative=negative, ask=ask), unit(owner[1], it, lemma), ask=ask), ask)


def owned(d: Dice) -> Phrase:
    """My brother's car is fast; la macchina di mio fratello è veloce."""
    noun = d.pick(BELONGINGS + nouns.of("house"))
    plural = d.chance(0.3)
    s = of_owner(noun, somebody(d) if d.chance(0.5) else _relative(d), plural)
    negative, ask = mode(d)
    a = d.pick(words.FITTING[noun.en]) if words.FITTING[noun.en] else words.BY_NAME["beautiful"]
    g = group(BE, s, d.pick(("present", "past")), negative=negative, ask=ask)
    return end(clause(s, g, predicate(a, s, not negative and d.chance(0.2)), ask=ask), ask)


def weather(d: Dice) -> Phrase:
    """In Rome it is cold today; a Roma oggi fa freddo."""
    where = in_city(d)
    en, it = d.pick((("it is/1 cold/2", "fa/1 freddo/2"), ("it is/1 hot/2", "fa/1 caldo/2"),
                     ("it is/1 raining/2", "sta/1 piovendo/2"), ("it is/1 snowing/2", "sta/1 nevicando/2"),
                     ("it is/1 windy/2", "c'/1 è/1 vento/2"), ("it is/1 sunny/2", "c'/1 è/1 il/2 sole/2")))  # fmt: skip
    lemma = en.split()[-1][:-2]
    time = unit(*d.pick(words.NOW)) if d.chance(0.6) else EMPTY
    return end(pair(f"{en} $0 $1", f"{it} $0 $1", where, time, lemmas=(lemma,)))


def happening(d: Dice) -> Phrase:
    """The cat is sleeping on the sofa."""
    verb = d.pick(tuple(verbs.BY_LEMMA[v] for v in ("sleep", "rest", "play", "eat")))
    noun = d.pick(nouns.of("pet"))
    s = np(noun, d.pick(("the", *OWNERS)), False, describe(d, noun, 0.3))
    tense = d.pick(("present", "progressive", "was"))
    negative, ask = mode(d)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), spot(d, noun), ask=ask), ask)


def called(d: Dice) -> Phrase:
    """My name is Anna; mia sorella si chiama Giulia."""
    x = somebody(d)
    if d.chance(0.3):
        own, it = d.pick((("my", "mi chiamo"), ("your", "ti chiami")))
        return end(pair(f"{own}/1 name/2 is/2 $0", f"{it.split()[0]}/1 {it.split()[1]}/2 $0", x.phrase, lemmas=("~" + own,)))
    s = _relative(d)
    while s.gender != x.gender:
        s = _relative(d)
    return end(pair("$0 's/1 name/2 is/2 $1", "$0 si/1 chiama/2 $1", s.phrase, x.phrase))
