#!/usr/bin/env bash
# A real Slurm of N nodes on this machine: start.sh FOLDER N SHARED...   (root; Debian's slurm-wlm and munge)
# Nodes 1 to 4 are the partition batch, each two after them a partition of their own (pair5 is node5 and node6), so that
# what happens to one job's nodes happens to no other; of the last seven, one stands by for pair13 in the partition spare,
# and three are the partition trio. Nodes 15 to 18 are also the partition quad.
# Jobs in urgent preempt all others.
# A node is a network, host name, boot id, process table, /tmp and /dev/shm of its own; SHARED are the folders that all
# nodes see.
# Names of interfaces, subnet and port come from the folder's hash: two clusters do not meet. Nothing under /etc changes.
set -euo pipefail
folder=$1 count=$2
shift 2
hash=$(printf %s "$folder" | cksum | cut -d' ' -f1)
tag=rl$((hash % 10000)) net=10.$((100 + hash % 100)).$((hash / 100 % 250))
export SLURM_CONF=$folder/etc/slurm.conf
mkdir -p "$folder"/{etc,run,log,state,munge,spool,nodes}
chmod 755 "$folder/munge"
printf '%s\n' "$tag" >"$folder/run/tag"

head -c 128 /dev/urandom >"$folder/etc/munge.key"
chmod 400 "$folder/etc/munge.key"
munged --force --key-file="$folder/etc/munge.key" --socket="$folder/munge/socket" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/munge/seed" 2>>"$folder/log/munged.err"

controller=$(hostname -s)
cat >"$SLURM_CONF" <<CONF
ClusterName=$tag
SlurmctldHost=$controller($net.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
SlurmctldPort=$((20000 + hash % 10000))
SlurmctldPidFile=$folder/run/slurmctld.pid
SlurmctldLogFile=$folder/log/slurmctld.log
SlurmdPidFile=$folder/run/slurmd.%n.pid
SlurmdLogFile=$folder/log/slurmd.%n.log
SlurmdSpoolDir=$folder/spool/%n
StateSaveLocation=$folder/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=10
MinJobAge=3600
SlurmdTimeout=10
SlurmdParameters=config_overrides
SrunPortRange=61000-61999
AccountingStorageType=accounting_storage/none
CONF
printf 'CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n' >"$folder/etc/cgroup.conf"
{
    echo "127.0.0.1 localhost"
    echo "$net.254 $controller"
} >"$folder/etc/hosts"
for i in $(seq "$count"); do
    echo "NodeName=node$i NodeAddr=$net.$i NodeHostname=node$i Port=16818 CPUs=8 RealMemory=32000 Feature=rack$i State=UNKNOWN" >>"$SLURM_CONF"
    echo "$net.$i node$i" >>"$folder/etc/hosts"
done
cat >>"$SLURM_CONF" <<CONF
PartitionName=DEFAULT MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE OverSubscribe=NO
PartitionName=batch Nodes=node[1-4] Default=YES
CONF
for i in $(seq 5 2 "$((count - 7))"); do echo "PartitionName=pair$i Nodes=node$i,node$((i + 1))" >>"$SLURM_CONF"; done
echo "PartitionName=spare Nodes=node13,node14,node$((count - 6))" >>"$SLURM_CONF"
echo "PartitionName=trio Nodes=node[$((count - 5))-$((count - 3))]" >>"$SLURM_CONF"
echo "PartitionName=quad Nodes=node[15-18]" >>"$SLURM_CONF"
echo "PartitionName=urgent Nodes=ALL PriorityTier=10" >>"$SLURM_CONF"

ip link add "$tag" type bridge
ip addr add "$net.254/24" dev "$tag"
ip link set "$tag" up
slurmctld -c -f "$SLURM_CONF"
for i in $(seq "$count"); do
    node=node$i private=$folder/nodes/node$i/tmp
    mkdir -p "$private"
    chmod 1777 "$private"
    ip netns add "$tag-$node"
    ip link add "$tag-$i" type veth peer name eth0 netns "$tag-$node"
    ip link set "$tag-$i" master "$tag" up
    ip -n "$tag-$node" addr add "$net.$i/24" dev eth0
    ip -n "$tag-$node" link set eth0 up
    ip -n "$tag-$node" link set lo up
    "$(dirname "$0")/power_on.sh" "$folder" "$node" "$@"
done
for _ in $(seq 300); do
    up=$(sinfo -h -N -p urgent -o '%t' 2>/dev/null | grep -c '^idle$' || true)
    [ "$up" = "$count" ] && exit 0
    sleep 0.1
done
echo "only $up of $count nodes are up; see $folder/log" >&2
exit 1
