"""One replica of the bench's loop under torchft: `python -m bench.recovery.torchft`.

Usual use of torchft: each replica keeps its own share of the data. The manager reduces the
gradients. All replicas commit a step together. A restarted replica gets its state from a peer.
"""

from __future__ import annotations

import datetime
import os
import time
from pathlib import Path

import torch.distributed as dist
from bench.recovery.job import NUM_RANKS
from bench.recovery.loop import COLLECTIVE, Loop
from torchft import Manager, ProcessGroupGloo
from torchft.manager import ReduceOp

CALL = datetime.timedelta(seconds=30)
LOOK_S = 0.01


def meet(folder: Path, replica: int) -> None:
    """Wait for all replicas once: the lighthouse would let the first ones start alone."""
    (folder / f"ready-{replica}").touch()
    while len(list(folder.glob("ready-*"))) < NUM_RANKS:
        time.sleep(LOOK_S)


def main() -> None:
    """Train until killed."""
    replica = int(os.environ["REPLICA_GROUP_ID"])
    loop = Loop(replica)
    # A replica is one rank here, so Megatron's world is that rank alone.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    loop.build()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=COLLECTIVE),
        min_replica_size=1,
        load_state_dict=loop.adopt,
        state_dict=loop.state,
        replica_id=f"bench_{replica}",
        timeout=CALL,
        quorum_timeout=CALL,
        connect_timeout=CALL,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        # The same seed everywhere: no state to synchronise before the first step.
        init_sync=False,
    )
    meet(loop.folder, replica)
    while loop.iteration < loop.train.iterations:
        manager.start_quorum()
        loop.micro_batches(range(replica, loop.train.num_micro_batches, NUM_RANKS))
        stats = loop.stats()
        parts = [stats, *loop.trainee.gradients]
        for work in [manager.allreduce(part, reduce_op=ReduceOp.SUM) for part in parts]:
            work.wait()
        if not manager.should_commit():
            loop.generation += 1
            continue
        loop.iteration = manager.current_step() - 1
        loop.trainee.ddps[0].scale_gradients(1.0 / stats[1].item())
        loop.step(stats, tells=manager.participating_rank() == 0)


if __name__ == "__main__":
    main()
