# Sourced by cluster.sbatch and join.sbatch: the agents of one allocation, from their start to their end.
# docs/guides/slurm.md has the settings. The cluster's folder is on a file system that all hosts share.

export UNICRON_STATE=${UNICRON_STATE:-${XDG_STATE_HOME:-$HOME/.local/state}/unicron}
state=$UNICRON_STATE job=$SLURM_JOB_ID leaving=
cluster_file=$state/slurm/cluster stop_file=$state/slurm/stop-$job

say() { echo "unicron: $*"; }

fail() { # WHAT HINT
    printf 'error: %s\nhint: %s\n' "$1" "$2" >&2
    exit 2
}

command -v unicron > /dev/null || fail "there is no unicron on $SLURMD_NODENAME" \
    "activate its environment before sbatch; every node needs it at the same path"
mkdir -p -m 700 "$state" "$state/slurm" || fail "$state cannot be made" "set UNICRON_STATE"
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit

# The token of an outside control plane is a variable of this script: no node, rank or srun has it.
export -n UNICRON_TOKEN
UNICRON_TOKEN=${UNICRON_TOKEN-}
if [ -n "${UNICRON_TOKEN_FILE-}" ]; then
    UNICRON_TOKEN=$(cat "$UNICRON_TOKEN_FILE") || exit
fi
unicron() { UNICRON_TOKEN=$UNICRON_TOKEN command unicron "$@"; }

# USR1, of --signal and of preemption: leave, and be requeued. USR2: leave for good.
trap 'leaving=requeue' USR1
trap 'leaving=end' USR2

# Wait, but not when Slurm wants the nodes back.
rest() {
    [ -n "$leaving" ] && return
    sleep "$1" &
    wait $!
}

is_alive() { kill -0 "$1" 2> /dev/null; }

start_agents() {
    rm -f "$stop_file"
    local answer
    answer=$(unicron token create --join --uses "$SLURM_JOB_NUM_NODES" --reason "slurm job $job" -o json) || exit
    # The token goes by standard input: all users of a host can read arguments.
    sed 's/.*"command": "\([^"]*\)".*/\1/' <<< "$answer" | srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --no-kill --overlap \
        --kill-on-bad-exit=0 --cpu-bind=none bash "$here/agent.sh" &
    agents=$!
    unicron slurm enter $nodes
}

# Take the tasks off these nodes: no iteration is lost. Then their agents end. A node that this job has
# lost may be another job's by now. squeue fails while slurmctld is away.
leave() {
    local list
    list=$(squeue -h -j "$job" -o %N 2> /dev/null) && [ -n "$list" ] && nodes=$(scontrol show hostnames "$list")
    say "leaves $(echo $nodes): $1"
    unicron slurm leave $nodes --reason "slurm job $job: $1"
    stop_agents
}

stop_agents() {
    : > "$stop_file"
    local num=0
    # srun waits longer for a node that is lost.
    while is_alive "$agents" && [ $((num += 1)) -le 20 ]; do sleep 1; done
    rm -f "$stop_file"
}

# Unless it is cancelled meanwhile, or was submitted with --no-requeue.
requeue() {
    [ "$leaving" = requeue ] && [ "$(squeue -h -j "$job" -o %T)" = RUNNING ] && scontrol requeue "$job" && sleep 60
}
