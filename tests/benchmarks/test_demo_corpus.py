"""The built-in corpus: correct, distinct, one translation each, unseen combinations in the test set, reproducible."""

from __future__ import annotations

import hashlib
import itertools
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

import demo_corpus as demo
from demo_corpus import grammar, lexicon, nouns, verbs
from demo_corpus.phrase import render
from qkv.core.errors import UsageError
from qkv.data.formats import open_text, read_lines

Corpus = dict[str, list[demo.Example]]


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return demo.splits(0)


# Checked by a person, at least one sentence per construction: the rule, English, and Italian on the next line.
CHECKED = """
who_relative: The writers who are washing his cup are tall.
    Gli scrittori che stanno lavando la sua tazza sono alti.
how_old: How old is her husband?
    Quanti anni ha suo marito?
so_clitic: This poem is interesting, so he will read it.
    Questa poesia è interessante, quindi la leggerà.
compares: Her dress is cleaner than this hat.
    Il suo vestito è più pulito di questo cappello.
on_date: Her birthday is on the first of June.
    Il suo compleanno è il primo giugno.
know_who: You will meet the tourists who touched a small flower.
    Incontrerai i turisti che hanno toccato un piccolo fiore.
with_pronoun: His grandmother wants to greet him.
    Sua nonna vuole salutarlo.
likes: She does not like rabbits.
    Non le piacciono i conigli.
because_feeling: The princess is shouting because she is nervous.
    La principessa sta gridando perché è nervosa.
beast_relative: The rabbit that plays under the sofa is fat.
    Il coniglio che gioca sotto il divano è grasso.
meet_where: When did you take my bags?
    Quando hai preso le mie borse?
animal_acts: The dog will not eat cheese.
    Il cane non mangerà formaggio.
where_thing: The purple skirt is not on the small desk.
    La gonna viola non è sulla piccola scrivania.
contrast: They are nervous but we are calm.
    Loro sono nervosi ma noi siamo calmi.
why: Why is he worried?
    Perché è preoccupato?
needs: Does Marco need a ticket?
    Marco ha bisogno di un biglietto?
gives: They will show the letter to the girl.
    Mostreranno la lettera alla ragazza.
happening: Is our puppy resting under the desk?
    Il nostro cucciolo sta riposando sotto la scrivania?
frequency: Franco often shouts at the stadium.
    Franco grida spesso allo stadio.
quality: Her piano was not beautiful.
    Il suo pianoforte non era bello.
together: Francesca and Giulia followed his uncle.
    Francesca e Giulia hanno seguito suo zio.
because_object: Laura will read these letters because they are interesting.
    Laura leggerà queste lettere perché sono interessanti.
transitive: You open the bottles.
    Apri le bottiglie.
says_that: We say that we are hungry.
    Diciamo che abbiamo fame.
intransitive: She is travelling in France today.
    Sta viaggiando in Francia oggi.
price: The novel costs twenty-eight euros.
    Il romanzo costa ventotto euro.
mine: The notebook is ours.
    Il quaderno è nostro.
this_is: This is my desk.
    Questa è la mia scrivania.
building: The hospital is not behind the church.
    L'ospedale non è dietro la chiesa.
total: Forty-six minus three is forty-three.
    Quarantasei meno tre fa quarantatré.
today: Today is Monday, the first of May.
    Oggi è lunedì primo maggio.
when_state: When their brothers are sleepy, they sleep in the garden.
    Quando i loro fratelli hanno sonno, dormono in giardino.
gives_pronoun: You must not offer him our orange.
    Non devi offrirgli la nostra arancia.
afraid: This writer was afraid of mice.
    Questo scrittore aveva paura dei topi.
love_much: My brother loves Giulia very much.
    Mio fratello ama molto Giulia.
because_home: Our brother did not play at the beach because he was tired.
    Nostro fratello non ha giocato in spiaggia perché era stanco.
job: Laura is not a lawyer.
    Laura non è un'avvocata.
how_much: How much does that skirt cost?
    Quanto costa quella gonna?
because_fell: These chairs fell in the bedroom because they were old.
    Queste sedie sono cadute in camera perché erano vecchie.
age: The parrots are not fourteen years old.
    I pappagalli non hanno quattordici anni.
timetable: The ship arrived at ten past six yesterday.
    La nave è arrivata alle sei e dieci ieri.
opening: The bank is closed from twelve o'clock to three o'clock.
    La banca è chiusa dalle dodici alle tre.
meanwhile: While the princess was sleeping, your aunt was running.
    Mentre la principessa stava dormendo, tua zia stava correndo.
language: Sofia speaks Spanish in Lisbon.
    Sofia parla spagnolo a Lisbona.
lives: I do not live in a modern house.
    Non abito in una casa moderna.
goes: The girls want to go to the park.
    Le ragazze vogliono andare al parco.
what: What does he want to buy?
    Che cosa vuole comprare?
owned: Was Luca's bicycle yellow?
    La bicicletta di Luca era gialla?
has: I have eight flowers.
    Ho otto fiori.
modal: I must follow the cows tomorrow.
    Devo seguire le mucche domani.
superlative: Matteo is the bravest man in the city.
    Matteo è l'uomo più coraggioso della città.
on_day: On Monday you will not arrive.
    Lunedì non arriverai.
bought_for: She will sell the computer for ninety-eight euros.
    Venderà il computer per novantotto euro.
lovely: Her puppy is a grey puppy.
    Il suo cucciolo è un cucciolo grigio.
but_clitic: I bought the salad, but I did not taste it.
    Ho comprato l'insalata, ma non l'ho assaggiata.
weather: It is raining in Germany now.
    Sta piovendo in Germania adesso.
if_must: If she is tired, she can rest in the bedroom.
    Se è stanca, può riposare in camera.
nationality: Davide is French.
    Davide è francese.
who_is: Who is this journalist?
    Chi è questo giornalista?
which: Which bird will you watch?
    Quale uccello guarderai?
mood: She is tall.
    È alta.
where_person: The painters are behind the school now.
    I pittori sono dietro la scuola adesso.
where_is: Where were the puppies yesterday evening?
    Dov'erano i cuccioli ieri sera?
weekday: Does Pietro travel on Sundays?
    Pietro viaggia la domenica?
there_is: There are no apples in their brown backpack.
    Non ci sono mele nel loro zaino marrone.
that_relative: The beds that you bought were new.
    I letti che hai comprato erano nuovi.
called: My name is Maria.
    Mi chiamo Maria.
when_does: What time did the girl return?
    A che ora è tornata la ragazza?
rises: You did not get dressed at five o'clock.
    Non ti sei vestito alle cinque.
who: Who meets the women?
    Chi incontra le donne?
equals: Am I as strong as our uncles?
    Sono forte come i nostri zii?
where_does: Where do they work?
    Dove lavorano?
comes_from: Paolo comes from Spain.
    Paolo viene dalla Spagna.
time_now: It is two o'clock in the afternoon.
    Sono le due del pomeriggio.
stays: She will stay at home this evening.
    Resterà a casa stasera.
how_many: How many umbrellas did you break?
    Quanti ombrelli hai rotto?
need_state: Were they thirsty this morning?
    Avevano sete stamattina?
would_like: I would like those cherries.
    Vorrei quelle ciliegie.
order: Sell the fresh tomatoes!
    Vendi i pomodori freschi!
so_clitic: That meat is cold, so Marco does not eat it.
    Quella carne è fredda, quindi Marco non la mangia.
compares: That actor is not taller than her sons.
    Quell'attore non è più alto dei suoi figli.
likes: Does Sara like rice?
    A Sara piace il riso?
why: Why is the bird nervous?
    Perché l'uccello è nervoso?
gives: The waiter brings that ticket to that baker.
    Il cameriere porta quel biglietto a quel panettiere.
weekday: I do not dance at the theatre on Saturdays.
    Non ballo a teatro il sabato.
equals: Is she as kind as Franco?
    È gentile come Franco?
but_clitic: They bought the fish, but they did not taste it.
    Hanno comprato il pesce, ma non l'hanno assaggiato.
where_is: Where is this waitress?
    Dov'è questa cameriera?
comes_from: We come from Madrid.
    Veniamo da Madrid.
lovely: Your cat is a lovely cat.
    Il tuo gatto è un gatto adorabile.
lovely: Your dog is a lovely dog.
    Il tuo cane è un cane adorabile.
with_pronoun: I love you very much.
    Ti amo molto.
with_pronoun: I love her very much.
    La amo molto.
"""


