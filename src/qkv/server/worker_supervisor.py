"""The model processes as seen from the one that listens: started, asked, watched, and started again when they die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Any

from qkv.core.errors import QkvError
from qkv.server.middleware import Refusal
from qkv.worker_pool import ALLOCATOR_ENVIRONMENT, cpu_count

Event = dict[str, Any]
START = "from qkv.server.model_worker import main; main()"
LONGEST = 1 << 28  # bytes of a line: an attention map of a long sentence is large
AGAIN = (0.0, 0.5, 1, 2, 5, 10)  # seconds before a process that died is started again, the last from then on


def threads(workers: int) -> int:
    """Threads of each of so many processes: their share of the processors, unless the environment says otherwise."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, cpu_count() // workers)


class Worker:
    """A place for one model process; whoever is in it answers, and `ready` says whether somebody is."""

    def __init__(self, told: Mapping[str, Any], *, restarted: Callable[[], None] = lambda: None) -> None:
        self.told, self.restarted = dict(told), restarted
        self.ready = asyncio.Event()
        self.about: Event = {}
        self.trouble = ""
        self.process: asyncio.subprocess.Process | None = None
        self.open: dict[int, asyncio.Queue[Event]] = {}
        self.numbers = count()
        self.answered = 0.0  # when it last was done with a batch
        self.closing = False

    async def live(self) -> None:
        """Start a process and, whenever it dies, the next; a run that cannot be opened at the start is an error."""
        deaths = 0
        while True:
            began = asyncio.get_running_loop().time()
            await self._start()
            try:
                await self._listen()
            finally:
                self.ready.clear()
                await self._bury()
            if self.closing:
                return
            if not self.about:
                raise QkvError(self.trouble)
            self.restarted()
            deaths = 0 if asyncio.get_running_loop().time() - began > 60 else deaths + 1
            await asyncio.sleep(AGAIN[min(deaths, len(AGAIN) - 1)])

    async def _start(self) -> None:
        self.trouble = ""
        own = str(self.told["threads"])
        paths = os.pathsep.join(part or os.getcwd() for part in sys.path)
        environment = {**ALLOCATOR_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": own, "MKL_NUM_THREADS": own}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            START,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"PYTHONPATH": paths},
            limit=LONGEST,
            start_new_session=True,  # Ctrl-C is for the parent
        )
        await self._send(self.told)

    async def _send(self, message: Event) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(ConnectionError):  # that it died is noticed where it is listened to
            self.process.stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
            await self.process.stdin.drain()

    async def _listen(self) -> None:
        """Hand every answer to whoever asked, until the process is gone."""
        assert self.process is not None
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            message = json.loads(line)
            if "job" in message:
                if waiting := self.open.get(message["job"]):
                    waiting.put_nowait(message)
            elif "ready" in message:
                self.about = message
                self.ready.set()
            else:
                self.trouble = message["failed"]

    async def _bury(self) -> None:
        """Tell everybody who waits for an answer that none will come."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            self.process.kill()
        code = await self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.trouble = self.trouble or f"the model process {how} before its models were loaded"
        for waiting in self.open.values():
            waiting.put_nowait({"died": f"the model process {how} while it was at this: send it again"})

    async def ask(self, kind: str, model: str, asked: Event) -> AsyncGenerator[Event, None]:
        """The events of a job; a caller who leaves early ends it."""
        number, answers = next(self.numbers), asyncio.Queue[Event]()
        self.open[number] = answers
        ended = False
        try:
            await self._send({"job": number, "kind": kind, "model": model, "asked": asked})
            while not ended:
                message = await answers.get()
                if "event" in message:
                    yield message["event"]
                else:
                    ended = True
                    check(message)
        finally:
            del self.open[number]
            if not ended and self.ready.is_set():
                await self._send({"cancel": number})

    async def result(self, kind: str, model: str, asked: Event) -> Event:
        """What a job gives that has one event."""
        (found,) = [event async for event in self.ask(kind, model, asked)]
        return found

    async def close(self) -> None:
        """Hang up, which ends the process; one that is stuck is ended."""
        self.closing = True
        if self.process is not None and self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self.process.wait()
            with suppress(ProcessLookupError):
                self.process.kill()


def check(message: Mapping[str, Any]) -> None:
    """Raise what a message says went wrong, if it says so."""
    if "wrong" in message:
        raise Refusal(422, message["wrong"])
    if "failed" in message:
        raise Refusal(500, message["failed"])
    if "died" in message:
        raise Refusal(503, message["died"], retry_after=1)
