#!/usr/bin/env bash
# One node, inside its namespaces: node.sh FOLDER NAME SHARED...
set -euo pipefail
folder=$1 name=$2
shift 2
private=$folder/nodes/$name/tmp
hostname "$name"
mount --make-rprivate /
mount -t proc proc /proc
cat /proc/sys/kernel/random/uuid >"$folder/nodes/$name/boot_id"
mount --bind "$folder/nodes/$name/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs -o size=1g tmpfs /dev/shm
mount --bind "$folder/etc/hosts" /etc/hosts
for shared in "$folder" "$@"; do
    case $shared in
        /tmp/*)
            mkdir -p "$private/${shared#/tmp/}"
            mount --bind "$shared" "$private/${shared#/tmp/}"
            ;;
    esac
done
mount --rbind "$private" /tmp
export SLURM_CONF=$folder/etc/slurm.conf
slurmd -D -N "$name" -f "$SLURM_CONF" &
daemon=$!
while kill -0 "$daemon" 2>/dev/null; do wait "$daemon" || true; done
