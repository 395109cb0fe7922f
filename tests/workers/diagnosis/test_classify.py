"""The classifier: real lines for each status of the table, harmless lines, and arbitrary text."""

from __future__ import annotations

import csv
import json
import string
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
from confusion import tables
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unicron.control_plane.incidents.severity import TABLE
from unicron.workers.diagnosis.classifier import (
    LINE_CHARS_MAX,
    NOTHING,
    OVERLAP_CHARS,
    RULES,
    Verdict,
    classify,
)
from unicron.workers.diagnosis.rules.hardware import XIDS
from unicron.workers.diagnosis.rules.ignored import IGNORE_RULES
from unicron.workers.diagnosis.rules.rule import FABRIC

DATA = Path(__file__).parents[2] / "data"
SAMPLES = ("error_lines.jsonl", "error_lines_more.jsonl", "error_lines_drawn.jsonl")


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


LABELLED = [line for name in SAMPLES for line in lines_of(name)]
QUIET = [line["text"] for line in LABELLED if not line["status"]]


@pytest.mark.parametrize("line", LABELLED, ids=lambda line: line["text"][:60])
def test_each_labelled_line_gets_its_status(line: dict[str, Any]) -> None:
    verdict = classify(line["text"])
    assert verdict.status == line["status"], verdict
    assert TABLE.get(verdict.status, "NONE") == line["severity"], verdict


