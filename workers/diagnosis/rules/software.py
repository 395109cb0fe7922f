"""Rules for software errors and exited processes: Python, filesystems, launchers."""

import re

from ....events.records import statuses
from .rule import FABRIC, RAISED, TRACE, WRAPPER, Rule, rules

# An exception as Python prints it: a capitalised name, optionally after a prefix or a module.
_EXCEPTION = (
    r"(?:^|[\s\]>|:：│(])(?:[a-z_]\w{0,40}\.){0,8}(?!Lustre)(?=\w{5})[A-Z]\w{0,60}"
    r"(?:Error|Exception|Failure|Exit|NotFound|Expired|Exhausted|Mismatch)(?::|\(|\s*$)"
)

ENDED_RULES = (
    *rules(
        statuses.EXITED_ABNORMALLY,
        WRAPPER,
        (
            (
                "child-ended",
                "processexitedexception|processraisedexception|childfailederror"
                "|signalexception|calledprocesserror|actordiederror|workercrashederror|rayactorerror",
            ),
            (
                "worker-died",
                "died|crash|unexpectedly exit|exited immediately|worker group failed|failed to start",
                r"(?:worker|actor|rank|process|trainer|owner)\w{0,10}(?:'s node)? .{0,40}(?:died"
                r"|crashed)|unexpectedly exits|exited immediately|worker group failed|(?:worker|actor"
                r"|rank|process|trainer)\w{0,10} (?:\w{1,12} )?failed to start",
            ),
            (
                "evicted",
                "evicted|low on resource",
                r"low on resource|reason:? ?evicted|\b(?:pod"
                r"|container|worker)\S{0,40} .{0,60}\bevicted\b|\bevicted\b +\d+ ",
            ),
        ),
    ),
)
"""A launcher's messages about an exited process: tried before the causes that they seem to name."""
PROCESS_RULES = (
    *rules(
        statuses.WRONG_INPUT,
        FABRIC,
        (
            ("wrong-input", "unicron.events.errors.usageerror"),
            (
                "not-deterministic",
                "does not have a deterministic implementation",
                r"runtimeerror: .{1,200}does not have a deterministic implementation",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        FABRIC,
        (
            (
                "disk-full",
                "no space left|quota|enospc",
                r"no space left|(?:disk )?quota exceeded|enospc\b",
            ),
            (
                "stale-handle",
                "stale|estale|errno 116",
                r"stale (?:nfs )?file handle|estale\b|errno[: ]*116",
            ),
            (
                "io-failed",
                "input/output|errno 5]|remote i/o|eio|write error",
                r"input/output error|errno 5\]|write error: (?:wrote \d|bad file|file too)"
                r"|remote i/o error|\beio\b",
            ),
            (
                "read-only",
                "read-only|erofs",
                r"read-only file ?system|remounting filesystem read-only"
                r"|erofs\b|forced readonly|remounting .{0,30}read-only",
            ),
            (
                "filesystem-damaged",
                "ext4-fs error|xfs|btrfs|structure needs|beyond end of device|corrupt",
                r"ext[234]-fs error|xfs.{0,60}(?:corruption|shut(?:ting)? ?down|metadata|internal error"
                r"|error -?\d)|btrfs.{0,30}(?:error|critical)|structure needs cleaning"
                r"|access beyond end of device",
            ),
            (
                "files-exhausted",
                "file-max|too many open files|emfile|enfile",
                r"file-max limit|too many open files|emfile\b|enfile\b",
            ),
            (
                "nfs-state",
                "nfs",
                r"\bnfs4?_\w{1,40}: (?!.{0,40}\b(?:no|0|without) fail).{0,40}"
                r"\bfail(?:ed|ure)\b(?! ?[:=])|\bnfs\w{0,40}.{0,30}reclaim.{0,12} failed\b"
                r"|\bnfs.{0,60}\berror -?[1-9]|\bnfs.{0,40}state manager.{0,40} failed\b",
            ),
            (
                "mount-gone",
                "transport endpoint|lustreerror|fuse",
                r"transport endpoint|lustreerror: |fuse.{0,40}(?:error|crash)",
            ),
            (
                "checkpoint-io",
                "pytorchstream|inline_container|checkpoint|safetensor|unexpected pos|unexpected eof",
                r"pytorchstream(?:writer|reader) failed|enforce fail at inline_container"
                r"|unexpected pos \d{1,18} vs \d|unexpected eof, expected \d{1,18} more bytes"
                r"|(?:corrupt\w{0,4}|invalid|incomplete|truncated) (?:\S{1,20} )?checkpoint"
                r"|checkpoint .{0,60}(?:corrupt|incomplete|truncated)|failed to (?:save|load|write"
                r"|read) .{0,20}checkpoint|checkpoint .{0,40}(?:save|load|write|upload) failed",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        RAISED,
        (
            (
                "not-a-number",
                "nan|inf|loss scale",
                r"found (?:nan|inf)|(?:loss|grad\w{0,6}).{0,20}(?:is|became|contains?) (?:nan|inf)"
                r"|loss scale already at minimum|unexpected (?:nan|inf|result nan)",
            ),
            (
                "library-missing",
                "shared object|undefined symbol|glibc|command not found|no module named|no such file",
                r"cannot open shared object file: no such|undefined symbol"
                r"|glibc\w{0,3}_\d\S{0,12}' not found|command not found|no module named"
                r"|can't open file .{0,200}no such file",
            ),
            (
                "permission-denied",
                "permission denied|eacces|not permitted",
                r"permission denied|eacces\b|operation not permitted",
            ),
            (
                "memory-short",
                "cannot allocate memory|bad_alloc|enomem|defaultcpuallocator",
                r"cannot allocate memory|std::bad_alloc|enomem\b|defaultcpuallocator: can",
            ),
            (
                "size-mismatch",
                "size mismatch|shape|mismatch",
                r"size mismatch for|shape mismatch"
                r"|collectives? .{0,60}mismatch|mismatch between collective",
            ),
        ),
    ),
    Rule(
        statuses.OTHER_SOFTWARE,
        "exception",
        RAISED,
        ("error", "exception", "failure", "exit", "notfound", "expired", "exhausted", "mismatch"),
        re.compile(_EXCEPTION),
    ),
    *rules(
        statuses.EXITED_ABNORMALLY,
        WRAPPER,
        (
            (
                "signal",
                "signal|sig|killed|aborted|core dumped|code 1|exitcode|terminate called|wterm",
                r"exit ?code\s{0,3}:?\s{0,3}-\d|exit (?:code|status):? (?:13[4-9]|14[0-3])\b|(?:killed"
                r"|terminated|died|interrupted|exited|ended)\W{0,3}.{0,30}(?:by|with"
                r"|on) .{0,12}sig(?:nal)?|signal (?:[469]|11|7)\b|\bsig(?:kill|abrt|quit|hup|xcpu)\b"
                r"|wtermsig [1-9]|core dumped|fatal python error|terminate called|(?:^"
                r"|[\s:])killed\b(?! by user)(?:\W|$)|(?:^|\W)aborted\b|got (?:a )?(?:fatal )?signal\b",
            ),
            (
                "exit-code",
                "exit|returned non-zero|non-zero status|return code",
                r"exit ?code\s{0,3}:?\s{0,8}[1-9]\d{0,2}\b|exited with (?:exit )?(?:code|status) ?[1-9]"
                r"|exit status:? [1-9]|exited with [1-9]|return ?code ?[:=]? ?-?[1-9]"
                r"|non-?zero (?:exit )?(?:status|code)|exited unexpectedly|exit code:? [1-9]",
            ),
            (
                "worker-dead",
                "dead|was killed",
                r"(?:worker|actor|rank|process|trainer)\w{0,10} .{0,40}(?:is dead|was killed)",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_NETWORK,
        TRACE,
        (
            # matches the message of a failure, but no condition, no count and no neural network
            (
                "network-told",
                "nccl|rccl|rdma|infiniband|mlx|libfabric|net/|ucx|gloo|tcpstore|rendezvous"
                "|ceph|nfs|lustre|beegfs|weka|network|connection|socket",
                r"^(?!.{0,4096}\b(?:if|unless"
                r"|in case|where|falls? ?back|falling back|retrying)\b).{0,4096}?(?:(?:\b[nr]ccl|rdma"
                r"|infiniband|\bmlx\d|libfabric|\bnet/|\bucx|\bgloo|tcpstore|rendezvous|\bceph|\bnfs"
                r"|\blustre|beegfs|\bweka).{0,80}(?:(?<!no )(?<! 0 )\b(?:failed|fatal|aborted"
                r"|unresponsive|unreachable|broken)\b(?! ?[:=] ?0|-)|\berror: |\b(?:unable to|cannot"
                r"|couldn't|could not) (?:connect|reach|open|create|send|receive|bind|mount|write"
                r"|allocate|post)\b)|\b(?:network|connection|socket) (?:\w{1,12} ){0,2}(?:error|failure"
                r"|failed|lost|aborted|broken|unreachable|unresponsive)\b(?!.{0,3}\d| to (?:converge"
                r"|learn|train|generali)))",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        TRACE,
        (
            ("unhandled", "unhandled exception|uncaught exception"),
            (
                "error-told",
                "error",
                r"(?:^|[\s\[(])(?:fatal )?error[:\])].{0,120}(?:fail|cannot|can't"
                r"|unable|invalid|not found|expired|missing|unknown|unexpected|abort)",
            ),
        ),
    ),
)
"""Only the pattern of `exception` sees the original line: class names are capitalised."""
