"""One policy on one cluster, timed: `python -m bench.simulator.trial CASE POLICY` prints JSON."""

from __future__ import annotations

import json
import resource
import sys
import time

from bench.simulator.cluster import scenario
from condensed import condensed
from unicron.control_plane.simulation import scenario as scenarios
from unicron.control_plane.simulation.run import Run
from unicron.control_plane.simulation.trace import generator


def main(case: str, policy: str) -> None:
    """Simulate and time it. The printed number of events is the number of records."""
    parsed = scenarios.parse(scenario(case, [policy]))
    assert not isinstance(parsed.trace, str)
    happenings = generator.draw(
        parsed.trace.drawn, parsed.cluster.names, parsed.cluster.slots, parsed.horizon_s
    )
    chosen = scenarios.policy(parsed, policy)
    ground = condensed(scenarios.run_input(parsed, chosen, happenings), parsed.cluster.slots)
    began_s = time.process_time()
    run = Run(ground, chosen)
    run.play()
    cpu_s = time.process_time() - began_s
    print(
        json.dumps(
            {
                "events": run.engine.num_records,
                "cpu_s": cpu_s,
                "events_per_s": run.engine.num_records / cpu_s,
                "faults": sum(one.event == "fault" for one in happenings),
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
