"""What the server counts, for Prometheus; every server has a registry of its own."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Metrics:
    """Counters by name; none holds anything of a text, a client or a key."""

    def __init__(self) -> None:
        self.registry = own = CollectorRegistry()
        self.requests = Counter("qkv_requests", "Requests answered.", ["route", "status"], registry=own)
        self.seconds = Histogram("qkv_request_seconds", "Until the answer.", ["route"], registry=own, buckets=SECONDS)
        self.waiting = Gauge("qkv_queue_sentences", "Sentences that wait.", registry=own)
        self.waiting_tokens = Gauge("qkv_queue_tokens", "Their tokens.", registry=own)
        self.ready = Gauge("qkv_workers_ready", "Model processes that can answer.", registry=own)
        self.restarts = Counter("qkv_worker_restarts", "Model processes that died.", registry=own)
        self.refused = Counter("qkv_refused", "Requests refused: full, rate, key.", ["why"], registry=own)
        self.cancelled = Counter("qkv_cancelled", "Requests whose sender left or whose time was up.", registry=own)
        self.sentences = Counter("qkv_sentences", "Sentences answered.", ["model"], registry=own)
        self.tokens = Counter(
            "qkv_tokens", "Tokens read of translations, written of completions.", ["model"], registry=own
        )
        self.batch_size = Histogram("qkv_batch_sentences", "Sentences in a batch.", registry=own, buckets=SIZES)
        self.batch_seconds = Histogram("qkv_batch_seconds", "Time of a batch.", registry=own, buckets=SECONDS)

        self._request = cache(lambda route, status: (self.requests.labels(route, status), self.seconds.labels(route)))

    def request(self, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        count, time = self._request(route, status)
        count.inc()
        time.observe(seconds)

    def batch(self, model: str, sentences: int, tokens: int, seconds: float) -> None:
        """A batch was answered."""
        self.sentences.labels(model).inc(sentences)
        self.tokens.labels(model).inc(tokens)
        self.batch_size.observe(sentences)
        self.batch_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