def checked() -> list[tuple[str, str, str]]:
    lines = CHECKED.strip().splitlines()
    heads = (line.partition(": ") for line in lines[::2])
    return [(rule, source, line.strip()) for (rule, _, source), line in zip(heads, lines[1::2], strict=True)]


def test_checked_pairs_cover_every_construction() -> None:
    assert {rule for rule, _, _ in checked()} == {rule.__name__ for rule, _ in grammar.RULES}
    assert len(grammar.RULES) >= 40
    assert len(checked()) >= 60


def test_checked_pairs_are_in_the_corpus(corpus: Corpus) -> None:
    made = {e.source: e.target for examples in corpus.values() for e in examples}
    assert {source: made.get(source) for _, source, _ in checked()} == {s: t for _, s, t in checked()}


def test_sizes_and_distinctness(corpus: Corpus) -> None:
    assert {split: len(examples) for split, examples in corpus.items()} == demo.SIZES
    assert demo.SIZES["train"] >= 100_000
    sources = [e.source for examples in corpus.values() for e in examples]
    assert len(set(sources)) == len(sources)


def test_lengths_are_spread(corpus: Corpus) -> None:
    lengths = [len([w for w in demo.words(e.source) if w[0].isalpha()]) for e in corpus["train"]]
    assert min(lengths) >= 2
    assert max(lengths) <= 16
    for low, high in ((2, 4), (5, 6), (7, 8), (9, 16)):
        assert sum(low <= n <= high for n in lengths) > 0.08 * len(lengths)


