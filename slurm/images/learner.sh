#!/usr/bin/env bash
# This package and what it needs, with Ray and W&B, in the learner's environment.
set -euo pipefail
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
learner=${PREFIX:-/opt}/learner
"$learner/bin/pip" install --no-cache-dir -c "$code/constraints.txt" -e "$code[ray,wandb]"
"$learner/bin/rl-megatron" doctor
