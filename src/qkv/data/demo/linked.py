"""Constructions of two clauses, and comparisons: agreement that reaches from one part of the sentence to another."""

from __future__ import annotations

from qkv.data.demo import nouns, verbs, words
from qkv.data.demo.choose import (
    PETS, animal, at_home, describe, in_room, kin, person, place, somebody, spot, subject, target, thing, third,
)  # fmt: skip
from qkv.data.demo.nouns import Noun
from qkv.data.demo.phrase import EMPTY, Phrase, chain, pair, tokens, unit
from qkv.data.demo.simple import ACTIONS, PERSONAL, SMALL, STOP, TONIC, end, mode
from qkv.data.demo.syntax import (
    NP, PRONOUNS, Dice, Group, back, both, clause, group, having, link, name, np, object_back, of_owner, predicate, pronoun,
)  # fmt: skip
from qkv.data.demo.verbs import BE, Verb
from qkv.data.demo.words import Adjective

BECAUSE = unit("because", "perché")


def _named(spec: str) -> dict[str, tuple[str, ...]]:
    """Lines of `key: word word …`."""
    lines = (line.split(":") for line in spec.strip().splitlines())
    return {key.strip(): tuple(rest.split()) for key, rest in lines}


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
carry: heavy
draw: beautiful strange big
take: useful beautiful
""")
_OBSTACLES = _named("""
buy: expensive ugly old big dirty broken small
eat: cold
read: boring difficult long
choose: expensive ugly boring
carry: heavy
open: empty heavy
use: broken old dirty
wear: dirty old ugly
visit: dangerous noisy
drink: cold
""")
_FALLING = nouns.of("cup", "glass", "plate", "bottle", "lamp", "mirror", "picture", "clock", "plant", "tree", "chair", "box",
                    "bag")  # fmt: skip
_NEEDS = {en: it for en, it in words.NEEDS}


def _state(s: NP, word: str, tense: str) -> Phrase:
    """He was sad, or he was hungry (aveva fame)."""
    if word in _NEEDS and word != "cold":
        return clause(s, having(s, tense), unit(word, _NEEDS[word], word))
    return clause(s, group(BE, s, tense), predicate(words.BY_NAME[word], s))


def because_feeling(d: Dice) -> Phrase:
    """The cat was purring because it was happy; il gatto stava facendo le fusa perché era felice."""
    x = d.random()
    past = d.chance(0.6)
    if x < 0.35:
        s = animal(d)
        if s.noun and s.noun.en in ("cat", "kitten"):
            verb, states = verbs.PURR, ("happy", "calm")
        elif s.noun and s.noun.en in ("dog", "puppy"):
            verb, states = verbs.BARK, ("happy", "nervous", "hungry", "afraid")
        else:
            key = d.pick(tuple(_BEAST_FEELINGS))
            verb, states = verbs.BY_LEMMA[key], _BEAST_FEELINGS[key]
    else:
        s = subject(d)
        key = d.pick(tuple(_FEELINGS))
        verb, states = verbs.BY_LEMMA[key], _FEELINGS[key]
    tense = "was" if past else d.pick(("present", "progressive"))
    first = clause(s, group(verb, s, tense), in_room(d) if d.chance(0.25) else EMPTY)
    return end(chain(first, BECAUSE, _state(back(s), d.pick(states), "past" if past else "present")))


def because_home(d: Dice) -> Phrase:
    """Anna stayed at home because she was ill; Anna è restata a casa perché era malata."""
    s = subject(d)
    if d.chance(0.5):
        first = clause(s, group(verbs.STAY, s, "past"), at_home() if d.chance(0.5) else in_room(d))
    else:
        verb = d.pick(tuple(verbs.BY_LEMMA[v] for v in ("work", "study", "dance", "swim", "cook", "play", "travel")))
        first = clause(s, group(verb, s, "past", negative=True))
    return end(chain(first, BECAUSE, _state(back(s), d.pick(("ill", "tired", "sad", "worried", "sleepy", "angry")), "past")))


def because_fell(d: Dice) -> Phrase:
    """The cup fell because it was old; la tazza è caduta perché era vecchia."""
    noun = d.pick(_FALLING)
    plural = d.chance(0.3)
    s = np(noun, d.pick(("the", "the", "these", "those", "my", "your", "our") if plural else ("the", "the", "this", "that", "my", "your", "her")), plural)
    verb = verbs.FALL
    states = [w for w in ("old", "heavy", "big", "full", "fragile", "tall", "broken", "small") if words.BY_NAME[w] in words.FITTING[noun.en]]
    if "fragile" in noun.classes and d.chance(0.4) or not states:
        verb, states = verbs.BREAK, ["old", "fragile"]
    return end(chain(clause(s, group(verb, s, "past")), BECAUSE, _state(back(s), d.pick(states), "past")))


def _suited(d: Dice, table: dict[str, tuple[str, ...]]) -> tuple[Verb, Noun, Adjective]:
    """A verb of the table, an object, and a reason that suits the object."""
    while True:
        key = d.pick(tuple(table))
        verb = next(v for v in verbs.TRANSITIVE if v.lemma == key)
        noun = d.pick(verb.objects)
        fitting = [words.BY_NAME[w] for w in table[key] if words.BY_NAME[w] in words.FITTING[noun.en]]
        if fitting and "person" not in noun.classes:
            return verb, noun, d.pick(fitting)


def because_object(d: Dice) -> Phrase:
    """I bought the cup because it was beautiful; non abbiamo mangiato la zuppa perché era fredda."""
    negative = d.chance(0.4)
    verb, noun, a = _suited(d, _OBSTACLES if negative else _REASONS)
    tense = "past" if (negative or verb.past_is_plain()) and d.chance(0.6) else "future" if d.chance(0.3) else "present"
    s = subject(d)
    plural = "mass" not in noun.classes and d.chance(0.35)
    o = np(noun, d.pick(("the", "these", "those") if plural else ("the", "this", "that")), plural)
    it = back(o)
    reason = clause(it, group(BE, it, "past" if tense == "past" else "present"), predicate(a, it, d.chance(0.2)))
    return end(chain(clause(s, group(verb, s, tense, negative=negative), o.phrase), BECAUSE, reason))


def so_clitic(d: Dice) -> Phrase:
    """The soup is cold, so I do not eat it; la zuppa è fredda, quindi non la mangio."""
    negative = d.chance(0.5)
    verb, noun, a = _suited(d, _OBSTACLES if negative else _REASONS)
    plural = "mass" not in noun.classes and d.chance(0.4)
    s = np(noun, d.pick(("the", "these") if plural else ("the", "this", "that")), plural)
    past = d.chance(0.4)
    first = clause(s, group(BE, s, "past" if past else "present"), predicate(a, s))
    me = pronoun(d.pick(("I", "you", "he", "she", "we"))) if d.chance(0.6) else somebody(d)
    o, clitic, agree = object_back(s)
    tense = "past" if past and (negative or verb.past_is_plain()) else d.pick(("present", "future", "want"))
    if tense != "past" and past:
        first = clause(s, group(BE, s, "present"), predicate(a, s))
    g = group(verb, me, tense, negative=negative, clitic=clitic, agree=agree)
    return end(pair("$0 ,/1 so/2 $1", "$0 ,/1 quindi/2 $1", first, clause(me, g, o)))


def but_clitic(d: Dice) -> Phrase:
    """I bought the apples, but I did not eat them; ho comprato le mele, ma non le ho mangiate."""
    firsts, seconds = d.pick((("buy", "eat cook wash taste"), ("buy", "wear read use open"), ("take", "read use"),
                              ("write", "send"), ("open", "close"), ("look for", "find"), ("lose", "find"),
                              ("prepare", "eat taste"), ("order", "eat drink taste"), ("receive", "open read"),
                              ("see", "buy take touch"), ("break", "repair"), ("choose", "buy wear read")))  # fmt: skip
    table = {v.lemma: v for v in (*verbs.GIVING, *verbs.TRANSITIVE)}
    one, two = table[firsts], table[d.pick(seconds.split())]
    shared = tuple(n for n in one.objects if n in two.objects and "person" not in n.classes)
    if not shared:
        return but_clitic(d)
    noun = d.pick(shared)
    s = subject(d)
    plural = "mass" not in noun.classes and d.chance(0.4)
    o = np(noun, "the" if plural or d.chance(0.6) or "mass" in noun.classes else "a", plural, describe(d, noun, 0.2))
    if not one.past_is_plain():
        return but_clitic(d)
    again = back(s)
    ref, clitic, agree = object_back(o)
    g = group(two, again, "past", negative=True, clitic=clitic, agree=agree)
    return end(pair("$0 ,/1 but/2 $1", "$0 ,/1 ma/2 $1", clause(s, group(one, s, "past"), o.phrase), clause(again, g, ref)))


def who_relative(d: Dice) -> Phrase:
    """The girl who reads the book is my sister; la ragazza che legge il libro è mia sorella."""
    noun = d.pick(nouns.PEOPLE)
    plural = noun.en not in ("king", "queen") and d.chance(0.3)
    s = np(noun, d.pick(("the", "the", "those") if plural else ("the", "the", "that")), plural)
    verb = d.pick(tuple(v for v in ACTIONS if v.past_is_plain()))
    tense = d.pick(("present", "past") + (() if "brief" in verb.flags else ("progressive",) * 2))
    o = target(d, verb, free=False)
    while "person" in (o.noun.classes if o.noun else "person") and d.chance(0.7):
        verb = d.pick(ACTIONS)
        tense = "progressive" if "brief" not in verb.flags else "present"
        o = target(d, verb, free=False)
    inner = clause(NP(unit("who", "che"), plural=plural, gender=s.gender), group(verb, NP(EMPTY, plural=plural, gender=s.gender), tense), o.phrase)
    subj = NP(chain(s.phrase, inner), plural=plural, gender=s.gender)
    if d.chance(0.4) and not plural and noun.en in ("boy", "girl", "man", "woman", "lady", "child", "student", "gentleman"):
        k = kin(d)
        while k.plural or k.gender != s.gender:
            k = kin(d)
        return end(clause(subj, group(BE, subj), k.phrase))
    a = d.pick(words.MOODS + words.CHARACTER)
    return end(clause(subj, group(BE, subj), predicate(a, subj, d.chance(0.2))))


def know_who(d: Dice) -> Phrase:
    """I know the man who sold the house; conosco l'uomo che ha venduto la casa."""
    s = subject(d)
    noun = d.pick(nouns.PEOPLE)
    plural = d.chance(0.3)
    lead = d.pick(tuple(v for v in verbs.TRANSITIVE if v.lemma in ("know", "meet", "thank", "see", "look for", "wait for", "help")))
    o = np(noun, d.pick(("the", "the", "those") if plural else ("the", "the", "a")), plural)
    verb = d.pick(tuple(v for v in ACTIONS if v.past_is_plain()))
    tense = d.pick(("past", "past", "present"))
    what = target(d, verb, free=False)
    who = NP(EMPTY, plural=plural, gender=o.gender)
    inner = clause(NP(unit("who", "che")), group(verb, who, tense), what.phrase)
    return end(clause(s, group(lead, s, tense_for(d, lead)), o.phrase, inner))


