"""Constructions with numbers: ages, prices, sums, times of day, days and dates."""

from __future__ import annotations

from demo_corpus import english, italian, lexicon, nouns, verbs
from demo_corpus.choose import (
    HOURS,
    animal,
    at_time,
    clock,
    date,
    describe,
    in_city,
    kin,
    several,
    somebody,
    subject,
    target,
    to_or_at,
)
from demo_corpus.phrase import EMPTY, Phrase, chain, link, pair, tokens, unit
from demo_corpus.questions import EVENTS, PRICED, SHOPS, TRANSIT
from demo_corpus.simple import ACTIONS, STOP, end, mode
from demo_corpus.syntax import NP, Dice, clause, group, having, np, numeral, of_owner
from demo_corpus.verbs import BE, COST


def counted(number: int, en: str, it: str) -> Phrase:
    """A number and a noun: twenty-one years, ventun anni."""
    n, m = link(), link()
    return Phrase(tokens(english.cardinal(number), n) + tokens(en, m), (numeral(number, n), *tokens(it, m)),
                  (english.cardinal(number), en))  # fmt: skip


def cost(d: Dice, noun: nouns.Noun) -> Phrase:
    """A price that the thing may have."""
    if "fruit" in noun.classes:
        number = 2 + d.below(8)
    elif noun.classes & {"furniture", "device", "instrument", "vehicle"}:
        number = 20 + d.below(80) if d.chance(0.5) and "vehicle" not in noun.classes else 100 * (1 + d.below(10))
    elif noun.classes & {"printed", "plant", "ready", "tool"}:
        number = 2 + d.below(29)
    else:
        number = 5 + d.below(95)
    return counted(number, "euros", "euro")


def age(d: Dice) -> Phrase:
    """I am twenty-three years old; ho ventitré anni."""
    x = d.random()
    s = animal(d) if x < 0.15 else kin(d) if x < 0.45 else somebody(d) if x < 0.7 else subject(d)
    number = 2 + d.below(14) if s.noun and "animal" in s.noun.classes else 3 + d.below(90)
    negative, ask = mode(d)
    old = counted(number, "years", "anni")
    n = old.en[-1][1][0]
    return end(clause(s, having(s, "present", negative, ask), old, Phrase(tokens("old", n)), ask=ask), ask)


def price(d: Dice) -> Phrase:
    """The book costs twenty-three euros; il libro costa ventitré euro."""
    noun = d.pick(PRICED)
    plural = several(d, noun, 0.35)
    s = np(
        noun, d.pick(("the", "these", "those") if plural else ("the", "this", "that")), plural, describe(d, noun, 0.2)
    )
    negative, ask = mode(d)
    return end(clause(s, group(COST, s, negative=negative, ask=ask), cost(d, noun), ask=ask), ask)


def bought_for(d: Dice) -> Phrase:
    """She sold the car for nine hundred euros; ha venduto la macchina per novecento euro."""
    verb, goods = d.pick(TRADE)
    noun = d.pick(goods)
    s = subject(d)
    o = np(noun, d.pick(("the", "these", "those") if "pair" in noun.classes else ("the", "this", "a")),
           "pair" in noun.classes, describe(d, noun, 0.15))  # fmt: skip
    price = pair("for/1 $0", "per/1 $0", cost(d, noun))
    return end(clause(s, group(verb, s, d.pick(("past", "past", "future"))), o.phrase, price))


TRADE = tuple((v, tuple(n for n in PRICED if n in v.objects)) for v in verbs.transitive("buy, sell"))


def total(d: Dice) -> Phrase:
    """Seven plus five is twelve; sette più cinque fa dodici."""
    a, b = 2 + d.below(48), 2 + d.below(48)
    word, parola, c = ("plus", "più", a + b) if d.chance(0.6) else ("minus", "meno", a - b)
    if c < 0:
        a, b, c = b, a, -c
    e, i = english.cardinal, italian.cardinal
    return pair(f"{e(a)}/1 {word}/2 {e(b)}/3 is/4 {e(c)}/5 ./6", f"{i(a)}/1 {parola}/2 {i(b)}/3 fa/4 {i(c)}/5 ./6",
                lemmas=(e(a), word, e(b)))  # fmt: skip


def time_now(d: Dice) -> Phrase:
    """It is half past three; sono le tre e mezza."""
    hours, en, it = d.pick(PARTS)
    when, hour = clock(d, hours)
    part = unit(en, it) if en else EMPTY
    one = hour == 1
    be, essere = ("was", "era" if one else "erano") if d.chance(0.3) else ("is", "è" if one else "sono")
    return end(pair(f"it/1 {be}/1 $0 $1", f"{essere}/1 $0 $1", when, part))


