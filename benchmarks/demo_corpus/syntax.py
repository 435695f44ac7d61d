"""The joints of the grammar: noun phrases, and verb groups that carry tense, negation and pronouns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from demo_corpus import english, italian, verbs
from demo_corpus.italian import Token
from demo_corpus.lexicon import Adjective
from demo_corpus.nouns import Noun
from demo_corpus.phrase import Phrase, link, tokens, unit
from demo_corpus.verbs import Verb

T = TypeVar("T")


class Dice:
    """Random choices that use only `random()`: its stream is the same in every Python version."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]

    def chance(self, p: float) -> bool:
        return self.random() < p

    def below(self, n: int) -> int:
        return int(self.random() * n)


@dataclass(slots=True)
class NP:
    """A noun phrase that can be a subject; a subject pronoun is not said in Italian, so `drop` is its link."""

    phrase: Phrase
    person: int = 3
    plural: bool = False
    gender: str = "m"
    drop: int = 0
    pronoun: str = ""
    noun: Noun | None = None

    @property
    def index(self) -> int:
        return self.person - 1 + (3 if self.plural else 0)

    @property
    def agreement(self) -> str:
        return self.gender + ("p" if self.plural else "s")


# English subject and object form, person, plural, gender, Italian subject, direct and indirect clitic, possessive.
PRONOUNS: dict[str, tuple[str, int, bool, str, str, str, str]] = {
    "I": ("me", 1, False, "m", "io", "mi", "mi"),
    "you": ("you", 2, False, "m", "tu", "ti", "ti"),
    "he": ("him", 3, False, "m", "lui", "lo", "gli"),
    "she": ("her", 3, False, "f", "lei", "la", "le"),
    "we": ("us", 1, True, "m", "noi", "ci", "ci"),
    "they": ("them", 3, True, "m", "loro", "li", "gli"),
}
POSSESSIVES = {"my": "mio", "your": "tuo", "his": "suo", "her": "suo", "our": "nostro", "their": "loro"}
_OWN = {"mio": "mio mia miei mie", "tuo": "tuo tua tuoi tue", "suo": "suo sua suoi sue"}
_PLACE = {"ms": 0, "fs": 1, "mp": 2, "fp": 3}
_REFLEXIVE = ("mi", "ti", "si", "ci", "vi", "si")


def possessive(word: str, agreement: str) -> str:
    """`possessive("her", "fp")` is "sue"."""
    base = POSSESSIVES[word]
    if base == "loro":
        return base
    if base == "nostro":
        return italian.adjective(base, agreement[0], agreement[1] == "p")
    return _OWN[base].split()[_PLACE[agreement]]


def pronoun(word: str) -> NP:
    """A subject pronoun, said in English and left out in Italian."""
    _, person, plural, gender, *_ = PRONOUNS[word]
    n = link()
    return NP(Phrase(tokens(word, n), (), ("~" + word,)), person, plural, gender, drop=n, pronoun=word)


def back(to: NP) -> NP:
    """The pronoun that refers back to a noun phrase: it for things and animals, he, she or they."""
    if to.pronoun:
        return pronoun(to.pronoun)
    human = to.noun is None or "person" in to.noun.classes
    word = "they" if to.plural else "it" if not human else "he" if to.gender == "m" else "she"
    n = link()
    return NP(Phrase(tokens(word, n)), 3, to.plural, to.gender, drop=n, pronoun=word, noun=to.noun)


def name(word: str, gender: str) -> NP:
    return NP(unit(word, word, word), gender=gender)


def both(a: NP, b: NP) -> NP:
    """Two noun phrases joined by and; feminine only if both are."""
    n = link()
    en = a.phrase.en + (("and", (n,)),) + b.phrase.en
    it = a.phrase.it + (("e", (n,)),) + b.phrase.it
    gender = "f" if a.gender == b.gender == "f" else "m"
    return NP(Phrase(en, it, a.phrase.lemmas + b.phrase.lemmas), plural=True, gender=gender)


