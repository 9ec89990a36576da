# One attempt of a run: trains from the last checkpoint, then decides whether the job is requeued. Bash reads it in the job.
# The script before it sets PYTHON, RUN (the run's folder), TRAIN (arguments of `train`), REQUEUES, RESTARTS, EXCLUDE, and
# ASKED, which a trap fills when SIGUSR1 comes. That trap is set first, because the default of the signal ends the job.
# The next lines restore bash's defaults, which the environment (SHELLOPTS, BASHOPTS, BASH_ENV) or slurm.setup may change.
set -B +aefkmuCET +o pipefail +o posix
shopt -u dotglob expand_aliases extdebug failglob inherit_errexit lastpipe nocaseglob nocasematch nullglob 2>/dev/null
unset IFS GLOBIGNORE SLURM_TIME_FORMAT
trap - DEBUG ERR RETURN
restart=${SLURM_RESTART_COUNT:-0} job=$SLURM_JOB_ID
say() { echo "[$(date +%FT%T%z)] job $job, restart $restart: $*"; }
running() { # true if a process holds the run's lock, as train does; false if the file system has no locks
    [ -e "$RUN/lock" ] && { flock --nonblock "$RUN/lock" true 2>/dev/null; [ $? -eq 1 ]; }
}
# Wait for a job that is about to end. After a node's loss, a file system with leases keeps its lock for minutes.
for _ in $(seq $((restart ? 48 : 12))); do running && sleep 5 || break; done
if running; then # jobs/ belongs to the other process
    say "failed: another process runs in $RUN; wait for its end, or end it"
    exit 1
fi
attempt=$RUN/jobs/$job-$restart
if [ -e "$attempt" ]; then # an earlier job had this number, because Slurm's counter started again
    earlier=$RUN/jobs/earlier-$(date +%s)
    mkdir -m 700 "$earlier" && mv "$RUN/jobs/$job"-* "$earlier"
    rm -f "$RUN/jobs/stalled"
fi
if ! why=$({ mkdir -p "$RUN/jobs" && mkdir -m 700 "$attempt"; } 2>&1); then # this attempt must not read files of another one
    say "failed: this attempt has no folder: $why"
    exit 1
fi
echo "$job" >"$RUN/jobs/id"
if [ -f /dev/stdout ] && [ ! -e "$RUN/jobs/$job.txt" ]; then # `status` finds the job by this link if its output is in another place
    ln -sfn "$(readlink "/proc/$$/fd/1")" "$RUN/jobs/$job.txt"
fi
for_good() { # true if scontrol requeue will never succeed after the error $1; otherwise the controller may be busy or down
    case $1 in *"Invalid job id"* | *disabled* | *denied*) ;; *) false ;; esac
}
newest() { # the checkpoint with the most steps, of each kind; file times are not used, because clocks can go back
    for kind in step warm_start; do ls -1d "$RUN/checkpoints/$kind"_[0-9]* 2>/dev/null | sort -V | tail -n 1; done
}
before=$(newest) trained=
[ ! -s "$RUN/metrics.jsonl" ] || trained=yes # an earlier attempt trained, perhaps without a checkpoint
say "starts on $SLURM_JOB_NODELIST; output is in $attempt"

# The run ignores SIGUSR1 until it has a handler, so the signal is repeated until the run ends. Without controller.txt the
# signal is not ignored yet, and would end the run. SIGTERM is not trapped, because a job must not survive scancel.
ask_to_save() {
    say "the time limit or preemption is near: the run saves"
    (while kill -0 "$controller" 2>/dev/null; do
        [ ! -e "$attempt/controller.txt" ] || kill -USR1 "$controller" 2>/dev/null
        sleep 2
    done) &
}
(trap '' USR1; exec "$PYTHON" -P -m launcher train "${TRAIN[@]}" --resume >"$attempt/controller.txt" 2>&1) &
controller=$!
trap ask_to_save USR1
[ -z "${ASKED:-}" ] || ask_to_save
while kill -0 "$controller" 2>/dev/null; do wait "$controller"; done
wait "$controller"
status=$?
trap '' USR1
[ "$(newest)" = "$before" ] || rm -f "$RUN/jobs/stalled" # there is progress, however this attempt ended

