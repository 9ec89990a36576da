#!/usr/bin/env bash
# Ends what start.sh FOLDER started, each process by its id, and removes its networks.
folder=$1
tag=$(cat "$folder/run/tag")
end() { # pid file, what its process is called, signal
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    grep -qa "$2" "/proc/$pid/cmdline" 2>/dev/null || return 0
    kill "-$3" "$pid"
    for _ in $(seq 200); do
        case $(awk '{print $3}' "/proc/$pid/stat" 2>/dev/null) in '' | Z) return 0 ;; esac
        sleep 0.05
    done
}
end "$folder/run/slurmctld.pid" slurmctld TERM
for file in "$folder"/run/node*.pid; do end "$file" unshare KILL; done
end "$folder/run/munged.pid" munged TERM
for name in $(ip netns list | awk -v tag="$tag-" 'index($1, tag) == 1 {print $1}'); do ip netns del "$name"; done
ip link del "$tag" 2>/dev/null || true
