#!/usr/bin/env bash
# A real Slurm on this machine for the tests: controller, one slurmd a virtual node, accounting database.
#
#   cluster.sh install                 install the Debian packages (as root)
#   cluster.sh missing                 print what is missing here; ends with 1 if anything is
#   cluster.sh start DIR [NODES]       start one under DIR (emptied first); 4 nodes unless told otherwise
#   cluster.sh stop DIR                end every process of it, jobs included; DIR stays, to read its logs
#   cluster.sh restart-controller DIR  as when an administrator restarts slurmctld
#   cluster.sh stop-controller DIR     squeue, sbatch and scontrol no longer get an answer ...
#   cluster.sh start-controller DIR    ... and now they do again, with the state from before
#   cluster.sh kill-dbd DIR            sacct no longer gets an answer ...
#   cluster.sh start-dbd DIR           ... and now it does again
#   cluster.sh down DIR NODE           an administrator sets the node DOWN: its jobs are requeued
#   cluster.sh crash DIR NODE          everything on the node dies at once, and nobody tells Slurm
#   cluster.sh freeze DIR NODE         everything on the node stands still: no answer, no closed connection
#   cluster.sh up DIR NODE             the node is back
#
# Then `export SLURM_CONF=DIR/slurm.conf`. Nodes are named 127.0.0.1, 127.0.0.2, ... : numbers, because the
# rendezvous of torch must be able to resolve them. Settings from the environment:
#   PORT            first of the 200 ports in use (17000)
#   MAX_ARRAY_SIZE  Slurm's MaxArraySize (1001)
#   SLURMD_TIMEOUT  seconds without an answer after which Slurm gives a node up (300)
#   CPUS            CPUs of a node as Slurm sees them (16; they need not exist)
#   OWNER           a process id: the cluster stops itself soon after that process has gone
set -euo pipefail

readonly PACKAGES=(slurmctld slurmd slurm-client munge slurmdbd mariadb-server numactl)
readonly COMMANDS=(slurmctld slurmd slurmdbd munged mariadbd mariadb-install-db mariadb-admin
    sbatch srun squeue sacct sacctmgr scontrol scancel sinfo numactl)

say() { echo "cluster.sh: $*" >&2; }
die() { say "$*"; exit 1; }