def _determiner(det: str, noun: Noun, plural: bool, adorned: bool) -> tuple[Token, ...]:
    agreement = noun.agreement(plural)
    if det in POSSESSIVES:
        own = possessive(det, agreement)
        bare = "kin" in noun.classes and not plural and not adorned and det != "their"
        return tokens(own) if bare else tokens(f"@il.{agreement} {own}")
    if det == "some":
        return tokens(f"di @il.{agreement}")
    if det == "many":
        return tokens(italian.adjective("molto", agreement[0], plural))
    if det == "which":
        return tokens("quali" if plural else "quale")
    if det == "how many":
        return tokens(italian.adjective("quanto", agreement[0], plural))
    mark = {
        "the": "@il.",
        "a": "@un.",
        "that": "@quello.",
        "those": "@quello.",
        "this": "@questo.",
        "these": "@questo.",
    }[det]
    return tokens(mark + agreement)


def np(noun: Noun, det: str = "the", plural: bool = False, adjective: Adjective | None = None, number: int = 0) -> NP:
    """A noun with its determiner (or none, or a number from 2) and at most one adjective."""
    gender, n, m = noun.agreement(plural)[0], link(), link()
    en: tuple[Token, ...] = tokens("@a" if det == "a" else det, n)
    it: tuple[Token, ...] = ()
    lemmas: tuple[str, ...] = ()
    if number:
        en, it, lemmas = tokens(english.cardinal(number), n), (numeral(number, n),), (english.cardinal(number),)
    elif det:
        it = tuple([(text, (n,)) for text, _ in _determiner(det, noun, plural, adjective is not None)])
    en_noun, it_noun = tokens(noun.en_plural if plural else noun.en, m), tokens(noun.form(plural), m)
    if adjective:
        k = link()
        en += tokens(adjective.en, k)
        form = adjective.form(gender, plural)
        if adjective.it in ("bello", "buono"):
            form = f"@{adjective.it}.{noun.agreement(plural)}"
        it += tokens(form, k) + it_noun if adjective.first else it_noun + tokens(form, k)
        lemmas += (adjective.en,)
    else:
        it += it_noun
    return NP(Phrase(en + en_noun, it, (*lemmas, noun.en)), plural=plural, gender=gender, noun=noun)


def numeral(number: int, n: int) -> Token:
    """An Italian number before a noun."""
    text = italian.cardinal(number)
    return (f"@uno.{text}" if text.endswith("uno") else text, (n,))


def of_owner(noun: Noun, owner: NP, plural: bool = False) -> NP:
    """`Anna's cat`: il gatto di Anna."""
    n, m = link(), link()
    agreement = noun.agreement(plural)
    en = owner.phrase.en + tokens("'s", n) + tokens(noun.en_plural if plural else noun.en, m)
    it = tokens(f"@il.{agreement} {noun.form(plural)}", m) + tokens("di", n) + owner.phrase.it
    return NP(Phrase(en, it, (*owner.phrase.lemmas, noun.en)), plural=plural, gender=agreement[0], noun=noun)


@dataclass(slots=True)
class Group:
    """A verb with its helpers; in an English question `aux` goes before the subject."""

    aux: tuple[Token, ...]
    main: tuple[Token, ...]
    it: tuple[Token, ...]
    lemmas: tuple[str, ...]


def _be(subject: NP, past: bool) -> str:
    if past:
        return "were" if subject.plural or subject.person == 2 else "was"
    return "am" if subject.index == 0 else "are" if subject.plural or subject.person == 2 else "is"


@dataclass(slots=True)
class _Build:
    """The parts of a verb group before negation and clitics are put in."""

    aux: tuple[Token, ...]
    main: tuple[Token, ...]
    finite: tuple[str, int]
    rest: tuple[Token, ...] = ()