HARMLESS = [
    # words of networks without a fault
    "Loaded the network from net.pt, unexpected keys: []",
    "The network failed to converge within 10 epochs, validation error 0.31",
    "network loss 0.3, reconstruction error 0.02",
    "residual connection of block 3: error norm 1e-3",
    "If the connection fails it is tried again",
    "socket 1: cannot read its NUMA distance, using 10",
    "Gloo picks an interface by itself; where that is unexpected set GLOO_SOCKET_IFNAME",
    "NCCL falls back to sockets where InfiniBand failed",
    "rdma link mlx5_0/1 state ACTIVE, error counters 12 since boot",
    "nfs: mount options soft,timeo=600,retrans=2, failures are told to the program",
    "mlx5_core 0000:01:00.0: error reporting on",
    "weka: 3 backends, fail domains 2",
    "lustre: mount with flock, error=remount-ro",
    "NFS exports: fail over to nas-2 after 30 s",
    "nfsd: last error 0",
    "nfs: 3 mounts, error 0",
    "nfs_volume: failed=0",
    "nfs4_callback: failover partner is nas-2",
    "nfs_cache: 12 hits, 0 failed",
    "nfs4_state: reclaim complete, no failed locks",
    " 12%|#2 | 120/1000 [00:10<01:12, 12.2it/s, val_error=0.3]",
    # harmless failures, and failures that the program retries
    "nvidia_peermem: module verification failed: signature and/or required key missing",
    "Error: Driver 'pcspkr' is already registered, aborting...",
    "nvme nvme0: I/O 512 QID 3 timeout, aborting",
    "nvme nvme0: Abort status: 0x371",
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 "
    "(errno: 99 - Cannot assign requested address).",
    "WARNING:urllib3.connectionpool:Retrying (Retry(total=4, connect=None)) after connection "
    "broken by 'NewConnectionError(': [Errno 111] Connection refused')': /api/5",
    "urllib3.connectionpool Retrying (9 attempts remain) after connection broken by "
    "'ReadTimeoutError(\"Read timed out.\")': /path",
    # amdgpu: successful resets and repeated totals
    "amdgpu 0000:c6:00.0: amdgpu: no uncorrectable hardware errors detected in umc block",
    "amdgpu 0000:c6:00.0: amdgpu: 9 uncorrectable hardware errors detected in total in umc block",
    "amdgpu 0000:c6:00.0: amdgpu: GPU reset(2) succeeded!",
    "amdgpu 0000:c6:00.0: amdgpu: GPU reset end with ret = 0",
    "amdgpu: Failed to send message 0x26, response 0x1",
    # a word of a fault in a program's own words
    "eval: beam search, killed hypotheses 4, error rate 0.08",
    "game over: players killed: 17, survived: 3",
    "Speculative decoding: 18 drafts aborted",
    "rollout statistics: episodes=120 died=14 crashed=0",
    "0 of 1,024 requests timed out",
    "observer error 0.03, client error rate 0.1",
    "DeepEP: buffer allocated, num_timeout_cycles=200000000000, timeout: 100 s",
    # a rule has the words of each
    "gpu_fail_on_error: true",
    "recommended action: upgrade to torch 2.6",
    "8 GPUs found, expected 8",
    "Port 8000 is already in use, trying port 8001",
    "ssh: connect to host gpu-3 port 22: Connection refused, retrying in 5 s",
    "E0811 12:00:00 transfer_task.cpp:44] Transfer failed, retrying (attempt 1/3)",
    "transfer_task.cpp:12] transfer timeout set to 60 s",
    "UCX error handling mode: peer",
    "vLLM instance is stopping, waiting for 3 requests",
    "pod web-1 is scheduled for termination at the end of the rollout",
    " 17 | 02/02/2026 | 10:00:00 | Temperature GPU3 | Upper Critical going high | Deasserted",
    # boot messages of a healthy machine
    *(
        line
        for line in (DATA / "boot_lines.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ),
]


@pytest.mark.parametrize("text", HARMLESS)
def test_lines_that_look_like_faults_and_are_none(text: str) -> None:
    assert not classify(text).status, classify(text)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("iommu: fault on device 0000:4e:00.0", "invalid DMA mapping"),
        ("DMAR: DRHD: handling fault status reg 102", "invalid DMA mapping"),
        ("arm-smmu-v3: unhandled context fault: fsr=0x402", "invalid DMA mapping"),
        ("nvme nvme0: I/O 25 QID 0 timeout, reset controller", "lost connection"),
        (
            "[W socket.cpp:558] [c10d] The client socket has failed to connect to [n1]:29500 "
            "(errno: 99 - Cannot assign requested address).",
            "other network errors",
        ),
        (
            "[E socket.cpp:922] [c10d] The client socket has timed out after 60s while trying to "
            "connect to (10.0.0.1, 29500).",
            "other network errors",
        ),
        (
            "requests.exceptions.ConnectionError: Max retries exceeded with url: /api",
            "other network errors",
        ),
    ],
)
def test_similar_lines_of_real_faults_keep_their_status(text: str, status: str) -> None:
    assert classify(text).status == status, classify(text)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        # an ignore rule has the words of each
        ("neighbour: ndisc_cache: neighbor table overflow!", "other network errors"),
        ("CRC errors: 0, replay errors: 14, NVLink 3 failed", "NVLink errors"),
        ("ECC: corrected errors 12, uncorrected errors: 3, GPU 4", "ECC errors"),
        ("single-bit ECC errors 4, double-bit ECC errors 1", "ECC errors"),
        ("mlx5_3 port 1: link up, then link down again, link flap", "link flapping"),
        ("GPU 5: NVLink is not ready, NVLink training failed", "NVLink errors"),
        ("Error at iteration 120/ 500: CUDA error: unspecified launch failure", "CUDA errors"),
        ("skipping step 7: CUDA error: device-side assert triggered", "CUDA errors"),
        ("destroy_process_group: CUDA error: unspecified launch failure", "CUDA errors"),
        ("rank 7 terminated via SIGKILL", "exited abnormally"),
        ("received SIGTERM: the node was preempted", "lost connection"),
        ("all_reduce timed out: time limit of the collective was exceeded", "NCCL timeout"),
        ("2 Workers killed due to memory pressure (OOM), 0 Workers crashed", "exited abnormally"),
        ("EDAC MC0: 1 UE overflow on DIMM 3, uncorrectable memory error", "ECC errors"),
        ("systemd[1]: mnt-ckpt.mount: Mount process exited, code=exited", "other software errors"),
        ("NCCL WARN NET/Plugin: Failed to initialize the plugin", "other network errors"),
        ("the worker failed and was not successfully recovered: Broken pipe", "connection reset"),
    ],
)
def test_no_ignore_rule_hides_a_fault_that_has_its_words(text: str, status: str) -> None:
    assert classify(text).status == status, classify(text)