def tense_for(d: Dice, verb: Verb) -> str:
    return "present" if "state" in verb.flags else d.pick(("present", "past", "past", "future"))


def that_relative(d: Dice) -> Phrase:
    """The book that Anna bought is interesting; il libro che Anna ha comprato è interessante."""
    verb = d.pick(tuple(v for v in verbs.TRANSITIVE if v.lemma in "buy sell write see find lose repair choose take want wash "
                        "draw visit use prepare eat order receive".split()))  # fmt: skip
    noun = d.pick(tuple(n for n in verb.objects if "person" not in n.classes and words.FITTING[n.en]))
    plural = "mass" not in noun.classes and d.chance(0.35)
    s = np(noun, "the", plural)
    who = subject(d)
    tense = "present" if "state" in verb.flags else "past" if "event" in verb.flags else d.pick(("past", "past", "future"))
    that = unit("that", "che")
    subj = NP(chain(s.phrase, that, clause(who, group(verb, who, tense))), plural=plural, gender=s.gender)
    a = d.pick(words.FITTING[noun.en])
    be = "present" if tense != "past" else d.pick(("present", "past"))
    return end(clause(subj, group(BE, subj, be, negative=d.chance(0.2)), predicate(a, subj, d.chance(0.15))))


def beast_relative(d: Dice) -> Phrase:
    """The cat that is sleeping on the chair is black; il gatto che sta dormendo sulla sedia è nero."""
    noun = d.pick(PETS)
    plural = d.chance(0.3)
    s = np(noun, "the", plural)
    verb = verbs.BY_LEMMA[d.pick(("sleep", "rest", "play", "eat"))]
    who = NP(EMPTY, plural=plural, gender=s.gender)
    where = spot(d, noun) if d.chance(0.6) else in_room(d)
    inner = clause(NP(unit("that", "che")), group(verb, who, d.pick(("present", "progressive"))), where)
    subj = NP(chain(s.phrase, inner), plural=plural, gender=s.gender)
    if d.chance(0.3) and not plural:
        what = of_owner(noun, somebody(d)) if d.chance(0.5) else np(noun, d.pick(("my", "your", "his", "her", "our")))
        return end(clause(subj, group(BE, subj), what.phrase))
    return end(clause(subj, group(BE, subj), predicate(d.pick(words.FITTING[noun.en]), subj)))


