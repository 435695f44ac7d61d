"""The nouns: English, Italian, gender, and classes that say what a sentence may sensibly do with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from demo_corpus import english, italian


@dataclass(frozen=True, slots=True, eq=False)
class Noun:
    """A noun of both languages with its plurals; `classes` hold the meaning, `woman` the form for a woman."""

    en: str
    en_plural: str
    it: str
    it_plural: str
    gender: str
    plural_gender: str
    classes: frozenset[str]
    woman: str = ""

    def form(self, plural: bool) -> str:
        return self.it_plural if plural else self.it

    def agreement(self, plural: bool) -> str:
        return (self.plural_gender if plural else self.gender) + ("p" if plural else "s")


def _nouns(classes: str, table: str) -> tuple[Noun, ...]:
    """Lines of `english[/plural] italian[/plural] gender [class …]`; the gender mf is m, in the plural f."""
    out = []
    for line in table.strip().splitlines():
        en, it, gender, *more = line.split()
        single, _, plural = en.replace("_", " ").partition("/")
        uno, _, due = it.partition("/")
        woman = [m[6:] for m in more if m.startswith("woman=")]
        out.append(
            Noun(
                en=single,
                en_plural=plural or english.plural(single),
                it=uno,
                it_plural=due or italian.plural_noun(uno, gender),
                gender=gender[0],
                plural_gender=gender[-1],
                classes=frozenset(classes.split()) | {m for m in more if not m.startswith("woman=")},
                woman=woman[0] if woman else "",
            )
        )
    return tuple(out)


PEOPLE = _nouns(
    "person",
    """
boy ragazzo m
girl ragazza f
man/men uomo/uomini m adult
woman/women donna f adult
child/children bambino m
friend amico/amici m adult
neighbour vicino m adult
guest ospite m adult
student studente m adult job woman=studentessa
teacher insegnante m adult job woman=insegnante
doctor dottore m adult job woman=dottoressa
nurse infermiere m adult job woman=infermiera
singer cantante m adult job woman=cantante
writer scrittore m adult job woman=scrittrice
painter pittore m adult job woman=pittrice
chef cuoco m adult job woman=cuoca
journalist giornalista m adult job woman=giornalista
dentist dentista m adult job woman=dentista
waiter cameriere m adult job
waitress cameriera f adult job woman=cameriera
actor attore m adult job
actress attrice f adult job woman=attrice
farmer contadino m adult job woman=contadina
lawyer avvocato m adult job woman=avvocata
baker panettiere m adult job woman=panettiera
tourist turista m adult
king re/re m adult
queen regina f adult
princess principessa f adult
gentleman/gentlemen signore m adult
lady signora f adult
""",
)

KIN = _nouns(
    "person kin",
    """
mother madre f adult
father padre m adult
brother fratello m adult
sister sorella f adult
son figlio m
daughter figlia f
grandfather nonno m adult
grandmother nonna f adult
uncle zio/zii m adult
aunt zia f adult
cousin cugino m adult
husband marito m adult
wife/wives moglie/mogli f adult
""",
)

ANIMALS = _nouns(
    "animal",
    """
cat gatto m pet
dog cane m pet
kitten gattino m pet
puppy cucciolo m pet
rabbit coniglio m pet
parrot pappagallo m pet
turtle tartaruga f pet
horse cavallo m
bird uccello m
mouse/mice topo m
cow mucca f
hen gallina f
duck anatra f
lion leone m
tiger tigre f
elephant elefante m
bear orso m
wolf/wolves lupo m
fox volpe f
monkey scimmia f
frog rana f
snake serpente m
squirrel scoiattolo m
""",
)

FOOD = (
    _nouns(
        "food count",
        """
apple mela f fruit
pear pera f fruit
orange arancia f fruit
strawberry fragola f fruit
cherry ciliegia/ciliegie f fruit
peach pesca f fruit
lemon limone m
egg uovo/uova mf cooked
potato/potatoes patata f cooked
tomato/tomatoes pomodoro m
carrot carota f
onion cipolla f
sandwich panino m ready
pizza pizza f cooked ready
cake torta f cooked ready
biscuit biscotto m
""",
    )
    + _nouns(
        "food mass",
        """
bread pane m
cheese formaggio m
meat carne f cooked ready
fish pesce m cooked ready
rice riso m cooked
pasta pasta f cooked ready
soup zuppa f cooked ready
salad insalata f ready
honey miele m
chocolate cioccolato m
""",
    )
    + _nouns(
        "drink mass",
        """