could_run() { # true if Slurm would accept the job with these options
    sbatch --test-only "$@" "$0" >/dev/null 2>&1
}
requeue() { # $1: the trap of SIGTERM during the call; between two tries scancel ends the job
    local why last=
    until trap "$1" TERM; why=$(scontrol requeue "$job" 2>&1); do
        trap - TERM
        if for_good "$why"; then
            say "failed with status 1: Slurm does not requeue it: $why"
            exit 1
        fi
        [ "$why" = "$last" ] || say "it was not requeued, and tries again every 15 s: $why"
        last=$why
        sleep 15
    done
}
come_back() { # requeues for the reason $1, without as many of the failed nodes as the job can spare
    local without few= count fit=0 middle
    without=$(tac "$RUN/jobs/failed_nodes" 2>/dev/null | awk 'NF && !seen[$0]++') # the latest failure first
    count=$(grep -c . <<<"$without")
    if ((count > fit)) && ! could_run --exclude="$(first "$count")" && could_run; then # otherwise it would wait forever
        while ((count > fit + 1)); do # the job can spare the first $fit, but not the first $count
            middle=$(((fit + count) / 2))
            if could_run --exclude="$(first "$middle")"; then fit=$middle; else count=$middle; fi
        done
        few="; without $(first "$count" '') there are too few nodes"
        count=$fit
    fi
    say "$1$few; comes back$( ((count)) && echo " without $(first "$count" '')")"
    requeue '' # SIGTERM is ignored until the list of nodes has changed, which a running job does not allow
    scontrol update JobId="$job" ExcNodeList="$(first "$count")" || say "the nodes that it leaves out were not changed"
    exec sleep 600 # Slurm ends this script
}
first() { # the first $1 nodes of $without, and the nodes of $2 or EXCLUDE, separated by commas
    (head -n "$1" <<<"$without" | sort; tr , '\n' <<<"${2-${EXCLUDE:-}}") | awk NF | paste -sd, -
}
failures() { # the number of this job's failures since the newest checkpoint, with this attempt
    local each count=0
    for each in "$RUN/jobs/$job"-*/failed_node; do
        if [ "$(cat "${each%failed_node}newest")" = "$(newest)" ]; then ((count += 1)); fi
    done
    echo "$count"
}
preempted() { scontrol show job "$job" | grep -qE '(^|[[:space:]])PreemptTime=[0-9]'; }
if [ -e "$attempt/requeue" ] && [ "$restart" -lt "$REQUEUES" ]; then
    if [ "$(newest)" = "$before" ] && ! preempted; then
        if [ "$(cat "$RUN/jobs/stalled" 2>/dev/null)" = "$job" ]; then # only this job's own stall counts
            rm "$RUN/jobs/stalled"
            say "failed: twice in a row its time was up before a step was made; raise slurm.time, or lower slurm.signal_seconds"
            exit 1
        fi
        echo "$job" >"$RUN/jobs/stalled"
    fi
    say "saved; comes back"
    requeue - # Slurm keeps the list of excluded nodes
    exec sleep 600
fi
if preempted; then
    say "preempted; comes back"
    requeue - # with PreemptMode=CANCEL Slurm does not do it
    exec sleep 600
fi
reason=$(grep -a '^error:' "$attempt/controller.txt" | tail -n 1)
[ "$status" -gt 128 ] || reason=${reason:-$(tail -n 1 "$attempt/controller.txt" | cut -c -400)} # the last line of a traceback
command -v "$PYTHON" >/dev/null || reason="$PYTHON, in which the controller runs, is not on this node; set slurm.python"
# The file is empty if ranks of several nodes did not start. Before the first step the options may be the cause.
if [ -s "$attempt/failed_node" ] || { [ -e "$attempt/failed_node" ] && [ -n "$before$trained" ]; }; then
    cat "$attempt/failed_node" >>"$RUN/jobs/failed_nodes"
    newest >"$attempt/newest"
    if [ "$(failures)" -le "$RESTARTS" ]; then
        come_back "failed: $reason"
    fi
fi
if [ "$status" -eq 0 ] && [ -e "$attempt/requeue" ]; then
    say "saved, but slurm.requeues=$REQUEUES are used up; to continue, submit its script again (docs/cluster.md)"
    exit 1
fi
if [ "$status" -eq 0 ]; then say "done"; else say "failed with status $status: ${reason:-see controller.txt}"; fi
exit "$status"
