"""Proof of who speaks: each node's key, server password and signatures, from one secret.

The control plane has a secret and stores nothing else: it derives what a node needs, again each
time. A node is told its own key and password when it joins.

The key is the node's, whatever its incarnation: a new agent delivers the reports of its
predecessor, and carries out orders that are still open. The password is the incarnation's, so that
a new agent takes away its predecessor's access to the server.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable
from functools import lru_cache
from typing import Literal
from urllib.parse import quote, urlunsplit

from msgspec import Struct
from msgspec.structs import replace

from ..network_address import url_parts
from ..node_probe import DATAGRAM_BYTES, challenge, is_proof_of, probe_secret
from ..records import orders, reports
from ..records.codec import UnknownBody
from ..records.envelope import Record, Report, incarnation_of
from ..records.types import Body

SECRET_BYTES = 32
SIGNATURE_BYTES = 32
RESERVED_NAMES = ("leader", "operator")
"""No node may have such a name: reports of the leader and of operators have it in their source."""

PREFIX = "unicron_"
SECRET = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}\Z")
_PROOF = re.compile(rf"[0-9a-f]{{{2 * DATAGRAM_BYTES}}}")

KEYS_NUM_MAX = 1 << 14
"""Derived keys that are kept: a control plane needs those of a node for each report and order."""
Keys = Callable[[str], bytes]
"""Returns the key of a node."""


def new_secret() -> str:
    """A secret of 256 random bits. The prefix lets scanners of leaked secrets find it."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


class Identities:
    """The identities of the nodes of one cluster, for its control plane."""

    def __init__(self, secret: bytes, cluster: str) -> None:
        assert len(secret) == SECRET_BYTES
        self._secret, self._cluster = secret, cluster

    @property
    def new_cluster_id(self) -> str:
        """Distinguishes a new cluster from others of the same name, the same for each of its
        control planes. It is no secret."""
        return self._derive("cluster").hex()[:16]

    def key(self, node: str) -> bytes:
        """The key that signs this node's reports, and the orders for it."""
        return self._derive("key", node)

    def password(self, node: str, incarnation: int) -> str:
        """The server password of one incarnation of a node."""
        return self._derive("password", node, str(incarnation)).hex()

    def _derive(self, *parts: str) -> bytes:
        # No part holds a newline, so two lists of parts never give one text.
        return _derived(self._secret, "\n".join((*parts, self._cluster)).encode())


def only_key(node: str, key: bytes) -> Keys:
    """The keys that an agent has: its own."""

    def key_of(name: str) -> bytes:
        assert name == node, f"the agent of {node} has no key of {name}"
        return key

    return key_of


def user_name(cluster: str, node: str) -> str:
    """The name of a node's user on the server."""
    return f"unicron:{cluster}:{node}"


def password_hash(password: str) -> str:
    """The form in which the server is told and stores a password."""
    return hashlib.sha256(password.encode()).hexdigest()


def with_credentials(url: str, user: str, password: str) -> str:
    """The server's URL with these credentials in place of its own."""
    parts = url_parts(url)
    where = f"{quote(user, safe='')}:{quote(password, safe='')}@{parts.netloc.rpartition('@')[2]}"
    return urlunsplit(parts._replace(netloc=where))


# --- signatures ---------------------------------------------------------------------------------
def sign_report(key: bytes, wire: bytes) -> bytes:
    """The encoded report with the signature in front."""
    return _sign(key, b"report", wire) + wire


def split_report(entry: bytes) -> tuple[bytes, bytes]:
    """(signature, encoded report) of what an agent has sent."""
    return entry[:SIGNATURE_BYTES], entry[SIGNATURE_BYTES:]


def is_report_signed(key: bytes, signature: bytes, wire: bytes) -> bool:
    """Whether the node of this key has signed the encoded report."""
    return hmac.compare_digest(signature, _sign(key, b"report", wire))


def report_error(keys: Keys, report: Report, signature: bytes, wire: bytes, sender: str) -> str:
    """Why a report is not one of the node that its source names; "": it is. `sender`: the node in
    whose list it was, which has signed it; "": it was in the list that agents share."""
    node, incarnation = report.source.rpartition("/")[0], incarnation_of(report.source)
    if node in RESERVED_NAMES or incarnation is None:
        return "its source is not a node"
    if sender and node != sender:
        return "its source is another node"
    if not sender and not is_report_signed(keys(node), signature, wire):
        return "its signature is not the node's"
    body = report.body
    about = AGENT_REPORTS.get(type(body))
    if about is None:
        return "an agent does not report this"
    if about != "share" and getattr(body, "node", node) != node:
        return "it is about another node"
    if getattr(body, "incarnation", incarnation) != incarnation:
        return "it is about another incarnation of its node"
    if isinstance(body, reports.NodeDrained) and (body.who, body.role) != (node, "node"):
        return "it names an operator"
    return ""


def sign_order(key: bytes, entry: str, wire: bytes, store_keys: bytes = b"") -> bytes:
    """The signature of an order, with its keys of stores, at its place (`<epoch>-<seq>`) in a
    node's stream."""
    return _sign(key, b"order", b"\n".join((entry.encode(), b"%d" % len(wire), wire + store_keys)))


