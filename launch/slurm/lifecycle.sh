# The lifecycle of a job, sourced by the scripts in this folder: health check, run, save and requeue near the time limit,
# restart without bad nodes, clean up.
#
# Settings, from the environment (`spiral-mega launch` writes them into the script), and their defaults:
#   RUN_DIR           run.dir of the configuration, with status.json and checkpoints (required)
#   NODES             nodes of the run; further nodes of the allocation are spares (all of the job's)
#   RANKS_PER_NODE    processes on each node (one for each GPU: see torchrun.sh)
#   SPIRAL_HOME       folder of the repository (where sbatch was called)
#   PYTHON            the Python interpreter, on the nodes or in the container (python)
#   HEALTH            flags of `python -m spiral_mega.launch.health`, such as "--min-bandwidth 100"; off: no check
#   MAX_FAILURES      most consecutive failures without a new checkpoint (2)
#   STOP_SECONDS      seconds for the ranks to save after SIGUSR1; less than the lead time of --signal (240)
#   CONTAINER_IMAGE   container image for pyxis/enroot, with mounts in CONTAINER_MOUNTS (host:inside,...)
#   SRUN_ARGS         options for every srun, such as "--mpi=none --mem=0"

: "${RUN_DIR:?set RUN_DIR to the run.dir of the configuration}" "${SPIRAL_HOME:?}" "${NODES:=$SLURM_JOB_NUM_NODES}" "${PYTHON:=python}"
: "${HEALTH:=}" "${MAX_FAILURES:=2}" "${STOP_SECONDS:=240}"
export RANKS_PER_NODE PYTHON STOP_SECONDS
job=$SLURM_JOB_ID
# The last task of an array has the array's own job number, with which the whole array would be requeued.
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
folder=$RUN_DIR/launch
mkdir -p "$folder"
bad_nodes=$folder/bad-nodes
: >"$bad_nodes" # nodes may have been repaired since
attempt=0
stopping=
step=

say() { echo "[$(date +%FT%T) job $job${SLURM_RESTART_COUNT:+ restart $SLURM_RESTART_COUNT}] $*"; }
newest() { ls -d "$RUN_DIR"/checkpoints/step_*[0-9] 2>/dev/null | tail -n 1; }

state() { # the state of the run, if this attempt has written one
    [ "$RUN_DIR/status.json" -nt "$folder/attempt" ] && sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$RUN_DIR/status.json"
}