missing() {
    local command absent=()
    for command in "${COMMANDS[@]}"; do
        type -P "$command" >/dev/null || absent+=("$command")
    done
    [ ${#absent[@]} = 0 ] && return
    echo "${absent[*]} (install with: sudo tests/slurm/cluster.sh install)"
    return 1
}

install() {
    missing >/dev/null && return
    [ "$(id -u)" = 0 ] || die "installing packages needs root"
    type -P apt-get >/dev/null || die "installs from Debian's packages only: there is no apt-get here"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${PACKAGES[@]}" >/dev/null
}

# Daemons carry the mark of their cluster in their environment, so that they are found even without pid files.
daemon() { env "EUROPA_TEST_CLUSTER=$DIR" "$@"; }
marked() { grep -lzxF "EUROPA_TEST_CLUSTER=$DIR" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3 || :; }

# Processes of jobs: they have the cluster's configuration and a job's id. (A user's shell has only the first.)
job_processes() {
    local file
    for file in $(grep -lzxF "SLURM_CONF=$DIR/slurm.conf" /proc/[0-9]*/environ 2>/dev/null || :); do
        if grep -qz '^SLURM_JOB_ID=' "$file" 2>/dev/null; then echo "$file" | cut -d/ -f3; fi
    done
}

# Daemons of one name, or of the one node that is its second argument.
daemons() {
    local pid
    for pid in $(marked); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] || continue
        [ $# = 1 ] || tr '\0' ' ' <"/proc/$pid/cmdline" | grep -qF -- "-N $2 " || continue
        echo "$pid"
    done
}

# All processes of a node: its slurmd, what runs there, and the steps' own daemons, which are the parents of that.
node_processes() {
    local file pid parent
    daemons slurmd "$1"
    for file in $(grep -lzxF "SLURMD_NODENAME=$1" /proc/[0-9]*/environ 2>/dev/null || :); do
        pid=$(echo "$file" | cut -d/ -f3)
        grep -qzxF "SLURM_CONF=$DIR/slurm.conf" "$file" 2>/dev/null || continue
        echo "$pid"
        parent=$(sed 's/.*) . //; s/ .*//' "/proc/$pid/stat" 2>/dev/null) || continue
        [ "$(cat "/proc/$parent/comm" 2>/dev/null)" != slurmstepd ] || echo "$parent"
    done
}

# Stops all of a node before it kills any of it: nothing gets to say a last word.
crash() {
    local pid pids
    pids=$(node_processes "$1" | sort -u)
    for pid in $pids; do kill -STOP "$pid" 2>/dev/null || :; done
    [ "$2" = KILL ] || return 0
    for pid in $pids; do kill -KILL "$pid" 2>/dev/null || :; done
}

# end LISTING...: ends what the listing command lists, first politely, then not.
end() {
    local signal pid
    for signal in TERM KILL; do
        for pid in $("$@"); do kill -"$signal" "$pid" 2>/dev/null || :; done
        for _ in $(seq 100); do
            [ -n "$("$@")" ] || return 0
            sleep 0.1
        done
    done
    die "could not end all of: $*"
}

wait_for() {
    local seconds=$1 what=$2 until
    shift 2
    until=$((SECONDS + seconds))
    until timeout 10 "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $until ] || die "no $what after $seconds s; see $DIR/log"
        sleep 0.1
    done
}

ready() { [ "$(sinfo --noheader --Node --partition=main --states=idle --format=%N | wc -l)" = "$1" ]; }
answers() { scontrol ping | grep -q ' UP'; }
export -f ready answers

write_configuration() {
    local nodes=$1 port=${PORT:-17000} node
    umask 077
    head -c 128 /dev/urandom >"$DIR/munge/key"
    cat >"$DIR/slurmdbd.conf" <<END
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock
DbdHost=localhost
DbdPort=$((port + 191))
SlurmUser=root
PidFile=$DIR/run/slurmdbd.pid
LogFile=$DIR/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 190))
StorageUser=root
StorageLoc=slurm
END
    umask 022
    # Slurm wants a device file for each GPU; any eight will do.
    echo "NodeName=127.0.0.[1-$nodes] Name=gpu Count=8 File=/dev/tty[0-7]" >"$DIR/gres.conf"
    # cred_expire is also what a requeued job waits before it may start again: 120 s unless told otherwise.
    # FirstJobId: old folders of submitit must not answer for new jobs of the same number.
    cat >"$DIR/slurm.conf" <<END
ClusterName=virtual
SlurmctldHost=localhost
SlurmctldPort=$port
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=10
StateSaveLocation=$DIR/state
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdPidFile=$DIR/run/%n.pid
SlurmdSpoolDir=$DIR/state/%n
SlurmdLogFile=$DIR/log/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort=$((port + 191))
AccountingStoragePass=$DIR/run/munge.sock
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=${SLURMD_TIMEOUT:-300}
JobRequeue=1
MaxArraySize=${MAX_ARRAY_SIZE:-1001}
FirstJobId=$((RANDOM % 30000 * 30 + 1000))
SchedulerParameters=sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=2
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
GresTypes=gpu
END
    for node in $(seq "$nodes"); do
        echo "NodeName=127.0.0.$node NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((port + node))" \
            "CPUs=${CPUS:-16} RealMemory=16000 Gres=gpu:8"
    done >>"$DIR/slurm.conf"
    cat >>"$DIR/slurm.conf" <<END
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=20
PartitionName=high Nodes=ALL MaxTime=INFINITE PriorityTier=10
END
}

