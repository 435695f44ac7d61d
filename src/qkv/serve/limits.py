"""What a request may ask for, and how one that is refused is told so."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import TracebackType

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


class Wait:
    """What is waited for inside ends with a refusal after so many seconds, or when somebody calls `end`."""

    def __init__(self, seconds: float, status: int, why: str) -> None:
        self.seconds, self.status, self.why = seconds, status, why  # {} in `why` is where the seconds are told
        self.refusal: Refusal | None = None

    def __enter__(self) -> Wait:
        task = asyncio.current_task()
        assert task is not None
        self.task: asyncio.Task[object] | None = task
        self.clock = task.get_loop().call_later(self.seconds, self.end, self.status, self.why)
        return self

    def end(self, status: int, why: str) -> None:
        if self.task is not None and self.refusal is None:
            self.refusal = Refusal(status, why.format(self.seconds))
            self.task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clock.cancel()
        task, self.task = self.task, None
        if self.refusal is not None and task is not None and kind is asyncio.CancelledError:
            task.uncancel()
            raise self.refusal from None


def too_many(what: str, count: int, limit: int, pointer: str = "") -> None:
    """Refuse with 413 what is larger than a limit."""
    if count > limit:
        raise Refusal(413, f"{count:,} {what}, and at most {limit:,} are taken: send less at once", pointer=pointer)