on() { # NODES...: sets `srun` to the start of a command that runs one task on each node
    local IFS=,
    # --overlap: a step with a dead node never ends for Slurm, and would otherwise hold the other nodes.
    # --cpu-bind=none: the one task of a node uses all of its cores.
    srun=(srun --nodes=$# --ntasks=$# --ntasks-per-node=1 --nodelist="$*" --overlap --cpu-bind=none --wait=60)
    IFS=' '
    # shellcheck disable=SC2206
    srun+=(${SRUN_ARGS:-})
    [ -z "${CONTAINER_IMAGE:-}" ] || srun+=(--container-image="$CONTAINER_IMAGE" --container-workdir="$PWD"
        --container-mounts="${CONTAINER_MOUNTS:-$PWD}")
}

nodes_up() { # nodes of the allocation that are up for Slurm and were not found bad
    sinfo -h -N -n "$SLURM_JOB_NODELIST" -o "%N %t" | awk '$2 !~ /down|fail|unk|boot|\*/ { print $1 }' | sort -uV |
        { [ -s "$bad_nodes" ] && grep -vxFf "$bad_nodes" || cat; }
}

choose_nodes() { # sets `chosen` to NODES healthy nodes; fails if there are too few
    local up output=$folder/health-$SLURM_JOB_ID-$attempt.log
    mapfile -t up < <(nodes_up)
    if [ "$HEALTH" != off ] && [ ${#up[@]} -ge "$NODES" ]; then
        on "${up[@]}"
        # shellcheck disable=SC2086
        "${srun[@]}" --output="$output" \
            timeout -k 10 300 "$PYTHON" -m spiral_mega.launch.health --folder "$RUN_DIR" $HEALTH
        grep -h "health: bad" "$output"
        # A node that did not answer in time counts as bad.
        sed -n 's/^health: ok \([^ ]*\).*/\1/p' "$output" | sort -uV >"$folder/fit"
        printf '%s\n' "${up[@]}" | grep -vxFf "$folder/fit" >>"$bad_nodes"
        mapfile -t up < <(nodes_up)
    fi
    chosen=("${up[@]:0:$NODES}")
    [ ${#chosen[@]} -eq "$NODES" ]
}

check_together() { # checks all ranks together; nodes found bad are left out of the next attempt
    [ "$HEALTH" = off ] && return
    local status output=$folder/health-$SLURM_JOB_ID-$attempt.all.log
    on "${chosen[@]}"
    # shellcheck disable=SC2086
    "${srun[@]}" --kill-on-bad-exit=1 --output="$output" timeout -k 10 600 "$SPIRAL_HOME/launch/torchrun.sh" \
        -m spiral_mega.launch.health --folder "$RUN_DIR" $HEALTH
    status=$?
    grep -h "health: " "$output" || tail -n 20 "$output"
    sed -n 's/^health: bad \([^ :]*\).*/\1/p' "$output" >>"$bad_nodes"
    return $status
}

stop() { # the trap for SIGUSR1, which Slurm sends before the time limit
    say "asked to stop: saving"
    stopping=$SECONDS
    [ -z "$step" ] || kill -USR1 "$step" 2>/dev/null
}

end_steps() { # kills all steps at once, but not this script
    squeue -h --steps --job "$SLURM_JOB_ID" -o %i | grep -E '\.[0-9]+$' | xargs -r -n 1 scancel --signal=KILL
}

wait_for_step() { # returns its status; after a request to stop, waits at most STOP_SECONDS
    local status
    while kill -0 "$step" 2>/dev/null; do
        if [ -n "$stopping" ]; then
            if [ $((SECONDS - stopping)) -gt "$STOP_SECONDS" ]; then
                say "not saved within STOP_SECONDS=$STOP_SECONDS: the steps since the last checkpoint will be done again"
                end_steps
            fi
            kill -USR1 "$step" 2>/dev/null # again: a rank that was starting may have missed it
        fi
        sleep 2 &
        wait -n "$step" $! 2>/dev/null
    done
    wait "$step"
    status=$?
    step=
    return $status
}

requeue() {
    say "requeued, to resume from ${1:-the beginning}"
    scontrol requeue "$job"
    sleep 60 # Slurm ends this script
    exit 1
}

continue_elsewhere() { # too few healthy nodes: submits a copy of this job without the bad nodes
    say "$1"
    [ -s "$bad_nodes" ] || requeue "$(newest)" # Slurm itself avoids nodes that are down
    [ -n "$(nodes_up)" ] || { say "no node is healthy: is HEALTH too strict, or the disk of RUN_DIR full?"; exit 1; }
    [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || { say "submit this task again, without $(paste -sd, "$bad_nodes")"; exit 1; }
    scontrol write batch_script "$SLURM_JOB_ID" "$folder/again-$SLURM_JOB_ID.sbatch" >/dev/null
    local exclude next
    exclude=$({ scontrol show job "$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=//p' | grep -v null; sort -u "$bad_nodes"; } |
        paste -sd, -)
    next=$(sbatch --parsable --dependency="afterany:$job" --exclude="$exclude" --nodes="$SLURM_JOB_NUM_NODES" \
        "$folder/again-$SLURM_JOB_ID.sbatch" "${arguments[@]}") || exit 1
    say "job $next takes over, without $exclude"
    exit 1
}

clean_up() { # no step holds the nodes after this script, whatever ends it
    [ -z "$step" ] || end_steps
}

run_once() { # ARGUMENTS of spiral-mega: a command without checkpoints; does not return
    trap stop USR1
    choose_nodes || continue_elsewhere "fewer than $NODES healthy nodes are left of $SLURM_JOB_NODELIST"
    on "${chosen[@]}"
    "${srun[@]}" --kill-on-bad-exit=1 "$SPIRAL_HOME/launch/torchrun.sh" "$@" &
    step=$!
    wait_for_step
    local status=$?
    if [ -n "$stopping" ] && [ $status -ne 0 ]; then
        [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ] || { say "not done in $SLURM_RESTART_COUNT restarts: raise --time"; exit 1; }
        requeue "where it stopped"
    fi
    exit $status
}

run_to_the_end() { # ARGUMENTS of `spiral-mega train`; does not return
    arguments=("$@")
    local failures=0 idle before status at_start
    trap stop USR1
    at_start=$(newest)
    while true; do
        attempt=$((attempt + 1))
        choose_nodes || continue_elsewhere "fewer than $NODES healthy nodes are left of $SLURM_JOB_NODELIST"
        if ! check_together; then
            [ $attempt -le "$MAX_FAILURES" ] || { say "the nodes do not work together: see $folder"; exit 1; }
            continue
        fi
        before=$(newest)
        say "attempt $attempt on ${chosen[*]}, from ${before:-the beginning}"
        if [ -z "$stopping" ]; then
            touch "$folder/attempt"
            on "${chosen[@]}"
            "${srun[@]}" --kill-on-bad-exit=1 "$SPIRAL_HOME/launch/torchrun.sh" \
                --logs "$RUN_DIR/logs/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$attempt" "$@" &
            step=$!
            wait_for_step
            status=$?
            say "the step ended with status $status, the run is $(state)"
        fi
        case $(state) in
            finished) exit 0 ;;
            failed) say "the run needs a fix: $(sed -n 's/.*"error": //p' "$RUN_DIR/status.json")"; exit 2 ;;
        esac
        if [ -n "$stopping" ]; then
            idle=$(cat "$folder/idle" 2>/dev/null || echo 0)
            [ "$(newest)" = "$at_start" ] && idle=$((idle + 1)) || idle=0
            echo $idle >"$folder/idle"
            [ $idle -le "$MAX_FAILURES" ] || { say "no new checkpoint in $idle whole jobs: raise --time"; exit 1; }
            requeue "$(newest)"
        fi
        [ "$(newest)" = "$before" ] && failures=$((failures + 1)) || failures=1
        [ $failures -le "$MAX_FAILURES" ] || { say "$failures failures without a new checkpoint: stopping"; exit 1; }
    done
}
trap clean_up EXIT
