"""Whose certificates the HTTP client trusts: by the environment, or the system's where that names what is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import certifi

CODE = "from rl_megatron.http import client; client.new_client(); print(len(client._trusted().get_ca_certs()))"


def ended(**named: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("SSL_CERT_FILE", "SSL_CERT_DIR")}
    given = {name: str(value) for name, value in named.items()}
    return subprocess.run([sys.executable, "-c", CODE], env=environment | given, capture_output=True, text=True)


def test_a_file_that_the_environment_names_is_the_only_one(tmp_path: Path) -> None:
    mark = "-----END CERTIFICATE-----\n"
    first = Path(certifi.where()).read_text().partition(mark)[0] + mark
    (tmp_path / "one.pem").write_text(first)
    assert ended(SSL_CERT_FILE=tmp_path / "one.pem").stdout == "1\n"


def test_a_name_of_nothing_is_said_and_the_systems_certificates_count(tmp_path: Path) -> None:
    usual, missing = ended(), ended(SSL_CERT_FILE=tmp_path / "nowhere.pem")
    assert missing.stdout == usual.stdout
    assert "SSL_CERT_FILE or SSL_CERT_DIR cannot be read" in missing.stderr
