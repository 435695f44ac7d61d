"""What a request may ask for, and how one that is refused is told so."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.exceptions import HTTPException


@dataclass(frozen=True)
class Limits:
    """Every bound of the server; what exceeds one is refused, never cut."""

    characters: int = 20_000  # of all texts in a request
    texts: int = 1_000  # in a request
    alternatives: int = 10
    body: int = 1 << 20  # bytes of a request
    file: int = 10 << 20  # bytes of a document
    documents: int = 32  # kept at once
    kept: float = 900.0  # seconds that a finished document waits for its reader
    queue: int = 4096  # sentences that wait
    streams: int = 64  # completions that wait or run
    tokens: int = 2048  # of a completion
    seconds: float = 60.0  # from a request to its answer
    patience: float = 10.0  # seconds for the head of a request, and again for its body
    drain: float = 30.0  # seconds for what was accepted, once the server is told to stop


class Refusal(HTTPException):
    """A request that is not answered as asked: the status, one line of why, and a pointer to the part at fault."""

    def __init__(self, status: int, why: str, *, pointer: str = "", retry_after: float = 0) -> None:
        headers = {"Retry-After": str(max(1, round(retry_after)))} if retry_after or status in (429, 503) else None
        super().__init__(status, why, headers)
        self.pointer = pointer


def too_many(what: str, count: int, limit: int, pointer: str = "") -> None:
    """Refuse with 413 what is larger than a limit."""
    if count > limit:
        raise Refusal(413, f"{count:,} {what}, and at most {limit:,} are taken: send less at once", pointer=pointer)