@pytest.mark.parametrize(
    ("text", "can_pass"),
    [
        ("socket.gaierror: [Errno -2] Name or service not known", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("OSError: [Errno 101] Network is unreachable", True),
        ("torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients", True),
        ("OSError: [Errno 5] Input/output error", True),
        ("OSError: [Errno 28] No space left on device", True),
        ("OSError: [Errno 116] Stale file handle", True),
        ("OSError: [Errno 122] Disk quota exceeded", True),
        ("RuntimeError: [enforce fail at inline_container.cc:664] . unexpected pos 704 vs 1", True),
        ("nfs: server 10.0.0.1 not responding, still trying", True),
        ("mmfs: [E] Lost connection to quorum node 192.0.2.40, retrying", True),
        ("urllib.error.HTTPError: HTTP Error 503: Slow Down", True),
        ("huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests", True),
        ("ValueError: no such layer", False),
        ("RuntimeError: CUDA error: unspecified launch failure", False),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8)", False),
        ("NVRM: Xid (PCI:0000:05:00): 79, GPU has fallen off the bus.", False),
        ("OSError: [Errno 30] Read-only file system: '/ckpt'", False),
        ("torch.OutOfMemoryError: CUDA out of memory.", False),
        ("INFO: all well", False),
    ],
)
def test_whether_a_fault_can_end_by_itself(text: str, can_pass: bool) -> None:
    assert classify(text).can_pass is can_pass, classify(text)


def test_no_fault_of_a_device_or_of_a_process_ends_by_itself() -> None:
    passing = {rule.status for rule in RULES if rule.can_pass}
    assert passing == {
        "connection refused",
        "connection reset",
        "link flapping",
        "other network errors",
        "other software errors",
    }
    assert not [rule.name for rule in RULES if rule.can_pass and rule.depth < FABRIC]


def test_a_failed_rdma_call_is_an_own_fault_for_any_reason() -> None:
    for why in ("Connection timed out", "Connection refused", "Connection reset by peer"):
        verdict = classify(
            f"n1:118:220 [0] ibvwrap.c:118 NCCL WARN Call to ibv_modify_qp failed with error {why}"
        )
        assert (verdict.status, verdict.rule, verdict.second_hand) == (
            "other network errors",
            "ib-call",
            False,
        )


@pytest.mark.parametrize(
    "text",
    [
        "rdma transport: connection to 10.0.0.4 failed",
        "gloo error: no route",
        "Network failure",
        "weka: backend 3 is unreachable",
        "UCX: cannot connect to 10.0.0.4",
        "12%|#2 | 120/1000 [00:10<01:12, 12.2it/s][rank0]: OSError: [Errno 113] No route to host",
    ],
)
def test_a_failure_that_a_network_layer_reports_is_a_fault(text: str) -> None:
    assert TABLE[classify(text).status] == "SEV3", classify(text)


def test_the_samples_have_every_status_and_many_harmless_lines() -> None:
    assert {line["status"] for line in LABELLED} == {"", *TABLE} - {
        "wrong input",
        "silent data corruption",
    }
    assert len(QUIET) >= 50


def test_the_page_contains_the_current_tables() -> None:
    page = (DATA.parent.parent / "docs/guides/detection.md").read_text(encoding="utf-8")
    assert tables() in page, "outdated: run make confusion"


