#!/usr/bin/env bash
# The learner's environment, $PREFIX/learner: torch, then TransformerEngine, which is compiled against it with nvcc.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
version=${TRANSFORMER_ENGINE-}
given=${TRANSFORMER_ENGINE+given}
# shellcheck source=slurm/images/versions
. "$here/versions"
[ -z "$given" ] || TRANSFORMER_ENGINE=$version
learner=${PREFIX:-/opt}/learner
"${PYTHON:-python3}" -m venv "$learner"
"$learner/bin/pip" install --no-cache-dir -c "$here/../../constraints.txt" torch==2.13.0
if [ -n "$TRANSFORMER_ENGINE" ]; then
    "$learner/bin/pip" install --no-cache-dir -c "$here/../../constraints.txt" numpy packaging pybind11 setuptools wheel
    NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=$CUDA_ARCHS "$learner/bin/pip" install --no-cache-dir --no-build-isolation \
        -c "$here/../../constraints.txt" "transformer-engine[pytorch,core_cu13]==$TRANSFORMER_ENGINE"
fi
