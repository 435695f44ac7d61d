"""Constructions of two clauses: pronouns and agreement that reach from one clause into the other."""

from __future__ import annotations

from demo_corpus import lexicon, nouns, verbs
from demo_corpus.choose import (
    PETS,
    animal,
    at_home,
    describe,
    in_room,
    kin,
    place,
    scene,
    several,
    somebody,
    subject,
    target,
    third,
)
from demo_corpus.lexicon import CHARACTER, MOODS, Adjective
from demo_corpus.nouns import Noun
from demo_corpus.phrase import EMPTY, Phrase, chain, pair, tokens, unit
from demo_corpus.simple import ACTIONS, end, mode
from demo_corpus.syntax import (
    NP,
    PRONOUNS,
    Dice,
    back,
    both,
    clause,
    group,
    having,
    np,
    object_back,
    predicate,
    pronoun,
)
from demo_corpus.verbs import BE, Verb

BECAUSE = unit("because", "perché")


def _named(spec: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Lines of `key: word word …`."""
    lines = (line.split(":") for line in spec.strip().splitlines())
    return tuple((key.strip(), tuple(rest.split())) for key, rest in lines)


_FEELINGS = _named("""
cry: sad tired worried ill hungry afraid
smile: happy calm
laugh: happy nervous
sing: happy
dance: happy
sleep: tired ill sleepy
rest: tired ill
shout: angry nervous worried afraid
run: happy nervous afraid
eat: hungry nervous
""")
_BEAST_FEELINGS = _named("""
sleep: tired calm sleepy
rest: tired ill
run: happy nervous afraid
eat: hungry
play: happy
""")
_REASONS = _named("""
buy: beautiful new useful elegant cheap comfortable good small big interesting modern
sell: old ugly big broken expensive small
eat: good delicious fresh sweet
read: interesting famous important funny beautiful
wash: dirty
clean: dirty
repair: broken old
choose: beautiful elegant cheap interesting delicious good funny red blue
visit: famous beautiful wonderful old interesting
draw: beautiful strange
take: useful
""")
_OBSTACLES = _named("""
buy: expensive ugly old big dirty broken small
eat: cold
read: boring difficult long
choose: expensive ugly boring
carry: heavy
open: empty
use: broken old dirty
wear: dirty old ugly
visit: dangerous
drink: cold
""")
_FALLING = tuple(
    (nouns.BY_NAME[name], states)
    for name, states in _named("""
    cup: old fragile full
    glass: old fragile full
    plate: old heavy
    bottle: full heavy
    lamp: old heavy
    mirror: old heavy
    picture: old heavy
    clock: old heavy
    tree: old tall
    chair: old
    box: heavy full
    bag: heavy full
    """)
)
CATS = nouns.of("cat", "kitten")
DOGS = nouns.of("dog", "puppy")
SKIPPED = tuple(verbs.BY_LEMMA[v] for v in ("work", "study", "dance", "swim", "cook", "play", "sing"))
_NEEDS = {en: it for en, it in lexicon.NEEDS if en != "cold"}


def _state(s: NP, word: str, tense: str) -> Phrase:
    """He was sad, or he was hungry (aveva fame)."""
    if word in _NEEDS:
        return clause(s, having(s, tense), unit(word, _NEEDS[word], word))
    return clause(s, group(BE, s, tense), predicate(lexicon.BY_NAME[word], s))


def because_feeling(d: Dice) -> Phrase:
    """The cat was purring because it was happy; il gatto stava facendo le fusa perché era felice."""
    past = d.chance(0.6)
    beast = d.chance(0.4)
    s = animal(d, plain=True) if beast else subject(d, plain=True)
    if beast and s.noun in CATS:
        verb, state = verbs.PURR, d.pick(("happy", "calm"))
    elif beast and s.noun in DOGS and d.chance(0.7):
        verb, state = verbs.BARK, d.pick(("happy", "nervous", "hungry", "afraid"))
    else:
        key, states = d.pick(_BEAST_FEELINGS if beast else _FEELINGS)
        verb, state = verbs.BY_LEMMA[key], d.pick(states)
    tense = "was" if past else d.pick(("present", "progressive"))
    indoors = not beast or s.noun in PETS
    first = clause(s, group(verb, s, tense), in_room(d) if indoors and d.chance(0.25) else EMPTY)
    return end(chain(first, BECAUSE, _state(back(s), state, "past" if past else "present")))


def because_home(d: Dice) -> Phrase:
    """Anna stayed at home because she was ill; Anna è restata a casa perché era malata."""
    s = subject(d, plain=True)
    if d.chance(0.5):
        first = clause(s, group(verbs.STAY, s, "past"), at_home() if d.chance(0.5) else in_room(d))
    else:
        verb = d.pick(SKIPPED)
        first = clause(s, group(verb, s, "past", negative=True), scene(d, verb) if d.chance(0.3) else EMPTY)
    reason = d.pick(("ill", "tired", "sad", "worried", "sleepy", "angry"))
    return end(chain(first, BECAUSE, _state(back(s), reason, "past")))


def because_fell(d: Dice) -> Phrase:
    """The cup fell because it was old; la tazza è caduta perché era vecchia."""
    noun, states = d.pick(_FALLING)
    plural = d.chance(0.3)
    dets = ("the", "the", "these", "those") if plural else ("the", "the", "this", "that")
    s = np(noun, d.pick((*dets, "my", "your", "our", "his")), plural, describe(d, noun, 0.1))
    verb = verbs.FALL
    if "fragile" in noun.classes and d.chance(0.4):
        verb, states = verbs.BREAK, ("old", "fragile")
    where = in_room(d) if noun.en != "tree" and d.chance(0.2) else EMPTY
    return end(chain(clause(s, group(verb, s, "past"), where), BECAUSE, _state(back(s), d.pick(states), "past")))


Fitting = tuple[tuple[Verb, tuple[tuple[Noun, tuple[Adjective, ...]], ...]], ...]


def _suit(table: tuple[tuple[str, tuple[str, ...]], ...]) -> Fitting:
    """For each verb of a table, the objects with the reasons that suit them."""
    out = []
    for lemma, reasons in table:
        verb = verbs.transitive(lemma)[0]
        options = []
        for noun in verb.objects:
            fitting = tuple(lexicon.BY_NAME[w] for w in reasons if lexicon.BY_NAME[w] in lexicon.FITTING[noun.en])
            if fitting and "person" not in noun.classes and noun.en not in ("water", "milk", "wine", "beer"):
                options.append((noun, fitting))
        out.append((verb, tuple(options)))
    return tuple(out)


REASONS, OBSTACLES = _suit(_REASONS), _suit(_OBSTACLES)


def _suited(d: Dice, table: Fitting) -> tuple[Verb, Noun, Adjective]:
    """A verb of the table, an object, and a reason that suits the object."""
    verb, options = d.pick(table)
    noun, fitting = d.pick(options)
    return verb, noun, d.pick(fitting)


def because_object(d: Dice) -> Phrase:
    """I bought the cup because it was beautiful; non abbiamo mangiato la zuppa perché era fredda."""
    negative = d.chance(0.4)
    verb, noun, a = _suited(d, OBSTACLES if negative else REASONS)
    tense = "past" if (negative or verb.past_is_plain()) and d.chance(0.6) else d.pick(("future", "present", "want"))
    s = subject(d, plain=True)
    plural = several(d, noun, 0.35)
    o = np(noun, d.pick(("the", "these", "those") if plural else ("the", "this", "that")), plural)
    it = back(o)
    very = a.en not in lexicon.ABSOLUTE and d.chance(0.2)
    reason = clause(it, group(BE, it, "past" if tense == "past" else "present"), predicate(a, it, very))
    return end(chain(clause(s, group(verb, s, tense, negative=negative), o.phrase), BECAUSE, reason))


def so_clitic(d: Dice) -> Phrase:
    """The soup is cold, so I do not eat it; la zuppa è fredda, quindi non la mangio."""
    negative = d.chance(0.5)
    verb, noun, a = _suited(d, OBSTACLES if negative else REASONS)
    plural = several(d, noun, 0.4)
    s = np(noun, d.pick(("the", "these") if plural else ("the", "this", "that")), plural)
    past = (negative or verb.past_is_plain()) and d.chance(0.4)
    first = clause(s, group(BE, s, "past" if past else "present"), predicate(a, s))
    me = pronoun(d.pick(("I", "you", "he", "she", "we"))) if d.chance(0.6) else somebody(d)
    o, clitic, agree = object_back(s)
    tense = "past" if past else d.pick(("present", "future", "want"))
    g = group(verb, me, tense, negative=negative, clitic=clitic, agree=agree)
    return end(pair("$0 ,/1 so/2 $1", "$0 ,/1 quindi/2 $1", first, clause(me, g, o)))


def but_clitic(d: Dice) -> Phrase:
    """I bought the apples, but I did not eat them; ho comprato le mele, ma non le ho mangiate."""
    one, two, shared = d.pick(SEQUELS)
    noun = d.pick(shared)
    s = subject(d, plain=True)
    plural = several(d, noun, 0.4)
    det = "the" if plural or "mass" in noun.classes or d.chance(0.6) else "a"
    o = np(noun, det, plural, describe(d, noun, 0.2))
    again = back(s)
    ref, clitic, agree = object_back(o)
    g = group(two, again, "past", negative=True, clitic=clitic, agree=agree)
    first = clause(s, group(one, s, "past"), o.phrase)
    return end(pair("$0 ,/1 but/2 $1", "$0 ,/1 ma/2 $1", first, clause(again, g, ref)))


def _sequels() -> tuple[tuple[Verb, Verb, tuple[Noun, ...]], ...]:
    """Pairs of verbs that make a small story of one object, with the objects both may take."""
    named = {v.lemma: v for v in (*verbs.GIVING, *verbs.TRANSITIVE)}
    out = []
    for line in (
        "buy: eat, cook, wash, taste, wear, read, use, open", "take: read, use", "write: send", "open: close",
        "look for: find", "lose: find", "prepare: eat, taste", "order: eat, drink", "receive: open, read",
        "see: buy, take, touch", "break: repair", "choose: buy, wear, taste",
    ):  # fmt: skip
        first, _, seconds = line.partition(": ")
        for second in seconds.split(", "):
            one, two = named[first], named[second]
            shared = tuple(n for n in one.objects if n in two.objects and "person" not in n.classes)
            if shared:
                out.append((one, two, shared))
    return tuple(out)


SEQUELS = _sequels()


def when_state(d: Dice) -> Phrase:
    """When I am tired, I sleep; quando sono stanco, dormo."""
    s = subject(d, plain=True)
    key, states = d.pick(_FEELINGS)
    again = back(s)
    then = clause(again, group(verbs.BY_LEMMA[key], again), in_room(d) if d.chance(0.3) else EMPTY)
    return end(pair("when/1 $0 ,/2 $1", "quando/1 $0 ,/2 $1", _state(s, d.pick(states), "present"), then))


_ADVICE = _named("""
tired: sleep rest
ill: sleep rest
hungry: eat cook
sleepy: sleep rest
angry: walk
nervous: rest walk
sad: sing dance travel
""")


def if_must(d: Dice) -> Phrase:
    """If you are tired, you must sleep; se sei stanco, devi dormire."""
    s = subject(d, plain=True)
    state, remedies = d.pick(_ADVICE)
    verb = verbs.BY_LEMMA[d.pick(remedies)]
    again = back(s)
    modal = "must" if "skill" in verb.flags or d.chance(0.5) else "can"
    then = clause(again, group(verb, again, modal), scene(d, verb) if d.chance(0.4) else EMPTY)
    return end(pair("if/1 $0 ,/2 $1", "se/1 $0 ,/2 $1", _state(s, state, "present"), then))


def _two(d: Dice) -> tuple[NP, NP]:
    a, b = third(d, plain=True), third(d, plain=True)
    while a.phrase.lemmas == b.phrase.lemmas:
        b = third(d, plain=True)
    return a, b


def meanwhile(d: Dice) -> Phrase:
    """While Anna was reading, Marco was cooking; mentre Anna stava leggendo, Marco stava cucinando."""
    a, b = _two(d)
    one, two = d.pick(DOING), d.pick(DOING)
    tense = d.pick(("was", "was", "progressive"))
    first, second = clause(a, group(one, a, tense)), clause(b, group(two, b, tense))
    return end(pair("while/1 $0 ,/2 $1", "mentre/1 $0 ,/2 $1", first, second))


DOING = tuple(v for v in verbs.INTRANSITIVE if v.lemma not in ("shout", "travel"))


def contrast(d: Dice) -> Phrase:
    """He reads and she writes; lui legge e lei scrive. The boy is tall but the girl is short."""
    if d.chance(0.4):
        one, two = d.pick(ACROSS)
        a, b = pronoun(one), pronoun(two)
        for s in (a, b):  # a contrast makes Italian say the pronouns
            s.phrase = s.phrase._replace(it=tokens(PRONOUNS[s.pronoun][4], s.drop))
            s.drop = 0
    else:
        a, b = _two(d)
    if d.chance(0.5):
        v, w = d.pick(DOING), d.pick(DOING)
        while v is w:
            w = d.pick(DOING)
        tense = d.pick(("present", "progressive"))
        return end(pair("$0 and/1 $1", "$0 e/1 $1", clause(a, group(v, a, tense)), clause(b, group(w, b, tense))))
    x, y = d.pick(lexicon.OPPOSITES)
    if d.chance(0.5):
        x, y = y, x
    first, second = clause(a, group(BE, a), predicate(x, a)), clause(b, group(BE, b), predicate(y, b))
    return end(pair("$0 but/1 $1", "$0 ma/1 $1", first, second))


ACROSS = (
    ("he", "she"),
    ("she", "he"),
    ("I", "you"),
    ("you", "I"),
    ("we", "they"),
    ("they", "we"),
    ("I", "she"),
    ("I", "he"),
)


def together(d: Dice) -> Phrase:
    """Anna and Maria are tired; Anna e Maria sono stanche."""
    a = somebody(d)
    b = somebody(d) if d.chance(0.5) else kin(d)
    while a.phrase.lemmas == b.phrase.lemmas:
        b = somebody(d)
    s = both(a, b)
    negative, ask = mode(d)
    x = d.random()
    if x < 0.4:
        tense, verb, rest = d.pick(("present", "past")), BE, predicate(d.pick(MOODS + CHARACTER), s)
    elif x < 0.7:
        verb = d.pick((*verbs.LEAVING, verbs.STAY, *verbs.REFLEXIVE))
        tense, rest = d.pick(("past", "future")), place(d) if verb is verbs.STAY else EMPTY
    else:
        verb = d.pick(PLAIN_ACTIONS)
        tense, rest = d.pick(("past", "future", "present")), target(d, verb, free=False).phrase
    return end(clause(s, group(verb, s, tense, negative=negative, ask=ask), rest, ask=ask), ask)


PLAIN_ACTIONS = tuple(v for v in ACTIONS if v.past_is_plain())


def says_that(d: Dice) -> Phrase:
    """Anna says that she is tired; I know that Marco will sell the car."""
    s = subject(d, plain=True)
    if d.chance(0.5):
        state = d.pick(("tired", "happy", "ill", "hungry", "thirsty", "sleepy", "worried", "sad", "afraid", "nervous"))
        inner = _state(back(s), state, "present")
        return end(pair("$0 that/1 $1", "$0 che/1 $1", clause(s, group(verbs.SAY, s)), inner))
    other = third(d, plain=True)
    while other.phrase.lemmas == s.phrase.lemmas:
        other = third(d, plain=True)
    if d.chance(0.5):
        inner = clause(other, group(BE, other), predicate(d.pick(MOODS + CHARACTER), other))
    else:
        verb = d.pick(PLAIN_ACTIONS)
        inner = clause(other, group(verb, other, d.pick(("past", "future"))), target(d, verb, free=False).phrase)
    lead = clause(s, group(d.pick((verbs.SAY, verbs.KNOW)), s))
    return end(pair("$0 that/1 $1", "$0 che/1 $1", lead, inner))
