"""The probe of a silent node: challenge and proof as datagrams, and what signs them.

The leader orders agents on other hosts to probe a node that sends no heartbeat (ProbeNode). With
the order each gets a challenge: it is signed with a secret of the probed node, so nobody else can
make one, and it names the order, so nobody knows it before. The node answers with a proof that only
its secret makes. The prober reports it, and the leader verifies it. A proof is as long as a
challenge, so a forged sender gets no more than was sent.
"""

import hmac
import struct

PORT_FIRST, PORTS_NUM = 8430, 64
"""The UDP ports of agents that are given none: the first free one."""
PROBE_S_MAX = 0.4
"""How long a prober waits for the proof."""
SEND_S = 0.1
"""After this long without a proof the challenge is sent again."""
SENDS_NUM_MAX = 3
PROBED_S_MAX = 0.8
"""How long the leader waits for the answers of the probers."""
RATE_NUM_MAX = 10
"""Challenges a second that a node answers, and probes a second that an agent makes."""

_HEAD = struct.Struct(">8sQQ")
_ASKS, _PROVES = b"UNICRON?", b"UNICRON!"
_MAC_BYTES = 32
DATAGRAM_BYTES = _HEAD.size + _MAC_BYTES
"""Of a challenge, and of a proof."""


def probe_secret(key: bytes, incarnation: int) -> bytes:
    """The secret by which one incarnation of a node answers probes, from the node's key."""
    return hmac.digest(key, b"probe\n%d" % incarnation, "sha256")


def challenge(secret: bytes, epoch: int, order: int) -> bytes:
    """The datagram that asks the node with this secret on behalf of an order."""
    return _signed(secret, _HEAD.pack(_ASKS, epoch, order))


def proof(secret: bytes, datagram: bytes) -> bytes:
    """The answer to a challenge; b"": it is none for the node with this secret."""
    head = datagram[: _HEAD.size]
    is_asked = datagram.startswith(_ASKS) and len(datagram) == DATAGRAM_BYTES
    if not is_asked or not hmac.compare_digest(datagram, _signed(secret, head)):
        return b""
    return _signed(secret, _PROVES + head[len(_ASKS) :])


def is_proof_of(secret: bytes, epoch: int, order: int, datagram: bytes) -> bool:
    """Whether the node with this secret has answered the challenge of this order."""
    expected = proof(secret, challenge(secret, epoch, order))
    return hmac.compare_digest(expected, datagram)


def _signed(secret: bytes, head: bytes) -> bytes:
    return head + hmac.digest(secret, head, "sha256")
