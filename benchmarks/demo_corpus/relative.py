"""Relative clauses and comparisons: agreement across the words between subject and verb."""

from __future__ import annotations

from demo_corpus import lexicon, nouns, verbs
from demo_corpus.choose import (
    EVERYONE,
    PETS,
    in_room,
    several,
    somebody,
    spot,
    subject,
    target,
    tense_of,
    third,
)
from demo_corpus.lexicon import CHARACTER, MOODS, Adjective
from demo_corpus.phrase import EMPTY, Phrase, chain, pair, unit
from demo_corpus.simple import ACTIONS, PERSONAL, TONIC, end, mode
from demo_corpus.syntax import NP, PRONOUNS, Dice, clause, group, np, of_owner, predicate
from demo_corpus.verbs import BE, Verb

DEEDS = tuple(v for v in ACTIONS if v not in PERSONAL)
PLAIN_DEEDS = tuple(v for v in DEEDS if v.past_is_plain())
LEADS = verbs.transitive("know, meet, thank, see, look for, wait for, help")
MADE = verbs.transitive(
    "buy, sell, write, see, find, lose, repair, choose, take, want, wash, draw, visit, use, prepare, eat, receive"
)
FAMILY = {
    "boy": ("brother", "son", "cousin"),
    "girl": ("sister", "daughter"),
    "man": ("father", "brother", "uncle", "cousin", "husband"),
    "woman": ("mother", "sister", "aunt", "wife"),
    "gentleman": ("father", "uncle", "grandfather"),
    "lady": ("mother", "aunt", "grandmother"),
}
FAMILY_NOUNS = tuple(nouns.BY_NAME[n] for n in FAMILY)
MANY_PEOPLE = tuple(n for n in nouns.PEOPLE if n.en not in ("king", "queen", "friend", "neighbour"))
RESTING = tuple(verbs.BY_LEMMA[v] for v in ("sleep", "rest", "play"))


def _inner(word: str, head: NP, verb: Verb, tense: str, rest: Phrase) -> Phrase:
    """A relative clause with the preceding noun as subject: who reads the book, che legge il libro."""
    silent = NP(EMPTY, plural=head.plural, gender=head.gender)
    return clause(NP(unit(word, "che")), group(verb, silent, tense), rest)


def who_relative(d: Dice) -> Phrase:
    """The girl who reads the book is my sister; la ragazza che legge il libro è mia sorella."""
    family = d.chance(0.4)
    noun = d.pick(FAMILY_NOUNS if family else MANY_PEOPLE)
    plural = not family and d.chance(0.3)
    head = np(noun, d.pick(("the", "the", "those") if plural else ("the", "the", "that")), plural)
    verb = d.pick(DEEDS)
    tenses = ("present", "past") if verb.past_is_plain() else ("present",)
    tense = d.pick(tenses if "brief" in verb.flags else (*tenses, "progressive", "progressive"))
    inner = _inner("who", head, verb, tense, target(d, verb, free=False).phrase)
    s = NP(chain(head.phrase, inner), plural=plural, gender=head.gender)
    if family:
        relative = nouns.BY_NAME[d.pick(FAMILY[noun.en])]
        owners = {"husband": ("my", "your", "her"), "wife": ("my", "your", "his")}
        det = d.pick(owners.get(relative.en, ("my", "your", "his", "her", "our", "their")))
        return end(clause(s, group(BE, s, negative=d.chance(0.15)), np(relative, det).phrase))
    return end(clause(s, group(BE, s), predicate(d.pick(MOODS + CHARACTER), s, d.chance(0.2))))


def know_who(d: Dice) -> Phrase:
    """I know the man who sold the house; conosco l'uomo che ha venduto la casa."""
    s = subject(d, plain=True)
    noun = d.pick(MANY_PEOPLE)
    plural = d.chance(0.3)
    lead = d.pick(LEADS)
    head = np(noun, d.pick(("the", "the", "those") if plural else ("the", "the", "that")), plural)
    verb = d.pick(PLAIN_DEEDS)
    inner = _inner("who", head, verb, "past", target(d, verb, free=False).phrase)
    tense = "present" if "state" in lead.flags else d.pick(("past", "past", "future"))
    return end(clause(s, group(lead, s, tense), head.phrase, inner))


def that_relative(d: Dice) -> Phrase:
    """The book that Anna bought is interesting; il libro che Anna ha comprato è interessante."""
    verb = d.pick(MADE)
    noun = d.pick(tuple(n for n in verb.objects if "person" not in n.classes and lexicon.FITTING[n.en]))
    plural = several(d, noun, 0.35)
    head = np(noun, "the", plural)
    who = subject(d, plain=True)
    tense = tense_of(d, verb)
    if tense == "progressive" or (tense == "present" and "state" not in verb.flags):
        tense = "past"
    that = unit("that", "che")
    s = NP(chain(head.phrase, that, clause(who, group(verb, who, tense))), plural=plural, gender=head.gender)
    a = d.pick(lexicon.FITTING[noun.en])
    be = "present" if tense != "past" else "past" if verb.lemma == "eat" else d.pick(("present", "past"))
    very = a.en not in lexicon.ABSOLUTE and d.chance(0.15)
    return end(clause(s, group(BE, s, be, negative=not very and d.chance(0.2)), predicate(a, s, very)))


