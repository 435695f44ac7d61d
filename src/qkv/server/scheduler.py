"""The engine: sentences wait in a bounded, fair queue and go to the model processes in batches of so many tokens.

A batch is taken when a process is free: at once if many wait, else a few milliseconds after the last of its sentences
came, so that others may join. Where none is free, each gets its next batch while it is at one. What is refused is
refused before it waits; what was accepted is answered, also when the server is told to stop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from qkv.core.errors import QkvError
from qkv.server.middleware import Limits, Metrics, Refusal
from qkv.server.worker_supervisor import Worker, check, threads
from qkv.worker_pool import cpu_count, freeze_garbage_collector

LOG = logging.getLogger("uvicorn.error")
Event = dict[str, Any]
STREAMS = 4  # completions that grow side by side in one process
CPU_TOKENS, GPU_TOKENS = 2048, 32_768  # of a batch, where nothing else is said
AT_HAND = 2  # batches that a process has: one that it is at, and the next, so that it does not wait for us
AHEAD = 4  # batches that are planned at once
ROUNDS = 5  # times that a batch waits for company which keeps coming
SHARE, PAUSE = 0.1, 0.025  # each time this part of what a batch takes, and at most so many seconds
BATCHED = ("translate", "markup", "aligned")  # kinds of jobs that take many at once
EMPTY = object()  # ends a stream


@dataclass(frozen=True)
class Setup:
    """What the processes are told, and how they are used."""

    runs: Mapping[str, str]  # name → folder
    device: str = "auto"
    dtype: str = "auto"
    workers: int = 0  # 0: one for each core on a CPU, one in all on a GPU
    batch_tokens: int = 0  # 0: as the device likes it
    wait: float = 0.003  # seconds that a sentence waits for company


class Engine:
    """The queue and the processes behind it."""

    def __init__(self, setup: Setup, limits: Limits, metrics: Metrics) -> None:
        self.setup, self.limits, self.metrics = setup, limits, metrics
        self.sentences, self.streams = FairQueue(), FairQueue()
        self.planned: deque[list[Unit]] = deque()
        self.workers: list[Worker] = []
        self.running = 0  # units that a process is at
        self.busy: list[Worker] = []  # the process of each batch that is not answered yet
        self.open: set[Unit] = set()  # whatever was accepted and is not answered yet
        self.draining = False
        self.over = False
        self.failed: QkvError | None = None
        self.speed = 1000.0  # tokens a second, as lately seen
        self.took = 0.0  # seconds of a batch, as lately seen
        self.usual = math.inf  # tokens of a batch, as lately seen
        self.tasks: set[asyncio.Task[None]] = set()

    # ---- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the processes; they are ready when their models are."""
        self._spawn(self._open())

    async def _open(self) -> None:
        first = self._hire()
        await first.ready.wait()
        freeze_garbage_collector()
        gc.set_threshold(20_000)  # the many requests that wait are no garbage either
        on_cpu = first.about["device"] == "cpu"
        for _ in range((self.setup.workers or (cpu_count() if on_cpu else 1)) - 1):
            self._hire()

    def _hire(self) -> Worker:
        many = self.setup.workers or cpu_count()
        told = {
            "runs": dict(self.setup.runs),
            "device": self.setup.device,
            "dtype": self.setup.dtype,
            "threads": threads(many),
        }
        worker = Worker(told, restarted=self.metrics.restarts.inc)
        self.workers.append(worker)
        self._spawn(self._live(worker))
        for _ in range(AT_HAND):
            self._spawn(self._lane(worker, self.sentences))
        for _ in range(STREAMS):
            self._spawn(self._lane(worker, self.streams))
        return worker

    async def _live(self, worker: Worker) -> None:
        try:
            await worker.live()
        except QkvError as error:
            self.failed = error

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def give_up(self) -> None:
        """Refuse all that was accepted and is not answered yet, and whatever may still come."""
        self.over = True
        _fail(self.open, _stopped())

    async def close(self) -> None:
        """End the processes, and whatever they are at."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """Whether a process can answer."""
        return any(worker.ready.is_set() for worker in self.workers)

    @property
    def idle(self) -> bool:
        """Whether everything that was accepted has its answer."""
        return not (self.running or self.waiting or self.streams.count)

    @property
    def waiting(self) -> int:
        """How many sentences are accepted and not yet begun."""
        return self.sentences.count + sum(unit.wanted for batch in self.planned for unit in batch)

    @property
    def cards(self) -> dict[str, Event]:
        """What is known of each model, once one process has opened them."""
        about = next((worker.about for worker in self.workers if worker.about), {})
        cards: dict[str, Event] = about.get("ready", {})
        return cards

    @property
    def budget(self) -> int:
        """Source tokens of a batch."""
        on_gpu = bool(self.workers) and self.workers[0].about.get("device", "cpu") != "cpu"
        return self.setup.batch_tokens or (GPU_TOKENS if on_gpu else CPU_TOKENS)

    # ---- asking ------------------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse while nothing can be accepted."""
        if self.draining:
            raise Refusal(503, "the server is stopping: ask another, or again later", retry_after=5)
        if not self.ready:
            raise Refusal(503, "the model is still being loaded: ask again in a moment", retry_after=2)

    async def batch(
        self, client: Hashable, group: Group, asked: Sequence[Any], costs: Sequence[int], *, patient: bool = False
    ) -> list[Event]:
        """The results of several units of one group, in their order; `patient` waits for room instead of refusal."""
        limit = self.limits.queue
        if len(asked) > limit:
            raise Refusal(413, f"{len(asked):,} sentences, and at most {limit:,} wait at once: send less")
        while patient and self.sentences.count > limit // 2:
            await asyncio.sleep(0.05)
        if self.over:
            raise _stopped()
        if not patient:
            self.check_open()
            self._check_room(self.sentences, len(asked), limit)
        units = [Unit(client, group, each, cost) for each, cost in zip(asked, costs, strict=True)]
        self.open.update(units)
        for unit in units:
            self.sentences.add(unit)
        try:
            return [await unit.answer for unit in units]
        except asyncio.CancelledError:
            self.metrics.cancelled.inc()
            raise
        finally:  # left early, nobody waits for the others, nor hears why they failed
            self.open.difference_update(units)
            for unit in units:
                if not unit.answer.cancel() and not unit.answer.cancelled():
                    unit.answer.exception()

    def _check_room(self, queue: FairQueue, more: int, limit: int) -> None:
        if queue.count + more > limit:
            self.metrics.refused.labels("full").inc()
            seconds = min(60, math.ceil(queue.cost / self.speed) or 1)
            raise Refusal(429, f"too much is waiting already: ask again in {seconds} s", retry_after=seconds)

    async def one(self, client: Hashable, kind: str, model: str, asked: Event, cost: int) -> Event:
        """The result of one job of its own."""
        (found,) = await self.batch(client, (kind, model, ""), [asked], [cost])
        return found

    async def stream(self, client: Hashable, kind: str, model: str, asked: Event) -> AsyncIterator[Event]:
        """The events of a job as they come."""
        self.check_open()
        self._check_room(self.streams, 1, self.limits.streams)
        events = asyncio.Queue[Any]()
        unit = Unit(client, (kind, model, ""), (asked, events), 1)
        unit.answer.add_done_callback(lambda _: events.put_nowait(EMPTY))
        self.open.add(unit)
        self.streams.add(unit)
        try:
            while (event := await events.get()) is not EMPTY:
                yield event
            await unit.answer
        finally:
            self.open.discard(unit)
            if not unit.answer.done():
                self.metrics.cancelled.inc()
                unit.answer.cancel()

    # ---- answering ---------------------------------------------------------------------------------------------------

    async def _lane(self, worker: Worker, queue: FairQueue) -> None:
        """Hand what waits in a queue to one process, batch after batch."""
        single = queue is self.streams
        while True:
            await worker.ready.wait()
            await queue.filled.wait()
            if not single and not self.planned:
                await self._company()
            if not worker.ready.is_set():
                continue
            if not single and worker in self.busy and self._free():  # that one has nothing to do
                await asyncio.sleep(self.setup.wait)
                continue
            units = queue.take(1, 1) if single else self._batch()
            if not units:
                queue.filled.clear()
                continue
            self.running += len(units)
            try:
                await (self._stream_one(worker, units[0]) if single else self._answer(worker, units))
            except Refusal as error:
                _fail(units, error)
            except Exception:  # a fault of ours: it is told, and the lane goes on
                LOG.exception("a batch failed")
                _fail(units, Refusal(500, "something went wrong here, and was written to the log"))
            finally:
                self.running -= len(units)

    def _free(self) -> int:
        """How many processes have nothing to do."""
        return sum(worker.ready.is_set() and worker not in self.busy for worker in self.workers)

    async def _company(self) -> None:
        """Wait for others to join, as long as somebody comes: their answers set many clients free at once.

        Where half of a usual batch waits already, the next process will be free before many more have come.
        """
        for _ in range(ROUNDS):
            there = self.sentences.count
            if self.sentences.cost < min(self.budget, self.usual / 2):
                await asyncio.sleep(max(self.setup.wait, min(PAUSE, SHARE * self.took)))
            if self.sentences.count <= there:
                return

    def _batch(self) -> list[Unit]:
        """The next batch of sentences that somebody still waits for."""
        units: list[Unit] = []
        while not units and (self.planned or self._plan()):
            units = [unit for unit in self.planned.popleft() if unit.wanted]
        if self.planned:
            self.sentences.filled.set()  # for other processes
        return units

    def _plan(self) -> bool:
        """Cut the next sentences into batches, several at once, because those of like length go best together."""
        units = sorted(self.sentences.take(AHEAD * self.budget, self.limits.queue), key=lambda unit: unit.cost)
        if not units:
            return False
        total = sum(unit.cost for unit in units)
        share = total / max(math.ceil(total / self.budget), min(self._free(), len(units)), 1)
        begun = 0.0
        batch: list[Unit] = []
        for unit in units:
            if batch and begun + unit.cost / 2 > share:
                self.planned.append(batch)
                batch, begun = [], 0.0
            batch.append(unit)
            begun += unit.cost
        self.planned.append(batch)
        return True

    async def _answer(self, worker: Worker, units: list[Unit]) -> None:
        kind, model, how = units[0].group
        began, cost = asyncio.get_running_loop().time(), sum(unit.cost for unit in units)
        self.busy.append(worker)
        try:
            if kind not in BATCHED:
                results = await self._alone(worker, kind, model, units)
            else:
                asked = {"texts": [unit.asked for unit in units], "how": _options(how)}
                results = (await worker.result(kind, model, asked))["results"]
        finally:
            self.busy.remove(worker)
        now = asyncio.get_running_loop().time()
        seconds = max(1e-4, now - max(began, worker.answered))  # not what it waited behind another
        worker.answered = now
        self.speed += 0.1 * (cost / seconds * len(self.workers) - self.speed)
        self.took += 0.5 * (seconds - self.took)
        self.usual = cost if self.usual == math.inf else self.usual + 0.2 * (cost - self.usual)
        self.metrics.batch(model, len(units), cost, seconds)
        # Told after the process has its next batch: what hangs on the answers takes a while.
        self.running += len(units)
        asyncio.get_running_loop().call_soon(self._tell, units, results)

    def _tell(self, units: Sequence[Unit], results: Sequence[Event]) -> None:
        self.running -= len(units)
        for unit, result in zip(units, results, strict=True):
            if unit.wanted:
                try:
                    check(result)
                    unit.answer.set_result(result)
                except Refusal as error:
                    unit.answer.set_exception(error)

    async def _alone(self, worker: Worker, kind: str, model: str, units: list[Unit]) -> list[Event]:
        """Jobs of which a process does one at a time."""
        results: list[Event] = []
        for unit in units:
            try:
                results.append(await worker.result(kind, model, unit.asked) if unit.wanted else {})
            except Refusal as error:
                if error.status_code == 503:
                    raise
                results.append({"wrong" if error.status_code == 422 else "failed": error.detail})
        return results

    async def _stream_one(self, worker: Worker, unit: Unit) -> None:
        kind, model, _ = unit.group
        asked, events = unit.asked
        try:
            async with aclosing(worker.ask(kind, model, asked)) as told:
                async for event in told:
                    if not unit.wanted:
                        break
                    events.put_nowait(event)
                    self.metrics.tokens.labels(model).inc(len(event.get("tokens", ())))
            if unit.wanted:
                unit.answer.set_result(None)
        except Refusal as error:
            with suppress(asyncio.InvalidStateError):
                unit.answer.set_exception(error)


