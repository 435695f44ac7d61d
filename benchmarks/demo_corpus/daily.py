"""Constructions of daily life: needs, likes, wishes, gifts, orders, places, possessions."""

from __future__ import annotations

from demo_corpus import lexicon, nouns, verbs
from demo_corpus.choose import (
    BUILDINGS,
    EVERYONE,
    OWNERS,
    PETS,
    at_time,
    beside,
    describe,
    in_city,
    in_room,
    kin,
    place,
    several,
    somebody,
    spot,
    subject,
    target,
    thing,
    third,
    to_or_at,
    when,
)
from demo_corpus.italian import Token, adjective
from demo_corpus.nouns import Noun
from demo_corpus.phrase import EMPTY, Phrase, chain, link, pair, tokens, unit
from demo_corpus.simple import ACTIONS, BELONGINGS, PLEASE, SHOUT, SMALL, STOP, end, mode
from demo_corpus.syntax import NP, PRONOUNS, Dice, clause, group, having, np, of_owner, possessive, predicate
from demo_corpus.verbs import BE, HAVE, NEED

GENERIC = nouns.of(
    "food", "drink", "pet", "flower", "rose", "book", "novel", "poem", "film", "museum", "snake", "horse"
)
PASTIMES = tuple(verbs.BY_LEMMA[v] for v in "read write sing dance cook swim travel walk study".split())
WISHES = nouns.of(
    "food", "drink", "printed", "clothes", "pet", "instrument", "device", "ring", "toy", "bag", "umbrella"
)
FEARED = nouns.of("dog", "mouse", "snake", "wolf", "bear", "lion", "tiger", "horse", "frog", "fox")
PLEASING = nouns.of("text", "clothes", "film", "song", "furniture", "pet", "place")
RELATIVES = nouns.of("brother", "sister", "son", "daughter", "cousin", "friend")
HOMES = nouns.of("house", "village", "castle", "island", "hotel", "city")
SHOWN = BELONGINGS + nouns.of("house", "furniture")
OWNED = tuple(n for n in BELONGINGS + nouns.of("house") if lexicon.FITTING[n.en])
COUNTED = tuple(n for n in (*SMALL, *PETS, *nouns.FOOD) if n.classes.isdisjoint(("mass", "pair")))
COMMANDS = tuple(v for v in ACTIONS if v.lemma not in ("see", "meet", "photograph"))
NAPPING = tuple(verbs.BY_LEMMA[v] for v in ("sleep", "rest", "play"))
HAD = tuple(n for n in BELONGINGS if "text" not in n.classes or "printed" in n.classes)
_SKIES = (
    ("cold", "fa/1 freddo/2"),
    ("hot", "fa/1 caldo/2"),
    ("raining", "sta/1 piovendo/2"),
    ("snowing", "sta/1 nevicando/2"),
    ("windy", "c'/1 è/1 vento/2"),
    ("sunny", "c'/1 è/1 il/2 sole/2"),
)
_WOULD = ("vorrei", "vorresti", "vorrebbe", "vorremmo", "", "vorrebbero")


def need_state(d: Dice) -> Phrase:
    """I am hungry; ho fame."""
    negative, ask = mode(d)
    s = subject(d, ask)
    tense = d.pick(("present", "present", "past"))
    en, it = d.pick(lexicon.NEEDS)
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
    noun = d.pick(FEARED)
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
        noun = d.pick(PLEASING)
        plural = several(d, noun, 0.25)
        what = np(noun, d.pick(("these", "those") if plural else ("this", "that")), plural).phrase
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
        it = (("a", (n,)), *s.phrase.it, *no, finite)
    g.it = it
    s.phrase = s.phrase._replace(it=())
    return end(clause(s, g, what, ask=ask), ask)


def would_like(d: Dice) -> Phrase:
    """I would like a coffee, please; We would like to visit the museum."""
    s = subject(d)
    n, m = link(), link()
    would = Phrase(tokens("would like", n), ((_WOULD[s.index], (n, s.drop) if s.drop else (n,)),), ("like",))
    if d.chance(0.5):
        verb = d.pick(ACTIONS)
        doing = Phrase(tokens(f"to {verb.en} {verb.particle}", m), tokens(verb.it, m), (verb.en,))
        return end(chain(s.phrase, would, doing, target(d, verb).phrase, when(d, "future", 0.2)))
    body = chain(s.phrase, would, thing(d, d.pick(WISHES)).phrase)
    return chain(body, PLEASE, STOP) if s.person == 1 and d.chance(0.5) else end(body)


