"""Zip archives of documents: members are read within limits, and changed members are written between copied bytes.

Only the structure that document formats use is accepted: one disk, members that are stored or deflated, each name once,
no encryption, no overlaps. `ZipPackage.write` copies every unchanged member (header, compressed data, order) from the
input; the header of a changed member keeps its name, date, attributes and compression method.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from qkv.core.errors import UsageError
from qkv.documents.xml_events import XmlPart

MAX_UNPACKED_BYTES = 128 << 20  # of all members that are read, together
MAX_DECLARED_BYTES = 1 << 30  # of all members
MAX_RATIO = 200  # unpacked : packed, for members larger than FREE_BYTES
FREE_BYTES = 64 << 20
MAX_MEMBERS = 10_000
MAX_DIRECTORY_BYTES = 8 << 20
STORED, DEFLATED = 0, 8
ENCRYPTED, SIZES_FOLLOW = 1, 8  # flags of a member
UNKNOWN = 0xFFFFFFFF  # the value is in the Zip64 field
ZIP64_FIELD = 1
LOCAL = struct.Struct("<4s5H3L2H")
CENTRAL = struct.Struct("<4s6H3L5H2L")
END = struct.Struct("<4s4H2LH")
PASSWORD_MAGIC = b"\xd0\xcf\x11\xe0"  # OLE: the old binary formats, and new ones with a password


class DamagedZipError(Exception):
    """The archive breaks a rule of the format; the text says which."""


@dataclass(frozen=True)
class Member:
    """An entry of the central directory, and where its data are."""

    name: str
    fixed: tuple[int | bytes, ...]  # the values of CENTRAL
    tail: tuple[bytes, bytes, bytes]  # name, extra field without Zip64, comment
    flags: int
    method: int
    crc: int
    packed_size: int
    unpacked_size: int
    begin: int  # of the local header
    data_begin: int = 0
    end: int = 0  # of everything before the next member


class ZipPackage:
    """An archive in memory; `kind` names the format in messages, for example "a Word document"."""

    def __init__(self, name: str, data: bytes, kind: str, suffix: str) -> None:
        self.name, self.data, self.kind = name, data, kind
        self.remedy = f"save it as .{suffix} again"
        if data.startswith(PASSWORD_MAGIC):
            raise self.error("has a password or an old binary format", f"save it as .{suffix} without a password")
        if not data.startswith(b"PK\x03\x04"):
            raise self.error(f"not {kind}")
        try:
            self._members = self._read_directory()
        except (DamagedZipError, struct.error) as error:
            raise self.error(f"damaged file ({error})") from None
        self._left = MAX_UNPACKED_BYTES

    def error(self, problem: str, remedy: str = "") -> UsageError:
        return UsageError(f"{self.name}: {problem}: {remedy or self.remedy}")

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, member: str) -> bool:
        return member in self._members

    # ---- reading -----------------------------------------------------------------------------------------------------

    def read(self, member_name: str) -> bytes:
        """Return the unpacked data of a member, within the limits of the whole archive."""
        member = self._members[member_name]
        packed = memoryview(self.data)[member.data_begin : member.data_begin + member.packed_size]
        limit = min(self._left, max(FREE_BYTES, MAX_RATIO * member.packed_size))
        if member.method == STORED:
            unpacked, whole = bytes(packed[: limit + 1]), True
        else:
            decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
            try:
                unpacked = decompressor.decompress(packed, limit + 1)
            except zlib.error:
                raise self.error(f"damaged file ({member_name} cannot be unpacked)") from None
            whole = decompressor.eof
        if len(unpacked) > limit:
            raise self._too_large()
        self._left -= len(unpacked)
        if not whole or len(unpacked) != member.unpacked_size or zlib.crc32(unpacked) != member.crc:
            raise self.error(f"damaged file ({member_name} has a wrong size or checksum)")
        return unpacked

    def xml(self, member_name: str) -> XmlPart:
        return XmlPart(self.name, member_name, self.read(member_name))

    def _too_large(self) -> UsageError:
        return self.error(f"larger than {MAX_UNPACKED_BYTES >> 20} MiB when unpacked", "send it in parts")

    def _read_directory(self) -> dict[str, Member]:
        place = self.data.rfind(b"PK\x05\x06", max(0, len(self.data) - END.size - 0xFFFF))
        if place < 0:
            raise DamagedZipError("its end is missing")
        _, disk, first_disk, _, count, size, begin, comment_size = END.unpack_from(self.data, place)
        if disk or first_disk or place + END.size + comment_size != len(self.data):
            raise DamagedZipError("its end is not the end of one archive")
        if count > MAX_MEMBERS or size > MAX_DIRECTORY_BYTES:
            raise self.error(f"more than {MAX_MEMBERS} files in the archive", "send it in parts")
        if begin + size > place:
            raise DamagedZipError("its directory is not inside the file")
        self._directory, self._comment = begin, self.data[place + END.size :]
        members, at = [], begin
        while at < begin + size:
            member, at = self._read_entry(at)
            members.append(member)
        if at != begin + size or len(members) != count or not members:
            raise DamagedZipError("its directory has another size than it says")
        if sum(member.unpacked_size for member in members) > MAX_DECLARED_BYTES:
            raise self._too_large()
        names = {member.name.casefold() for member in members}
        if len(names) < len(members):
            raise DamagedZipError("a name occurs twice")
        return self._locate(members)

    def _read_entry(self, at: int) -> tuple[Member, int]:
        fixed = CENTRAL.unpack_from(self.data, at)
        flags, method, crc, packed, unpacked, name_size, extra_size, comment_size = (
            *fixed[3:5],
            *fixed[7:13],
        )
        edges = [at + CENTRAL.size]
        for size in (name_size, extra_size, comment_size):
            edges.append(edges[-1] + size)
        if fixed[0] != b"PK\x01\x02" or edges[-1] > len(self.data):
            raise DamagedZipError("its directory cannot be read")
        raw_name, extra, comment = (self.data[a:b] for a, b in pairwise(edges))
        name = raw_name.decode("utf-8", "replace") if flags & 0x800 else raw_name.decode("cp437")
        steps = name.replace("\\", "/").split("/")
        if ".." in steps or not steps[0] or ":" in steps[0] or "\0" in name:
            raise DamagedZipError(f"the name {name!a} points outside the archive")
        if flags & ENCRYPTED:
            raise self.error("encrypted", f"{self.remedy} without a password")
        if method not in (STORED, DEFLATED):
            raise DamagedZipError(f"{name!a} has an unknown compression")
        (unpacked, packed, begin), kept = _zip64_values(extra, [unpacked, packed, fixed[16]])
        tail = (raw_name, kept, comment)
        return Member(name, fixed, tail, flags, method, crc, packed, unpacked, begin), edges[-1]

    def _locate(self, members: list[Member]) -> dict[str, Member]:
        """Check that the members do not overlap and that each local header names the member of the directory."""
        starts = sorted(member.begin for member in members)
        following = dict(zip(starts, [*starts[1:], self._directory], strict=True))
        if starts[0] != 0 or len(following) < len(members):
            raise DamagedZipError("its members overlap")
        located = {}
        for member in members:
            header = LOCAL.unpack_from(self.data, member.begin)
            name_end = member.begin + LOCAL.size + header[9]
            data_begin, end = name_end + header[10], following[member.begin]
            if header[0] != b"PK\x03\x04" or self.data[member.begin + LOCAL.size : name_end] != member.tail[0]:
                raise DamagedZipError(f"{member.name!a} has another name in its own header")
            if header[2] & ENCRYPTED:
                raise self.error("encrypted", f"{self.remedy} without a password")
            if data_begin + member.packed_size > end:
                raise DamagedZipError("its members overlap")
            located[member.name] = Member(**(vars(member) | {"data_begin": data_begin, "end": end}))
        return located

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, changed: Mapping[str, bytes]) -> bytes:
        """Return the archive with other data in some members; without changes, the input itself."""
        if not changed:
            return self.data
        out = bytearray()
        values: dict[str, tuple[int, int, int, int, int]] = {}  # flags, CRC, packed, unpacked, begin
        for member in sorted(self._members.values(), key=lambda each: each.begin):
            begin = len(out)
            if member.name in changed:
                sizes = self._write_member(out, member, changed[member.name])
                values[member.name] = (*sizes, begin)
            else:
                out += memoryview(self.data)[member.begin : member.end]
                values[member.name] = (member.flags, member.crc, member.packed_size, member.unpacked_size, begin)
        directory = len(out)
        for member in self._members.values():
            flags, crc, packed, unpacked, begin = values[member.name]
            fixed = [*member.fixed]
            fixed[3], fixed[7:10], fixed[11], fixed[16] = flags, [crc, packed, unpacked], len(member.tail[1]), begin
            out += CENTRAL.pack(*fixed) + b"".join(member.tail)
        count, size = len(self._members), len(out) - directory
        out += END.pack(b"PK\x05\x06", 0, 0, count, count, size, directory, len(self._comment)) + self._comment
        return bytes(out)

    def _write_member(self, out: bytearray, member: Member, data: bytes) -> tuple[int, int, int, int]:
        header = [*LOCAL.unpack_from(self.data, member.begin)]
        name_end = member.begin + LOCAL.size + header[9]
        name = self.data[member.begin + LOCAL.size : name_end]
        _, extra = _zip64_values(self.data[name_end : member.data_begin], [])
        packed = data
        if member.method == DEFLATED:
            compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
            packed = compressor.compress(data) + compressor.flush()
        flags, crc = member.flags & ~SIZES_FOLLOW, zlib.crc32(data)
        header[2], header[6:9], header[10] = flags, [crc, len(packed), len(data)], len(extra)
        out += LOCAL.pack(*header) + name + extra + packed
        return flags, crc, len(packed), len(data)


def _zip64_values(extra: bytes, values: list[int]) -> tuple[list[int], bytes]:
    """Replace unknown values by those of the Zip64 field; returns them and the extra field without it."""
    kept, at, wide = b"", 0, b""
    while at + 4 <= len(extra):
        identifier, size = struct.unpack_from("<2H", extra, at)
        if identifier == ZIP64_FIELD:
            wide = extra[at + 4 : at + 4 + size]
        else:
            kept += extra[at : at + 4 + size]
        at += 4 + size
    numbers = iter(struct.unpack(f"<{len(wide) // 8}Q", wide[: len(wide) // 8 * 8]))
    known = [next(numbers, UNKNOWN) if value == UNKNOWN else value for value in values]
    if UNKNOWN in known:
        raise DamagedZipError("a size is missing")
    return known, kept + extra[at:]
