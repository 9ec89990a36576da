#!/usr/bin/env bash
# Python, and the compilers that TransformerEngine's extension and engines' kernels want. Run by both recipes, as root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends build-essential git libnuma1 ninja-build python3 python3-dev python3-venv
rm -rf /var/lib/apt/lists/*
