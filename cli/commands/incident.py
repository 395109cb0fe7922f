"""`incident`: print the facts of an incident (control_plane/api/incident_facts.py), or list all."""

from ...events.errors import UsageError
from ..cluster.client import DRY_RUN_S_MAX, Urls
from ..cluster.state_dir import StateDir
from ..screens import incident as incident_screen
from ..terminal import console
from .offline import connect_to_read, read_to_end
from .tasks import incident_id, option_for


def incident(
    state: StateDir,
    url: Urls,
    which: str,
    *,
    every: bool,
    as_json: bool,
    since: float | None = None,
) -> None:
    """Print one incident's page (without `which` the newest), or the list of those that lasted
    beyond `since`. Raises UsageError."""
    if which and every:
        raise UsageError("an ID and --all do not go together", "give one of the two")
    if since is not None and not every:
        raise UsageError("--since goes with --all", "unicron incident --all --since 2h")
    option = option_for(state)
    if which:  # reject an invalid ID before the first request
        incident_id(
            which, f"for example inc-41; all, and whose they are: unicron incident --all{option}"
        )
    client = connect_to_read(state, url)
    if every:
        found = read_to_end(client, "/v1/timeline/incidents", since=since or 0.0)
        listed = [*found["incidents"], *found["node_losses"], *found["outages"]]
        console.show(listed, incident_screen.every(found, option=option), as_json=as_json)
        return
    number = (
        incident_id(which)
        if which
        else max(
            (one["id"] for one in client.get("/v1/state", DRY_RUN_S_MAX)["incidents"]), default=0
        )
    )
    if not number and not which:
        console.show(None, [incident_screen.NONE], as_json=as_json)
        return
    facts = client.get(f"/v1/incidents/{number}/facts", DRY_RUN_S_MAX, option=option)
    console.show(facts, incident_screen.page(facts, option=option), as_json=as_json)
