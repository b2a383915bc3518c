#!/usr/bin/env bash
# Install Debian's Slurm for the tests that run jobs (tests/launch). Safe to run again; needs root.
set -euo pipefail
missing=()
for need in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge ip:iproute2 nsenter:util-linux; do
    command -v "${need%%:*}" >/dev/null || missing+=("${need##*:}")
done
[ ${#missing[@]} = 0 ] && exit 0
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
