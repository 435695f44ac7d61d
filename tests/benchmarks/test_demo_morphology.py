"""The morphology of the built-in corpus, against tables written by hand."""

from __future__ import annotations

from demo_corpus import english, italian, lexicon, nouns, syntax, verbs
from demo_corpus.phrase import render


def test_articles() -> None:
    table = """
    il libro i libri|lo zaino gli zaini|lo studente gli studenti|lo gnomo gli gnomi|lo psicologo gli psicologi
    l'amico gli amici|l'uovo gli uomini|lo specchio gli specchi|il sale i soli|la zia le zie|la scuola le scuole
    l'anatra le anatre|l'isola le isole|la sedia le sedie
    """
    for row in table.replace("\n", "|").split("|"):
        parts = row.replace("'", "' ").split()
        if parts:
            gender = "f" if parts[2] == "le" else "m"
            assert italian.before("il", gender + "s", parts[1]) == parts[0]
            assert italian.before("il", gender + "p", parts[3]) == parts[2]
    table = "ms un libro|ms uno zaino|ms uno studente|ms un amico|fs una zia|fs un' isola|fs una scuola"
    for phrase in table.split("|"):
        agreement, article, noun = phrase.split()
        assert italian.before("un", agreement, noun) == article
    for phrase in (
        "ms quel libro|ms quello specchio|ms quell' uomo|mp quei libri|mp quegli zaini|mp quegli uomini|fs quella casa|"
        "fs quell' isola|fp quelle isole"
    ).split("|"):
        agreement, form, noun = phrase.split()
        assert italian.before("quello", agreement, noun) == form
        bello = form.replace("quel", "bel").replace("que", "be")
        assert italian.before("bello", agreement, noun) == ("bella" if agreement == "fs" else bello)
    assert [italian.before("buono", "ms", w) for w in ("libro", "amico", "zaino")] == ["buon", "buon", "buono"]
    assert [italian.before("questo", "fs", w) for w in ("isola", "casa")] == ["quest'", "questa"]


def test_contracted_prepositions() -> None:
    table = {
        "di": "del dello dell' della dei degli delle",
        "a": "al allo all' alla ai agli alle",
        "da": "dal dallo dall' dalla dai dagli dalle",
        "in": "nel nello nell' nella nei negli nelle",
        "su": "sul sullo sull' sulla sui sugli sulle",
    }
    for preposition, forms in table.items():
        articles = ("il", "lo", "l'", "la", "i", "gli", "le")
        assert [italian.contract(preposition, a) for a in articles] == forms.split()


def test_settle_works_from_the_right() -> None:
    def settle(text: str) -> str:
        return " ".join(word for word, _ in italian.settle([(w, ()) for w in text.split()]))

    assert settle("su @il.ms vecchio specchio") == "sul vecchio specchio"
    assert settle("su @il.ms specchio vecchio") == "sullo specchio vecchio"
    assert settle("di @il.ms @bello.ms albero") == "del bell' albero"
    assert settle("con @il.mp @bello.mp zaini") == "con i begli zaini"
    assert settle("a Anna e Elena e Marco") == "ad Anna ed Elena e Marco"
    assert settle("@uno.ventuno anni") == "ventun anni"
    assert settle("@uno.ventuno studenti") == "ventuno studenti"
    assert settle("non lo vedo") == "non lo vedo"


def test_italian_plurals() -> None:
    table = """
    amico/amici cuoco/cuochi parco/parchi lago/laghi orologio/orologi zio/zii figlio/figli uomo/uomini cane/cani
    giornalista/giornalisti film/film autobus/autobus caffè/caffè re/re uovo/uova mucca/mucche tartaruga/tartarughe
    arancia/arance spiaggia/spiagge camicia/camicie valigia/valigie ciliegia/ciliegie città/città foto/foto radio/radio
    chiave/chiavi moglie/mogli
    """
    for pair in table.split():
        one, many = pair.split("/")
        assert next(n for n in nouns.NOUNS if n.it == one).it_plural == many
    egg = nouns.BY_NAME["egg"]
    assert (egg.agreement(False), egg.agreement(True)) == ("ms", "fp")


def test_adjective_agreement() -> None:
    table = """
    alto alta alti alte|felice felice felici felici|stanco stanca stanchi stanche
    simpatico simpatica simpatici simpatiche|lungo lunga lunghi lunghe
    vecchio vecchia vecchi vecchie|grigio grigia grigi grigie|blu blu blu blu
    tedesco tedesca tedeschi tedesche|greco greca greci greche|economico economica economici economiche
    """
    for row in table.replace("\n", "|").split("|"):
        forms = row.split()
        if forms:
            wanted = [("m", False), ("f", False), ("m", True), ("f", True)]
            assert [italian.adjective(forms[0], gender, plural) for gender, plural in wanted] == forms


