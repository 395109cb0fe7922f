"""Whether a server keeps what the log acknowledges as the policy asks: from its own settings."""

from collections.abc import Mapping

from ..spec.policy import DURABILITIES, Policy

Settings = Mapping[str, str]
"""The server's INFO, and its `appendfsync`: "" if it does not tell."""


def provided(settings: Settings) -> str:
    """What the server provides, as `Policy.durability` names it; `everysec` if it does not tell."""
    if settings.get("aof_enabled") != "1":
        return "none"
    return {"always": "always", "no": "none"}.get(settings.get("appendfsync", ""), "everysec")


def refusal(settings: Settings, policy: Policy) -> tuple[str, str]:
    """Why this server may not hold the log, and what to change; "": it may."""
    evicts = settings.get("maxmemory_policy", "noeviction")
    if evicts.startswith("allkeys"):
        return (
            f"maxmemory-policy is {evicts}: the server would evict the log",
            "CONFIG SET maxmemory-policy noeviction",
        )
    found, asked = provided(settings), policy.durability
    if DURABILITIES.index(found) <= DURABILITIES.index(asked):
        return "", ""
    lost = (
        "a restart loses the log"
        if settings.get("aof_enabled") != "1"
        else "a crash of its host loses the last seconds of the log"
    )
    return (
        f"the log's server has {in_words(settings)}: {lost}, and the policy's durability is "
        f"{asked}",
        f"CONFIG SET appendonly yes, and appendfsync {asked}; or in the policy durability: {found}",
    )


def failure(settings: Settings, policy: Policy) -> str:
    """Why this server cannot keep at present what it acknowledges; "": it can."""
    if policy.durability != "none" and settings.get("aof_last_write_status", "ok") != "ok":
        return (
            "the log's server could not write or sync its file (aof_last_write_status): is its "
            "disk full or broken?"
        )
    return refusal(settings, policy)[0]


def in_words(settings: Settings) -> str:
    """The settings that count, for a person."""
    return (
        f"appendonly {'yes' if settings.get('aof_enabled') == '1' else 'no'}, appendfsync "
        f"{settings.get('appendfsync') or 'not told'}"
    )
