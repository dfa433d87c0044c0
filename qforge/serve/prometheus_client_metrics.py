"""Figures of a server in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from qforge.serve.worker import Ticket

_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_EACH = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


class Metrics:
    """Counted as requests end.

    Args:
        counts: how many requests run and wait now.
    """

    def __init__(self, counts: Callable[[], tuple[int, int]]) -> None:
        self._registry = CollectorRegistry()
        self._ended = Counter("qforge_requests", "Requests that ended, by why", ["reason"], registry=self._registry)
        self._prompt = Counter("qforge_prompt_tokens", "Tokens of prompts that were computed, once for each choice", registry=self._registry)
        self._cached = Counter("qforge_cached_prompt_tokens", "Tokens of prompts that were in the cache", registry=self._registry)
        self._generated = Counter("qforge_generated_tokens", "Tokens generated", registry=self._registry)
        self._first = Histogram("qforge_time_to_first_token_seconds", "From the request to its first token", registry=self._registry, buckets=_FIRST)
        self._each = Histogram("qforge_time_per_output_token_seconds", "Between tokens of a request, on average", registry=self._registry, buckets=_EACH)
        Gauge("qforge_requests_running", "Requests that are computed", registry=self._registry).set_function(lambda: counts()[0])
        Gauge("qforge_requests_waiting", "Requests that wait for their turn", registry=self._registry).set_function(lambda: counts()[1])

    def ended(self, ticket: Ticket, reason: str) -> None:
        """A request has ended, or its client has left."""
        self._ended.labels(reason).inc()
        tokens = len(ticket.sequence.generated)
        self._generated.inc(tokens)
        if ticket.first is not None:
            self._prompt.inc(ticket.sequence.num_prompt - ticket.sequence.cached)
            self._cached.inc(ticket.sequence.cached)
            self._first.observe(ticket.first - ticket.began)
            if tokens > 1:
                self._each.observe((time.monotonic() - ticket.first) / (tokens - 1))

    def refused(self) -> None:
        """A request was refused before anything was computed."""
        self._ended.labels("refused").inc()

    def text(self) -> bytes:
        """All of them."""
        return generate_latest(self._registry)
