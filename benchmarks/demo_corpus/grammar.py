"""The constructions with their weights, and the stream of sentences they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from demo_corpus import daily, lexicon, linked, nouns, numbers, questions, relative, simple, verbs
from demo_corpus.phrase import Phrase, unit
from demo_corpus.syntax import Dice, clause, group, np, object_pronoun, pronoun

Rule = Callable[[Dice], Phrase]

RULES: tuple[tuple[Rule, int], ...] = (
    (simple.transitive, 12), (simple.intransitive, 8), (simple.animal_acts, 3), (simple.with_pronoun, 6),
    (simple.love_much, 2), (simple.modal, 6), (simple.frequency, 4), (simple.mood, 4), (simple.quality, 4),
    (simple.lovely, 3), (simple.job, 2), (simple.nationality, 1), (simple.language, 2),
    (daily.need_state, 1), (daily.afraid, 2), (daily.likes, 4), (daily.would_like, 3), (daily.needs, 2), (daily.has, 3),
    (daily.gives, 4), (daily.gives_pronoun, 4), (daily.order, 3), (daily.where_thing, 3), (daily.where_person, 3),
    (daily.building, 1), (daily.there_is, 3), (daily.goes, 4), (daily.comes_from, 1), (daily.lives, 2),
    (daily.stays, 2), (daily.rises, 3), (daily.this_is, 3), (daily.mine, 2), (daily.owned, 2),
    (daily.weather, 1), (daily.happening, 2), (daily.called, 1),
    (questions.what, 2), (questions.who, 2), (questions.who_is, 1), (questions.where_is, 2), (questions.where_does, 2),
    (questions.when_does, 2), (questions.why, 2), (questions.how_many, 2), (questions.which, 2), (questions.how_old, 1),
    (questions.how_much, 2), (questions.meet_where, 2), (questions.weekday, 2),
    (numbers.age, 3), (numbers.price, 3), (numbers.bought_for, 2), (numbers.total, 1), (numbers.time_now, 1),
    (numbers.timetable, 3), (numbers.opening, 1), (numbers.on_date, 2), (numbers.today, 2), (numbers.on_day, 3),
    (linked.because_feeling, 4), (linked.because_home, 2), (linked.because_fell, 2), (linked.because_object, 4),
    (linked.so_clitic, 4), (linked.but_clitic, 4), (relative.who_relative, 4), (relative.know_who, 3),
    (relative.that_relative, 4), (relative.beast_relative, 2), (relative.compares, 4), (relative.equals, 2),
    (relative.superlative, 2), (linked.when_state, 2), (linked.if_must, 2), (linked.meanwhile, 2), (linked.contrast, 2),
    (linked.together, 3), (linked.says_that, 3),
)  # fmt: skip

WHEEL: tuple[Rule, ...] = tuple(rule for rule, weight in RULES for _ in range(weight))


def sentences(seed: int) -> Iterator[Phrase]:
    """An endless stream of sentences, the two named ones first; the same seed gives the same stream everywhere."""
    yield lovely_cat()
    yield love_you()
    dice = Dice(seed)
    while True:
        yield dice.pick(WHEEL)(dice)


def lovely_cat() -> Phrase:
    """Your cat is a lovely cat; il tuo gatto è un gatto adorabile."""
    cat = nouns.BY_NAME["cat"]
    s = np(cat, "your")
    return simple.end(clause(s, group(verbs.BE, s), np(cat, "a", False, lexicon.BY_NAME["lovely"]).phrase))


def love_you() -> Phrase:
    """I love you very much; ti amo molto."""
    s = pronoun("I")
    you, clitic, _ = object_pronoun("you")
    love = group(verbs.BY_LEMMA["love"], s, clitic=clitic)
    return simple.end(clause(s, love, you, unit("very much", "molto")))