def is_order_signed(
    key: bytes, entry: str, wire: bytes, store_keys: bytes, signature: bytes
) -> bool:
    """Whether the leader gave this order to the node of this key, at this place of its stream."""
    return hmac.compare_digest(signature, sign_order(key, entry, wire, store_keys))


# --- checkpoint stores --------------------------------------------------------------------------
class StoreKey(Struct, frozen=True, array_like=True):
    """Opens one node's checkpoint store to one task: its ranks read all shares of the task there,
    and store shares of generations up to `generation`. 0: of any; a task that restarts from memory
    counts by the attempts of its ranks, which the order does not have."""

    task: int
    generation: int
    key: bytes


StoreKeys = dict[str, StoreKey]
"""By the node of the store. Of a ProbeNode: the challenge, by the node that it is for."""


def store_secret(key: bytes) -> bytes:
    """The secret of a node's checkpoint store, from the node's key."""
    return _derived(key, b"store\n")


@lru_cache(KEYS_NUM_MAX)
def store_key(secret: bytes, task: int, generation: int) -> StoreKey:
    """A key of the store that has this secret. Without the secret, none can be made."""
    return StoreKey(task, generation, _sign(secret, b"task", b"%d\n%d" % (task, generation)))


def order_keys(keys: Keys, record: Record, node: str) -> StoreKeys:
    """What `node` needs to carry out an order and is not in the log: it goes there beside the
    order."""
    order = record.body
    if isinstance(order, orders.ProbeNode):
        secret = probe_secret(keys(order.node), order.incarnation)
        return {order.node: StoreKey(0, 0, challenge(secret, record.epoch, record.seq))}
    return store_keys(keys, order, node)


def with_verified_proof(keys: Keys, body: reports.NodeProbed) -> reports.NodeProbed:
    """The report of a probe, in which the leader says whether the proof is the target's."""
    secret = probe_secret(keys(body.target), body.target_incarnation)
    given = bytes.fromhex(body.proof) if _PROOF.fullmatch(body.proof) else b""
    reached = is_proof_of(secret, body.epoch, body.order, given)
    return replace(body, reached=reached)


def store_keys(keys: Keys, order: Body, node: str) -> StoreKeys:
    """The keys that the ranks of `node` need to carry out an order."""
    if not isinstance(order, (orders.StartRank, orders.Reconfigure, orders.SetCheckpointStores)):
        return {}
    own = next((one.stores for one in getattr(order, "stores", ()) if one.node == node), None)
    found = {one.node for one in getattr(order, "keepers", ()) if own is None or one.node in own}
    found |= {copy.node for copy in getattr(order, "copies", ())}
    return {
        name: store_key(store_secret(keys(name)), order.task, getattr(order, "generation", 0))
        for name in sorted(found)
    }


@lru_cache(KEYS_NUM_MAX)
def _derived(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _sign(key: bytes, purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\n" + data, "sha256")


About = Literal["node", "process", "share", "member", "order", "probe", "nothing"]
"""What a report is about. The node that sends it; a process on that node, or its share of an
in-memory checkpoint; a task, of whose generation the node has a member; an order to the node; a
probe that the node was ordered to make. But for the first, the state of the cluster tells
(control_plane/decide/speakers.py)."""

AGENT_REPORTS: dict[type[Body], About] = {
    reports.NodeJoined: "node",
    reports.NodeLeft: "node",
    reports.AgentRestarting: "node",
    reports.AgentRestarted: "node",
    reports.MemoryCheckpointsLost: "node",
    reports.ReportsLost: "node",
    reports.NodeDrained: "node",
    reports.HealthChanged: "node",
    reports.DeviceErred: "node",
    reports.NodeProbed: "probe",
    reports.OrderRefused: "order",
    reports.CheckpointPublished: "order",
    reports.RankStarted: "process",
    reports.RankAdopted: "process",
    reports.RankReady: "process",
    reports.RankErrored: "process",
    reports.RankExited: "process",
    reports.RankReportsDropped: "process",
    reports.RankSuspended: "process",
    reports.RankContinued: "process",
    reports.RankStalled: "process",
    reports.StacksKept: "process",
    reports.RankUnstalled: "process",
    reports.RankWorked: "process",
    reports.RankFinished: "process",
    reports.CollectiveFailed: "process",
    reports.Quiesced: "process",
    reports.Reconfigured: "process",
    reports.ReconfigureFailed: "process",
    reports.IterationsLogged: "process",
    reports.StepTimeChanged: "process",
    reports.MemoryCheckpointStored: "share",
    reports.CheckpointFailed: "process",
    reports.InMemoryRecoveryDeclined: "process",
    reports.TaskProgressed: "member",
    reports.LossNotFinite: "member",
    reports.LossFiniteAgain: "member",
    reports.CheckpointSaved: "member",
    UnknownBody: "nothing",
}
"""What an agent may report, and what each kind is about. A body of a later version (UnknownBody)
has no effect here."""