def _grade(a: Adjective, s: NP, degree: str) -> Phrase:
    """Taller, more elegant, less tall; as tall."""
    form = a.form(s.gender, s.plural)
    if degree == "less":
        return pair(f"less/1 {a.en}/2", f"meno/1 {form}/2", lemmas=(a.en,))
    if a.comparative:
        return unit(a.comparative, f"più {form}", a.en)
    return pair(f"more/1 {a.en}/2", f"più/1 {form}/2", lemmas=(a.en,))


_RANKED = tuple(a for a in words.ADJECTIVES if a.en not in ("good", "ill", "broken", "full", "empty", "wild", "wonderful", "delicious") and "colour" not in a.classes and a.en != "purple")


def _rivals(d: Dice) -> tuple[NP, NP, Adjective]:
    """Two of a kind, and a quality to compare them by."""
    if d.chance(0.5):
        a, b = subject(d), third(d)
        if not a.pronoun and d.chance(0.2):
            me = d.pick(("I", "you", "he", "she", "we", "they"))
            b = NP(unit(PRONOUNS[me][0], TONIC[me], "~" + me))
        return a, b, d.pick(words.CHARACTER)
    kind = d.pick(("animal", "clothes", "furniture", "text", "vehicle", "place", "holder", "instrument", "device", "fruit"))
    options = nouns.of(kind)
    while True:
        x, y = d.pick(options), d.pick(options)
        fitting = [w for w in words.FITTING[x.en] if w in words.FITTING[y.en] and w in _RANKED]
        if x is not y and fitting:
            dets = ("the", "the", "this", "that") if kind in ("animal", "place", "fruit") else ("the", "this", "my", "your")
            return np(x, d.pick(dets)), np(y, d.pick(dets)), d.pick(fitting)