def _stopped() -> Refusal:
    return Refusal(503, "the server stopped before this was done: ask another, or again later", retry_after=5)


def _fail(units: Iterable[Unit], error: Refusal) -> None:
    for unit in units:
        if unit.wanted:
            unit.answer.set_exception(error)


def _options(how: str) -> Event:
    found: Event = json.loads(how) if how else {}
    found.pop("own", None)  # which only keeps a job from sharing its batch
    return found


# ---- What waits for a model: bounded, and fair between clients, however much one of them brings ----------------------


Group = tuple[str, str, str]  # kind of job, model, how: what may share a batch


@dataclass(eq=False)
class Unit:
    """One sentence, or one job that cannot be divided; `answer` is what its sender waits for."""

    client: Hashable
    group: Group
    asked: Any
    cost: int  # in tokens
    answer: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    waits: bool = True

    @property
    def wanted(self) -> bool:
        """Whether somebody still waits for the answer."""
        return not self.answer.done()


class FairQueue:
    """A queue for each client, served in turns; what nobody waits for any more does not count."""

    def __init__(self) -> None:
        self.clients: OrderedDict[Hashable, deque[Unit]] = OrderedDict()
        self.count = 0
        self.cost = 0
        self.filled = asyncio.Event()  # set by what comes, cleared by whoever finds nothing

    def add(self, unit: Unit) -> None:
        self.clients.setdefault(unit.client, deque()).append(unit)
        self.count += 1
        self.cost += unit.cost
        self.filled.set()
        unit.answer.add_done_callback(lambda _: self._leaves(unit))

    def _leaves(self, unit: Unit) -> None:
        """A unit no longer waits: it was taken, or given up."""
        if unit.waits:
            unit.waits = False
            self.count -= 1
            self.cost -= unit.cost
            if not self.count:
                self.clients.clear()

    def take(self, budget: int, most: int) -> list[Unit]:
        """The next units of one group, one of each client in turn, as many as the budget allows but at least one."""
        taken: list[Unit] = []
        group: Group | None = None
        cost = 0
        passed: list[Hashable] = []  # clients who had nothing for this batch, and are the first of the next
        while len(passed) < len(self.clients) and len(taken) < most:
            client, waiting = next(iter(self.clients.items()))
            while waiting and not waiting[0].wanted:
                waiting.popleft()
            if not waiting:
                del self.clients[client]
                continue
            self.clients.move_to_end(client)
            unit = waiting[0]
            if group is not None and (unit.group != group or cost + unit.cost > budget):
                passed.append(client)
                continue
            waiting.popleft()
            taken.append(unit)
            group, cost = unit.group, cost + unit.cost
            self._leaves(unit)
        for client in reversed(passed):
            self.clients.move_to_end(client, last=False)
        return taken
