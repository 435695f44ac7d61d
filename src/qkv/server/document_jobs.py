"""Documents on the desk: each is read, translated sentence by sentence behind those who ask for less, and kept a while.

Everything is in memory, under names that nobody can guess. What a client calls its document is never a path here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request

from qkv.core.errors import QkvError
from qkv.documents import Document, read_document
from qkv.server.middleware import Refusal
from qkv.server.served_models import Served
from qkv.server.service import Service

CHUNK = 64  # segments in the queue at once: those of others come between
LONGEST = 255  # characters of a name
TRIES = 3


@dataclass(eq=False)
class Paper:
    """One document, from upload to download."""

    id: str
    client: Hashable
    name: str
    total: int = 0
    done: int = 0
    state: str = "running"  # running, done or failed
    error: str = ""
    result: bytes = b""
    media_type: str = "application/octet-stream"
    fetched: bool = False
    until: float = 0.0
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def told(self) -> dict[str, Any]:
        """Its state, for whoever asks."""
        plain: dict[str, Any] = {"id": self.id, "state": self.state, "done": self.done, "total": self.total}
        return plain | ({"error": self.error} if self.error else {"name": self.name})


class Desk:
    """All documents at hand."""

    def __init__(self, served: Service) -> None:
        self.served = served
        self.papers: dict[str, Paper] = {}

    @property
    def busy(self) -> tuple[int, int]:
        """How many documents are being translated, and how many are done and were never fetched."""
        papers = self.every()
        done = sum(paper.state == "done" and not paper.fetched for paper in papers)
        return sum(paper.state == "running" for paper in papers), done

    def every(self) -> list[Paper]:
        """The documents that are still kept; those whose time is over are gone."""
        now = time.monotonic()
        for paper in [paper for paper in self.papers.values() if paper.until and paper.until < now]:
            del self.papers[paper.id]
        return list(self.papers.values())

    async def accept(
        self, client: Hashable, name: str, data: bytes, source: str, target: str, model: str | None = None
    ) -> Paper:
        """Read a document and begin to translate it."""
        self.served.engine.check_open()
        limits = self.served.limits
        if len(self.every()) >= limits.documents:
            raise Refusal(429, "too many documents are being kept: fetch or delete some, or come again", retry_after=30)
        short = PurePosixPath(name.replace("\\", "/")).name[-LONGEST:]
        paper = Paper(secrets.token_urlsafe(16), client, short)
        self.papers[paper.id] = paper  # it has its place while it is read
        try:
            document = await asyncio.to_thread(read_document, short, data)
            chosen, _ = self.served.models.choose(source, target, document.segments, model)
        except QkvError as error:
            del self.papers[paper.id]
            raise Refusal(422, str(error), pointer="/file") from None
        except BaseException:
            del self.papers[paper.id]
            raise
        paper.total, paper.name, paper.media_type = len(document.segments), document.name, document.media_type
        work = self._translate(paper, document, chosen, target or chosen.targets[0])
        paper.task = asyncio.get_running_loop().create_task(work)
        return paper

    async def _translate(self, paper: Paper, document: Document, model: Served, target: str) -> None:
        try:
            segments, marked = document.segments, document.has_markup
            translated, links = [""] * paper.total, [None] * paper.total
            for begin in range(0, paper.total, CHUNK):
                some = range(begin, min(begin + CHUNK, paper.total))
                for tagged in (False, True):
                    numbers = [i for i in some if marked[i] == tagged]
                    found = await self._patiently(paper, model, target, [segments[i] for i in numbers], tagged)
                    for i, (text, link) in zip(numbers, found, strict=True):
                        translated[i], links[i] = text, link
                    paper.done += len(numbers)
            paper.result = await asyncio.to_thread(document.build, translated, links)
            paper.state = "done"
        except (QkvError, Refusal) as error:
            paper.state, paper.error = "failed", str(getattr(error, "detail", error))
        except Exception as error:
            paper.state, paper.error = "failed", f"the document could not be put together ({type(error).__name__})"
        finally:
            paper.until = time.monotonic() + self.served.limits.kept

    async def _patiently(
        self, paper: Paper, model: Served, target: str, texts: list[str], tagged: bool
    ) -> list[tuple[str, Any]]:
        """The translations, with alignments for those with markup; asked for again if a model process dies."""
        client = f"document {paper.id}"  # of its own: whoever sent it is not kept waiting by it
        for left in reversed(range(TRIES)):
            try:
                if tagged:
                    return [*await self.served.translate_aligned(client, model, target, texts)]
                found = await self.served.translate(client, model, target, texts, patient=True)
                return [(each.texts[0], None) for each in found]
            except Refusal as error:
                if error.status_code != 503 or not left:
                    raise
        raise AssertionError

    async def wait(self, paper: Paper) -> None:
        """Until it is translated; whoever leaves before that takes it along."""
        assert paper.task is not None
        try:
            await paper.task
        except asyncio.CancelledError:
            self.drop(paper.id)
            raise

    def find(self, id: str) -> Paper:
        """The document of this name."""
        self.every()
        if id not in self.papers:
            raise Refusal(404, "there is no such document: it was deleted, or kept for long enough: send it again")
        return self.papers[id]

    def drop(self, id: str) -> None:
        """Forget a document, and stop translating it."""
        paper = self.find(id)
        if paper.task is not None:
            paper.task.cancel()
        del self.papers[id]


def desk(request: Request) -> Desk:
    """The desk of the server that a request is for."""
    found: Desk = request.app.state.desk
    return found
