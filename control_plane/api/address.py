"""The address that agents are told, and what clients may call this control plane."""

from msgspec import Struct


class Address(Struct, frozen=True, kw_only=True):
    """The log that an agent is told when it joins.

    `shared_password`: agents use the credentials of `redis_url`, instead of their own. `names`: of
    this control plane; a Host header may also be localhost, this host's name, or any address.
    """

    redis_url: str
    cluster: str
    cluster_id: str = ""
    """Distinguishes clusters of the same name."""
    shared_password: bool = False
    insecure: bool = False
    """Something crosses the network unencrypted."""
    names: tuple[str, ...] = ()
