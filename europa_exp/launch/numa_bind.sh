#!/usr/bin/env bash
# Starts a rank on the NUMA node that belongs to it: local rank i on node i.
#
#   numa_bind.sh cpu|cpu_and_memory go_on|stop COMMAND [ARGUMENT...]
#
# Where that can't be done it says why, and then runs the command unbound (go_on) or ends with 71 (stop). The command finds
# what happened in EUROPA_NUMA. EUROPA_NUMA_ROOT is the folder with node0, node1, ... (for tests).
binding=$1 otherwise=$2
shift 2
root=${EUROPA_NUMA_ROOT:-/sys/devices/system/node}
node=${SLURM_LOCALID:-}
how=(--cpunodebind="$node")
[ "$binding" = cpu ] || how+=(--membind="$node")

if [ -z "$node" ]; then
    why="SLURM_LOCALID is not set, so this is no task of a Slurm job"
elif ! command -v numactl >/dev/null; then
    why="numactl is not installed"
elif [ ! -d "$root/node$node" ]; then
    why="there is no such node here ($(cd "$root" 2>/dev/null && echo node[0-9]*))"
elif ! grep -q '[0-9]' "$root/node$node/cpulist" 2>/dev/null; then
    why="that node has no CPUs; the memory of an accelerator shows as such a node"
elif ! why=$(numactl "${how[@]}" true 2>&1); then
    # Slurm may have given the task cores of another node, and a cgroup then forbids this one's.
    why="numactl refuses it: ${why%%$'\n'*}"
else
    export EUROPA_NUMA="node $node, $binding"
    exec numactl "${how[@]}" "$@"
fi
export EUROPA_NUMA="not bound to NUMA node ${node:-?}: $why"
printf 'europa: rank %s on %s is %s\n' "${SLURM_PROCID:-?}" "$(uname -n)" "$EUROPA_NUMA" >&2
if [ "$otherwise" = stop ]; then
    echo "europa: cluster.numa_required=true stops it" >&2
    exit 71
fi
exec "$@"