def needs(d: Dice) -> Phrase:
    """I need a pen; ho bisogno di una penna."""
    negative, ask = mode(d)
    s = subject(d, ask)
    noun = d.pick(NEED.objects)
    plural = several(d, noun, 0.15)
    if "mass" in noun.classes:
        what = np(noun, "")
    elif "person" in noun.classes:
        what = np(noun, "a")
    elif plural:
        what = np(noun, d.pick(("the", "these", *OWNERS)), True)
    else:
        what = np(noun, d.pick(("a", "a", "the", "this", "my", "your")), False, describe(d, noun))
    return end(clause(s, group(NEED, s, negative=negative, ask=ask), what.phrase, ask=ask), ask)


def has(d: Dice) -> Phrase:
    """She has two black cats."""
    negative, ask = mode(d)
    s = subject(d, ask)
    if d.chance(0.2):
        noun, most, look = d.pick(RELATIVES), 5, None
    else:
        noun, most = d.pick(HAD), 9
        look = describe(d, noun, 0.3)
    plural = several(d, noun, 0.45)
    if "pair" in noun.classes:
        what = np(noun, d.pick(("the", "many", *OWNERS)), True, look)
    else:
        what = np(noun, "" if plural else "a", plural, look, number=2 + d.below(most) if plural else 0)
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
    to = d.pick([p for p in EVERYONE if p != s.pronoun and not (p in ("I", "we") and s.pronoun in ("I", "we"))])
    n = link()
    g = group(verb, s, tense, negative=negative, ask=ask, clitic=(PRONOUNS[to][6], n))
    receiver = Phrase(tokens(PRONOUNS[to][0], n), (), ("~" + to,))
    return end(clause(s, g, receiver, target(d, verb, free=not negative and not ask).phrase, ask=ask), ask)


def order(d: Dice) -> Phrase:
    """Open the window, please. Do not touch the piano!"""
    verb = d.pick(COMMANDS)
    o = target(d, verb, free=False)
    if o.noun and "mass" in o.noun.classes:
        o = np(o.noun)
    n = link()
    particle = tokens(verb.particle, n)
    if d.chance(0.35):
        k = link()
        en, it = tokens("do not", k) + tokens(verb.en, n), tokens("non", k) + tokens(verb.it, n)
    else:
        en, it = tokens(verb.en, n), tokens(verb.imperative, n)
    body = chain(Phrase(en + particle, it, (verb.en,)), o.phrase)
    if d.chance(0.3):
        called = somebody(d)
        if called.phrase.lemmas != o.phrase.lemmas:
            body = pair("$0 ,/1 $1", "$0 ,/1 $1", called.phrase, body)
    return chain(body, PLEASE, STOP) if d.chance(0.4) else chain(body, SHOUT)


def where_thing(d: Dice) -> Phrase:
    """My keys are on the table."""
    noun = d.pick(SMALL + PETS)
    plural = several(d, noun, 0.35)
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
    noun = d.pick(COUNTED)
    where = spot(d, noun) if d.chance(0.75) or "food" in noun.classes else in_room(d)
    if d.chance(0.45):
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
        en, it = d.pick(lexicon.CITIES)
        origin = pair(f"from/1 {en}/2", f"da/1 {it}/2", lemmas=(en,))
    else:
        en, it = d.pick(lexicon.COUNTRIES)
        origin = pair(f"from/1 {en}/2", f"da/1 @il.fs/2 {it}/2", lemmas=(en,))
    return end(clause(s, group(verbs.MOVING[1], s, negative=negative, ask=ask), origin, ask=ask), ask)


def lives(d: Dice) -> Phrase:
    """My uncle lives in Florence; abito vicino al parco."""
    negative, ask = mode(d)
    s = subject(d, ask)
    x = d.random()
    where = in_city(d) if x < 0.5 else beside(d, d.pick(BUILDINGS)) if x < 0.7 else EMPTY
    if where is EMPTY:
        noun = d.pick(HOMES)
        where = pair("in/1 $0" if noun.en != "island" else "on/1 $0", "in/1 $0" if noun.en != "island" else "su/1 $0",
                     np(noun, "a", False, d.pick(lexicon.FITTING[noun.en])).phrase)  # fmt: skip
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
    night = verb.lemma == "fall asleep"
    tense = d.pick(
        ("present", "past", "past", "future") if night or ask else ("present", "past", "past", "future", "must")
    )
    days = {"present": ("every day", "ogni giorno"), "past": ("yesterday", "ieri"), "future": ("tomorrow", "domani")}
    day = unit(*days[tense]) if tense in days and d.chance(0.35) else EMPTY
    hour = at_time(d, (9, 10, 11) if night else (5, 6, 7, 8, 9)) if d.chance(0.85) or day is EMPTY else EMPTY
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), hour, day, ask=ask), ask)