def compares(d: Dice) -> Phrase:
    """Marco is taller than my sister; la borsa è meno pesante della valigia."""
    s, other, a = _rivals(d)
    if s.phrase.lemmas == other.phrase.lemmas:
        return compares(d)
    negative, ask = mode(d)
    more = _grade(a, s, "less" if d.chance(0.2) else "more")
    g = group(BE, s, negative=negative, ask=ask)
    return end(clause(s, g, more, pair("than/1 $0", "di/1 $0", other.phrase), ask=ask), ask)


def equals(d: Dice) -> Phrase:
    """The dog is as big as the wolf; il cane è grande come il lupo."""
    s, other, a = _rivals(d)
    if s.phrase.lemmas == other.phrase.lemmas:
        return equals(d)
    negative, ask = mode(d)
    same = pair(f"as {a.en}/1 as/2 $0", f"{a.form(s.gender, s.plural)}/1 come/2 $0", other.phrase, lemmas=(a.en,))
    return end(clause(s, group(BE, s, negative=negative, ask=ask), same, ask=ask), ask)


def superlative(d: Dice) -> Phrase:
    """Anna is the tallest girl in the school; Anna è la ragazza più alta della scuola."""
    if d.chance(0.6):
        s = somebody(d)
        noun = nouns.BY_NAME[d.pick(("boy", "man", "student", "doctor", "waiter", "actor", "gentleman") if s.gender == "m" else ("girl", "woman", "waitress", "actress", "lady"))]
        a = d.pick(words.CHARACTER)
        where = nouns.BY_NAME[d.pick(("school", "city", "village", "university", "hospital", "hotel"))]
    else:
        noun = d.pick(nouns.of("place", "house"))
        fitting = [a for a in words.FITTING[noun.en] if a in _RANKED]
        a = d.pick(fitting) if fitting else words.BY_NAME["beautiful"]
        s = np(noun, "this")
        where = nouns.BY_NAME[d.pick(("city", "village", "island"))]
        if where is noun:
            return superlative(d)
    g = noun.agreement(False)
    form = a.form(g[0], False)
    best = unit(a.comparative[:-1] + "st", f"più {form}", a.en) if a.comparative else pair(f"most/1 {a.en}/2", f"più/1 {form}/2", lemmas=(a.en,))
    n = unit(noun.en, noun.it, noun.en)
    what = pair("the/1 $0 $1 in/2 $2", f"@il.{g}/1 $1 $0 di/2 $2", best, n, np(where).phrase)
    negative, ask = mode(d)
    return end(clause(s, group(BE, s, negative=negative, ask=ask), what, ask=ask), ask)


