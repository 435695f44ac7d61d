"""The verbs: forms of both languages, and the nouns that each may sensibly take as its object."""

from __future__ import annotations

from dataclasses import dataclass

from demo_corpus import english, italian, nouns
from demo_corpus.nouns import Noun


@dataclass(frozen=True, slots=True, eq=False)
class Verb:
    """A verb of both languages, conjugated once; persons run 1s 2s 3s 1p 2p 3p."""

    lemma: str
    en: str
    en_third: str
    en_past: str
    en_ing: str
    particle: str  # "for" in look for
    it: str  # the infinitive, without si
    tail: str  # "le fusa" in fare le fusa
    present: tuple[str, ...]
    imperfect: tuple[str, ...]
    future: tuple[str, ...]
    gerund: str
    participle: str
    imperative: str
    essere: bool
    reflexive: bool
    objects: tuple[Noun, ...]
    flags: frozenset[str]

    def past_is_plain(self) -> bool:
        """Whether the English past differs from the present (not so in: I read the book)."""
        return self.en_past != self.en


def verb(english_forms: str, italian_forms: str, objects: str = "", flags: str = "") -> Verb:
    """A verb from `base[/past] [particle]` and `infinitive[:participle][*] [tail]`; * marks pulire, pulisco.

    Flags: essere (its auxiliary); state (present only); event (past only); brief (no progressive); skill (no can:
    Italian says sapere); animal (animals do it too).
    """
    head, _, particle = english_forms.partition(" ")
    base, _, past = head.partition("/")
    head, _, tail = italian_forms.partition(" ")
    isc = head.endswith("*")
    infinitive, _, part = head.rstrip("*").partition(":")
    reflexive = infinitive.endswith("si")
    plain = infinitive[:-2] + "e" if reflexive else infinitive
    return Verb(
        lemma=f"{base} {particle}".strip(),
        en=base,
        en_third=english.third(base),
        en_past=past or english.past(base),
        en_ing=english.ing(base),
        particle=particle,
        it=plain,
        tail=tail,
        present=italian.present(plain, isc),
        imperfect=italian.imperfect(plain),
        future=italian.future(plain),
        gerund=italian.gerund(plain),
        participle=part or italian.participle(plain),
        imperative=italian.imperative(plain, isc),
        essere="essere" in flags.split() or reflexive,
        reflexive=reflexive,
        objects=nouns.of(*objects.replace(",", " ").split()) if objects else (),
        flags=frozenset(flags.split()),
    )


BE = verb("be/was", "essere:stato")
STAY_ING = verb("stay", "stare", "", "essere")  # the auxiliary of sto leggendo
HAVE = verb("have/had", "avere", "", "state")

TRANSITIVE: tuple[Verb, ...] = (
    verb("eat/ate", "mangiare", "food", "animal"),
    verb("drink/drank", "bere:bevuto", "drink"),
    verb("cook", "cucinare", "cooked", "skill"),
    verb("prepare", "preparare", "ready hot"),
    verb("order", "ordinare", "ready drink"),
    verb(
        "buy/bought",
        "comprare",
        "food drink printed clothes furniture device instrument plant car boat umbrella ring toy ball doll bag "
        "backpack suitcase pen pencil notebook ticket",
    ),
    verb("sell/sold", "vendere", "food drink printed clothes furniture device instrument car boat ring toy"),
    verb("read/read", "leggere:letto", "text", "skill"),
    verb("write/wrote", "scrivere:scritto", "letter poem story novel book", "skill"),
    verb("open/opened", "aprire:aperto", "opening bottle letter umbrella"),
    verb("close", "chiudere:chiuso", "opening bottle umbrella book"),
    verb("clean", "pulire*", "furniture tableware room house car window shoe"),
    verb("wash", "lavare", "clothes tableware fruit car dog"),
    verb("see/saw", "vedere:visto", "person animal place thing media", "brief animal"),
    verb("look for", "cercare", "person pet small clothes station hospital bank pharmacy hotel", "animal"),
    verb("find/found", "trovare", "pet small clothes", "animal event"),
    verb("lose/lost", "perdere:perso", "small clothes", "event"),
    verb("break/broke", "rompere:rotto", "fragile toy umbrella chair radio", "event"),
    verb("repair", "riparare", "device chair table toy umbrella boat", "skill"),
    verb("carry", "portare", "holder chair lamp plant mirror picture"),
    verb("draw/drew", "disegnare", "animal plant house castle bridge boat", "skill"),
    verb("paint/painted", "dipingere:dipinto", "picture door chair boat house", "skill"),
    verb("play", "suonare", "instrument", "skill"),
    verb("watch", "guardare", "watch bird horse television"),
    verb("listen to", "ascoltare", "person radio song concert story"),
    verb("call", "chiamare", "person dog taxi cat"),
    verb("help", "aiutare", "person"),
    verb("meet/met", "incontrare", "person", "brief"),
    verb("visit", "visitare", "sight"),
    verb("thank", "ringraziare", "person", "brief"),
    verb("greet", "salutare", "person", "brief"),
    verb("invite", "invitare", "person", "brief"),
    verb("wait for", "aspettare", "person transit taxi"),
    verb(
        "forget/forgot", "dimenticare", "key ticket umbrella bag book suitcase gift notebook telephone scarf", "event"
    ),
    verb("use", "usare", "tool car bicycle knife spoon fork"),
    verb("choose/chose", "scegliere:scelto", "fruit ready clothes printed poem gift film song ring toy"),
    verb(
        "take/took",
        "prendere:preso",
        "umbrella key bag book ticket pen pencil backpack suitcase coat jacket fruit train bus taxi magazine",
    ),
    verb("wear/wore", "indossare", "clothes", "brief"),
    verb("drive/drove", "guidare", "drive", "skill"),
    verb("hide/hid", "nascondere:nascosto", "small key gift letter", "animal"),
    verb("follow", "seguire", "person animal", "animal"),
    verb("love", "amare", "person pet", "state"),
    verb("hate", "odiare", "cat dog mouse snake television radio tie", "state"),
    verb("know/knew", "conoscere:conosciuto", "person", "state"),
    verb("want", "volere", "food drink text small clothes device instrument pet", "state"),
    verb("sing/sang", "cantare", "song", "skill"),
    verb("photograph", "fotografare", "animal plant sight person"),
    verb("admire", "ammirare", "picture painter writer singer flower castle church", "state"),
    verb("cut/cut", "tagliare", "bread cheese meat cake apple pear pizza flower tomato onion"),
    verb("taste", "assaggiare", "ready wine fruit cheese honey chocolate"),
    verb("push", "spingere:spinto", "car bicycle door table sofa"),
    verb("touch", "toccare", "pet horse cow plant picture mirror door lamp piano"),
    verb("receive", "ricevere", "letter gift photo book ring flower", "event"),
)

