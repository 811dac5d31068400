"""What a server counts, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from types import MappingProxyType

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..translate.scheduler import BOUNDS, Times
from .models import Model


class Schedulers(Collector):
    """The schedulers' own numbers, read when they are asked for."""

    def __init__(self, models: Iterable[Model]) -> None:
        self.models = models

    def collect(self) -> Iterable[Metric]:
        """All of them, by model."""
        waiting = GaugeMetricFamily("tformer_waiting_lines", "Lines in the queue.", labels=["model"])
        running = GaugeMetricFamily("tformer_running_lines", "Lines in the running batch.", labels=["model"])
        steps = CounterMetricFamily("tformer_steps", "Decoding steps.", labels=["model"])
        rows = CounterMetricFamily("tformer_rows", "Rows of all decoding steps.", labels=["model"])
        tokens = CounterMetricFamily("tformer_tokens", "Tokens of finished outputs.", labels=["model"])
        failed = CounterMetricFamily("tformer_failed_lines", "Lines that failed, by kind.", labels=["model", "kind"])
        first = HistogramMetricFamily(
            "tformer_first_token_seconds", "Time from a text's arrival to its first token.", labels=["model"]
        )
        further = HistogramMetricFamily(
            "tformer_token_seconds", "Mean time of a text's further tokens.", labels=["model"]
        )
        for model in self.models:
            scheduler = model.scheduler
            waiting.add_metric([model.name], scheduler.waiting)
            running.add_metric([model.name], scheduler.running)
            steps.add_metric([model.name], scheduler.steps)
            rows.add_metric([model.name], scheduler.rows)
            tokens.add_metric([model.name], scheduler.tokens)
            for kind, count in dict(scheduler.failed).items():
                failed.add_metric([model.name, kind], count)
            for family, times in ((first, scheduler.first_token), (further, scheduler.per_token)):
                family.add_metric([model.name], buckets(times), times.sum)
        return waiting, running, steps, rows, tokens, failed, first, further


def buckets(times: Times) -> list[tuple[str, float]]:
    """Upper bounds in seconds, and how many times are at most these."""
    return list(zip([*map(str, BOUNDS), "+Inf"], accumulate(times.counts), strict=True))


class Labelled(Collector):
    """The metrics of a registry, each with further labels."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.registry, self.labels = registry, labels

    def collect(self) -> Iterable[Metric]:
        """All of them."""
        for found in self.registry.collect():
            family = Metric(found.name, found.documentation, found.type)
            family.samples = [each._replace(labels={**each.labels, **self.labels}) for each in found.samples]
            yield family


class Counted:
    """All metrics of a server."""

    media_type = CONTENT_TYPE_LATEST
    labels: Mapping[str, str] = MappingProxyType({})
    """Of every number, to tell servers behind one address apart."""

    def __init__(self, models: Iterable[Model]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Schedulers(models))
        self.requests = Counter("tformer_requests", "Requests by status.", ["route", "status"], registry=self.registry)
        self.errors = Counter("tformer_errors", "Requests that failed, by kind.", ["kind"], registry=self.registry)
        self.seconds = Histogram("tformer_request_seconds", "Time of a request.", ["route"], registry=self.registry)

    def answered(self, route: str, status: int, seconds: float, error: BaseException | None) -> None:
        """Count a request of a route; not of a path, as strangers can make any number of these."""
        self.requests.labels(route, status).inc()
        self.seconds.labels(route).observe(seconds)
        if error:
            self.errors.labels(type(error).__name__).inc()

    def text(self) -> str:
        """All numbers."""
        registry = CollectorRegistry()
        registry.register(Labelled(self.registry, self.labels))
        return generate_latest(registry).decode()
