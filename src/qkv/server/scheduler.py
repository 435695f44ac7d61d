"""The scheduler: a bounded, fair queue of sentences, sent to model processes in batches with a token budget.

An idle process gets a batch at once if enough sentences wait; otherwise the scheduler waits a few milliseconds for more
sentences. If every process is busy, each gets one more batch in advance. A full queue refuses a request at once; an
accepted request is answered, also while the server stops.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import math
import os
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from qkv.core.errors import QkvError
from qkv.server.middleware import Metrics, Refusal, RequestLimits
from qkv.server.worker_supervisor import ModelWorker, raise_error
from qkv.worker_pool import cpu_count, freeze_garbage_collector

LOG = logging.getLogger("uvicorn.error")
Event = dict[str, Any]
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 2048, 32_768  # defaults of a batch
BATCHES_PER_WORKER = 2  # one in progress and the next, so that a process never waits for the scheduler
STREAMS_PER_WORKER = 4  # completions that one process interleaves
PLANNED_BATCHES = 4  # batches formed from the queue at once
# While more sentences arrive, a batch waits up to this many times, each time for this share of the time that a batch
# usually takes, at most so many seconds.
MAX_WAITS, WAIT_SHARE, MAX_WAIT_SECONDS = 5, 0.1, 0.025
BATCHED_JOBS = ("translate", "translate_aligned")  # kinds of jobs that take several texts
END = object()  # last item of a stream's queue
STOPPED = "the server stopped before this was done: use another server, or try again later"


@dataclass(frozen=True)
class SchedulerOptions:
    """Which runs the model processes load, and how many processes there are."""

    runs: Mapping[str, str]  # name → folder
    device: str = "auto"
    dtype: str = "auto"
    workers: int = 0  # 0: one per core on a CPU, one in all on a GPU
    batch_tokens: int = 0  # 0: the device's default
    batching_delay: float = 0.003  # seconds


class Scheduler:
    """The queue and its model processes."""

    def __init__(self, options: SchedulerOptions, limits: RequestLimits, metrics: Metrics) -> None:
        self.options, self.limits, self.metrics = options, limits, metrics
        self.queue, self.stream_queue = FairQueue(), FairQueue()
        self.planned: deque[list[QueueItem]] = deque()
        self.workers: list[ModelWorker] = []
        self.running = 0  # items that a process works on
        self.busy: list[ModelWorker] = []  # the process of each batch in progress
        self.pending: set[QueueItem] = set()  # accepted and without a result
        self.draining = False  # new requests are refused
        self.stopped = False  # pending ones too
        self.failure: QkvError | None = None  # a run could not be loaded
        self.tokens_per_second = 1000.0  # this and the next two are moving averages
        self.batch_seconds = 0.0
        self.usual_batch_tokens = math.inf
        self.tasks: set[asyncio.Task[None]] = set()

    # ---- start and stop ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the model processes; `ready` becomes true once the first has loaded its models."""
        self._spawn(self._start_workers())

    async def _start_workers(self) -> None:
        first = self._start_worker()
        await first.ready.wait()
        freeze_garbage_collector()
        gc.set_threshold(20_000)  # many queued requests are not garbage: collect less often
        on_cpu = first.info["device"] == "cpu"
        for _ in range((self.options.workers or (cpu_count() if on_cpu else 1)) - 1):
            self._start_worker()

    def _start_worker(self) -> ModelWorker:
        given = os.environ.get("OMP_NUM_THREADS", "")  # else each process gets an equal share of the processors
        share = max(1, cpu_count() // (self.options.workers or cpu_count()))
        settings = {
            "runs": dict(self.options.runs),
            "device": self.options.device,
            "dtype": self.options.dtype,
            "threads": int(given) if given.isdigit() and int(given) else share,
        }
        worker = ModelWorker(settings, on_restart=self.metrics.restarts.inc)
        self.workers.append(worker)
        self._spawn(self._supervise(worker))
        for _ in range(BATCHES_PER_WORKER):
            self._spawn(self._dispatch(worker, self.queue))
        for _ in range(STREAMS_PER_WORKER):
            self._spawn(self._dispatch(worker, self.stream_queue))
        return worker

    async def _supervise(self, worker: ModelWorker) -> None:
        try:
            await worker.supervise()
        except QkvError as error:
            self.failure = error

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def stop(self) -> None:
        """Refuse all pending items and all later ones."""
        self.stopped = True
        _refuse_items(self.pending, Refusal(503, STOPPED, retry_after=5))

    async def close(self) -> None:
        """End the model processes and every task."""
        await asyncio.gather(*(worker.close() for worker in self.workers))
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a model process accepts jobs."""
        return any(worker.ready.is_set() for worker in self.workers)

    @property
    def idle(self) -> bool:
        """Whether every accepted request has its result."""
        return not (self.running or self.waiting or self.stream_queue.count)

    @property
    def waiting(self) -> int:
        """Number of accepted sentences that no process works on yet."""
        return self.queue.count + sum(item.wanted for batch in self.planned for item in batch)

    @property
    def model_cards(self) -> dict[str, Event]:
        """Description of each model by name; empty until a process has loaded them."""
        info = next((worker.info for worker in self.workers if worker.info), {})
        cards: dict[str, Event] = info.get("ready", {})
        return cards

    @property
    def batch_tokens(self) -> int:
        """Token budget of a batch, counted in source tokens."""
        on_gpu = bool(self.workers) and self.workers[0].info.get("device", "cpu") != "cpu"
        return self.options.batch_tokens or (GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS)

    # ---- submitting --------------------------------------------------------------------------------------------------

    def check_accepting(self) -> None:
        """Refuse with 503 while the server loads or stops."""
        if self.draining:
            raise Refusal(503, "the server is stopping: use another server, or try again later", retry_after=5)
        if not self.ready:
            raise Refusal(503, "the model is still being loaded: try again in a moment", retry_after=2)

    async def submit(
        self,
        client: Hashable,
        group: Group,
        payloads: Sequence[Any],
        costs: Sequence[int],
        *,
        wait_for_room: bool = False,
    ) -> list[Event]:
        """Return the results of several items of one group, in order.

        With `wait_for_room` the call waits while the queue is more than half full, instead of being refused when it is
        full; such work also continues while the server drains.
        """
        limit = self.limits.queue
        if len(payloads) > limit:
            raise Refusal(413, f"{len(payloads):,} sentences, but the queue holds {limit:,}: send less at once")
        while wait_for_room and self.queue.count > limit // 2:
            await asyncio.sleep(0.05)
        if self.stopped:
            raise Refusal(503, STOPPED, retry_after=5)
        if not wait_for_room:
            self.check_accepting()
            self._check_room(self.queue, len(payloads), limit)
        items = [QueueItem(client, group, payload, cost) for payload, cost in zip(payloads, costs, strict=True)]
        self.pending.update(items)
        for item in items:
            self.queue.add(item)
        try:
            return [await item.result for item in items]
        except asyncio.CancelledError:
            self.metrics.cancelled.inc()
            raise
        finally:  # after an error or a cancellation, the other results are not needed
            self.pending.difference_update(items)
            for item in items:
                if not item.result.cancel() and not item.result.cancelled():
                    item.result.exception()  # marks the exception as retrieved

    def _check_room(self, queue: FairQueue, added: int, limit: int) -> None:
        if queue.count + added > limit:
            self.metrics.refused.labels("full").inc()
            seconds = min(60, math.ceil(queue.cost / self.tokens_per_second) or 1)
            raise Refusal(429, f"the queue is full: try again in {seconds} s", retry_after=seconds)

    async def stream(self, client: Hashable, kind: str, model: str, payload: Event) -> AsyncIterator[Event]:
        """Yield the events of a job as they arrive."""
        self.check_accepting()
        self._check_room(self.stream_queue, 1, self.limits.streams)
        events = asyncio.Queue[Any]()
        item = QueueItem(client, (kind, model, ""), (payload, events), 1)
        item.result.add_done_callback(lambda _: events.put_nowait(END))
        self.pending.add(item)
        self.stream_queue.add(item)
        try:
            while (event := await events.get()) is not END:
                yield event
            await item.result
        finally:
            self.pending.discard(item)
            if not item.result.done():
                self.metrics.cancelled.inc()
                item.result.cancel()

    # ---- dispatching -------------------------------------------------------------------------------------------------

    async def _dispatch(self, worker: ModelWorker, queue: FairQueue) -> None:
        """Send batch after batch from a queue to one process."""
        single = queue is self.stream_queue
        while True:
            await worker.ready.wait()
            await queue.filled.wait()
            if not single and not self.planned:
                await self._wait_for_batch()
            if not worker.ready.is_set():
                continue
            if not single and worker in self.busy and self._idle_workers():  # an idle process takes the batch
                await asyncio.sleep(self.options.batching_delay)
                continue
            items = queue.take(1, 1) if single else self._next_batch()
            if not items:
                queue.filled.clear()
                continue
            self.running += len(items)
            try:
                await (self._run_stream(worker, items[0]) if single else self._run_batch(worker, items))
            except Refusal as error:
                _refuse_items(items, error)
            except Exception:  # a bug: report it, and continue with the next batch
                LOG.exception("a batch failed")
                _refuse_items(items, Refusal(500, "internal error: the server's log has the traceback"))
            finally:
                self.running -= len(items)

    def _idle_workers(self) -> int:
        return sum(worker.ready.is_set() and worker not in self.busy for worker in self.workers)

    async def _wait_for_batch(self) -> None:
        """Wait while more sentences keep arriving: the clients of one batch send their next requests together.

        Half of a usual batch is dispatched at once: a worker process will be idle before many more sentences arrive.
        """
        for _ in range(MAX_WAITS):
            count = self.queue.count
            if self.queue.cost < min(self.batch_tokens, self.usual_batch_tokens / 2):
                seconds = min(MAX_WAIT_SECONDS, WAIT_SHARE * self.batch_seconds)
                await asyncio.sleep(max(self.options.batching_delay, seconds))
            if self.queue.count <= count:
                return

    def _next_batch(self) -> list[QueueItem]:
        """Return the next batch, without items that were cancelled."""
        items: list[QueueItem] = []
        while not items and (self.planned or self._plan_batches()):
            items = [item for item in self.planned.popleft() if item.wanted]
        if self.planned:
            self.queue.filled.set()  # for the other processes
        return items

    def _plan_batches(self) -> bool:
        """Form several batches at once, so that sentences of similar length share one; False if the queue is empty."""
        taken = self.queue.take(PLANNED_BATCHES * self.batch_tokens, self.limits.queue)
        items = sorted(taken, key=lambda item: item.cost)
        if not items:
            return False
        total = sum(item.cost for item in items)
        share = total / max(math.ceil(total / self.batch_tokens), min(self._idle_workers(), len(items)), 1)
        cost = 0.0
        batch: list[QueueItem] = []
        for item in items:
            if batch and cost + item.cost / 2 > share:
                self.planned.append(batch)
                batch, cost = [], 0.0
            batch.append(item)
            cost += item.cost
        self.planned.append(batch)
        return True

    async def _run_batch(self, worker: ModelWorker, items: list[QueueItem]) -> None:
        kind, model, options = items[0].group
        began, cost = asyncio.get_running_loop().time(), sum(item.cost for item in items)
        self.busy.append(worker)
        try:
            if kind in BATCHED_JOBS:
                search: Event = json.loads(options) if options else {}
                search.pop("batch_id", None)  # it only kept these items in a batch of their own
                payload = {"texts": [item.payload for item in items], "options": search}
                results = (await worker.call(kind, model, payload))["results"]
            else:
                results = [await worker.call(kind, model, item.payload) for item in items]
        finally:
            self.busy.remove(worker)
        now = asyncio.get_running_loop().time()
        seconds = max(1e-4, now - max(began, worker.last_result))  # without the time behind the previous batch
        worker.last_result = now
        self.tokens_per_second += 0.1 * (cost / seconds * len(self.workers) - self.tokens_per_second)
        self.batch_seconds += 0.5 * (seconds - self.batch_seconds)
        usual = self.usual_batch_tokens
        self.usual_batch_tokens = cost if usual == math.inf else usual + 0.2 * (cost - usual)
        self.metrics.batch(model, len(items), cost, seconds)
        # Set the results after the process has its next batch: the responses take a while to write.
        self.running += len(items)
        asyncio.get_running_loop().call_soon(self._set_results, items, results)

    def _set_results(self, items: Sequence[QueueItem], results: Sequence[Event]) -> None:
        self.running -= len(items)
        for item, result in zip(items, results, strict=True):
            if item.wanted:
                try:
                    raise_error(result)
                    item.result.set_result(result)
                except Refusal as error:
                    item.result.set_exception(error)

    async def _run_stream(self, worker: ModelWorker, item: QueueItem) -> None:
        kind, model, _ = item.group
        payload, queue = item.payload
        async with aclosing(worker.stream(kind, model, payload)) as events:
            async for event in events:
                if not item.wanted:
                    return
                queue.put_nowait(event)
                self.metrics.tokens.labels(model).inc(len(event.get("tokens", ())))
        if item.wanted:
            item.result.set_result(None)


def _refuse_items(items: Iterable[QueueItem], error: Refusal) -> None:
    for item in items:
        if item.wanted:
            item.result.set_exception(error)


# ---- the queue -------------------------------------------------------------------------------------------------------

Group = tuple[str, str, str]  # kind of job, model, options as JSON: only equal groups share a batch


@dataclass(eq=False)
class QueueItem:
    """One sentence, or one job that cannot be divided."""

    client: Hashable
    group: Group
    payload: Any
    cost: int  # in tokens
    result: asyncio.Future[Any] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    queued: bool = True

    @property
    def wanted(self) -> bool:
        """Whether the request still waits for the result."""
        return not self.result.done()


class FairQueue:
    """A queue for each client, served round-robin; cancelled items are not counted."""

    def __init__(self) -> None:
        self.clients: OrderedDict[Hashable, deque[QueueItem]] = OrderedDict()
        self.count = 0
        self.cost = 0
        self.filled = asyncio.Event()  # set by `add`, cleared by a dispatcher that gets no item

    def add(self, item: QueueItem) -> None:
        self.clients.setdefault(item.client, deque()).append(item)
        self.count += 1
        self.cost += item.cost
        self.filled.set()
        item.result.add_done_callback(lambda _: self._uncount(item))

    def _uncount(self, item: QueueItem) -> None:
        """Subtract an item that was taken or cancelled from the totals, once."""
        if item.queued:
            item.queued = False
            self.count -= 1
            self.cost -= item.cost
            if not self.count:
                self.clients.clear()

    def take(self, max_cost: int, max_items: int) -> list[QueueItem]:
        """Take items of one group, one per client in turn, within the maximum cost but at least one."""
        taken: list[QueueItem] = []
        group: Group | None = None
        cost = 0
        skipped: list[Hashable] = []  # clients without an item for this batch; they come first in the next one
        while len(skipped) < len(self.clients) and len(taken) < max_items:
            client, waiting = next(iter(self.clients.items()))
            while waiting and not waiting[0].wanted:
                waiting.popleft()
            if not waiting:
                del self.clients[client]
                continue
            self.clients.move_to_end(client)
            item = waiting[0]
            if group is not None and (item.group != group or cost + item.cost > max_cost):
                skipped.append(client)
                continue
            waiting.popleft()
            taken.append(item)
            group, cost = item.group, cost + item.cost
            self._uncount(item)
        for client in reversed(skipped):
            self.clients.move_to_end(client, last=False)
        return taken