def beast_relative(d: Dice) -> Phrase:
    """The cat that is sleeping on the chair is black; il gatto che sta dormendo sulla sedia è nero."""
    noun = d.pick(PETS)
    plural = d.chance(0.3)
    head = np(noun, "the", plural)
    where = spot(d, noun) if d.chance(0.6) else in_room(d)
    inner = _inner("that", head, d.pick(RESTING), d.pick(("present", "progressive")), where)
    s = NP(chain(head.phrase, inner), plural=plural, gender=head.gender)
    if d.chance(0.3) and not plural:
        mine = of_owner(noun, somebody(d)) if d.chance(0.5) else np(noun, d.pick(("my", "your", "his", "her", "our")))
        return end(clause(s, group(BE, s), mine.phrase))
    return end(clause(s, group(BE, s), predicate(d.pick(lexicon.FITTING[noun.en]), s)))


UNGRADED = lexicon.ABSOLUTE | frozenset(("good", "ill", "full", "empty", "wild"))
GRADED = tuple(a for a in lexicon.ADJECTIVES if a.en not in UNGRADED)
KINDS = tuple(
    nouns.of(kind)
    for kind in "animal clothes furniture printed vehicle sight holder instrument device fruit shop".split()
)
RIVALS = tuple(
    (a, b, shared)
    for kind in KINDS
    for a in kind
    for b in kind
    if a is not b and (shared := tuple(w for w in lexicon.FITTING[a.en] if w in lexicon.FITTING[b.en] and w in GRADED))
)


def _grade(a: Adjective, s: NP, less: bool) -> Phrase:
    """Taller, more elegant, less elegant."""
    form = a.form(s.gender, s.plural)
    if less and not a.comparative:
        return pair(f"less/1 {a.en}/2", f"meno/1 {form}/2", lemmas=(a.en,))
    if a.comparative:
        return unit(a.comparative, f"più {form}", a.en)
    return pair(f"more/1 {a.en}/2", f"più/1 {form}/2", lemmas=(a.en,))


def _rivals(d: Dice) -> tuple[NP, NP, Adjective]:
    """Two of a kind, and a quality to compare them by."""
    if d.chance(0.5):
        a, b = subject(d, plain=True), third(d, plain=True)
        while a.phrase.lemmas == b.phrase.lemmas:
            b = third(d, plain=True)
        if not a.pronoun and d.chance(0.25):
            me = d.pick(EVERYONE)
            b = NP(unit(PRONOUNS[me][0], TONIC[me], "~" + me))
        return a, b, d.pick(CHARACTER)
    x, y, shared = d.pick(RIVALS)
    owned = x.classes.isdisjoint(("animal", "place", "fruit", "transit"))
    dets = ("the", "this", "my", "your", "his", "her") if owned else ("the", "the", "this", "that")
    plural = "pair" in x.classes and "pair" in y.classes
    if plural:
        dets = ("the", "these", "my", "your")
    elif "pair" in x.classes or "pair" in y.classes:
        return _rivals(d)
    return np(x, d.pick(dets), plural), np(y, d.pick(dets), plural), d.pick(shared)


def compares(d: Dice) -> Phrase:
    """Marco is taller than my sister; la borsa è meno elegante della valigia."""
    s, other, a = _rivals(d)
    negative, ask = mode(d)
    g = group(BE, s, negative=negative, ask=ask)
    return end(clause(s, g, _grade(a, s, d.chance(0.25)), pair("than/1 $0", "di/1 $0", other.phrase), ask=ask), ask)


def equals(d: Dice) -> Phrase:
    """The dog is as big as the wolf; il cane è grande come il lupo."""
    s, other, a = _rivals(d)
    negative, ask = mode(d)
    form = a.form(s.gender, s.plural)
    same = pair(f"as {a.en}/1 as/2 $0", f"{form}/1 come/2 $0", other.phrase, lemmas=(a.en,))
    return end(clause(s, group(BE, s, negative=negative, ask=ask), same, ask=ask), ask)


BEST_MEN = tuple(nouns.BY_NAME[n] for n in ("boy", "man", "student", "teacher", "doctor", "waiter", "actor", "singer"))
BEST_WOMEN = tuple(nouns.BY_NAME[n] for n in ("girl", "woman", "waitress", "actress", "lady"))
BEST_PLACES = tuple(
    (n, graded)
    for n in nouns.PLACES
    if n.en not in ("city", "village", "island") and (graded := tuple(a for a in lexicon.FITTING[n.en] if a in GRADED))
)


def superlative(d: Dice) -> Phrase:
    """Anna is the tallest girl in the school; Anna è la ragazza più alta della scuola."""
    if d.chance(0.6):
        s = somebody(d)
        noun, a = d.pick(BEST_MEN if s.gender == "m" else BEST_WOMEN), d.pick(CHARACTER)
        where = nouns.BY_NAME[d.pick(("school", "city", "village", "hotel"))]
    else:
        noun, fitting = d.pick(BEST_PLACES)
        s, a = np(noun, "this"), d.pick(fitting)
        where = nouns.BY_NAME[d.pick(("city", "village"))]
    agreement = noun.agreement(False)
    form = a.form(agreement[0], False)
    if a.comparative:
        most = unit(a.comparative[:-1] + "st", f"più {form}", a.en)
    else:
        most = pair(f"most/1 {a.en}/2", f"più/1 {form}/2", lemmas=(a.en,))
    named = unit(noun.en, noun.it, noun.en)
    what = pair("the/1 $0 $1 in/2 $2", f"@il.{agreement}/1 $1 $0 di/2 $2", most, named, np(where).phrase)
    negative, ask = mode(d)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), what, ask=ask), ask)
