"""Prometheus: a page that it scrapes on this machine, or a file for the textfile collector of the node exporter."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Iterable
from http.server import HTTPServer
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector
from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.metrics import documented
from rl_megatron.observability.sinks.sink import MetricSink, RunEnd, SinkSettings, tagged_numbers

logger = logging.getLogger(__name__)

_MAX_PORT = 65535


class PrometheusSink(MetricSink, Collector):
    """Exposes the latest value of each metric as a gauge ``rl_megatron_<name>`` with the label ``run``.

    ``prometheus:PORT`` listens on 127.0.0.1, without a port on a free one, which log.txt names. ``prometheus:/FOLDER``
    writes ``FOLDER/rl_megatron_<run>.prom``, which stays with the run's end in it.
    """

    def __init__(self, settings: SinkSettings) -> None:
        text = settings.argument or "0"
        self._port = int(text) if re.fullmatch(r"[0-9]{1,5}", text) else None
        if (self._port is None and not Path(text).is_absolute()) or (self._port or 0) > _MAX_PORT:
            raise ConfigError(
                f"log.sinks=prometheus:{text!s:.80}: write prometheus, prometheus:PORT with a port up to {_MAX_PORT}, "
                "or prometheus:/FOLDER with the full path of the textfile collector's folder"
            )
        self._run = settings.folder.name
        self._file = Path(text) / f"rl_megatron_{self._run}.prom"
        self._values: dict[str, tuple[str, float]] = {}  # name here -> metric, its latest value
        self._state = ""
        self._registry = CollectorRegistry()
        self._server: _Server | None = None

    @override
    def open(self) -> None:
        self._registry.register(self)
        if self._port is None:
            self._write()
            return
        self._server = _Server(("127.0.0.1", self._port), _Handler.factory(self._registry))
        threading.Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        logger.info("metrics for Prometheus: http://127.0.0.1:%d/metrics", self._server.server_port)

    @override
    def log(self, row: JsonRow) -> None:
        tags, _ = tagged_numbers(row)
        new = {f"rl_megatron_{re.sub(r'[^a-zA-Z0-9_]', '_', tag)}": (tag, float(tags[tag])) for tag in tags}
        self._values = {**self._values, **new}  # a new dictionary, because the server reads the other
        self._write()

    @override
    def close(self, end: RunEnd) -> None:
        self._state = end.state
        self._write()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @override
    def collect(self) -> Iterable[Metric]:
        """Yields the gauges. Called by Prometheus' server, or as the file is written."""
        for name, (tag, value) in self._values.items():
            metric = documented(tag)
            gauge = GaugeMetricFamily(name, metric.meaning if metric else tag, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        if self._state:
            gauge = GaugeMetricFamily("rl_megatron_run_ended", "1: the run is over", labels=["run", "state"])
            gauge.add_metric([self._run, self._state], 1.0)
            yield gauge

    def _write(self) -> None:
        """Replaces the file. Every user can read it, because the exporter is another one."""
        if self._port is None:
            temporary = self._file.with_name(f".{self._file.name}.tmp")  # the collector reads *.prom
            temporary.write_bytes(generate_latest(self._registry))
            temporary.chmod(0o644)
            temporary.replace(self._file)


class _Server(HTTPServer):
    """Serves one client at a time, so that many connections cannot take threads or files of the controller."""

    @override
    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("a client of the metrics for Prometheus left: %r", sys.exception())


class _Handler(MetricsHandler):
    timeout = 5.0  # seconds without a byte of the client
