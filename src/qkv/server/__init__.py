"""HTTP server for run folders: a web page, LibreTranslate's API, OpenAI's API, and native routes.

The listening process loads no torch and computes nothing. `app` has the routes; `scheduler` queues sentences and sends
batches to model processes; `worker_supervisor` starts those processes and restarts them when they die; `model_worker`
is the code that runs in them.
"""

from __future__ import annotations
