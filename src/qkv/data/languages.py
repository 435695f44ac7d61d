"""Which languages a corpus is in, where the names of its files tell."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from qkv.data.corpus import PACKED
from qkv.options import DataConfig

# ISO 639-1, and of ISO 639-2 what is one language and no family; each as it is written, by either of its codes.
CODES = frozenset(
    """
    aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo
    es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg
    ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn
    no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta
    te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu

    aar abk ace ach ada ady afh afr ain aka akk alb ale alt amh ang anp ara arc arg arm arn arp arw asm ast ava ave awa
    aym aze bak bal bam ban baq bas bej bel bem ben bho bik bin bis bla bod bos bra bre bua bug bul bur byn cad car cat
    ceb ces cha chb che chg chi chk chm chn cho chp chr chu chv chy cnr cop cor cos cre crh csb cym cze dak dan dar del
    den deu dgr din div doi dsb dua dum dut dyu dzo efi egy eka ell elx eng enm epo est eus ewe ewo fan fao fas fat fij
    fil fin fon fra fre frm fro frr frs fry ful fur gaa gay gba geo ger gez gil gla gle glg glv gmh goh gon gor got grb
    grc gre grn gsw guj gwi hai hat hau haw heb her hil hin hit hmn hmo hrv hsb hun hup hye iba ibo ice ido iii iku ile
    ilo ina ind inh ipk isl ita jav jbo jpn jpr jrb kaa kab kac kal kam kan kas kat kau kaw kaz kbd kha khm kho kik kin
    kir kmb kok kom kon kor kos kpe krc krl kru kua kum kur kut lad lah lam lao lat lav lez lim lin lit lol loz ltz lua
    lub lug lui lun luo lus mac mad mag mah mai mak mal man mao mar mas may mdf mdr men mga mic min mkd mlg mlt mnc mni
    moh mon mos mri msa mus mwl mwr mya myv nap nau nav nbl nde ndo nds nep new nia niu nld nno nob nog non nor nqo nso
    nwc nya nym nyn nyo nzi oci oji ori orm osa oss ota pag pal pam pan pap pau peo per phn pli pol pon por pro pus que
    raj rap rar roh rom ron rum run rup rus sad sag sah sam san sas sat scn sco sel sga shn sid sin slk slo slv sma sme
    smj smn smo sms sna snd snk sog som sot spa sqi srd srn srp srr ssw suk sun sus sux swa swe syc syr tah tam tat tel
    tem ter tet tgk tgl tha tib tig tir tiv tkl tlh tli tmh tog ton tpi tsi tsn tso tuk tum tur tvl twi tyv udm uga uig
    ukr umb urd uzb vai ven vie vol vot wal war was wel wln wol xal xho yao yap yid yor zap zbl zen zgh zha zho zul zun
    zza
    """.split()
)


def languages(data: DataConfig) -> DataConfig:
    """The same text with its languages, where they are not given and `train.en` and `train.de` tell them.

    A corpus tells if both its files end with a code, and not with the same one; others have no say. What the corpora
    do not agree on stays open.
    """
    pairs = [(_ending(corpus.src), _ending(corpus.tgt)) for corpus in (*data.train, *data.valid)]
    told = [(src, tgt) for src, tgt in pairs if {src, tgt} <= CODES and src != tgt]
    if not told:
        return data
    src_lang, tgt_lang = (side.pop() if len(side) == 1 else "" for side in map(set, zip(*told, strict=True)))
    return dataclasses.replace(data, src_lang=data.src_lang or src_lang, tgt_lang=data.tgt_lang or tgt_lang)


def _ending(name: str) -> str:
    """What the name of a file ends with, whatever it is packed in: en of `train.en.xz`."""
    return next((end[1:] for end in reversed(Path(name).suffixes) if end not in (*PACKED, ".txt")), "")
