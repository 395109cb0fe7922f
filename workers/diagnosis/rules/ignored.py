"""Rules for harmless lines that look like errors: progress, teardown, boot, planned exits."""

import re
from typing import NamedTuple

from .rule import DEVICE, FABRIC, HARDWARE


class IgnoreRule(NamedTuple):
    name: str
    words: tuple[str, ...]
    pattern: re.Pattern[str] | None
    """Searched in the lower-case line; None: a word is enough."""
    depth_max: int = -1
    """Error rules of this depth or deeper still apply; -1: none."""


def _ignore(name: str, words: str, pattern: str = "", *, depth_max: int = -1) -> IgnoreRule:
    return IgnoreRule(
        name, tuple(words.split("|")), re.compile(pattern) if pattern else None, depth_max
    )


# The log level is at the beginning of a line. Two forms are not ignored: "INFO: task ... blocked"
# is from the kernel, and "INFO - [rank0]: " is an exception of torch that a launcher forwards.
LEVEL_COLUMNS = 200
LEVEL = re.compile(
    r"(?<![\w.=/'\"-])(?:INFO|DEBUG|TRACE)(?![\w=])(?!:? ?(?:task |rcu|kernel))"
    r"(?!.{0,4}\[rank\d{1,6}\]: )"
    r"|(?:^|[\s\[:\]])I(?:\d{3,4} \d\d:\d\d:|\s[\w.]{1,40}\.(?:cpp|h|cc|py|go):\d"
    r"| \d{1,8} \d{1,8}\])"  # Ray
)

LAST_TRY = re.compile(r"\bretrying \((\d{1,4})/\1\)")
"""The last retry has failed: such a line is classified at any log level."""