water acqua f
milk latte m
coffee caffè m hot ready
tea tè m hot ready
wine vino m
beer birra f
""",
    )
)

READING = _nouns(
    "thing text small printed",
    """
book libro m
newspaper giornale m
magazine rivista f
novel romanzo m
""",
) + _nouns("thing text", "letter lettera f small\npoem poesia f\nstory storia f")

FURNITURE = (
    _nouns(
        "thing furniture",
        """
table tavolo m surface
chair sedia f surface
bed letto m surface
sofa divano m surface
desk scrivania f surface
carpet tappeto m surface
lamp lampada f fragile
mirror specchio m fragile
picture quadro m
clock orologio m device
wardrobe armadio m
""",
    )
    + _nouns("thing opening", "door porta f\nwindow finestra f fragile\ndrawer cassetto m holder")
    + _nouns(
        "thing tableware small",
        """
glass bicchiere m fragile
cup tazza f fragile
plate piatto m fragile
bottle bottiglia f fragile
fork forchetta f
spoon cucchiaio/cucchiai m
knife/knives coltello m
""",
    )
)

CLOTHES = _nouns(
    "thing clothes small",
    """
shirt camicia/camicie f
dress vestito m
hat cappello m
coat cappotto m
jacket giacca f
sweater maglione m
skirt gonna f
scarf/scarves sciarpa f
tie cravatta f
shoe scarpa f pair
boot stivale m pair
glove guanto m pair
""",
)

THINGS = (
    _nouns(
        "thing small",
        """
key chiave f
pen penna f tool
pencil matita f tool
notebook quaderno m
ticket biglietto m
gift regalo m
toy giocattolo m
ball palla f
doll bambola f
ring anello m
coin moneta f
photo foto/foto f
umbrella ombrello m tool
box scatola f holder opening
bag borsa f holder opening
backpack zaino m holder opening
suitcase valigia/valigie f holder opening
""",
    )
    + _nouns(
        "thing device",
        """
computer computer m tool
telephone telefono m tool
radio radio/radio f
television televisione f unique
""",
    )
    + _nouns(
        "thing vehicle device",
        """
car macchina f drive
bicycle bicicletta f
""",
    )
    + _nouns("thing vehicle transit", "bus autobus m drive\ntrain treno m\nship nave f")
    + _nouns("thing vehicle", "boat barca f\ntaxi taxi m drive")
    + _nouns(
        "thing instrument", "guitar chitarra f\npiano pianoforte m\nviolin violino m\ntrumpet tromba f\nflute flauto m"
    )
    + _nouns("thing plant", "flower fiore m small\nrose rosa f small\ntree albero m\nplant pianta f")
    + _nouns("media", "film film m watch\nsong canzone f listen\nconcert concerto m watch")
)

# The class a, in or bare is the Italian of "at the" and "to the": al mercato, in banca, a teatro.
PLACES = _nouns(
    "place",
    """
station stazione f a
airport aeroporto m a
hospital ospedale m a
university università f a
market mercato m a shop
museum museo m a sight
restaurant ristorante m a shop
hotel albergo m
supermarket supermercato m a shop
cinema cinema/cinema m a
theatre teatro m bare
park parco m a sight
stadium stadio m a
zoo zoo/zoo m a sight
castle castello m a sight
lake lago m a sight
river fiume m a sight
bank banca f in shop
library biblioteca f in shop
office ufficio m in
church chiesa f in sight
pharmacy farmacia/farmacie f in shop
square piazza f in sight
beach spiaggia f in
shop negozio m shop
bridge ponte m sight
house casa f
school scuola f
city città f sight
village villaggio m sight
island isola f sight
""",
)

ROOMS = _nouns("room", "kitchen cucina f\nbathroom bagno m\nroom stanza f\nbedroom camera f") + _nouns(
    "garden", "garden giardino m"
)

NOUNS = PEOPLE + KIN + ANIMALS + FOOD + READING + FURNITURE + CLOTHES + THINGS + PLACES + ROOMS
BY_NAME: dict[str, Noun] = {n.en: n for n in NOUNS}


@cache
def of(*classes: str) -> tuple[Noun, ...]:
    """The nouns that have any of the classes, or are named, in lexicon order."""
    return tuple(n for n in NOUNS if n.en in classes or not n.classes.isdisjoint(classes))
