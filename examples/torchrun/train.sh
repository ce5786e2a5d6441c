#!/bin/bash
# A run of several machines without a scheduler. On each of them, with the same DILATANT_TOKEN (openssl rand -hex 32),
# and NODE from 0 (that of HOST0) to 3:
#   HOST0=10.0.0.1 NODES=4 GPUS=8 NODE=0 examples/torchrun/train.sh plain config.yaml runs/mine
# Plain: a process for each GPU by torchrun; when one is lost, all begin again, from the newest checkpoint.
# Resilient (`resilient` instead of `plain`): one command a machine, which starts its processes; when some are lost, the
# others go on. More machines join with `dilatant agent --coordinator HOST0:29500`. HOST0 leads, and has to stay.
how=${1:?plain or resilient} config=${2:?the config} run=${3:?the folder of the run, which all machines share}
command=(dilatant train "$config" --set output_dir="$run" --set train.resume=auto --set train.save_steps=200)

case $how in
  plain)
    exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --node-rank "$NODE" --master-addr "$HOST0" \
        --master-port 29500 --max-restarts 3 --no-python "${command[@]}"
    ;;
  resilient)
    export RANK=$NODE WORLD_SIZE=$NODES MASTER_ADDR=$HOST0 MASTER_PORT=29500
    exec "${command[@]}" --set resilience.enabled=true --set resilience.ranks_per_node="$GPUS"
    ;;
  *) echo "plain or resilient, not $how" >&2; exit 2 ;;
esac