def test_vocabulary_is_rich() -> None:
    all_verbs = (*verbs.TRANSITIVE, *verbs.INTRANSITIVE, *verbs.MOVING, *verbs.LEAVING, *verbs.REFLEXIVE, *verbs.GIVING)
    assert len({n.en for n in nouns.NOUNS}) >= 120
    assert len({v.lemma for v in all_verbs}) >= 60
    assert len({a.en for a in lexicon.ADJECTIVES}) >= 60


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_english_decides_italian_for_any_seed(seed: int) -> None:
    made: dict[str, str] = {}
    for phrase in itertools.islice(grammar.sentences(seed), 12_000):
        source, target, _ = render(phrase)
        assert made.setdefault(source, target) == target


def test_named_sentences_are_held_out(corpus: Corpus) -> None:
    test = {e.source: e.target for e in corpus["test"]}
    assert test["Your cat is a lovely cat."] == "Il tuo gatto è un gatto adorabile."
    assert test["I love you very much."] == "Ti amo molto."
    train = {e.source for e in corpus["train"]}
    assert {"Your dog is a lovely dog.", "I love her very much."} <= train
    variants = {"I love you.", "I do not love you.", "You love me.", "You love me very much.", "The cat is lovely."}
    assert not train & variants


def test_combinations_do_not_cross_the_split(corpus: Corpus) -> None:
    home = {e.source: split for split, examples in corpus.items() for e in examples}
    splits_of: dict[tuple[str, ...], set[str]] = {}
    for phrase in itertools.islice(grammar.sentences(0), 40_000):
        split = home.get(render(phrase)[0])
        if split:
            splits_of.setdefault(demo.combination(phrase), set()).add(split)
    assert all(len(splits) == 1 for splits in splits_of.values())
    assert sum("test" in s for s in splits_of.values()) > 100


FUNCTION_WORDS = frozenset(
    """i you he she we they it me him her us them my your his our their mine yours hers ours theirs the a an this that
    these those some many no is are am was were be do does did will can cannot must to not would never always often and
    but because so if when while who what where why which how much in on at from with of for very more most less as than
    . , ? ! 's there every day morning evening afternoon yesterday today tomorrow now please""".split()
)
SOMETIMES_FUNCTION = frozenset("want wants like likes get gets got".split())  # want to, would like, get up


def test_no_held_out_bag_of_content_words_is_in_training(corpus: Corpus) -> None:
    """The same rule, checked on the text without the generator's data."""

    def bag(example: demo.Example) -> frozenset[str]:
        return frozenset(w.lower() for w in demo.words(example.source)) - FUNCTION_WORDS

    train = {bag(e) for e in corpus["train"]}
    for split in ("valid", "test"):
        bags = [b for b in map(bag, corpus[split]) if len(b) > 1 and not b & SOMETIMES_FUNCTION]
        assert len(bags) > 0.7 * len(corpus[split])
        assert not train.intersection(bags)


def test_every_held_out_word_is_seen_in_training(corpus: Corpus) -> None:
    counts: dict[str, int] = {}
    for e in corpus["train"]:
        for word in demo.words(e.source) + demo.words(e.target):
            counts[word] = counts.get(word, 0) + 1
    for e in corpus["valid"] + corpus["test"]:
        assert min(counts.get(w, 0) for w in demo.words(e.source) + demo.words(e.target)) >= demo.SEEN


def test_alignments_are_in_range_and_cover_every_content_word(corpus: Corpus) -> None:
    may_be_alone = {"of", "on", "as", "the", ","}
    for e in corpus["train"][::5] + corpus["valid"] + corpus["test"]:
        source, target = demo.words(e.source), demo.words(e.target)
        left, right = {i for i, _ in e.alignment}, {j for _, j in e.alignment}
        assert e.alignment == tuple(sorted(set(e.alignment)))
        assert left <= set(range(len(source)))
        assert right == set(range(len(target)))
        assert {source[i].lower() for i in set(range(len(source))) - left} <= may_be_alone


