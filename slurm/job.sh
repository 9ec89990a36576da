# One attempt of a run: train from the last checkpoint, then see whether the run comes back. Read by bash, in the job.
# Before it stand PYTHON, RUN (the run's folder), TRAIN (what `train` is given), REQUEUES, RESTARTS, EXCLUDE
# and ASKED, not empty once SIGUSR1 has come, by a trap that is set first: its default would end the job for good.
# As bash begins: the environment (SHELLOPTS, BASHOPTS, BASH_ENV) and what stands before, slurm.setup say, may differ.
set -B +aefkmuCET +o pipefail +o posix
shopt -u dotglob expand_aliases extdebug failglob inherit_errexit lastpipe nocaseglob nocasematch nullglob 2>/dev/null
unset IFS GLOBIGNORE SLURM_TIME_FORMAT
trap - DEBUG ERR RETURN
restart=${SLURM_RESTART_COUNT:-0} job=$SLURM_JOB_ID
say() { echo "[$(date +%FT%T%z)] job $job, restart $restart: $*"; }
running() { # whether a process has the run's lock, as train has it; false where the file system has no locks
    [ -e "$RUN/lock" ] && { flock --nonblock "$RUN/lock" true 2>/dev/null; [ $? -eq 1 ]; }
}
# Of a job that is about to end, or after a node's loss until the file system frees what it had: minutes with leases.
for _ in $(seq $((restart ? 48 : 12))); do running && sleep 5 || break; done
if running; then # jobs/id is of that one, as is the rest of jobs/
    say "failed: another process runs in $RUN; wait for its end, or end it"
    exit 1
fi
attempt=$RUN/jobs/$job-$restart
if [ -e "$attempt" ]; then # an earlier job had this number: Slurm gives them out again once its counter begins again
    earlier=$RUN/jobs/earlier-$(date +%s)
    mkdir -m 700 "$earlier" && mv "$RUN/jobs/$job"-* "$earlier"
    rm -f "$RUN/jobs/stalled"
fi
if ! why=$({ mkdir -p "$RUN/jobs" && mkdir -m 700 "$attempt"; } 2>&1); then # what another attempt left there would be taken for this one's
    say "failed: this attempt has no folder: $why"
    exit 1
fi
echo "$job" >"$RUN/jobs/id"
if [ -f /dev/stdout ] && [ ! -e "$RUN/jobs/$job.txt" ]; then # its output is elsewhere; by this `status` knows the job
    ln -sfn "$(readlink "/proc/$$/fd/1")" "$RUN/jobs/$job.txt"
fi
for_good() { # whether no later try would change what scontrol requeue said, $1; its controller may also be busy or away
    case $1 in *"Invalid job id"* | *disabled* | *denied*) ;; *) false ;; esac
}
newest() { # the checkpoint of the most steps, of each kind: clocks go back
    for kind in step warm_start; do ls -1d "$RUN/checkpoints/$kind"_[0-9]* 2>/dev/null | sort -V | tail -n 1; done
}
before=$(newest) trained=
[ ! -s "$RUN/metrics.jsonl" ] || trained=yes # by an attempt before, perhaps without a checkpoint
say "starts on $SLURM_JOB_NODELIST; output is in $attempt"

# SIGUSR1 is ignored until the run listens to it, so it is sent until the run has ended; before it is ignored, which is
# before there is a controller.txt, it would end the run. SIGTERM is not trapped: a job that came back after it would
# survive scancel.
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
[ "$(newest)" = "$before" ] || rm -f "$RUN/jobs/stalled" # however this attempt ended

could_run() { # with these options, as far as Slurm says here
    sbatch --test-only "$@" "$0" >/dev/null 2>&1
}
requeue() { # $1 is what SIGTERM does while Slurm is asked to; between two tries scancel ends the job
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
come_back() { # $1 is why; requeue without as many of the nodes that failed as the job can do without
    local without few= count fit=0 middle
    without=$(tac "$RUN/jobs/failed_nodes" 2>/dev/null | awk 'NF && !seen[$0]++') # the last one to fail first
    count=$(grep -c . <<<"$without")
    if ((count > fit)) && ! could_run --exclude="$(first "$count")" && could_run; then # it would wait for ever
        while ((count > fit + 1)); do # the job can do without the first $fit, and not without the first $count
            middle=$(((fit + count) / 2))
            if could_run --exclude="$(first "$middle")"; then fit=$middle; else count=$middle; fi
        done
        few="; without $(first "$count" '') there are too few nodes"
        count=$fit
    fi
    say "$1$few; comes back$( ((count)) && echo " without $(first "$count" '')")"
    requeue '' # until the list of nodes is changed, which a job that runs does not allow
    scontrol update JobId="$job" ExcNodeList="$(first "$count")" || say "the nodes that it leaves out were not changed"
    exec sleep 600 # Slurm ends this script
}
first() { # $1 of the nodes of $without, and those of $2 or of EXCLUDE, by commas
    (head -n "$1" <<<"$without" | sort; tr , '\n' <<<"${2-${EXCLUDE:-}}") | awk NF | paste -sd, -
}
failures() { # of this job since the newest checkpoint was made, this attempt's among them
    local each count=0
    for each in "$RUN/jobs/$job"-*/failed_node; do
        if [ "$(cat "${each%failed_node}newest")" = "$(newest)" ]; then ((count += 1)); fi
    done
    echo "$count"
}
preempted() { scontrol show job "$job" | grep -qE '(^|[[:space:]])PreemptTime=[0-9]'; }
if [ -e "$attempt/requeue" ] && [ "$restart" -lt "$REQUEUES" ]; then
    if [ "$(newest)" = "$before" ] && ! preempted; then
        if [ "$(cat "$RUN/jobs/stalled" 2>/dev/null)" = "$job" ]; then # an earlier job's does not count
            rm "$RUN/jobs/stalled"
            say "failed: twice in a row its time was up before a step was made; raise slurm.time, or lower slurm.signal_seconds"
            exit 1
        fi
        echo "$job" >"$RUN/jobs/stalled"
    fi
    say "saved; comes back"
    requeue - # Slurm still has the list of nodes that the job leaves out
    exec sleep 600
fi
if preempted; then
    say "preempted; comes back"
    requeue - # Slurm itself would not where its PreemptMode is CANCEL
    exec sleep 600
fi
reason=$(grep -a '^error:' "$attempt/controller.txt" | tail -n 1)
[ "$status" -gt 128 ] || reason=${reason:-$(tail -n 1 "$attempt/controller.txt" | cut -c -400)} # a traceback's last
command -v "$PYTHON" >/dev/null || reason="$PYTHON, in which the controller runs, is not on this node; set slurm.python"
# It is empty where ranks of several nodes did not come up: before the first step the options may be the cause.
if [ -s "$attempt/failed_node" ] || { [ -e "$attempt/failed_node" ] && [ -n "$before$trained" ]; }; then
    cat "$attempt/failed_node" >>"$RUN/jobs/failed_nodes"
    newest >"$attempt/newest"
    if [ "$(failures)" -le "$RESTARTS" ]; then
        come_back "failed: $reason"
    fi
fi
if [ "$status" -eq 0 ] && [ -e "$attempt/requeue" ]; then
    say "saved, but slurm.requeues=$REQUEUES are used up; to go on, submit its script again (docs/cluster.md)"
    exit 1
fi
if [ "$status" -eq 0 ]; then say "done"; else say "failed with status $status: ${reason:-see controller.txt}"; fi
exit "$status"