start() {
    local nodes=$1 node
    missing >&2 || exit 1
    [ "$(id -u)" = 0 ] || die "slurmd needs root"
    [ "$nodes" -ge 1 ] && [ "$nodes" -le 180 ] || die "1 to 180 nodes, not $nodes"
    stop
    [ ! -e "$DIR" ] || [ -e "$DIR/slurm.conf" ] || [ -z "$(ls -A "$DIR")" ] || die "$DIR holds something else"
    rm -rf "$DIR"
    mkdir -p "$DIR"/{run,log,state,munge}
    chmod 700 "$DIR/munge"
    write_configuration "$nodes"
    trap 'trap - EXIT; stop' EXIT

    daemon munged --key-file="$DIR/munge/key" --socket="$DIR/run/munge.sock" --pid-file="$DIR/run/munged.pid" \
        --log-file="$DIR/log/munged.log" --seed-file="$DIR/munge/seed"
    mariadb-install-db --no-defaults --datadir="$DIR/db" --user=root --skip-test-db >"$DIR/log/mariadb.log" 2>&1 ||
        die "no database; see $DIR/log/mariadb.log"
    daemon setsid mariadbd --no-defaults --user=root --datadir="$DIR/db" --socket="$DIR/run/db.sock" \
        --pid-file="$DIR/run/db.pid" --bind-address=127.0.0.1 --port=$((${PORT:-17000} + 190)) \
        --skip-grant-tables --innodb-flush-log-at-trx-commit=0 --log-error="$DIR/log/mariadb.log" \
        </dev/null >/dev/null 2>&1 &
    wait_for 60 database mariadb-admin --no-defaults --socket="$DIR/run/db.sock" ping
    start_dbd
    sacctmgr --immediate add cluster virtual >/dev/null || die "the accounting refuses; see $DIR/log/slurmdbd.log"
    daemon slurmctld
    for node in $(seq "$nodes"); do daemon slurmd -N "127.0.0.$node"; done
    wait_for 60 "$nodes idle nodes" bash -c "ready $nodes"
    trap - EXIT
    if [ -n "${OWNER:-}" ]; then
        setsid env --unset=SLURM_CONF "$BASH" "$SELF" watch "$DIR" "$OWNER" </dev/null >/dev/null 2>&1 &
    fi
}

start_dbd() {
    daemon slurmdbd
    wait_for 60 accounting sacctmgr --noheader show cluster
}

start_controller() {
    daemon slurmctld
    wait_for 30 controller bash -c answers
}

stop() {
    local pid
    if [ -n "$(daemons slurmctld)" ]; then
        timeout 10 scancel --quiet --full --user="$(id -un)" >/dev/null 2>&1 || :
    fi
    # The nodes end before their jobs: a live one could still start a requeued job.
    end daemons slurmctld
    end daemons slurmd
    for pid in $(job_processes) $(daemons slurmstepd); do kill -KILL "$pid" 2>/dev/null || :; done
    end marked
    for pid in $(job_processes); do kill -KILL "$pid" 2>/dev/null || :; done
}

# Ends once the owner or the cluster has gone.
watch() {
    export -n SLURM_CONF # what this starts is no process of the cluster
    while [ -d "/proc/$1" ] && [ -d "$DIR" ] && [ -n "$(daemons munged)" ]; do sleep 2; done
    export SLURM_CONF
    stop
}

readonly SELF=$(realpath "$0")
command=${1:-}
case $command in
install | missing) "$command"; exit ;;
start | stop | restart-controller | stop-controller | start-controller | kill-dbd | start-dbd | down | crash | freeze | up | watch) ;;
*) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2 ;;
esac
[ $# -ge 2 ] || die "$command needs the cluster's folder"
DIR=$(realpath -m "$2")
export SLURM_CONF=$DIR/slurm.conf
case $command in
down | crash | freeze | up) [ $# = 3 ] || die "$command needs a node, such as 127.0.0.2" ;;
esac

case $command in
start) start "${3:-4}" ;;
stop) stop ;;
watch) watch "$3" ;;
stop-controller) end daemons slurmctld ;;
start-controller) start_controller ;;
restart-controller) end daemons slurmctld; start_controller ;;
kill-dbd) end daemons slurmdbd ;;
start-dbd) start_dbd ;;
down) scontrol update NodeName="$3" State=DOWN Reason="set down by a test" ;;
crash) crash "$3" KILL ;;
freeze) crash "$3" STOP ;;
up)
    for pid in $(node_processes "$3"); do kill -CONT "$pid" 2>/dev/null || :; done
    [ -n "$(daemons slurmd "$3")" ] || daemon slurmd -N "$3"
    # Refused where the node is not down: it is up already then.
    scontrol update NodeName="$3" State=RESUME 2>/dev/null || :
    ;;
esac