def test_the_xids_are_those_of_the_catalogue() -> None:
    with (DATA / "xid_catalog.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 172
    assert {int(row["xid"]): row["unicron_status_suggested"] for row in rows} == XIDS


@pytest.mark.parametrize("xid", sorted(set(XIDS) - {154}))
def test_an_xid_is_found_in_every_spelling(xid: int) -> None:
    for text in (
        f"[1.2] NVRM: Xid (PCI:0000:05:00): {xid}, pid=1, name=python3, Ch 00000008",
        f"NVRM: Xid (0000:05:00): {xid}, Channel 1",
        f"XID errors: {xid}",
        f"xid={xid}",
    ):
        assert (classify(text).status, classify(text).code) == (XIDS[xid], xid), text


def test_codes_whose_status_depends_on_the_text() -> None:
    def nvlink(word: str) -> str:
        return f"NVRM: Xid (PCI:0000:04:00): 145, RLW_CTRL {word} XC0 i0 Link 00 (0x00000003)"

    def recovery(value: str) -> str:
        return (
            "NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x4 (Drain and "
            f"Reset) to {value}"
        )

    assert classify(nvlink("Fatal")).status == "NVLink errors"
    assert classify(nvlink("Nonfatal")).status == ""
    assert classify(recovery("0x0 (None)")).status == ""
    assert classify(recovery("0x2 (Node Reboot Required)")).status == "GPU driver errors"
    assert classify("NVRM: Xid (PCI:0009:01:00): 99999, of tomorrow").status == ""
    assert classify("XID 149.37 (err status 0x00000000) NETIR on GPU 3").device == "3"


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (149, "NVLink errors"),
        (48, "ECC errors"),
        (79, "GPU driver errors"),
        (13, "illegal memory access"),
        (45, "exited abnormally"),
        (63, "exited abnormally"),
    ],
)
def test_an_xid_that_names_its_cause_has_the_status_of_the_cause(cause: int, status: str) -> None:
    """A cause without a status of its own (63) leaves the status of XID 45."""
    verdict = classify(
        "NVRM: Xid (PCI:0000:dc:00): 45, pid=1, name=python3, Ch 00000001 caused by "
        f"previous Xid {cause}"
    )
    assert (verdict.status, verdict.code, verdict.second_hand) == (status, 45, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("No route to host", "other network errors"),
        ("Connection refused", "connection refused"),
        ("Connection timed out", "other network errors"),
    ],
)
def test_only_the_last_try_is_a_fault(error: str, status: str) -> None:
    def tried(num: int) -> str:
        return classify(
            "n1:118:220 [0] NCCL INFO socketPollConnect: connect to 10.0.0.4<43893> "
            f"returned {error}, retrying ({num}/34) after sleep for 100 msec"
        ).status

    assert tried(34) == status
    assert {tried(1), tried(3), tried(33)} == {""}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (
            "RuntimeError: rank 3 was preempted: CUDA error: unspecified launch failure",
            "CUDA errors",
        ),
        ("[rank2]: ValueError: preempted while it wrote its shard", "other software errors"),
        ("Node gpu-7 was preempted", "lost connection"),
        ("the instance has been preempted", "lost connection"),
        (
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 "
            "DUE TO PREEMPTION ***",
            "lost connection",
        ),
        ("vllm: Sequence group 12 is preempted by PreemptionMode.RECOMPUTE", ""),
        ("Linux version 6.8.0 #1 SMP PREEMPT_DYNAMIC", ""),
    ],
)
def test_the_word_preempted_alone_does_not_hide_a_fault(text: str, status: str) -> None:
    assert classify(text).status == status, classify(text)


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        (
            "NCCL WARN NET/IB : Got completion from peer 10.3.0.61<39430> with error 12, "
            "opcode 129",
            "10.3.0.61:39430",
        ),
        (
            "RuntimeError: [pair.cc:598] Connection closed by peer [172.28.0.12]:43185",
            "172.28.0.12:43185",
        ),
        ("socketProgress: Connection closed by remote peer node2<42830>", "node2:42830"),
        (
            "Connect to fe80::966d:ae03:a2:8cf0%ib1<17943> failed : Connection refused",
            "[fe80::966d:ae03:a2:8cf0%ib1]:17943",
        ),
        (
            "The client socket has timed out after 1800s while trying to connect "
            "to (127.0.0.1, 48391).",
            "127.0.0.1:48391",
        ),
        (
            "failed to connect to [::ffff:198.18.0.1]:3254 (errno: 110 - Connection timed out).",
            "198.18.0.1:3254",
        ),
        ("ERROR connecting to 10.87.137.19: Connection refused [111]", "10.87.137.19"),
        (
            "recvValue failed on SocketImpl(fd=1, addr=[a]:48750, remote=[b.local]:20000): "
            "Connection reset by peer",
            "b.local:20000",
        ),
        ("OSError: [Errno 104] Connection reset by peer", ""),
    ],
)
def test_the_peer_that_a_line_names(text: str, peer: str) -> None:
    assert classify(text).peer == peer


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("NVRM: Xid (PCI:0000:05:00): 79, pid=1, GPU has fallen off the bus.", "0000:05:00"),
        ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.", "0000:29:00.0"),
        (
            "Unable to determine the device handle for GPU 0000:02:00.0: GPU is lost.",
            "0000:02:00.0",
        ),
        ("for CUDA device ordinal 3: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error", "3"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", ""),
    ],
)
def test_the_gpu_that_a_line_names(text: str, device: str) -> None:
    assert classify(text).device == device