def test_alignment_by_hand(corpus: Corpus) -> None:
    cat, love = corpus["test"][:2]
    assert cat.source == "Your cat is a lovely cat."  # Il tuo gatto è un gatto adorabile .
    assert demo.pharaoh(cat.alignment) == "0-0 0-1 1-2 2-3 3-4 4-6 5-5 6-7"
    assert love.source == "I love you very much."  # Ti amo molto .
    assert demo.pharaoh(love.alignment) == "0-1 1-1 2-0 3-2 4-2 5-3"
    # La gonna viola non è sulla piccola scrivania . The contracted sulla stands for on and the.
    skirt = next(e for e in corpus["train"] if e.source == "The purple skirt is not on the small desk.")
    assert demo.pharaoh(skirt.alignment) == "0-0 1-2 2-1 3-4 4-3 5-5 6-5 7-6 8-7 9-8"


def test_words_tokenises_and_loses_nothing(corpus: Corpus) -> None:
    assert demo.words("L'amico c'è, un'arancia dov'era!") == "L' amico c' è , un' arancia dov' era !".split()
    assert demo.words("Anna's cat woke up at ten o'clock.") == "Anna 's cat woke up at ten o'clock .".split()
    assert demo.words("Twenty-three.") == ["Twenty-three", "."]
    for e in corpus["test"]:
        for text in (e.source, e.target):
            assert "".join(demo.words(text)) == text.replace(" ", "")


def test_spelling_of_sentences(corpus: Corpus) -> None:
    for e in corpus["train"][::7] + corpus["test"]:
        for text in (e.source, e.target):
            assert text[0].isupper()
            assert text[-1] in ".?!"
            assert "  " not in text
            assert "@" not in text
            assert " ." not in text


def _digest(examples: list[demo.Example]) -> str:
    text = "".join(f"{e.source}\t{e.target}\t{demo.pharaoh(e.alignment)}\n" for e in examples)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def test_the_corpus_of_seed_0_is_pinned(corpus: Corpus) -> None:
    assert {split: _digest(examples) for split, examples in corpus.items()} == PINNED


PINNED = {"train": "d4a9874a345efc3b", "valid": "c6067878b78870d9", "test": "79630b9d092441a0"}

_STREAM = """
import hashlib, itertools
from demo_corpus import grammar, combination, split_of
from demo_corpus.phrase import render
h = hashlib.blake2b(digest_size=8)
for p in itertools.islice(grammar.sentences(5), 3000):
    h.update(repr((render(p), combination(p), split_of(combination(p), 5))).encode())
print(h.hexdigest())
"""


def test_the_stream_does_not_depend_on_the_hash_seed() -> None:
    package_root = str(Path(demo.__file__).parents[1])
    digests = set()
    for hash_seed in ("0", "1", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": package_root}
        run = subprocess.run([sys.executable, "-c", _STREAM], env=env, capture_output=True, text=True, check=True)
        digests.add(run.stdout)
    assert len(digests) == 1


def test_another_seed_gives_another_stream() -> None:
    one, two = (list(itertools.islice(map(render, grammar.sentences(s)), 2, 50)) for s in (0, 1))
    assert one != two


def test_texts(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "splits", lambda seed=0: corpus)
    made = demo.texts()
    assert sorted(made) == sorted(f"{s}.{x}" for s in demo.SIZES for x in ("en", "it", "align"))
    for split, examples in corpus.items():
        sides = [made[f"{split}.{x}"].split("\n") for x in ("en", "it", "align")]
        assert all(side.pop() == "" for side in sides)
        assert [(e.source, e.target, demo.pharaoh(e.alignment)) for e in examples] == list(zip(*sides, strict=True))


def test_the_generator_reproduces_the_shipped_files(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, decompressed: the bytes of the .xz files depend on the library that wrote them."""
    monkeypatch.setattr(demo, "splits", lambda seed=0: corpus)
    shipped = open_text("demo:test.en", "").parent
    assert {path.name.removesuffix(".xz"): lzma.decompress(path.read_bytes()) for path in shipped.iterdir()} == {
        name: text.encode() for name, text in demo.texts().items()
    }


def test_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command writes each text compressed and overwrites old files."""
    few = {"test.en": "Your cat.\n", "test.it": "Il tuo gatto è qui.\n"}
    monkeypatch.setattr(demo, "texts", lambda seed=0: few if seed == 7 else {})
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        paths = demo.write(folder, 7)
        assert sorted(folder.iterdir()) == sorted(paths)
        assert {path.stem: lzma.decompress(path.read_bytes()).decode() for path in paths} == few
        paths[0].write_bytes(b"stale")


def test_files_are_found_by_name() -> None:
    """`demo:NAME` is accepted as a file name and means a file of the corpus."""
    assert open_text("demo:test.it", "elsewhere").is_file()
    assert read_lines("demo:test.it")[0] == "Il tuo gatto è un gatto adorabile."
    assert len(read_lines("demo:valid.align")) == demo.SIZES["valid"]
    for unknown in ("test.de", "", "test.it.xz", "../demo/test.it"):
        with pytest.raises(UsageError, match=r"no such file: the built-in corpus has .*test\.en"):
            open_text(f"demo:{unknown}", "")
