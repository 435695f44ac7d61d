"""The scheduler: fair queue, batches, deadlines, in simulated time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from qkv.server.middleware import BodyReader, Metrics, Refusal, RequestLimits
from qkv.server.scheduler import FairQueue, QueueItem, Scheduler, SchedulerOptions
from qkv.server.served_models import ServedModels
from qkv.server.service import Service
from qkv.server.worker_supervisor import ModelWorker

GROUP = ("translate", "tiny", "")


class JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits for a timer, but counts the seconds that it would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(None if timeout is None else 0)
        if timeout and not events:
            self.now += timeout
        return events


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop with simulated time: when nothing is ready, its clock jumps to the next timer."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def run_simulated(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:
        runner.run(work)


# ---- the queue -------------------------------------------------------------------------------------------------------


def test_clients_take_turns() -> None:
    async def turns() -> None:
        queue = FairQueue()
        for number in range(100):
            queue.add(QueueItem("large", GROUP, number, 1))
        for client in "abc":
            queue.add(QueueItem(client, GROUP, client, 1))
        first = queue.take(8, 100)
        assert Counter(item.client for item in first) == {"large": 5, "a": 1, "b": 1, "c": 1}
        assert [item.payload for item in first if item.client == "large"] == [0, 1, 2, 3, 4]
        assert (queue.count, queue.cost) == (95, 95)

    asyncio.run(turns())


def test_a_batch_has_one_group_and_respects_its_budget() -> None:
    async def batches() -> None:
        queue, other = FairQueue(), ("score", "tiny", "")
        for client, group, cost in (("a", GROUP, 5), ("b", other, 1), ("c", GROUP, 4), ("a", GROUP, 9)):
            queue.add(QueueItem(client, group, None, cost))
        assert [(u.client, u.cost) for u in queue.take(10, 100)] == [("a", 5), ("c", 4)]
        assert [u.client for u in queue.take(10, 100)] == ["b"]
        assert [u.cost for u in queue.take(1, 100)] == [9]  # above the budget, but one item is always taken
        assert queue.take(10, 100) == []
        assert (queue.count, queue.cost) == (0, 0)

    asyncio.run(batches())


def test_cancelled_items_are_not_taken() -> None:
    async def leave() -> None:
        queue = FairQueue()
        items = [QueueItem("a", GROUP, number, 2) for number in range(4)]
        for item in items:
            queue.add(item)
        items[0].result.cancel()
        items[2].result.cancel()
        await asyncio.sleep(0)
        assert (queue.count, queue.cost) == (2, 4)
        assert [item.payload for item in queue.take(100, 100)] == [1, 3]

    asyncio.run(leave())


def test_batches_have_similar_lengths_and_are_shared_by_the_processes() -> None:
    async def plan() -> None:
        scheduler = Scheduler(SchedulerOptions({}, batch_tokens=20), RequestLimits(), Metrics())
        costs = [3, 9, 2, 8, 3, 9, 2, 8]
        for number, cost in enumerate(costs):
            scheduler.queue.add(QueueItem(number, GROUP, number, cost))
        batches = []
        while batch := scheduler._next_batch():
            batches.append([item.cost for item in batch])
            assert scheduler.waiting == len(costs) - sum(map(len, batches))
        assert [cost for batch in batches for cost in batch] == sorted(costs)
        assert all(sum(batch) <= 20 + max(costs) / 2 for batch in batches)
        assert scheduler.idle

        for number in range(6):
            scheduler.queue.add(QueueItem(number, GROUP, number, 19))
        first, *_ = scheduler._next_batch()
        for batch in scheduler.planned:
            for item in batch:
                item.result.cancel()
        assert scheduler.waiting == scheduler.queue.count
        assert first.wanted
        for waiting in scheduler.queue.clients.values():  # all cancelled; the callbacks have not run yet
            for item in waiting:
                item.result.cancel()
        assert scheduler._next_batch() == []

    asyncio.run(plan())


def test_a_batch_waits_while_more_sentences_arrive() -> None:
    async def come() -> None:
        scheduler = Scheduler(SchedulerOptions({}, batch_tokens=1000, batching_delay=0.05), RequestLimits(), Metrics())

        async def arrive() -> None:
            for number in range(3):
                scheduler.queue.add(QueueItem(number, GROUP, number, 1))
                await asyncio.sleep(0.04)

        coming = asyncio.create_task(arrive())
        await asyncio.sleep(0)
        await scheduler._wait_for_batch()
        assert coming.done()
        assert len(scheduler._next_batch()) == 3
        scheduler.queue.add(QueueItem("much", GROUP, 0, 1000))  # a full batch does not wait
        late = asyncio.create_task(asyncio.sleep(0.04))
        await scheduler._wait_for_batch()
        assert not late.done()
        late.cancel()
        assert scheduler._next_batch()
        scheduler.usual_batch_tokens = 20  # with half of a usual batch there is no wait
        scheduler.queue.add(QueueItem("some", GROUP, 0, 10))
        late = asyncio.create_task(asyncio.sleep(0.04))
        await scheduler._wait_for_batch()
        assert not late.done()
        late.cancel()

    run_simulated(come())


def test_the_only_idle_process_takes_the_whole_batch() -> None:
    async def plan() -> None:
        scheduler = Scheduler(SchedulerOptions({}, batch_tokens=100), RequestLimits(), Metrics())
        scheduler.workers = [ModelWorker({}), ModelWorker({})]
        for worker in scheduler.workers:
            worker.ready.set()
        for busy, sizes in (([], [3, 3]), ([scheduler.workers[0]], [6])):
            scheduler.busy = busy
            for number in range(6):
                scheduler.queue.add(QueueItem(number, GROUP, number, 5))
            assert [len(scheduler._next_batch()) for _ in sizes] == sizes
            assert not scheduler.waiting

    asyncio.run(plan())


def test_a_busy_process_gets_a_batch_only_if_no_other_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[ModelWorker, int]] = []
    over = asyncio.Event()

    async def call(self: ModelWorker, kind: str, model: str, arguments: Any) -> Any:
        sent.append((self, len(arguments["texts"])))
        await over.wait()
        return {"results": [{"texts": [text]} for text in arguments["texts"]]}

    async def supervise(self: ModelWorker) -> None:
        self.info = {"device": "cpu", "ready": {}}
        self.ready.set()
        await asyncio.Event().wait()

    async def work() -> None:
        scheduler = Scheduler(SchedulerOptions({}, workers=2, batching_delay=0.001), RequestLimits(), Metrics())
        scheduler.start()
        await asyncio.sleep(0.01)
        asked = [
            asyncio.create_task(scheduler.submit("a", ("translate", "m", ""), ["x"] * size, [5] * size))
            for size in (4, 4)
        ]
        await asyncio.sleep(0.05)
        assert {worker for worker, _ in sent} == set(scheduler.workers)
        assert [size for _, size in sent] == [4, 4]
        asked += [asyncio.create_task(scheduler.submit("a", ("translate", "m", ""), ["y"], [5]))]
        await asyncio.sleep(0.05)
        assert [size for _, size in sent] == [4, 4, 1]  # although both are busy
        over.set()
        assert [len(results) for results in await asyncio.gather(*asked)] == [4, 4, 1]
        assert scheduler.idle
        assert scheduler.busy == []
        await scheduler.close()

    monkeypatch.setattr(ModelWorker, "call", call)
    monkeypatch.setattr(ModelWorker, "supervise", supervise)
    run_simulated(work())


def test_a_large_request_does_not_starve_single_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[str] = []

    async def call(self: ModelWorker, kind: str, model: str, arguments: Any) -> Any:
        await asyncio.sleep(0.01)
        return {"results": [{"texts": [text]} for text in arguments["texts"]]}

    async def supervise(self: ModelWorker) -> None:
        self.info = {"device": "cpu", "ready": {}}
        self.ready.set()
        await asyncio.Event().wait()

    async def ask(scheduler: Scheduler, client: str, size: int) -> None:
        await scheduler.submit(client, ("translate", "m", ""), [client] * size, [5] * size)
        answered.append(client)

    async def work() -> None:
        scheduler = Scheduler(SchedulerOptions({}, workers=1, batch_tokens=64), RequestLimits(), Metrics())
        scheduler.start()
        await asyncio.sleep(0.01)
        asked = [asyncio.create_task(ask(scheduler, "large", 900))]
        await asyncio.sleep(0.05)  # several batches later
        asked += [asyncio.create_task(ask(scheduler, client, 1)) for client in "abc"]
        await asyncio.gather(*asked)
        assert sorted(answered[:-1]) == ["a", "b", "c"]
        assert answered[-1] == "large"
        await scheduler.close()

    monkeypatch.setattr(ModelWorker, "call", call)
    monkeypatch.setattr(ModelWorker, "supervise", supervise)
    run_simulated(work())


def test_a_batch_has_at_most_the_given_number_of_items() -> None:
    async def take() -> None:
        queue = FairQueue()
        for number in range(5):
            queue.add(QueueItem(number, GROUP, number, 1))
        assert [item.payload for item in queue.take(100, 2)] == [0, 1]
        assert [item.payload for item in queue.take(100, 2)] == [2, 3]
        assert (queue.count, queue.cost) == (1, 1)

    asyncio.run(take())


@pytest.mark.parametrize("wait_for_room", [False, True])
def test_a_stopped_scheduler_refuses_every_submission(wait_for_room: bool) -> None:
    async def submit() -> None:
        scheduler = Scheduler(SchedulerOptions({}), RequestLimits(), Metrics())
        scheduler.stop()
        with pytest.raises(Refusal, match="stopped before") as refused:
            async with asyncio.timeout(9):  # simulated seconds: an accepted item would wait for ever
                await scheduler.submit("a", GROUP, ["x"], [1], wait_for_room=wait_for_room)
        assert refused.value.status_code == 503
        assert not scheduler.queue.count

    run_simulated(submit())


def test_a_full_queue_estimates_its_time_from_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(self: ModelWorker, kind: str, model: str, arguments: Any) -> Any:
        await asyncio.sleep(0.5)
        return {"results": [{"texts": [text]} for text in arguments["texts"]]}

    async def supervise(self: ModelWorker) -> None:
        self.info = {"device": "cpu", "ready": {}}
        self.ready.set()
        await asyncio.Event().wait()

    async def work() -> None:
        scheduler = Scheduler(SchedulerOptions({}, workers=2, batch_tokens=100), RequestLimits(queue=10), Metrics())
        scheduler.start()
        await asyncio.sleep(0.01)
        expected = scheduler.tokens_per_second
        for _ in range(20):  # 100 tokens in 0.5 s by each of two processes: 400 tokens a second
            await scheduler.submit("a", GROUP, ["x"], [100])
            expected += 0.1 * (400 - expected)
            assert scheduler.tokens_per_second == pytest.approx(expected)
        for number in range(10):
            scheduler.queue.add(QueueItem("b", ("other", "m", ""), number, 450))
        with pytest.raises(Refusal) as refused:
            await scheduler.submit("a", GROUP, ["x"], [100])
        assert refused.value.status_code == 429
        assert refused.value.headers == {"Retry-After": str(math.ceil(4500 / expected))}
        await scheduler.close()

    monkeypatch.setattr(ModelWorker, "call", call)
    monkeypatch.setattr(ModelWorker, "supervise", supervise)
    run_simulated(work())


class Connection:
    """A request as far as `Service.run` reads it: whether its client has disconnected."""

    def __init__(self) -> None:
        self.disconnected = asyncio.get_running_loop().create_future()
        self.scope = {"state": {"disconnected": self.disconnected}}


def test_a_request_ends_at_the_time_limit_or_by_a_disconnect() -> None:
    async def work(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "done"

    async def waits() -> None:
        limits, metrics = RequestLimits(timeout=0.5), Metrics()
        service = Service(ServedModels(), Scheduler(SchedulerOptions({}), limits, metrics), limits, metrics)

        async def run(connection: Any, seconds: float) -> str:
            return await service.run(connection, work(seconds))

        task = asyncio.current_task()
        assert task is not None
        assert await run(Connection(), 0.1) == "done"
        with pytest.raises(Refusal, match=r"not done within 0.5 s") as late:
            await run(Connection(), 9)
        assert late.value.status_code == 504
        left = Connection()
        asyncio.get_running_loop().call_soon(left.disconnected.set_result, None)
        with pytest.raises(Refusal, match="disconnected") as gone:
            await run(left, 9)
        assert gone.value.status_code == 499
        assert await run(left, 0) == "done"  # the client left when the work was done: no effect afterwards
        await asyncio.sleep(1)
        assert not task.cancelling()
        inner = asyncio.create_task(run(Connection(), 9))
        await asyncio.sleep(0)
        inner.cancel()  # cancelled from outside: no refusal
        with pytest.raises(asyncio.CancelledError):
            await inner

    run_simulated(waits())


def test_a_body_ends_at_its_time_limit_or_by_a_disconnect() -> None:
    async def read(*messages: tuple[float, Message]) -> list[Message]:
        coming = iter(messages)

        async def receive() -> Message:
            seconds, message = next(coming)
            await asyncio.sleep(seconds)
            return message

        body = BodyReader(receive, limit=10, receive_timeout=2)
        return [await body.receive() for _ in messages]

    async def reads() -> None:
        part: Message = {"type": "http.request", "body": b"12345", "more_body": True}
        last: Message = {"type": "http.request", "body": b"12345"}
        assert await read((0.9, part), (0.9, last)) == [part, last]
        for status, messages in (
            (408, [(1.5, part), (1.5, last)]),  # the limit is for the whole body
            (413, [(0.1, part), (0.1, part), (0.1, last)]),
            (499, [(0.1, part), (0.1, {"type": "http.disconnect"})]),
        ):
            with pytest.raises(Refusal) as refused:
                await read(*messages)
            assert refused.value.status_code == status

    run_simulated(reads())
