#!/usr/bin/env bash
# Starts one node: power_on.sh FOLDER NAME SHARED...   Its first process is its power switch: with it all others end.
folder=$1 node=$2
export SLURM_CONF=$folder/etc/slurm.conf
ip netns exec "$(cat "$folder/run/tag")-$node" unshare --uts --mount --ipc --pid --fork --kill-child \
    "$(dirname "$0")/node.sh" "$@" </dev/null >>"$folder/log/$node.txt" 2>&1 &
echo $! >"$folder/run/$node.pid"