def test_possessives() -> None:
    def both(noun: str, det: str, plural: bool = False, adjective: str = "") -> str:
        described = lexicon.BY_NAME[adjective] if adjective else None
        return render(syntax.np(nouns.BY_NAME[noun], det, plural, described).phrase)[1]

    assert both("cat", "my") == "Il mio gatto"
    assert both("mother", "my") == "Mia madre"
    assert both("mother", "their") == "La loro madre"
    assert both("brother", "your", plural=True) == "I tuoi fratelli"
    assert both("brother", "my", adjective="old") == "Il mio vecchio fratello"
    assert both("aunt", "our") == "Nostra zia"
    assert both("shoe", "her", plural=True) == "Le sue scarpe"
    assert both("egg", "his", plural=True) == "Le sue uova"


def test_italian_conjugation() -> None:
    present = {
        "mangiare": "mangio mangi mangia mangiamo mangiate mangiano",
        "cercare": "cerco cerchi cerca cerchiamo cercate cercano",
        "studiare": "studio studi studia studiamo studiate studiano",
        "leggere": "leggo leggi legge leggiamo leggete leggono",
        "dormire": "dormo dormi dorme dormiamo dormite dormono",
        "scegliere": "scelgo scegli sceglie scegliamo scegliete scelgono",
        "andare": "vado vai va andiamo andate vanno",
    }
    for infinitive, forms in present.items():
        assert italian.present(infinitive) == tuple(forms.split())
    assert italian.present("pulire", isc=True) == tuple("pulisco pulisci pulisce puliamo pulite puliscono".split())
    table = """
    mangiare mangerò|cercare cercherò|studiare studierò|vedere vedrò|bere berrò|andare andrò|venire verrò
    cominciare comincerò|dormire dormirò|dare darò
    """
    first = dict(row.split() for row in table.strip().replace("\n", "|").split("|"))
    assert {infinitive: italian.future(infinitive)[0] for infinitive in first} == first
    assert italian.imperfect("essere") == tuple("ero eri era eravamo eravate erano".split())
    assert italian.imperfect("fare")[2] == "faceva"
    gerunds = [italian.gerund(v) for v in ("mangiare", "bere", "fare", "dormire")]
    assert gerunds == ["mangiando", "bevendo", "facendo", "dormendo"]
    imperatives = [italian.imperative(v) for v in ("aprire", "mangiare", "leggere", "dare")]
    assert imperatives == ["apri", "mangia", "leggi", "dai"]


def test_participles() -> None:
    table = """read letto|write scritto|open aperto|close chiuso|see visto|lose perso|break rotto|take preso
    choose scelto|hide nascosto|push spinto|drink bevuto|paint dipinto
    cry pianto|laugh riso|smile sorriso|run corso|sleep dormito"""
    for row in table.replace("\n", "|").split("|"):
        lemma, form = row.split()
        assert verbs.BY_LEMMA[lemma].participle == form
    essere = [v.lemma for v in (*verbs.MOVING, *verbs.LEAVING, *verbs.REFLEXIVE, verbs.STAY, verbs.FALL) if v.essere]
    assert len(essere) == len(verbs.MOVING) - 1 + len(verbs.LEAVING) + len(verbs.REFLEXIVE) + 2


def test_english_morphology() -> None:
    assert [english.third(v) for v in ("watch", "carry", "play", "go", "have", "push")] == (
        ["watches", "carries", "plays", "goes", "has", "pushes"]
    )
    assert [english.ing(v) for v in ("run", "write", "see", "forget", "travel", "open", "eat", "lie")] == (
        ["running", "writing", "seeing", "forgetting", "travelling", "opening", "eating", "lying"]
    )
    assert [english.ordinal(n) for n in (1, 2, 3, 5, 8, 9, 12, 20, 21, 30)] == (
        "first second third fifth eighth ninth twelfth twentieth twenty-first thirtieth".split()
    )
    for phrase in "an apple|a university|an hour|a useful|an umbrella|an honest|a book".split("|"):
        article, word = phrase.split()
        assert english.settle([("@a", ()), (word, ())])[0][0] == article


def test_numbers() -> None:
    table = {
        3: "three tre", 16: "sixteen sedici", 17: "seventeen diciassette", 21: "twenty-one ventuno",
        23: "twenty-three ventitré", 28: "twenty-eight ventotto", 40: "forty quaranta", 67: "sixty-seven sessantasette",
        98: "ninety-eight novantotto",
    }  # fmt: skip
    for n, both in table.items():
        assert f"{english.cardinal(n)} {italian.cardinal(n)}" == both
    assert (english.cardinal(700), italian.cardinal(700)) == ("seven hundred", "settecento")
    assert (english.cardinal(1000), italian.cardinal(1000)) == ("one thousand", "mille")