def this_is(d: Dice) -> Phrase:
    """This is my book, these are Anna's shoes; questo è il mio libro."""
    noun = d.pick(SHOWN)
    plural = several(d, noun, 0.35)
    negative, ask = mode(d)
    far = d.chance(0.3)
    en = ("those" if plural else "that") if far else ("these" if plural else "this")
    gender = noun.agreement(plural)[0]
    s = NP(unit(en, adjective("quello" if far else "questo", gender, plural)), plural=plural, gender=gender)
    x = d.random()
    if x < 0.5:
        what = np(noun, d.pick(OWNERS), plural)
    else:
        what = of_owner(noun, somebody(d) if x < 0.75 else _relative(d), plural)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), what.phrase, ask=ask), ask)


def _relative(d: Dice) -> NP:
    while (k := kin(d)).plural:
        pass
    return k


def mine(d: Dice) -> Phrase:
    """This book is mine; queste scarpe sono tue."""
    noun = d.pick(BELONGINGS)
    plural = several(d, noun, 0.35)
    s = np(
        noun, d.pick(("these", "those", "the") if plural else ("this", "that", "the")), plural, describe(d, noun, 0.2)
    )
    negative, ask = mode(d)
    owner = d.pick(("my mine", "your yours", "his his", "her hers", "our ours", "their theirs")).split()
    agreement = noun.agreement(plural)
    it = possessive(owner[0], agreement) if owner[0] != "their" else f"@il.{agreement} loro"
    lemma = {"my": "~I", "your": "~you", "his": "~he", "her": "~she", "our": "~we", "their": "~they"}[owner[0]]
    return end(clause(s, group(BE, s, negative=negative, ask=ask), unit(owner[1], it, lemma), ask=ask), ask)


def owned(d: Dice) -> Phrase:
    """My brother's car is fast; la macchina di mio fratello è veloce."""
    noun = d.pick(OWNED)
    s = of_owner(noun, somebody(d) if d.chance(0.5) else _relative(d), several(d, noun, 0.3))
    negative, ask = mode(d)
    a = d.pick(lexicon.FITTING[noun.en])
    g = group(BE, s, d.pick(("present", "past")), negative=negative, ask=ask)
    very = not negative and a.en not in lexicon.ABSOLUTE and d.chance(0.2)
    return end(clause(s, g, predicate(a, s, very), ask=ask), ask)


def weather(d: Dice) -> Phrase:
    """In Rome it is cold today; a Roma oggi fa freddo."""
    where = in_city(d)
    en, it = d.pick(_SKIES)
    time = unit(*d.pick(lexicon.NOW)) if d.chance(0.6) else EMPTY
    return end(pair(f"it/1 is/1 {en}/2 $0 $1", f"{it} $0 $1", where, time, lemmas=(en,)))


def happening(d: Dice) -> Phrase:
    """The cat is sleeping on the sofa."""
    verb = d.pick(NAPPING)
    noun = d.pick(PETS)
    s = np(noun, d.pick(("the", *OWNERS)), False, describe(d, noun, 0.3))
    tense = d.pick(("present", "progressive", "was"))
    negative, ask = mode(d)
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), spot(d, noun), ask=ask), ask)


def called(d: Dice) -> Phrase:
    """My name is Anna; mia sorella si chiama Giulia."""
    x = somebody(d)
    if d.chance(0.3):
        own, me, verb, lemma = d.pick((("my", "mi", "chiamo", "~I"), ("your", "ti", "chiami", "~you")))
        return end(pair(f"{own}/1 name/2 is/2 $0", f"{me}/1 {verb}/2 $0", x.phrase, lemmas=(lemma, "name")))
    s = _relative(d)
    while s.gender != x.gender:
        s = _relative(d)
    return end(pair("$0 's/1 name/2 is/2 $1", "$0 si/1 chiama/2 $1", s.phrase, x.phrase, lemmas=("name",)))
