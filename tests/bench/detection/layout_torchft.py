"""One rank of a replica group of torchft: `python -m bench.detection.layout_torchft`.

Usual use of torchft with model parallelism: a replica group has a whole model, in a world of its
own. The manager reduces the gradients over the groups.
"""

from __future__ import annotations

import datetime
import os

import torch.distributed as dist
from bench.detection.layout_loop import LayoutLoop
from bench.recovery.loop import BUILD, COLLECTIVE
from torchft import Manager, ProcessGroupGloo

CALL = datetime.timedelta(seconds=60)


def main() -> None:
    """Train until killed. A step that is not committed is noted as a start."""
    dist.init_process_group("gloo", timeout=BUILD)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    replica, num_replicas = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["NUM_REPLICAS"])
    loop = LayoutLoop(int(os.environ["POSITION"]))
    loop.build()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE),
        min_replica_size=num_replicas,
        load_state_dict=loop.adopt,
        state_dict=loop.state,
        replica_id=f"bench_{replica}",
        timeout=CALL,
        quorum_timeout=CALL,
        connect_timeout=CALL,
        rank=rank,
        world_size=num_ranks,
        store_addr=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        init_sync=False,
    )
    while loop.iteration < loop.train.iterations:
        manager.start_quorum()
        loop.passes(range(replica, loop.train.num_micro_batches, num_replicas))
        for work in [manager.allreduce(part) for part in loop.trainee.gradients]:
            work.wait()
        if manager.should_commit():
            loop.step_optimizer()
        else:
            loop.generation += 1
            loop.note("start")


if __name__ == "__main__":
    main()
