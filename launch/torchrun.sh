#!/usr/bin/env bash
# Start the ranks of one node with torchrun. Run it once on every node, at about the same time.
#
#   launch/torchrun.sh train configs/x.yaml                                    one node, a rank for each GPU
#   NODES=4 NODE_RANK=$i MASTER_ADDR=host0 launch/torchrun.sh train configs/x.yaml     on each of four nodes
#   srun --ntasks-per-node=1 launch/torchrun.sh train configs/x.yaml           under Slurm: all is read from it
#   launch/torchrun.sh -m spiral_mega.launch.health --folder runs/x            another module than spiral_mega
#
# Environment, and the flag that does the same:
#   NODES            --nodes           nodes of the run              (Slurm: those of the step; else 1)
#   RANKS_PER_NODE   --ranks-per-node  processes on each             (GPUs that nvidia-smi lists)
#   MASTER_ADDR      --master          node where the ranks meet     (Slurm: the step's first; else localhost)
#   MASTER_PORT      --port            and its port                  (Slurm: from the job's number; else 29500)
#   NODE_RANK        --node-rank       this node's number, for the names of its logs            (Slurm: its own; else 0)
#   RUN_ID           --id              the same on all nodes         (Slurm: job and restart; else spiral-mega)
#   LOG_DIR          --logs            folder for what each rank prints: nodeN/.../attempt_0/R/{stdout,stderr}.log
#   RESTARTS         --restarts        times that torchrun itself starts ranks anew after a failure           (0)
#   STOP_SECONDS     --stop-seconds    time that SIGTERM leaves the ranks to save before they are killed      (300)
#   PYTHON                             the interpreter                                                       (python)
#
# Network (see docs/guide/cluster.md): NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME name the interface to meet by where hosts have
# several; NCCL_IB_HCA the InfiniBand adapters to use, such as mlx5_0,mlx5_1.
set -euo pipefail

die() { echo "error: launch/torchrun.sh: $*" >&2; exit 2; }

module=spiral_mega
while [[ ${1:-} == --* ]]; do
    [ $# -ge 2 ] || die "$1 needs a value"
    case $1 in
        --nodes) NODES=$2 ;;
        --ranks-per-node) RANKS_PER_NODE=$2 ;;
        --master) MASTER_ADDR=$2 ;;
        --port) MASTER_PORT=$2 ;;
        --node-rank) NODE_RANK=$2 ;;
        --id) RUN_ID=$2 ;;
        --logs) LOG_DIR=$2 ;;
        --restarts) RESTARTS=$2 ;;
        --stop-seconds) STOP_SECONDS=$2 ;;
        *) die "there is no flag $1: see the head of this file" ;;
    esac
    shift 2
done
if [ "${1:-}" = -m ]; then
    module=${2:?module}
    shift 2
fi
[ $# -gt 0 ] || die "say what to run, such as: train configs/x.yaml"

if [ -n "${SLURM_STEP_NODELIST:-}" ]; then
    : "${NODES:=$SLURM_STEP_NUM_NODES}" "${NODE_RANK:=$SLURM_NODEID}"
    : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}"
    : "${MASTER_PORT:=$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 12000))}"
    : "${RUN_ID:=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$SLURM_STEP_ID}"
fi
: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_PORT:=29500}" "${RUN_ID:=spiral-mega}" "${RESTARTS:=0}"
[ "$NODES" = 1 ] && : "${MASTER_ADDR:=localhost}"
[ -n "${MASTER_ADDR:-}" ] || die "NODES is $NODES: set MASTER_ADDR to the node where the ranks meet"
if [ -z "${RANKS_PER_NODE:-}" ]; then
    RANKS_PER_NODE=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    [ "$RANKS_PER_NODE" -gt 0 ] || die "nvidia-smi lists no GPU on $(hostname): set RANKS_PER_NODE"
fi

# One thread a rank, or the threads of all ranks fight over the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
logs=()
[ -z "${LOG_DIR:-}" ] || logs=(--log-dir "$LOG_DIR/node$NODE_RANK" --redirects 3 --tee 3)

# SIGUSR1 (a job's time is nearly up) is for the ranks, which save and end; torchrun would die of it.
trap '' USR1 USR2
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$RUN_ID" \
    --max-restarts "$RESTARTS" --shutdown-timeout "${STOP_SECONDS:-300}" "${logs[@]}" \
    -m "$module" "$@"