def _simple(verb: Verb, subject: NP, tense: str, split: bool, n: int, m: int) -> _Build:
    """Present, past and future of the verb itself; `split` uses do, does, did."""
    particle = tokens(verb.particle, m)
    if tense == "future":
        return _Build(tokens("will", m), tokens(verb.en, m) + particle, (verb.future[subject.index], m))
    if split:
        do = "did" if tense == "past" else "does" if subject.index == 2 else "do"
        aux, head = tokens(do, n if tense == "past" else m), verb.en
    else:
        aux, head = (), verb.en_past if tense == "past" else verb.en_third if subject.index == 2 else verb.en
    main = tokens(head, m) + particle
    if tense == "present":
        return _Build(aux, main, (verb.present[subject.index], m))
    helper = (verbs.BE if verb.essere else verbs.HAVE).present[subject.index]
    form = verb.participle
    if verb.essere:
        form = italian.adjective(form, subject.gender, subject.plural)
    if not split:
        main = ((head, (m, n)),) + particle
    return _Build(aux, main, (helper, n), tokens(form, m))


def _build(verb: Verb, subject: NP, tense: str, split: bool, n: int, m: int) -> _Build:
    """Any tense but the modals."""
    if verb is verbs.BE and tense != "future":
        past = tense == "past"
        forms = verb.imperfect if past else verb.present
        return _Build(tokens(_be(subject, past), m), (), (forms[subject.index], m))
    if tense in ("progressive", "was"):
        stare = verbs.STAY_ING.imperfect if tense == "was" else verbs.STAY_ING.present
        main = tokens(verb.en_ing, m) + tokens(verb.particle, m)
        return _Build(tokens(_be(subject, tense == "was"), n), main, (stare[subject.index], n), tokens(verb.gerund, m))
    return _simple(verb, subject, tense, split, n, m)


def group(
    verb: Verb,
    subject: NP,
    tense: str = "present",
    *,
    negative: bool = False,
    ask: bool = False,
    clitic: tuple[str, int] | None = None,
    agree: str = "",
    adverb: tuple[str, str] | None = None,
) -> Group:
    """Conjugate a verb in both languages.

    tense: present, progressive, past (ate, ha mangiato), was (was eating, stava mangiando), future, can, must, want,
    and for be also past (was, era). clitic: an Italian object pronoun and its link; agree: the agreement it needs in
    the participle (l'ho vista). adverb: always/sempre and the like, or never, which brings its own non.
    """
    if tense in ("can", "must", "want"):
        return _modal(verb, subject, tense, negative, ask, clitic)
    n, m = link(), link()
    built = _build(verb, subject, tense, negative or ask, n, m)
    main, rest = built.main, built.rest
    if agree and tense == "past":
        rest = tuple([(italian.adjective(t, agree[0], agree[1] == "p"), ls) for t, ls in rest])
    rest += tokens(verb.tail, m)
    finite = (built.finite[0], (built.finite[1], subject.drop) if subject.drop else (built.finite[1],))
    it: tuple[Token, ...] = ()
    if negative:
        k = link()
        main, it = tokens("not", k) + main, tokens("non", k)
    if adverb:
        k = link()
        main = tokens(adverb[0], k) + main
        it += tokens("non", k) if adverb[0] == "never" else ()
        rest = tokens(adverb[1], k) + rest
    if verb.reflexive:
        it += tokens(_REFLEXIVE[subject.index], m)
    if clitic:
        short = clitic[0] in ("lo", "la") and verb is not verbs.HAVE and finite[0] in verbs.HAVE.present
        it += (("l'" if short else clitic[0], (clitic[1],)),)
    return Group(built.aux, main, (*it, finite, *rest), () if verb is verbs.BE else (verb.en,))