def when_state(d: Dice) -> Phrase:
    """When I am tired, I sleep; quando sono stanco, dormo."""
    s = subject(d)
    key = d.pick(tuple(_FEELINGS))
    verb = verbs.BY_LEMMA[key]
    word = unit("when", "quando")
    first = _state(s, d.pick(_FEELINGS[key]), "present")
    again = back(s)
    return end(pair("$0 $1 ,/1 $2", "$0 $1 ,/1 $2", word, first, clause(again, group(verb, again), in_room(d) if d.chance(0.3) else EMPTY)))


def if_must(d: Dice) -> Phrase:
    """If you are tired, you must sleep; se sei stanco, devi dormire."""
    s = subject(d)
    advice = _named("""
    tired: sleep rest
    ill: sleep rest wait
    hungry: eat cook
    sleepy: sleep rest
    angry: wait walk
    nervous: rest walk wait
    sad: sing dance travel walk
    """)
    key = d.pick(tuple(advice))
    again = back(s)
    g = group(verbs.BY_LEMMA[d.pick(advice[key])], again, d.pick(("must", "can")))
    return end(pair("$0 $1 ,/1 $2", "$0 $1 ,/1 $2", unit("if", "se"), _state(s, key, "present"), clause(again, g, in_room(d) if d.chance(0.3) else at_home() if d.chance(0.2) else EMPTY)))


def _two(d: Dice) -> tuple[NP, NP]:
    a, b = third(d), third(d)
    while a.phrase.lemmas == b.phrase.lemmas:
        b = third(d)
    return a, b


