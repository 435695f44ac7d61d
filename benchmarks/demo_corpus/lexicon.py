"""The other words: adjectives, names, cities, days, adverbs."""

from __future__ import annotations

from dataclasses import dataclass

from demo_corpus import nouns
from demo_corpus.italian import adjective
from demo_corpus.nouns import Noun


@dataclass(frozen=True, slots=True, eq=False)
class Adjective:
    """An adjective of both languages; `first` ones precede the Italian noun (un piccolo gatto)."""

    en: str
    it: str
    comparative: str  # "taller"; empty: more
    first: bool
    classes: frozenset[str]

    def form(self, gender: str, plural: bool) -> str:
        return adjective(self.it, gender, plural)

    def fits(self, noun: Noun) -> bool:
        return noun.en in self.classes or not noun.classes.isdisjoint(self.classes)


def _adjectives(table: str) -> tuple[Adjective, ...]:
    """Lines of `english[/comparative] italian[+] class …`; + marks an adjective that goes before its noun."""
    out = []
    for line in table.strip().splitlines():
        en, it, *classes = line.split()
        base, _, comparative = en.partition("/")
        out.append(Adjective(base, it.rstrip("+"), comparative, it.endswith("+"), frozenset(classes)))
    return tuple(out)


ADJECTIVES = _adjectives(
    """
happy/happier felice person pet
sad/sadder triste person song story film poem
tired stanco person horse dog
tall/taller alto person tree bridge
short/shorter basso person
young/younger giovane+ adult lion tiger bear wolf fox elephant monkey horse cat dog
old/older vecchio+ adult horse cat dog turtle elephant lion bear furniture clothes device vehicle instrument castle
rich/richer ricco adult city
poor/poorer povero farmer painter writer village
kind/kinder gentile person
nice/nicer simpatico person
funny/funnier divertente person story film monkey parrot
intelligent intelligente person dog horse monkey parrot
lovely adorabile boy girl child woman friend lady kin pet squirrel fox duck bird monkey mouse dress photo
strong/stronger forte person horse bear lion tiger elephant
weak/weaker debole person
brave/braver coraggioso person lion
lazy/lazier pigro person cat dog
shy/shyer timido person pet bird squirrel fox mouse horse
famous famoso singer writer actor actress painter book film song museum castle city novel
angry/angrier arrabbiato person dog
worried preoccupato person
calm/calmer calmo person pet horse
serious serio person
generous generoso person
honest onesto person
curious curioso person pet monkey squirrel fox
elegant elegante person clothes hotel restaurant
ill malato person pet horse
nervous nervoso person pet horse
thin/thinner magro person cat dog horse cow wolf kitten puppy fox monkey
fat/fatter grasso cat dog kitten mouse hen duck cow bear rabbit squirrel
fast/faster veloce horse dog rabbit train car bicycle boat ship
slow/slower lento turtle train bus boat
wild selvatico horse cat duck
dangerous pericoloso lion tiger bear wolf snake bridge
beautiful bello+ girl woman lady actress princess animal garden clothes plant instrument picture photo place song film
ugly/uglier brutto+ clothes furniture picture photo house
big/bigger grande+ animal furniture holder house place room plant garden ship boat
small/smaller piccolo+ animal furniture holder house place room plant garden boat key radio spoon
new/newer nuovo text furniture clothes device vehicle instrument toy bag suitcase backpack house pen umbrella
expensive costoso clothes furniture device instrument ring restaurant hotel bag suitcase
cheap/cheaper economico clothes furniture restaurant hotel bag umbrella
clean/cleaner pulito clothes tableware room house bed car window table
dirty/dirtier sporco clothes tableware room house car window table chair
full/fuller pieno glass cup bottle holder restaurant bus train theatre
empty/emptier vuoto glass cup bottle holder restaurant bus train theatre house room
heavy/heavier pesante holder furniture coat
fragile fragile fragile
broken rotto fragile device toy umbrella chair
interesting interessante text film museum story city
boring noioso text film concert
important importante letter book city bank
long/longer lungo letter novel story poem film song concert bridge river skirt scarf dress coat
difficult difficile book poem song
strange/stranger strano person animal story film song letter dress house picture
quiet/quieter tranquillo person square island beach lake garden park village library hotel room house
noisy/noisier rumoroso restaurant market station school television room child
comfortable comodo chair bed sofa shoe hotel car boot
modern moderno furniture house school hospital station airport museum library
warm/warmer caldo sweater coat scarf jacket
cold/colder freddo soup pasta pizza drink meat
hot/hotter caldo soup hot
fresh/fresher fresco bread fish milk egg fruit salad tomato carrot
delicious delizioso wine fruit ready bread cheese honey chocolate biscuit
good/better buono+ wine beer fruit ready bread cheese honey chocolate biscuit book film novel restaurant
sweet/sweeter dolce fruit cake wine tea
wonderful meraviglioso sight beach theatre restaurant song film book story gift garden concert novel
useful utile book tool knife bag gift notebook
red rosso colour apple flower rose
black nero colour animal-colour
white bianco colour animal-colour flower rose
green verde colour apple pear
yellow giallo colour flower rose apple
blue blu colour flower
grey grigio colour animal-colour
brown marrone colour
pink rosa colour flower
purple viola clothes bag scarf flower
"""
)
_COLOURED = nouns.of("clothes", "car", "bicycle", "chair", "sofa", "carpet", "lamp", "cup", "plate", "box",
                     "bag", "backpack", "suitcase", "pen", "pencil", "umbrella", "ball", "door")  # fmt: skip