# A rule matches the harmless message, not a word of it: a fault may have the same word, or be
# counted in the same line.
IGNORE_RULES = (
    # not where another count of the same line is over 0
    _ignore(
        "count-of-none",
        "error|failure",
        r"^(?!.{0,1000}(?:errors?|failures?)(?:\(s\))?(?: ?count\w{0,3})?\s{0,2}[:=]\s{0,3}[1-9])"
        r".{0,1000}?(?:"
        r"(?:errors?|failures?)(?:\(s\))?(?: ?count\w{0,3})?\s{0,2}[:=]\s{0,3}0(?![\w.])"
        r"|(?<!gpu )(?<!device )(?<!rank )(?<!link )(?<!port )(?<!node )(?<!worker )(?<!process )"
        r"(?<!step )(?<!slot )(?<!stage )(?<!task )(?<![\d.])\b0 (?:[\w-]{1,20} "
        r"){0,2}errors\b|\b(?:no|zero|without)(?: any)? (?:[\w-]{1,20} ){0,2}errors\b)",
    ),
    _ignore(
        "none-of-them",
        "0 |no |zero |none ",
        r"^(?!.{0,1000}\b[1-9]\d{0,8} (?:\S{1,20} ){0,4}(?:timed out|timeouts|killed|crashed|unhealthy"
        r"|aborted|hung|stalled|died)\b).{0,1000}?(?:^|[,;:(|=] ?|\b(?:with|had|found|and|of|are) )(?:0|no|zero|none) (?:of [\d,]{1,12} )?(?:[\w-]{1,20} ){0,2}"
        r"(?:timed out|timeouts|killed|crashed|unhealthy|aborted|hung|stalled|died)\b",
    ),
    _ignore(
        "launcher-stops",
        "closing signal|death signal|forcefully exit|terminating job step"
        "|job step aborted|keyboardinterrupt|sigterm|sigint|killing subprocess",
        r"closing signal sig|death signal"
        r"|(?:shut ?down|stop\w*|exiting|killing|sending) .{0,60}via (?:sig|signals\.sig)(?:term|kill"
        r"|int)|terminating job step|job step aborted|keyboardinterrupt|received sig(?:term|int)"
        r"|caught sig(?:term|int)|sig(?:term|int)\)? received|received signal (?:15|2)\b"
        r"|killing subprocess \d",
        depth_max=HARDWARE,
    ),
    # a job preempted by its scheduler exits as planned; a preempted node is lost (node-failed)
    _ignore(
        "planned-end",
        "cancelled|due to preemption|time limit|requeue",
        r"cancelled at (?!.{0,60}node failure)|due to (?:time limit|preemption|job requeue)"
        r"|(?:job|wall ?clock|wall|run) ?time limit",
    ),
    _ignore("task-terminated", "terminated", r"srun: error: .{0,60}: terminated\s*$"),
    _ignore(
        "corrected",
        "correct|edac|ce error|single",
        r"^(?!.{0,1000}(?:uncorrect(?:ed|able)|double[- ]bit|\bue\b)).{0,1000}?"
        r"(?:\bcorrect(?:ed|able) .{0,20}error"
        r"|severity[=:] ?corrected|\d ce (?:error|memory)|error\(s\) corrected|single[- ]bit)",
    ),
    _ignore(
        "nonfatal",
        "non-fatal|nonfatal|sxid",
        r"sxid.{0,60}(?:non-?fatal|severity 0"
        r"|: \d{1,6}, data)|nvswitch non-?fatal|uncorrect(?:ed|able) \(non-?fatal",
    ),
    _ignore(
        "link-up",
        "link",
        r"\blink (?:is |becomes |status |now )?(?:definitely )?(?:up\b|ready"
        r"|not ready)(?!.{0,80}(?:\bdown|fail|lost|error))|sata link|usb .{0,40}link",
    ),
    _ignore("plugged", "cable plugged|insufficient power"),
    _ignore(
        "fabric-news",
        "reregist|gid table|lid change|sm change|pkey|port active|unknown event",
        r"(?:async )?event.{0,30}(?:client reregist|gid table|lid change|sm change|pkey"
        r"|port active|unknown event)",
    ),
    _ignore(
        "recovered",
        "restored|recovered|reconnected|: server|is back|normal",
        r"connection (?:was |is )?restored|nfs: server \S{1,80} ok\b|(?<!not )(?<!be )successfully (?:recovered|"
        r"reconnected)|temperature(?:/speed)? (?:is )?(?:back to )?normal",
    ),
    _ignore(
        "throttled",
        "throttled|above threshold",
        r"clock(?:s)? throttled|temperature above threshold",
        depth_max=HARDWARE,
    ),
    _ignore(
        "boot",
        "systemd|acpi|spi-nor|nmi watchdog|dmar:|audit:|pci |edac|io scheduler|i2c|usb ",
        r"systemd(?:\[|-generators|-journald|-fstab|-modules|-udevd)(?!.{0,200}(?:oom|killed"
        r"|carrier|nvidia|fabric|mount|imex))|acpi (?:error|warning|bios)|spi-nor"
        r"|nmi watchdog: enabled"
        r"|audit: |dmar: (?:iommu|host|drhd base|rmrr|atsr|intel)|\busb \d|i2c i2c"
        r"|edac .{0,30}\b(?:no |ver\b|giving)",
    ),
    # NVIDIA's developers: "That diagnostic is harmless" (Mellanox/nv_peer_memory, thread 120)
    _ignore("peermem-news", "detected invalid context, skipping"),
    _ignore(
        "missing-plugin",
        "plugin|symbol|iommu=pt|libnccl-net|libibverbs|load driver",
        r"(?:net|tuner)/plugin(?!.{0,160}(?:fail\w{0,4} to init|internal error))"
        r"|(?:could not find|failed to (?:find|open)).{0,40}(?:plugin"
        r"|libnccl|symbol|libibverbs)|libibverbs.{0,60}couldn.t load driver|missing .iommu=pt"
        r"|no plugin found",
    ),
    # libfabric looks for each library that it could use
    _ignore(
        "library-optional",
        "gdrcopy|dlopen|hmem",
        r"disabling gdrcopy|gdrcopy\w{0,20} (?:init )?failed|(?:hmem|dl)_init\S{0,20}<warn>"
        r"|<warn>.{0,60}(?:dlopen|hmem capability)",
    ),
    # a reader of counters asks for registers that the port's firmware keeps to itself
    _ignore("register-denied", "access_reg", r"mlx\d_cmd_\w{3,12}:.{0,60}access_reg\S{0,10} "),
    _ignore("address-family", "errno: 97|hostname of the client socket cannot be"),
    # torch tries localhost by IPv6 first, then by IPv4
    _ignore(
        "localhost-by-ipv6",
        "errno: 99",
        r"failed to connect to \[(?:ip6-)?(?:localhost"
        r"|::1)(?:\.localdomain)?\]:\d{1,5} \(errno: 99",
    ),
    _ignore("metrics-logger", "wandb:", r"wandb: (?!error|.{0,60}\berror\b: |.{0,60}exception)"),
    _ignore(
        "iteration",
        "iteration|elapsed time|consumed samples|lm loss|it/s|s/it",
        # a progress bar does not end its line: later output follows its bracket
        r"iteration +\d{1,9}/ *\d|consumed samples|\d(?:it/s|s/it)\b"
        r"(?!.{0,300}\] ?\[?[a-z])",
        depth_max=FABRIC,
    ),
    # of gradients; a table of the kernel overflows too
    _ignore(
        "overflow-skipped",
        "overflow|skipping step|loss scale",
        r"(?:grad\w{0,6}|deepspeed\]?|fp16|bf16|amp|optimizer)\S{0,3} overflow"
        r"|overflow\S? .{0,20}skipping|skipping step|loss scale.{0,30}reduc",
        depth_max=FABRIC,
    ),
    _ignore(
        "teardown",
        "exception ignored|leaked|has not been destroyed|abort complete|destroy complete",
        r"exception ignored|leaked (?:semaphore|shared_memory)|has not been destroyed"
        r"|(?:abort|destroy) complete",
    ),
    _ignore("teardown-told", "destroy_process_group", depth_max=FABRIC),
    _ignore(
        "driver-news",
        "nvrm: loading|nvlink|nvswitch|nv_assert|nvassert|nvcheck",
        r"nvrm: loading|link training completed(?!.{0,20}(?:fail|error))|nvlink driver (?:open|close)"
        r"|nvlink core is being|nvlink core, major|nvswitch\d{1,3}: (?:open|using|probing)"
        r"|nvassert(?!.{0,200}err_(?:gpu|reset))|nvcheckok",
    ),
    _ignore(
        "carriers-hint",
        "asynchronously reported|for debugging consider|torch_use_cuda_dsa|search for `cuda",
        r"^\s{0,20}(?:\[rank\d{1,6}\]: ?)?(?:cuda kernel errors might|for debugging consider"
        r"|compile with|search for `cuda)",
    ),
    _ignore(
        "warning-of-python",
        "warning",
        r"(?:user|future|deprecation|runtime|resource|syntax"
        r"|pending\w{0,12})warning: ",
        depth_max=DEVICE,
    ),
    _ignore("group-header", "sub-exception", r"group: .{0,1000}\(\d{1,9} sub-exceptions?\)\s*$"),
    _ignore(
        "retried",
        "retry|retries|attempts remain",
        r"(?:retry|retries) (?:succeeded"
        r"|successful)|\bretrying \((?:retry\(|\d{1,4} attempts remain)|\bretrying in \d",
    ),
    # the kernel aborts one request; if that fails, it logs "reset controller"
    _ignore(
        "io-aborted",
        "timeout, aborting|abort status",
        r"nvme\d{1,3}: (?:i/o .{0,60}timeout, aborting\b|abort status: 0x)",
    ),
    _ignore("module-unsigned", "module verification failed|is already registered, aborting"),
)
