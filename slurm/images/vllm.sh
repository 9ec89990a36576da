#!/usr/bin/env bash
# The engine in an environment of its own, $PREFIX/vllm: it wants other versions than the learner.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=slurm/images/versions
. "$here/versions"
engine=${PREFIX:-/opt}/vllm
"${PYTHON:-python3}" -m venv "$engine"
# vLLM for GPUs asks for another version of this one than the one for CPUs, whose versions are pinned.
pins=$(mktemp)
grep -v '^apache-tvm-ffi==' "$here/../../tests/engines/vllm.txt" > "$pins"
"$engine/bin/pip" install --no-cache-dir -c "$pins" "vllm==$VLLM"
rm "$pins"