_FURRY = nouns.of("cat", "dog", "kitten", "rabbit", "horse", "bird", "mouse", "hen", "duck", "puppy")
BY_NAME = {a.en: a for a in ADJECTIVES}


def _suits(a: Adjective, noun: Noun) -> bool:
    if "colour" in a.classes and noun in _COLOURED:
        return True
    return a.fits(noun) or ("animal-colour" in a.classes and noun in _FURRY)


FITTING: dict[str, tuple[Adjective, ...]] = {n.en: tuple(a for a in ADJECTIVES if _suits(a, n)) for n in nouns.NOUNS}
"""For each noun, by its English name, the adjectives that describe it sensibly."""

_PASSING = "clean dirty broken full empty ill worried nervous calm".split()
ATTRIBUTES: dict[str, tuple[Adjective, ...]] = {
    noun: tuple(a for a in fitting if a.en not in _PASSING) for noun, fitting in FITTING.items()
}
"""The same without passing states, which sound odd beside the noun (she washes the clean spoon)."""

# States of a person that pass, and qualities that stay.
MOODS = tuple(BY_NAME[a] for a in "happy sad tired angry worried calm nervous ill".split())
CHARACTER = tuple(
    BY_NAME[a]
    for a in "tall short young old rich poor kind nice funny intelligent strong weak brave lazy shy serious generous "
    "honest curious elegant thin".split()
)

MEN = tuple("Marco Luca Paolo Pietro Matteo Davide Carlo Antonio Giorgio Franco".split())
WOMEN = tuple("Anna Maria Giulia Sara Elena Laura Chiara Sofia Francesca Paola".split())

CITIES = tuple(
    tuple(line.split())
    for line in "Rome Roma|Milan Milano|Florence Firenze|Venice Venezia|Naples Napoli|Turin Torino|London Londra|"
    "Paris Parigi|Berlin Berlino|Madrid Madrid|Athens Atene|Lisbon Lisbona".split("|")
)
COUNTRIES = tuple(
    tuple(line.split())
    for line in "Italy Italia|France Francia|Spain Spagna|Germany Germania|England Inghilterra|Greece Grecia".split("|")
)
LANGUAGES = tuple(
    tuple(line.split())
    for line in "Italian italiano|French francese|Spanish spagnolo|German tedesco|English inglese|Greek greco".split(
        "|"
    )
)
DAYS = tuple(
    tuple(line.split())
    for line in "Monday lunedì|Tuesday martedì|Wednesday mercoledì|Thursday giovedì|Friday venerdì|Saturday sabato|"
    "Sunday domenica".split("|")
)
MONTHS = tuple(
    tuple(line.split())
    for line in "January gennaio|February febbraio|March marzo|April aprile|May maggio|June giugno|July luglio|"
    "August agosto|September settembre|October ottobre|November novembre|December dicembre".split("|")
)

ABSOLUTE = frozenset("broken wonderful delicious red black white green yellow blue grey brown pink purple".split())
"""What is never very so."""

OPPOSITES = tuple(
    (BY_NAME[a], BY_NAME[b])
    for a, b in (
        p.split()
        for p in "tall short|young old|rich poor|happy sad|strong weak|calm nervous|funny serious|brave shy|"
        "thin strong|kind lazy|intelligent lazy|elegant poor|tired happy|nice shy|worried calm".split("|")
    )
)

ALWAYS = (("always", "sempre"), ("often", "spesso"))
HABIT = (("every day", "ogni giorno"), ("every morning", "ogni mattina"), ("every evening", "ogni sera"))
NOW = (("now", "adesso"), ("today", "oggi"))
PAST_TIMES = (("yesterday", "ieri"), ("this morning", "stamattina"), ("yesterday evening", "ieri sera"))
FUTURE_TIMES = (("tomorrow", "domani"), ("this evening", "stasera"), ("tomorrow morning", "domani mattina"))
NEEDS = (("hungry", "fame"), ("thirsty", "sete"), ("sleepy", "sonno"), ("cold", "freddo"), ("afraid", "paura"))
