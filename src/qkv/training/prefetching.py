"""Prefetching: a thread makes the batches of the next updates while the model is trained on the current one.

`assembly.updates_for` wraps every stream with `prefetching`; the core by itself makes each update when it is read. The
updates are the same: all randomness in a batch follows from its seed.
"""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import TypeVar

from qkv.core.batches import Update, Updates, UpdateStream

UPDATES_AHEAD = 4  # made before they are needed
PATIENCE = 0.1  # seconds until a thread with a full queue checks whether it should stop

Stream = TypeVar("Stream", bound=UpdateStream)


def prefetching(updates: Stream, depth: int = UPDATES_AHEAD) -> Stream:
    """Make `updates.starting` read ahead in a thread; return the stream."""
    updates.wrap = partial(prefetch, depth=depth)
    return updates


def prefetch(updates: Updates, depth: int) -> Updates:
    """Run an endless iterator in a thread, at most `depth` items ahead; an exception in it is raised here."""
    items: queue.Queue[Update | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(item: Update | BaseException) -> None:
        while not stop.is_set():
            try:
                return items.put(item, timeout=PATIENCE)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for update in updates:
                put(update)
                if stop.is_set():
                    return
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()  # a thread inside torch while the interpreter ends would abort the process