def _modal(verb: Verb, subject: NP, tense: str, negative: bool, ask: bool, clitic: tuple[str, int] | None) -> Group:
    """Can, must, want to with an infinitive, with the Italian pronoun attached: voglio vederti."""
    n, m = link(), link()
    forms = {"can": verbs.CAN, "must": verbs.MUST, "want": verbs.WANT}[tense].present
    base = tokens(verb.en, m) + tokens(verb.particle, m)
    if tense == "want":
        split = negative or ask
        aux = tokens("does" if subject.index == 2 else "do", n) if split else ()
        head = "want" if split or subject.index != 2 else "wants"
        main = tokens(head, n) + tokens("to", m) + base
    else:
        aux, main = tokens(tense, n), base
    it: tuple[Token, ...] = ()
    if negative:
        k = link()
        it = tokens("non", k)
        if tense == "can":
            aux = (("cannot", (n, k)),)
        else:
            main = tokens("not", k) + main
    infinitive, links = verb.it, [m]
    attached = _REFLEXIVE[subject.index] if verb.reflexive else clitic[0] if clitic else ""
    if attached:
        infinitive = infinitive[:-1] + attached
        links += [clitic[1]] if clitic else []
    finite = (forms[subject.index], (n, subject.drop) if subject.drop else (n,))
    return Group(aux, main, (*it, finite, (infinitive, tuple(links)), *tokens(verb.tail, m)), (verb.en,))


def having(subject: NP, tense: str = "present", negative: bool = False, ask: bool = False) -> Group:
    """Be in English and avere in Italian: I am hungry, ho fame; I am ten years old, ho dieci anni."""
    g = group(verbs.BE, subject, tense, negative=negative, ask=ask)
    forms = verbs.HAVE.imperfect if tense == "past" else verbs.HAVE.present
    g.it = (*g.it[:-1], (forms[subject.index], g.it[-1][1]))
    return g


def clause(subject: NP, verb: Group, *rest: Phrase, ask: bool = False) -> Phrase:
    """Subject, verb group and the rest; in a question the English helper comes first."""
    s = subject.phrase
    en = verb.aux + s.en + verb.main if ask else s.en + verb.aux + verb.main
    it = s.it + verb.it
    lemmas = s.lemmas + verb.lemmas
    for part in rest:
        en += part.en
        it += part.it
        lemmas += part.lemmas
    return Phrase(en, it, lemmas)


def wh(word: Phrase, subject: NP, verb: Group, *rest: Phrase) -> Phrase:
    """A question with a question word; the Italian subject follows the verb (Dove dorme il gatto?)."""
    s = subject.phrase
    en = word.en + verb.aux + s.en + verb.main
    it = word.it + verb.it + s.it
    lemmas = word.lemmas + s.lemmas + verb.lemmas
    for part in rest:
        en += part.en
        it += part.it
        lemmas += part.lemmas
    return Phrase(en, it, lemmas)


def predicate(adjective: Adjective, subject: NP, very: bool = False) -> Phrase:
    """An adjective after the verb, agreeing with the subject."""
    a = unit(adjective.en, adjective.form(subject.gender, subject.plural), adjective.en)
    if not very:
        return a
    v = unit("very", "molto")
    return Phrase(v.en + a.en, v.it + a.it, a.lemmas)


def object_pronoun(word: str) -> tuple[Phrase, tuple[str, int], str]:
    """An object pronoun: the English word, the Italian clitic with its link, and the agreement it needs."""
    form, _, plural, gender, _, direct, _ = PRONOUNS[word]
    n = link()
    agree = gender + ("p" if plural else "s") if word in ("he", "she", "they") else ""
    return Phrase(tokens(form, n), (), ("~" + word,)), (direct, n), agree


def object_back(to: NP) -> tuple[Phrase, tuple[str, int], str]:
    """It or them for a noun phrase said before: lo, la, li, le."""
    n = link()
    clitic = {"ms": "lo", "fs": "la", "mp": "li", "fp": "le"}[to.agreement]
    human = to.noun is None or "person" in to.noun.classes
    form = "them" if to.plural else "it" if not human else "him" if to.gender == "m" else "her"
    return Phrase(tokens(form, n)), (clitic, n), to.agreement
