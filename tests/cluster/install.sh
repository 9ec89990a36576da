#!/usr/bin/env bash
# Debian's Slurm and munge, where they are not there and can be installed; the tests skip themselves otherwise.
set -euo pipefail
if command -v slurmctld && command -v munged && command -v ip; then exit 0; fi >/dev/null
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "NO CLUSTER TESTS: Slurm is not installed, and this is not root on Debian" >&2
    exit 0
fi
apt-get update -qq || true # an older list of packages may do
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge iproute2 ||
    echo "NO CLUSTER TESTS: apt-get could not install slurm-wlm and munge" >&2
