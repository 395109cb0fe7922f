"""The gather: each replica has stepped a shard of the parameters, and gets those of the others.

A gather that does not end leaves the step as it is: the next settlement recovers the rest.
"""

from functools import partial

from .own_part import E, OwnPart
from .progress import Interrupted
from .results import Done, Ended


def gather(part: OwnPart[E]) -> Ended | None:
    """Gather the parameters that the other replicas have stepped. None if all arrived."""
    part.notes("gather")
    collectives = part.collectives
    result = collectives.run(partial(part.engine.gather, collectives.operations), holds_model=True)
    if isinstance(result, Done):
        part.engine.set_gathered(is_gathered=True)
        return None
    end_gather(part)
    part.happened(Interrupted())
    return result


def expect_gather(part: OwnPart[E], *, will_pass: bool) -> Ended | None:
    """Tell the engine whether the next forward gathers the parameters. Without a pass, gather them
    now. None if that succeeds."""
    engine = part.engine
    if not engine.gathers_in_forward:
        return None
    engine.expect_gather()
    if engine.is_gathered or will_pass:
        return None
    return gather(part)


def end_gather(part: OwnPart[E]) -> None:
    """The generation ends before all parameters arrived; a gather may still write into them."""
    collectives = part.collectives
    collectives.end(part.engine.take_gathers(), collectives.operations.groups, holds_model=True)