PARTS: tuple[tuple[tuple[int, ...], str, str], ...] = (
    (HOURS, "", ""),
    (HOURS, "", ""),
    ((5, 6, 7, 8, 9, 10, 11), "in the morning", "di mattina"),
    ((2, 3, 4, 5), "in the afternoon", "del pomeriggio"),
    ((7, 8, 9, 10), "in the evening", "di sera"),
)


def timetable(d: Dice) -> Phrase:
    """The train leaves at ten past five; il treno parte alle cinque e dieci."""
    negative, ask = mode(d)
    x = d.random()
    if x < 0.35:
        s, verb = np(d.pick(TRANSIT), d.pick(("the", "the", "this"))), d.pick(verbs.LEAVING)
    elif x < 0.55:
        s, verb = np(d.pick(SHOPS)), d.pick((verbs.OPEN, verbs.CLOSE))
    elif x < 0.65:
        s, verb = np(d.pick(EVENTS)), verbs.BEGIN
    else:
        s, verb = subject(d, ask), d.pick((*verbs.LEAVING, verbs.MOVING[2]))
    tense = d.pick(("present", "past", "future"))
    times = {"past": ("yesterday", "ieri"), "future": ("tomorrow", "domani")}
    day = unit(*times[tense]) if tense in times and d.chance(0.4) else EMPTY
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), at_time(d), day, ask=ask), ask)


def opening(d: Dice) -> Phrase:
    """The bank is open from nine o'clock to five o'clock; la banca è aperta dalle nove alle cinque."""
    s = np(d.pick(SHOPS))
    shut = d.chance(0.3)
    a, b = (d.pick((11, 12)), d.pick((2, 3, 4, 5))) if shut else (8 + d.below(3), 4 + d.below(4))
    e, i = english.cardinal, italian.cardinal
    hours = pair(f"from/1 {e(a)}/2 o'clock/2 to/3 {e(b)}/4 o'clock/4", f"da/1 @il.fp/2 {i(a)}/2 a/3 @il.fp/4 {i(b)}/4",
                 lemmas=(e(a), e(b)))  # fmt: skip
    en, it = ("closed", "chiuso") if shut else ("open", "aperto")
    negative, ask = mode(d)
    state = unit(en, italian.adjective(it, s.gender, False), en)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), state, hours, ask=ask), ask)


def _occasion(d: Dice) -> NP:
    x = d.random()
    if x < 0.3:
        return np(nouns.BY_NAME["concert"])
    if x < 0.55:
        return np(BIRTHDAY, d.pick(("my", "your", "his", "her")))
    owner = somebody(d)
    if x < 0.75:
        while (owner := kin(d)).plural:
            pass
    return of_owner(BIRTHDAY, owner)


BIRTHDAY = nouns.Noun("birthday", "birthdays", "compleanno", "compleanni", "m", "m", frozenset())


def on_date(d: Dice) -> Phrase:
    """My birthday is on the tenth of March; il mio compleanno è il dieci marzo."""
    s = _occasion(d)
    negative, ask = mode(d)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), pair("on $0", "$0", date(d)), ask=ask), ask)


def today(d: Dice) -> Phrase:
    """Today is the first of May; oggi è il primo maggio. Tomorrow is Sunday; domani è domenica."""
    en, it, verb, forms = d.pick((("today", "oggi", "is", "è"), ("tomorrow", "domani", "is", "è"),
                                  ("yesterday", "ieri", "was", "era")))  # fmt: skip
    named = d.pick(lexicon.DAYS)
    day = unit(*named, named[0])
    x = d.random()
    if x < 0.1:
        when = day
    elif x < 0.5:
        when = pair("$0 ,/1 $1", "$0 $1", day, date(d, article=False))
    else:
        when = date(d)
    return pair(f"{en}/1 {verb}/2 $0 ./3", f"{it}/1 {forms}/2 $0 ./3", when)


def on_day(d: Dice) -> Phrase:
    """On Monday I will go to Rome; lunedì andrò a Roma."""
    en, it = d.pick(lexicon.DAYS)
    day = pair(f"on/1 {en}/1", f"{it}/1", lemmas=(en,))
    if d.chance(0.25):
        day = pair("on $0", "$0", date(d))
    negative, _ = mode(d)
    s = subject(d)
    if d.chance(0.5):
        verb = d.pick((*verbs.LEAVING, verbs.MOVING[0], verbs.MOVING[2]))
        rest = EMPTY if verb in verbs.LEAVING else in_city(d, "to") if d.chance(0.5) else to_or_at(d, "to")
    else:
        verb = d.pick(ACTIONS)
        rest = target(d, verb, free=not negative).phrase
    body = clause(s, group(verb, s, "future", negative=negative), rest)
    if d.chance(0.6):
        return chain(day, body, STOP)
    return chain(body, day, STOP)
