"""A challenge is one of the leader, for one order and node; a proof is one of that node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from unicron.events import node_probe
from unicron.events.log.identity import (
    SECRET_BYTES,
    Identities,
    order_keys,
    sign_report,
    with_verified_proof,
)
from unicron.events.log.intake import read_report
from unicron.events.log.port import Rejected, Sent
from unicron.events.records import codec
from unicron.events.records.envelope import Record, Report
from unicron.events.records.orders import ProbeNode
from unicron.events.records.reports import NodeProbed

KEYS = Identities(b"s" * SECRET_BYTES, "default").key
SECRET = node_probe.probe_secret(KEYS("n3"), 7)


def ordered(node: str = "n3", incarnation: int = 7, seq: int = 40) -> bytes:
    """The challenge that comes beside an order to n1."""
    body = ProbeNode(
        nodes=("n1",), incarnations=(1,), node=node, incarnation=incarnation, host="h", port=8430
    )
    record = Record(
        seq=seq,
        epoch=2,
        at_s=1.0,
        occurred_s=1.0,
        source="heart",
        source_seq=0,
        cause=1,
        incident=0,
        body=body,
    )
    return order_keys(KEYS, record, "n1")[node].key


def said(proof: bytes, *, target: str = "n3", incarnation: int = 7, order: int = 40) -> NodeProbed:
    return NodeProbed(
        node="n1",
        incarnation=1,
        target=target,
        target_incarnation=incarnation,
        order=order,
        epoch=2,
        proof=proof.hex(),
        reached=True,
    )


def reached(body: NodeProbed) -> bool:
    return with_verified_proof(KEYS, body).reached


def test_the_probed_node_answers_and_the_leader_verifies() -> None:
    asked = ordered()
    proof = node_probe.proof(SECRET, asked)
    assert len(proof) == len(asked) == node_probe.DATAGRAM_BYTES
    assert reached(said(proof))


def test_a_proof_counts_for_its_order_node_and_incarnation_alone() -> None:
    proof = node_probe.proof(SECRET, ordered())
    assert not reached(said(proof, order=41))
    assert not reached(said(proof, target="n2"))
    assert not reached(said(proof, incarnation=8))
    assert not reached(said(b""))
    assert not reached(said(ordered())), "the challenge sent back"
    other = node_probe.probe_secret(KEYS("n2"), 7)
    assert not node_probe.proof(other, ordered()), "another node does not answer"
    assert not node_probe.proof(node_probe.probe_secret(KEYS("n3"), 6), ordered())


def test_a_prober_cannot_say_that_it_has_reached_the_node() -> None:
    """The leader writes `reached`, whatever the report says; the report itself is no forgery."""
    for proof, is_reached in ((b"", False), (node_probe.proof(SECRET, ordered()), True)):
        report = Report(source="n1/1", source_seq=1, occurred_s=0.0, body=said(proof))
        wire = codec.encode_report(report)
        data = sign_report(KEYS("n1"), wire)
        got = read_report(KEYS, Sent(cursor="1-0", node="n1", data=data, num_bytes=len(data)))
        assert not isinstance(got, Rejected), got
        assert isinstance(got.body, NodeProbed)
        assert got.body.reached == is_reached


@given(st.binary(max_size=80) | st.binary(max_size=32).map(lambda tail: ordered()[:24] + tail))
def test_nothing_but_a_challenge_is_answered(data: bytes) -> None:
    assert node_probe.proof(SECRET, data) == b"" or data == ordered()


@given(st.text(max_size=130), st.integers(0, 2**53), st.integers(0, 2**53))
def test_a_false_proof_never_counts(proof: str, order: int, epoch: int) -> None:
    body = NodeProbed(
        node="n1",
        incarnation=1,
        target="n3",
        target_incarnation=7,
        order=order,
        epoch=epoch,
        proof=proof,
        reached=True,
    )
    assert not reached(body)
