"""What waits for a model: bounded, and fair between clients, however much one of them brings."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

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
