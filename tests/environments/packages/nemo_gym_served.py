"""The counter that NeMo-Gym ships as an example, served by its own application; run in an interpreter that has it."""

from __future__ import annotations

from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import DictConfig
from resources_servers.example_session_state_mgmt.app import (
    StatefulCounterResourcesServer,
    StatefulCounterResourcesServerConfig,
)

config = StatefulCounterResourcesServerConfig(host="127.0.0.1", port=1, entrypoint="", name="counter")
others = ServerClient(head_server_config=BaseServerConfig(host="127.0.0.1", port=1), global_config_dict=DictConfig({}))
app = StatefulCounterResourcesServer(config=config, server_client=others).setup_webserver()