def test_a_wrapper_gives_way_to_the_error_that_it_contains() -> None:
    watchdog = "[Rank 1] NCCL watchdog thread terminated with exception: "
    for inner, status in (
        ("CUDA error: uncorrectable ECC error encountered", "ECC errors"),
        ("CUDA error: an illegal memory access", "illegal memory access"),
        ("Watchdog caught collective operation timeout", "NCCL timeout"),
    ):
        assert classify(watchdog + inner).status == status
    text = (
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1331, unhandled system error"
        "\nLast error:\nsocketStartConnect: Connect to 10.0.0.2<45763> failed : Connection "
        "refused"
    )
    assert classify(text)[:2] == ("connection refused", "connection-refused")


def test_the_loss_of_a_peer_is_indirect_and_an_own_fault_is_not() -> None:
    for text in (
        "Connection closed by peer [10.0.0.1]:4",
        "remote process exited or there was a network error",
        "Watchdog caught collective operation timeout",
    ):
        assert classify(text).second_hand, text
    for text in (
        "ValueError: bad",
        "CUDA error: unknown error",
        "OSError: [Errno 5] Input/output error",
        "Connection refused",
    ):
        assert not classify(text).second_hand, text


def test_the_innermost_exception_of_a_traceback_decides() -> None:
    text = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in step\n'
        '    raise ConnectionResetError("CUDA error: uncorrectable ECC error")\n'
        "ValueError: no such layer\n\nDuring handling of the above exception, another "
        'exception occurred:\n\nTraceback (most recent call last):\n  File "a.py", line 9\n'
        "    close()\nConnectionResetError: [Errno 104] Connection reset by peer\n"
    )
    verdict = classify(text)
    assert verdict == Verdict(
        "other software errors", "exception", line="ValueError: no such layer"
    )


def test_source_lines_in_a_traceback_do_not_count() -> None:
    for prefix in ("", "[rank3]: ", "(Worker pid=12) ", "  | "):
        text = "\n".join(
            prefix + line
            for line in (
                "Traceback (most recent call last):",
                '  File "train.py", line 3, in step',
                '    raise OSError("CUDA error: uncorrectable ECC error")',
                "ValueError: no such layer",
            )
        )
        assert classify(text).rule == "exception", prefix
        assert classify(text).line.endswith("ValueError: no such layer"), prefix


# --- an exception group: each member is read alone -----------------------------------------------
def group_of(*members: str) -> str:
    """A group as Python prints it, without source lines. `members` are the exceptions to raise."""
    names: dict[str, Any] = {}
    exec(
        compile(
            "caught = []\n"
            + "".join(
                f"try:\n    raise {member}\nexcept Exception as error:\n    caught.append(error)\n"
                for member in members
            )
            + "group = ExceptionGroup('connection reset in the workers', "
            "caught)",
            "<string>",
            "exec",
        ),
        names,
    )
    return "".join(traceback.format_exception(names["group"]))


ECC = "RuntimeError('CUDA error: uncorrectable ECC error encountered')"
RESET = "ConnectionResetError(104, 'Connection reset by peer')"
SOFTWARE = "ValueError('no such layer')"


@pytest.mark.parametrize(
    ("members", "status"),
    [
        ((ECC,), "ECC errors"),
        ((SOFTWARE, ECC), "ECC errors"),
        ((ECC, RESET), "ECC errors"),
        ((RESET, ECC), "ECC errors"),
        ((RESET, SOFTWARE), "other software errors"),
        ((SOFTWARE, RESET), "other software errors"),
        ((RESET,), "connection reset"),
        ((f"ExceptionGroup('inner', [{SOFTWARE}, {ECC}])", RESET), "ECC errors"),
    ],
)
def test_each_member_of_a_group_is_read_alone(members: tuple[str, ...], status: str) -> None:
    text = group_of(*members)
    assert '  |   File "' in text or len(members) == 1, text
    for prefix in ("", "[rank1]: "):
        prefixed = "\n".join(prefix + line for line in text.splitlines())
        assert classify(prefixed).status == status, prefixed


def test_the_message_of_a_group_does_not_count() -> None:
    verdict = classify(group_of(SOFTWARE))
    assert verdict.line.endswith("ValueError: no such layer")
    assert not classify("ExceptionGroup: connection reset in it (2 sub-exceptions)").status


