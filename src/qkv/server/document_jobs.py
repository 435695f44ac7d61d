"""Document jobs: uploaded documents are translated in the background and kept in memory for some time.

Each job has a random identifier. The client's file name is never used as a path.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from starlette.requests import Request

from qkv.api.document_translation import FlaggedSegment, flags_of
from qkv.core.errors import QkvError
from qkv.data.alignments import Link
from qkv.documents import Document, read_document
from qkv.server.middleware import Refusal
from qkv.server.served_models import ServedModel
from qkv.server.service import Service, TranslationResult

CHUNK = 64  # segments of a document in the queue at once, so that other requests get their turn
MAX_NAME = 255  # characters
ATTEMPTS = 3  # per chunk: a model process may die


@dataclass(eq=False)
class DocumentJob:
    """One document, from upload to download."""

    id: str
    name: str
    total: int = 0  # segments
    done: int = 0
    state: str = "running"  # running, done or failed
    error: str = ""
    result: bytes = b""
    media_type: str = "application/octet-stream"
    downloaded: bool = False
    skipped: dict[str, int] = field(default_factory=dict)  # what the reader left untranslated, by its name
    flagged: list[FlaggedSegment] = field(default_factory=list)
    expires: float = 0.0  # on the monotonic clock; 0 while running
    task: asyncio.Task[None] | None = field(default=None, repr=False)

    def status(self) -> dict[str, Any]:
        """The state of the job as JSON."""
        status: dict[str, Any] = {"id": self.id, "state": self.state, "done": self.done, "total": self.total}
        if self.state == "done":
            status |= {"skipped": self.skipped, "flagged": [asdict(segment) for segment in self.flagged]}
        return status | ({"error": self.error} if self.error else {"name": self.name})


class JobStore:
    """All document jobs of a server."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.jobs: dict[str, DocumentJob] = {}

    @property
    def unfinished(self) -> tuple[int, int]:
        """Number of jobs in progress, and of finished documents that were never downloaded."""
        jobs = self.current()
        finished = sum(job.state == "done" and not job.downloaded for job in jobs)
        return sum(job.state == "running" for job in jobs), finished

    def current(self) -> list[DocumentJob]:
        """Delete expired jobs and return the others."""
        now = time.monotonic()
        for job in [job for job in self.jobs.values() if job.expires and job.expires < now]:
            del self.jobs[job.id]
        return list(self.jobs.values())

    async def submit(
        self, name: str, data: bytes, source: str, target: str, model_name: str | None = None
    ) -> DocumentJob:
        """Parse a document and start its translation."""
        self.service.scheduler.check_accepting()
        limits = self.service.limits
        if len(self.current()) >= limits.documents:
            raise Refusal(
                429, "too many documents in memory: download or delete one, or try again later", retry_after=30
            )
        base_name = PurePosixPath(name.replace("\\", "/")).name[-MAX_NAME:]
        job = DocumentJob(secrets.token_urlsafe(16), base_name)
        self.jobs[job.id] = job  # counts towards the limit while it is parsed
        try:
            document = await asyncio.to_thread(read_document, base_name, data)
            model, _ = self.service.models.choose(source, target, document.segments, model_name)
        except QkvError as error:
            del self.jobs[job.id]
            raise Refusal(422, str(error), pointer="/file") from None
        except BaseException:
            del self.jobs[job.id]
            raise
        job.total, job.name, job.media_type = len(document.segments), document.name, document.media_type
        work = self._translate(job, document, model, target or model.targets[0])
        job.task = asyncio.get_running_loop().create_task(work)
        return job

    async def _translate(self, job: DocumentJob, document: Document, model: ServedModel, target: str) -> None:
        """Translate a document chunk by chunk, and record the result or the error in its job."""
        try:
            segments, has_markup = document.segments, document.has_markup
            translated: list[str] = [""] * job.total
            links: list[list[Link] | None] = [None] * job.total
            for begin in range(0, job.total, CHUNK):
                chunk = range(begin, min(begin + CHUNK, job.total))
                for markup in (False, True):
                    numbers = [i for i in chunk if has_markup[i] == markup]
                    results = await self._translate_segments(job, model, target, document, numbers, aligned=markup)
                    for i, result in zip(numbers, results, strict=True):
                        translated[i], links[i] = result.texts[0], next(iter(result.links), None)
                        if flags := flags_of(result):
                            job.flagged.append(FlaggedSegment(i + 1, segments[i], result.texts[0], flags))
                    job.done += len(numbers)
            job.skipped = dict(document.skipped)
            job.result = await asyncio.to_thread(document.build, translated, links)
            job.flagged.sort(key=lambda segment: segment.number)
            job.state = "done"
        except (QkvError, Refusal) as error:
            job.state, job.error = "failed", str(getattr(error, "detail", error))
        except Exception as error:
            job.state, job.error = "failed", f"the translated document could not be written ({type(error).__name__})"
        finally:
            job.expires = time.monotonic() + self.service.limits.retention

    async def _translate_segments(
        self,
        job: DocumentJob,
        model: ServedModel,
        target: str,
        document: Document,
        numbers: Sequence[int],
        *,
        aligned: bool,
    ) -> list[TranslationResult]:
        """Translate some segments; repeats the request if the model process dies."""
        client = f"document {job.id}"  # its own place in the fair queue, so that the uploader's other requests pass it
        texts, spans = [document.segments[i] for i in numbers], [document.protected[i] for i in numbers]
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                return await self.service.translate(
                    client, model, target, texts, protected=spans, aligned=aligned, wait_for_room=True
                )
            except Refusal as error:
                if error.status_code != 503 or not attempts_left:
                    raise
        raise AssertionError

    async def wait(self, job: DocumentJob) -> None:
        """Wait until a job has finished; a client that disconnects deletes it."""
        assert job.task is not None
        try:
            await job.task
        except asyncio.CancelledError:
            self.delete(job.id)
            raise

    def get(self, id: str) -> DocumentJob:
        self.current()
        if id not in self.jobs:
            raise Refusal(404, "no such document: it was deleted or has expired: send it again")
        return self.jobs[id]

    def delete(self, id: str) -> None:
        """Delete a job and stop its translation."""
        job = self.get(id)
        if job.task is not None:
            job.task.cancel()
        del self.jobs[id]


def job_store(request: Request) -> JobStore:
    """The job store of the server that received a request."""
    store: JobStore = request.app.state.job_store
    return store