INTRANSITIVE: tuple[Verb, ...] = (
    verb("sleep/slept", "dormire", "", "animal"),
    verb("eat/ate", "mangiare", "", "animal"),
    verb("run/ran", "correre:corso", "", "animal"),
    verb("walk", "camminare", "", "animal"),
    verb("swim/swam", "nuotare", "", "animal skill"),
    verb("work", "lavorare"),
    verb("study/studied", "studiare"),
    verb("smile", "sorridere:sorriso"),
    verb("laugh/laughed", "ridere:riso"),
    verb("cry", "piangere:pianto"),
    verb("sing/sang", "cantare", "", "skill"),
    verb("dance", "ballare", "", "skill"),
    verb("cook", "cucinare", "", "skill"),
    verb("read/read", "leggere:letto", "", "skill"),
    verb("write/wrote", "scrivere:scritto", "", "skill"),
    verb("play", "giocare", "", "animal"),
    verb("wait", "aspettare", "", "animal"),
    verb("travel/travelled", "viaggiare"),
    verb("rest/rested", "riposare", "", "animal"),
    verb("shout/shouted", "gridare"),
)
MOVING: tuple[Verb, ...] = (
    verb("go/went", "andare", "", "essere"),
    verb("come/came", "venire:venuto", "", "essere"),
    verb("return", "tornare", "", "essere"),
    verb("run/ran", "correre:corso", "", ""),
)
LEAVING: tuple[Verb, ...] = (
    verb("arrive", "arrivare", "", "essere"),
    verb("leave/left", "partire", "", "essere"),
)
REFLEXIVE: tuple[Verb, ...] = (
    verb("wake/woke up", "svegliarsi", "", "animal"),
    verb("get/got up", "alzarsi", "", ""),
    verb("get/got dressed", "vestirsi", "", ""),
    verb("fall/fell asleep", "addormentarsi", "", "animal"),
)
GIVING: tuple[Verb, ...] = (
    verb(
        "give/gave",
        "dare",
        "printed letter key pen pencil notebook ticket gift toy ball doll ring coin photo umbrella box bag fruit "
        "flower rose",
    ),
    verb("show/showed", "mostrare", "printed letter photo picture ring gift ticket house garden"),
    verb(
        "bring/brought",
        "portare",
        "printed letter key pen ticket gift toy photo umbrella box bag suitcase fruit plant ready glass plate",
    ),
    verb("send/sent", "mandare", "letter photo gift book magazine box ticket"),
    verb("sell/sold", "vendere", "printed furniture device instrument ring boat"),
    verb("lend/lent", "prestare", "book pen pencil umbrella bicycle car suitcase novel magazine coat"),
    verb("offer/offered", "offrire:offerto", "coffee tea wine cake biscuit gift chair fruit"),
)
LIVE = verb("live", "abitare", "", "state")
STAY = verb("stay", "restare", "", "essere animal")
SPEAK = verb("speak/spoke", "parlare", "", "skill")
STUDY = verb("study/studied", "studiare", "", "skill")
SAY = verb("say/said", "dire:detto", "", "state")
KNOW = verb("know/knew", "sapere", "", "state")
COST = verb("cost/cost", "costare", "", "state")
PURR = verb("purr", "fare:fatto le fusa")
BARK = verb("bark", "abbaiare")
FALL = verb("fall/fell", "cadere", "", "essere")
BREAK = verb("break/broke", "rompersi:rotto")
OPEN = verb("open/opened", "aprire:aperto")
CLOSE = verb("close", "chiudere:chiuso")
BEGIN = verb("begin/began", "cominciare", "", "essere")
CAN = verb("can/could", "potere", "", "state")
MUST = verb("must", "dovere", "", "state")
WANT = verb("want", "volere", "", "state")
NEED = verb(
    "need",
    "avere bisogno di",
    "tool holder clothes device knife spoon key ticket notebook table chair bed lamp doctor lawyer friend drink bread",
    "state",
)
LIKE = verb("like", "piacere:piaciuto", "", "state")
BY_LEMMA: dict[str, Verb] = {v.lemma: v for v in (*TRANSITIVE, *INTRANSITIVE)}
"""Verbs by name; of play and the like the one without an object."""


def transitive(lemmas: str) -> tuple[Verb, ...]:
    """The transitive verbs named, in lexicon order; the names are separated by commas."""
    names = [name.strip() for name in lemmas.split(",")]
    return tuple(v for v in TRANSITIVE if v.lemma in names)
