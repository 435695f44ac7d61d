"""API keys, stored as hashes, and a rate limit for each client."""

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
MAX_CLIENTS = 10_000  # token buckets in memory; the least recently used one is dropped first


@dataclass(frozen=True)
class ApiKey:
    """A client with a key; `rate` is its limit in requests per minute (0: none, None: the server's default)."""

    name: str
    rate: int | None = None


def new_key(name: str = "client") -> tuple[str, str]:
    """Return a new random key and its line for the key file."""
    key = secrets.token_urlsafe(32)
    return key, f"{name} {hash_key(key)}"


def hash_key(key: str) -> str:
    """Hash a key; keys are long and random, so a plain SHA-256 cannot be inverted."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Read a key file into clients by key hash; each line is `name hash [requests per minute]` or a # comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the key file cannot be read: {error}: check --keys") from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        if (match := LINE.fullmatch(text)) is None:
            raise UsageError(
                f"{path}, line {number}: expected `name hash [requests a minute]`: qkv serve --new-key prints one"
            )
        keys[match[2]] = ApiKey(match[1], int(match[3]) if match[3] else None)
    if not keys:
        raise UsageError(f"{path}: no key, so every request would be refused: add a line from qkv serve --new-key")
    return keys


def find_key(keys: Mapping[str, ApiKey], given: str) -> ApiKey | None:
    """Return the client of a key; comparing hashes reveals nothing about the keys by timing."""
    return keys.get(hash_key(given)) if given else None


class RateLimiter:
    """A token bucket for each client; a full bucket allows a minute's worth of requests."""

    def __init__(self) -> None:
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and at which time

    def take(self, client: str, rate: int, now: float | None = None) -> float:
        """Take one request from the client's bucket; returns 0, or the seconds until the next one is allowed."""
        now = time.monotonic() if now is None else now
        left, at = self.buckets.pop(client, (float(rate), now))
        left = min(float(rate), left + (now - at) * rate / 60)
        allowed = left >= 1
        self.buckets[client] = (left - 1 if allowed else left, now)
        if len(self.buckets) > MAX_CLIENTS:
            self.buckets.popitem(last=False)
        return 0.0 if allowed else (1 - left) * 60 / rate
