"""The status of a document job: progress, and at its end what was skipped and flagged."""

from __future__ import annotations

import asyncio
from typing import Any

from qkv.documents import read_document
from qkv.server.document_jobs import DocumentJob, JobStore
from qkv.server.service import TranslationResult


class CountingService:
    """Translates by changing the case; texts with "flag" are truncated."""

    limits: Any = type("Limits", (), {"retention": 60.0})

    async def translate(
        self, client: str, model: Any, target: str, texts: list[str], **_: Any
    ) -> list[TranslationResult]:
        return [
            TranslationResult(
                [text.upper()], 0.0, 0.0, 1, 1, "flag" in text, False, flags=("truncated",) * ("flag" in text)
            )
            for text in texts
        ]


def test_skipped_and_flagged_parts_are_reported() -> None:
    page = b"WEBVTT\n\nNOTE x\n\n00:01.000 --> 00:02.000\n<i>a flag</i> one\n\n00:03.000 --> 00:04.000\nflag two\n"
    document = read_document("a.vtt", page)
    job = DocumentJob("id", "a.vtt", total=len(document.segments))
    assert job.status() == {"id": "id", "state": "running", "done": 0, "total": 2, "name": "a.vtt"}
    store = JobStore(CountingService())  # type: ignore[arg-type]
    asyncio.run(store._translate(job, document, None, "it"))  # type: ignore[arg-type]
    assert job.status() == {
        "id": "id",
        "state": "done",
        "done": 2,
        "total": 2,
        "name": "a.vtt",
        "skipped": {"note": 1},
        "flagged": [
            {"number": 1, "source": "a flag one", "text": "A FLAG ONE", "flags": ("truncated",)},
            {"number": 2, "source": "flag two", "text": "FLAG TWO", "flags": ("truncated",)},
        ],
    }
    assert job.result == page.replace(b"a flag", b"A FLAG").replace(b"one", b"ONE").replace(b"flag two", b"FLAG TWO")
