#!/usr/bin/env bash
# build.sh docker learner|vllm|sglang    builds the image rl-megatron:STAGE
# build.sh apptainer vllm|sglang         builds rl-megatron-STAGE.sif
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=slurm/images/versions
. slurm/images/versions
case "${1-} ${2-}" in
"docker learner" | "docker vllm" | "docker sglang")
    exec docker build --build-arg "BASE=$BASE" -f slurm/images/Dockerfile --target "$2" -t "rl-megatron:$2" . ;;
"apptainer vllm" | "apptainer sglang")
    exec apptainer build --build-arg "BASE=$BASE" --build-arg "ENGINE=$2" "rl-megatron-$2.sif" slurm/images/apptainer.def ;;
*)
    sed -n '2,3s/^# //p' "${BASH_SOURCE[0]##*/}" 2>/dev/null || sed -n '2,3s/^# //p' slurm/images/build.sh
    exit 2 ;;
esac
