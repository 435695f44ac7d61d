"""A run folder as a service: `app` has the routes, `engine` the queue, `worker` the model in a process of its own.

The process that listens has no torch in it and computes nothing. It reads requests, cuts texts into sentences, lets
them wait their turn and hands them in batches to model processes, which it watches and starts again when they die.
"""

from __future__ import annotations
