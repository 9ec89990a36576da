#!/usr/bin/env bash
# The engine in an environment of its own, $PREFIX/sglang: it wants other versions than the learner.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=slurm/images/versions
. "$here/versions"
engine=${PREFIX:-/opt}/sglang
"${PYTHON:-python3}" -m venv "$engine"
# SGLang for GPUs asks for another version of this one than the one for CPUs, whose versions are pinned.
pins=$(mktemp)
grep -v '^openai==' "$here/../../tests/engines/sglang.txt" > "$pins"
"$engine/bin/pip" install --no-cache-dir -c "$pins" "sglang==$SGLANG"
rm "$pins"
