#!/bin/bash
# The agent of one node, started by srun. The first line of standard input is what
# `unicron token create --join` has printed: UNICRON_TOKEN=... unicron agent --url ...

IFS= read -r line
secret=${line%% *} command=${line#* }
url=${command#*--url } url=${url%% *}
node=$(printf %s "$SLURMD_NODENAME" | tr 'A-Z' 'a-z' | tr -c 'a-z0-9.-' '-')
stop_file=$UNICRON_STATE/slurm/stop-$SLURM_JOB_ID
agent= tries=0
# srun may end before this node does, and its pipes with it.
log=$UNICRON_STATE/slurm/agent-$node.log
exec >> "$log" 2>&1

# With --no-kill, a job goes on without its batch script if the first node is lost. Two other nodes look
# for that: the tasks leave, unless it was the control plane's node, and the job begins again.
watch_script() {
    local first left
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    while sleep "${UNICRON_LOOK_S:-30}"; do
        left=$(squeue -h -t R -j "$SLURM_JOB_ID" -o %N 2> /dev/null) && [ -n "$left" ] || continue
        left=$(scontrol show hostnames "$left")
        grep -qx "$first" <<< "$left" && continue
        if [ "$(cat "$UNICRON_STATE/slurm/cluster" 2> /dev/null)" != "$SLURM_JOB_ID" ]; then
            UNICRON_TOKEN=$(cat "${UNICRON_TOKEN_FILE:-/dev/null}") unicron slurm leave $left \
                --reason "slurm job $SLURM_JOB_ID: the node of its script is lost"
        fi
        scontrol requeue "$SLURM_JOB_ID" || scancel "$SLURM_JOB_ID"
    done
}
case $SLURM_NODEID in
    1 | 2)
        watch_script < /dev/null &
        watcher=$!
        trap 'kill $watcher' EXIT
        ;;
esac

# A rank is no task of this step: what reads these would take the agents for its ranks.
for name in ${!SLURM_STEP*} ${!SLURM_CPU_BIND*} ${!SLURM_TASK*} ${!PMI*} SLURM_PROCID SLURM_LOCALID \
    SLURM_NODEID SLURM_NTASKS SLURM_NTASKS_PER_NODE SLURM_NPROCS SLURM_GTIDS; do
    unset "$name"
done
[ "${CUDA_VISIBLE_DEVICES-}" = NoDevFiles ] && unset CUDA_VISIBLE_DEVICES
if [ -z "${UNICRON_SLOTS-}${CUDA_VISIBLE_DEVICES-}" ] && ! command -v nvidia-smi > /dev/null; then
    echo "note: $node has no GPU: one slot on its CPU; UNICRON_SLOTS changes that"
fi

# Preemption where Slurm does not signal the batch script: it drains these nodes.
trap 'scancel --batch --signal=USR1 "$SLURM_JOB_ID"' TERM

# What an earlier step has left here, which Slurm ends if it can, is ended and not taken over.
rm -f "$UNICRON_STATE/nodes/$node/agents/$node.shim"

while :; do
    now=$(cat "$UNICRON_STATE/slurm/url" 2> /dev/null)
    [ -n "$now" ] && [ "${UNICRON_URL-}" = "" ] && command=${command/--url $url/--url $now} url=$now
    begun=$SECONDS
    (
        export "$secret"
        eval "exec $command --node $node --state \"\$UNICRON_STATE/nodes/$node\" --slots ${UNICRON_SLOTS:-0} ${UNICRON_AGENT_OPTIONS-}"
    ) < /dev/null &
    agent=$!
    while kill -0 $agent 2> /dev/null; do
        sleep 1 & wait $!
        [ "$(stat -c %s "$log")" -gt 67108864 ] && tail -c 16777216 "$log" > "$log.1" && : > "$log"
        # A second signal would end it without the ranks' last reports.
        [ -e "$stop_file" ] && kill -TERM $agent 2> /dev/null && break
        # The control plane has started on another node. The next agent takes over the ranks.
        [ -n "$now" ] && [ "$(cat "$UNICRON_STATE/slurm/url")" != "$now" ] && kill -KILL $agent 2> /dev/null
    done
    wait $agent
    code=$?
    # 77: the node was revoked.
    [ -e "$stop_file" ] || [ $code = 77 ] && exit $code
    [ $((SECONDS - begun)) -lt 10 ] && tries=$((tries + 1)) || tries=0
    [ $tries -gt 5 ] && exit $code
    sleep 1
done
