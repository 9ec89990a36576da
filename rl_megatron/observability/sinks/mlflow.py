"""MLflow, by its own client."""

from __future__ import annotations

import time
from typing import Any, Final

from typing_extensions import override

from rl_megatron.errors import ConfigError
from rl_megatron.http.urls import find_secret
from rl_megatron.observability.files import JsonRow
from rl_megatron.observability.sinks.sink import (
    MetricSink,
    RunEnd,
    SinkSettings,
    keep_id,
    kept_id,
    need_no_argument,
    need_package,
    tagged_numbers,
)

VARIABLE: Final = "MLFLOW_TRACKING_URI"
"""The environment variable with the address of the tracking server."""
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowSink(MetricSink):
    """Sends rows to a run of the experiment ``log.project``, named like the run's folder. A resume continues it."""

    def __init__(self, settings: SinkSettings) -> None:
        need_package("mlflow", "mlflow")
        need_no_argument("mlflow", settings)
        if not (address := settings.environment.get(VARIABLE)):
            raise ConfigError(
                f"log.sinks=mlflow: the environment variable {VARIABLE} is not set; export the address in it"
            )
        if secret := find_secret(address):
            raise ConfigError(
                f"log.sinks=mlflow: {VARIABLE} holds a secret ({secret}), which errors would show; export it as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        self._settings, self._address = settings, address
        self._client: Any = None
        self._id = ""

    @override
    def open(self) -> None:
        from mlflow import MlflowClient

        self._client, settings = MlflowClient(tracking_uri=self._address), self._settings
        file = settings.folder / "mlflow_id.txt"
        if (known := kept_id(file, fresh=settings.is_fresh)) is not None:
            self._client.update_run(known, status="RUNNING")
            self._id = known
            return
        run = self._client.create_run(self._experiment(settings.project), run_name=settings.folder.name)
        self._id = str(run.info.run_id)
        keep_id(file, self._id)

    def _experiment(self, name: str) -> str:
        """Returns the experiment's id. Another run may create it at the same time."""
        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    @override
    def log(self, row: JsonRow) -> None:
        from mlflow.entities import Metric

        (tags, x), now = tagged_numbers(row), time.time_ns() // 1_000_000
        self._client.log_batch(self._id, metrics=[Metric(tag, float(value), now, x) for tag, value in tags.items()])

    @override
    def close(self, end: RunEnd) -> None:
        self._client.set_terminated(self._id, _STATUS[end.state])
