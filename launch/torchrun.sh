#!/usr/bin/env bash
# Start the ranks of one node with torchrun. Run it once on every node, at about the same time.
#
#   launch/torchrun.sh train configs/x.yaml                                    one node, one rank for each GPU
#   NODES=4 NODE_RANK=$i MASTER_ADDR=host0 launch/torchrun.sh train configs/x.yaml     on each of four nodes
#   srun --ntasks-per-node=1 launch/torchrun.sh train configs/x.yaml           under Slurm: reads the values below from it
#   launch/torchrun.sh -m spiral_mega.launch.health --folder runs/x            a module other than spiral_mega
#
# Environment variables, equivalent flags and, in parentheses, defaults:
#   NODES            --nodes           nodes of the run (Slurm: those of the step; else 1)
#   RANKS_PER_NODE   --ranks-per-node  processes on each node (the number of GPUs that nvidia-smi lists)
#   MASTER_ADDR      --master          rendezvous host (Slurm: first node of the step; else localhost)
#   MASTER_PORT      --port            rendezvous port (Slurm: from the job number; else 29500)
#   NODE_RANK        --node-rank       index of this node, for the names of its logs (Slurm: its own; else 0)
#   RUN_ID           --id              rendezvous id, the same on all nodes (Slurm: job and restart; else spiral-mega)
#   LOG_DIR          --logs            folder for the output of each rank: nodeN/.../attempt_0/R/{stdout,stderr}.log
#   RESTARTS         --restarts        times that torchrun restarts the ranks after a failure (0)
#   STOP_SECONDS     --stop-seconds    seconds after SIGTERM to save before the ranks are killed (300)
#   PYTHON                             the Python interpreter (python)
#
# Network (see docs/guide/cluster.md): NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME select the interface on hosts with several;
# NCCL_IB_HCA selects InfiniBand adapters, such as mlx5_0,mlx5_1.
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
        *) die "unknown flag $1: see the head of this file" ;;
    esac
    shift 2
done
if [ "${1:-}" = -m ]; then
    module=${2:?module}
    shift 2
fi
[ $# -gt 0 ] || die "give the command to run, such as: train configs/x.yaml"

if [ -n "${SLURM_STEP_NODELIST:-}" ]; then
    : "${NODES:=$SLURM_STEP_NUM_NODES}" "${NODE_RANK:=$SLURM_NODEID}"
    : "${MASTER_ADDR:=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)}"
    : "${MASTER_PORT:=$((20000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 12000))}"
    : "${RUN_ID:=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}-$SLURM_STEP_ID}"
fi
: "${NODES:=1}" "${NODE_RANK:=0}" "${MASTER_PORT:=29500}" "${RUN_ID:=spiral-mega}" "${RESTARTS:=0}"
[ "$NODES" = 1 ] && : "${MASTER_ADDR:=localhost}"
[ -n "${MASTER_ADDR:-}" ] || die "NODES is $NODES: set MASTER_ADDR to one of the nodes, the same on all"
if [ -z "${RANKS_PER_NODE:-}" ]; then
    RANKS_PER_NODE=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
    [ "$RANKS_PER_NODE" -gt 0 ] || die "nvidia-smi lists no GPU on $(hostname): set RANKS_PER_NODE"
fi

# One thread for each rank, or the threads of all ranks compete for the cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
logs=()
[ -z "${LOG_DIR:-}" ] || logs=(--log-dir "$LOG_DIR/node$NODE_RANK" --redirects 3 --tee 3)

# SIGUSR1 (the time limit is near) is for the ranks, which save and exit; it would kill torchrun.
trap '' USR1 USR2
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$RUN_ID" \
    --max-restarts "$RESTARTS" --shutdown-timeout "${STOP_SECONDS:-300}" "${logs[@]}" \
    -m "$module" "$@"
