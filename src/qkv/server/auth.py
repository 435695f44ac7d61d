"""Who may ask, and how often: API keys, of which only hashes are kept, and a bucket of requests for each client."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from qkv.core.errors import UsageError

LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})(?:\s+(\d+))?")
CLIENTS = 10_000  # remembered; the one not seen for longest is forgotten first


@dataclass(frozen=True)
class Key:
    """A client with a key; `rate` is how many requests a minute it may send, 0 as many as it likes."""

    name: str
    rate: int | None = None


def new_key(name: str = "client") -> tuple[str, str]:
    """A new key, and the line of the key file that lets it in."""
    key = secrets.token_urlsafe(32)
    return key, f"{name} {digest(key)}"


def digest(key: str) -> str:
    """Keys are long and random, so a plain hash gives nothing away."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> dict[str, Key]:
    """The clients of a key file by the hash of their key; a line is `name hash [requests a minute]`, or a # comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the key file cannot be read: {error}") from None
    found: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        if (match := LINE.fullmatch(text)) is None:
            raise UsageError(
                f"{path}, line {number}: not `name hash [requests a minute]`: qkv serve --new-key makes one"
            )
        found[match[2]] = Key(match[1], int(match[3]) if match[3] else None)
    if not found:
        raise UsageError(f"{path}: no key in it, so nobody could ask: add a line that qkv serve --new-key makes")
    return found


def find_key(keys: Mapping[str, Key], given: str) -> Key | None:
    """The client of a key; hashes are compared, so the time it takes tells nothing about keys."""
    return keys.get(digest(given)) if given else None


class Rates:
    """A bucket for each client, which fills up to a minute's worth of requests."""

    def __init__(self) -> None:
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was so

    def wait(self, client: str, rate: int, now: float | None = None) -> float:
        """Take one request from the client's bucket: 0 if there was one, or the seconds until there will be."""
        now = time.monotonic() if now is None else now
        left, at = self.buckets.pop(client, (float(rate), now))
        left = min(float(rate), left + (now - at) * rate / 60)
        allowed = left >= 1
        self.buckets[client] = (left - 1 if allowed else left, now)
        if len(self.buckets) > CLIENTS:
            self.buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / rate