def while_(d: Dice) -> Phrase:
    """While Anna was reading, her brother was cooking; mentre Anna stava leggendo, Marco stava cucinando."""
    a, b = _two(d)
    doing = tuple(v for v in verbs.INTRANSITIVE if v.lemma not in ("shout", "travel"))
    one, two = d.pick(doing), d.pick(doing)
    tense = d.pick(("was", "was", "progressive"))
    return end(pair("$0 $1 ,/1 $2", "$0 $1 ,/1 $2", unit("while", "mentre"), clause(a, group(one, a, tense)), clause(b, group(two, b, tense))))


def contrast(d: Dice) -> Phrase:
    """He reads and she writes; lui legge e lei scrive. The boy is tall but the girl is short."""
    if d.chance(0.5):
        one, two = d.pick((("he", "she"), ("she", "he"), ("I", "you"), ("you", "I"), ("we", "they"), ("they", "we"), ("I", "she"), ("I", "he")))
        a, b = pronoun(one), pronoun(two)
        for s, w in ((a, one), (b, two)):
            s.phrase = s.phrase._replace(it=tokens(PRONOUNS[w][4], s.drop))
            s.drop = 0
    else:
        a, b = _two(d)
    if d.chance(0.5):
        v, w = d.pick(verbs.INTRANSITIVE), d.pick(verbs.INTRANSITIVE)
        if v is w:
            return contrast(d)
        tense = d.pick(("present", "progressive"))
        return end(pair("$0 and/1 $1", "$0 e/1 $1", clause(a, group(v, a, tense)), clause(b, group(w, b, tense))))
    x, y = d.pick(words.MOODS + words.CHARACTER), d.pick(words.MOODS + words.CHARACTER)
    if x is y:
        return contrast(d)
    return end(pair("$0 but/1 $1", "$0 ma/1 $1", clause(a, group(BE, a), predicate(x, a)), clause(b, group(BE, b), predicate(y, b))))


def together(d: Dice) -> Phrase:
    """Anna and Maria are tired; Anna e Maria sono stanche."""
    a = somebody(d)
    b = somebody(d) if d.chance(0.5) else kin(d)
    if a.phrase.lemmas == b.phrase.lemmas:
        return together(d)
    s = both(a, b)
    negative, ask = mode(d)
    x = d.random()
    if x < 0.4:
        a_ = d.pick(words.MOODS + words.CHARACTER)
        return end(clause(s, group(BE, s, d.pick(("present", "past")), negative=negative, ask=ask), predicate(a_, s), ask=ask), ask)
    if x < 0.7:
        verb = d.pick(tuple(v for v in (*verbs.LEAVING, verbs.STAY, *verbs.REFLEXIVE)))
        rest = place(d) if verb is verbs.STAY else EMPTY
        return end(clause(s, group(verb, s, d.pick(("past", "future")), negative=negative, ask=ask), rest, ask=ask), ask)
    verb = d.pick(tuple(v for v in ACTIONS if v.past_is_plain()))
    return end(clause(s, group(verb, s, d.pick(("past", "future", "present")), negative=negative, ask=ask), target(d, verb, free=False).phrase, ask=ask), ask)


def says_that(d: Dice) -> Phrase:
    """Anna says that she is tired; I know that the museum is closed."""
    s = subject(d)
    that = unit("that", "che")
    if d.chance(0.5):
        again = back(s)
        key = d.pick(("tired", "happy", "ill", "hungry", "thirsty", "sleepy", "worried", "sad"))
        inner = _state(again, key, "present")
        return end(chain(clause(s, group(verbs.SAY, s)), that, inner))
    other = third(d)
    if other.phrase.lemmas == s.phrase.lemmas:
        return says_that(d)
    g = group(d.pick((verbs.SAY, verbs.KNOW)), s, negative=False)
    if d.chance(0.5):
        return end(chain(clause(s, g), that, clause(other, group(BE, other), predicate(d.pick(words.MOODS + words.CHARACTER), other))))
    verb = d.pick(tuple(v for v in ACTIONS if v.past_is_plain()))
    return end(chain(clause(s, g), that, clause(other, group(verb, other, d.pick(("past", "future"))), target(d, verb, free=False).phrase)))
