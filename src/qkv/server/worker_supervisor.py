"""Model processes from the listening process's side: started, supervised, and restarted when they die."""

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
from qkv.worker_pool import ALLOCATOR_ENVIRONMENT

Event = dict[str, Any]
START = "from qkv.server.model_worker import main; main()"  # the Python code of a model process
MAX_LINE = 1 << 28  # bytes of a message: the attention map of a long sentence is large
RESTART_DELAYS = (0.0, 0.5, 1, 2, 5, 10)  # seconds before the first, second, … restart in a row
STABLE = 60  # seconds after which a process counts as healthy


class ModelWorker:
    """One model process and its replacements; `ready` is set while a process accepts jobs.

    Messages in both directions are lines of JSON. The first one has the settings, and the process answers
    {"ready": model cards} or {"failed": reason}. A job {"job", "kind", "model", "arguments"} is answered by messages
    with its number: {"event": …} repeatedly, then "done", "invalid" (the request's fault) or "failed".
    """

    def __init__(self, settings: Mapping[str, Any], *, on_restart: Callable[[], None] = lambda: None) -> None:
        self.settings, self.on_restart = dict(settings), on_restart
        self.ready = asyncio.Event()
        self.info: Event = {}  # the process's first message: model cards, device
        self.failure = ""  # why the models could not be loaded
        self.process: asyncio.subprocess.Process | None = None
        self.jobs: dict[int, asyncio.Queue[Event]] = {}
        self.numbers = count()
        self.last_result = 0.0  # loop time of the last finished batch
        self.closing = False

    async def supervise(self) -> None:
        """Start a process and restart it whenever it dies; raises if the models cannot be loaded the first time."""
        deaths = 0
        while True:
            began = asyncio.get_running_loop().time()
            process = await self._start()
            try:
                await self._read_messages(process)
            finally:
                self.ready.clear()
                await self._fail_pending(process)
            if self.closing:
                return
            if not self.info:
                raise QkvError(self.failure)
            self.on_restart()
            deaths = 0 if asyncio.get_running_loop().time() - began > STABLE else deaths + 1
            await asyncio.sleep(RESTART_DELAYS[min(deaths, len(RESTART_DELAYS) - 1)])

    async def _start(self) -> asyncio.subprocess.Process:
        self.failure = ""
        threads = str(self.settings["threads"])
        paths = os.pathsep.join(part or os.getcwd() for part in sys.path)
        environment = {**ALLOCATOR_ENVIRONMENT, **os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            START,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment | {"PYTHONPATH": paths},
            limit=MAX_LINE,
            start_new_session=True,  # Ctrl-C signals the listening process only
        )
        await self._send(self.settings)
        return self.process

    async def _send(self, message: Event) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(ConnectionError):  # `_read_messages` notices the death of the process
            self.process.stdin.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")
            await self.process.stdin.drain()

    async def _read_messages(self, process: asyncio.subprocess.Process) -> None:
        """Pass each message to its job, until the process ends."""
        assert process.stdout is not None
        async for line in process.stdout:
            message = json.loads(line)
            if "job" in message:
                if messages := self.jobs.get(message["job"]):
                    messages.put_nowait(message)
            elif "ready" in message:
                self.info = message
                self.ready.set()
            else:
                self.failure = message["failed"]

    async def _fail_pending(self, process: asyncio.subprocess.Process) -> None:
        """End the process and fail its jobs."""
        with suppress(ProcessLookupError):
            process.kill()
        code = await process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.failure = self.failure or f"the model process {how} before its models were loaded"
        for messages in self.jobs.values():
            messages.put_nowait({"died": f"the model process {how} during this request: send it again"})

    async def stream(self, kind: str, model: str, arguments: Event) -> AsyncGenerator[Event, None]:
        """Yield the events of a job; closing the generator early cancels the job."""
        number, messages = next(self.numbers), asyncio.Queue[Event]()
        self.jobs[number] = messages
        ended = False
        try:
            await self._send({"job": number, "kind": kind, "model": model, "arguments": arguments})
            while not ended:
                message = await messages.get()
                if "event" in message:
                    yield message["event"]
                else:
                    ended = True
                    raise_error(message)
        finally:
            del self.jobs[number]
            if not ended and self.ready.is_set():
                await self._send({"cancel": number})

    async def call(self, kind: str, model: str, arguments: Event) -> Event:
        """Return the event of a job that has exactly one."""
        (event,) = [event async for event in self.stream(kind, model, arguments)]
        return event

    async def close(self) -> None:
        """Close the process's input, which ends it; kill it after two seconds."""
        self.closing = True
        if self.process is not None and self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await self.process.wait()
            with suppress(ProcessLookupError):
                self.process.kill()


def raise_error(message: Mapping[str, Any]) -> None:
    """Raise the error in a model process's message, if it has one."""
    for outcome, status in (("invalid", 422), ("failed", 500), ("died", 503)):
        if outcome in message:
            raise Refusal(status, message[outcome])