def test_the_first_exception_of_a_chain_decides_also_in_a_group() -> None:
    chain = (
        "ConnectionResetError: [Errno 104] Connection reset by peer\n\nThe above exception "
        "was the direct cause of the following exception:\n\nValueError: no batch"
    )
    assert classify(chain).rule == "connection-reset"
    member = "".join(f"    | {line}\n" for line in chain.splitlines())
    group = (
        f"  | ExceptionGroup: x (1 sub-exception)\n  +-+{'-' * 16} 1 {'-' * 16}\n{member}"
        f"    +{'-' * 36}\n"
    )
    assert classify(group).rule == "connection-reset"


def test_a_usage_error_is_wrong_input() -> None:
    assert classify("unicron.events.errors.UsageError: no such shard").status == "wrong input"


# --- any text at all -----------------------------------------------------------------------------
@settings(deadline=None)
@given(st.text())
def test_any_text_gets_a_status_of_the_table_or_none(text: str) -> None:
    verdict = classify(text)
    assert verdict.status in {"", *TABLE}
    assert verdict.rule or verdict == NOTHING


@settings(deadline=None)
@given(
    st.sampled_from(LABELLED),
    st.lists(st.sampled_from(QUIET), max_size=4),
    st.lists(st.sampled_from(QUIET), max_size=4),
)
def test_harmless_lines_change_no_verdict(
    line: dict[str, Any], before: list[str], behind: list[str]
) -> None:
    assert classify("\n".join([*before, line["text"], *behind])).status == line["status"]


@settings(deadline=None)
@given(
    st.sampled_from([line for line in LABELLED if line["status"]]),
    st.integers(LINE_CHARS_MAX, 3 * LINE_CHARS_MAX),
)
@example(next(line for line in LABELLED if "TCP client failed to connect" in line["text"]), 6986)
def test_a_cause_far_inside_a_long_line_is_found(line: dict[str, Any], ahead: int) -> None:
    last = line["text"].splitlines()[-1]
    alone = classify(last)
    if len(line["text"].splitlines()) == 1 and len(last) < OVERLAP_CHARS:
        found = classify("." * ahead + " " + last + " " + "." * ahead)
        assert found.status == alone.status or alone.rule == "exception", (found, alone)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.sampled_from([word for rule in RULES for word in rule.words]), min_size=1, max_size=3
    ),
    st.sampled_from(["", " ", "=", ":0", "a" * 50, "\n"]),
)
def test_the_time_is_linear_in_the_length_of_any_repetition(words: list[str], between: str) -> None:
    unit = between.join(words) + between

    def cost_s(num_chars: int) -> float:
        text = (unit * (num_chars // len(unit) + 1))[:num_chars]
        begun_s = time.process_time()
        classify(text)
        return time.process_time() - begun_s

    cost_s(1_000)
    assert cost_s(40_000) < 1.0  # measured: 0.04 s; a quadratic pattern takes minutes


FRAGMENTS = [
    *sorted({word for rule in (*RULES, *IGNORE_RULES) for word in rule.words}),
    *string.printable,
    "\u0130",
    "\ud800",
    "\x00",
    '  File "a", line 1',
    "[rank0]: ",
    "  | ",
    "+---------------- 1 ----------------",
    "(1 sub-exception)",
    "xid (",
    "peer 1.2:3",
]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=40), st.sampled_from(["", " ", "\n", ": "]))
def test_no_combination_of_the_words_of_rules_raises(fragments: list[str], between: str) -> None:
    verdict = classify(between.join(fragments))
    assert verdict.status in {"", *TABLE}


@pytest.mark.parametrize(
    "unit",
    [
        "a",
        " ",
        "0",
        "(",
        "|",
        "-",
        ":a",
        "nfs ",
        "nccl ",
        "network ",
        "lustreerror ",
        "nvrm: ",
        "error ",
        "1.1.1.1:",
        "[0] ",
    ],
)
def test_a_quarter_megabyte_of_repeats_is_classified_within_seconds(unit: str) -> None:
    text = unit * (250_000 // len(unit))
    begun_s = time.process_time()
    classify(text)
    assert time.process_time() - begun_s < 10.0  # measured: at most 0.6 s


def test_a_megabyte_in_one_line_is_classified_within_seconds() -> None:
    begun_s = time.process_time()
    assert classify("x" * 1_000_000 + " CUDA error: unknown error").status == "CUDA errors"
    assert time.process_time() - begun_s < 10.0  # measured: 0.4 s
