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
    # structured logs: level=info, "level":"info"
    r"|\b(?:level|lvl|severity)\"?[=:] ?\"?(?i:info|debug|trace)\b"
    r"|(?:^|[\s\[:\]])I(?:\d{3,4} \d\d:\d\d:|\s[\w.]{1,40}\.(?:cpp|h|cc|py|go):\d"
    r"| \d{1,8} \d{1,8}\])"  # Ray
)

LAST_TRY = re.compile(r"\bretrying \((\d{1,4})/\1\)")
"""The last retry has failed: such a line is classified at any log level."""

# What a health check did not find: these words are taken out before a line is classified, so that a
# fault that the same line names is found nevertheless.
_CHECKED = (
    r"(?:xids?|sxids?|ecc|uncorrect\w{2,5}|correct\w{2,5}|double[- ]bit|dbe|row[- ]remap\w{0,5}|nvlinks?|pcie|aer"
    r"|hardware|hw|gpus?|kernel|nccl|oom|links?|fatal|critical|health|ib|infiniband|memory|thermal|cuda|dcgm"
    r"|driver|fabric|known|recent|new|pending|or|and)"
)
NOT_FOUND = re.compile(
    rf"\b(?:no|zero|0|without(?: any)?|never (?:saw|seen|had)) (?:{_CHECKED}[ ,/]{{1,2}}){{0,5}}(?:errors?|failures?"
    r"|faults?|panics?|issues?|kills?|flaps?|lockups?|problems?|xids?(?: \d[\d, ]{0,40})?)\b(?! of)"
    r"|\b(?:no|0|zero) (?:nvidia )?gpus? (?:is |are |was |were |has |have )?(?:been )?(?:lost|fallen off the bus)"
    r"|\b(?:no|0|zero) (?:inactive|failed|degraded|lost|unhealthy) (?:nvlinks?|links?|ports?|gpus?|nodes?)\b"
)
NOT_FOUND_WORDS = ("no ", "zero ", "0 ", "without ", "never ")

# Lines that tell of an error that nobody has: they come before every rule, also before XIDs.
QUOTE_RULES = (
    # a check or a test that has passed
    _ignore(
        "passed",
        "✔|✓|✅|pass|ok",
        r"^\s{0,8}(?:✔|✓|✅|\[ ?(?:ok|pass(?:ed)?) ?\]|pass(?:ed)?\b(?! ?[:=])|ok \d)"
        r"|::\S{1,300} passed\b|\.\.\. ?ok\s*$",
    ),
    # TensorFlow's allocator, when it asks for more than it needs
    _ignore("not-a-failure", "this is not a failure"),
    # what people and models write to each other: samples of a task
    _ignore(
        "dialogue",
        "> |q: |a: |prompt|response|role|question|instruction|{\"|{'|decoded|generated|assistant|completion|human:|observation"
        '|tool_result|"text"|sample ',
        r"^\s{0,4}(?:> .{0,300}\?\s*$|[qa]: )|\[(?:prompt|response|question|completion|generated|assistant|user|sample)\]"
        r"|[\"']role[\"']: ?[\"'](?:user|assistant|system|tool)[\"']"
        r"|^\s{0,8}\{[\"'](?:instruction|prompt|question|problem|completion|conversations?|messages|chosen"
        r"|rejected|answer|input|output|query)[\"']: "
        r"|(?:^|[\])] ?)(?:prompt|question|completion|assistant|human|(?:decoded|generated)(?: text)?"
        r"|observation|(?:dataset )?sample \d{1,9}): |\btool_result\b|^\{\"text\":",
    ),
    # a commit or a changelog, which names the fault that it mends
    _ignore(
        "commit",
        "fix|feat|chore|docs|refactor|perf|revert|merge|add|handle|(#|commit",
        r"\(#\d{1,6}\)\s*$|^\W{0,6}(?:fix(?:e[sd])?|feat|chore|docs|refactor|perf|revert)"
        r"(?:\([^)]{1,40}\))?!?: |^\s{0,8}[-*\u2022] (?:fix|add|handle|avoid|improve|support|make|bump)"
        r"(?:e?[sd]|ing)?\b|^\W{0,6}(?:commit )?(?=\d{0,12}[a-f])(?=[a-f]{0,12}\d)[0-9a-f]{7,40} "
        r"(?:\(|merge\b|fix|feat|chore|docs|test|add|handle|avoid|revert|refactor|use\b|make\b|swallow"
        r"|retry|bump|remove|\[)|^merge (?:pull request|branch|commit) ",
    ),
    # documents, comments, advice: a condition, not an event
    _ignore(
        "advice",
        "action for xid|#|//|if |see |hint|tip|note|refer|possible|solution|for more|docs|this |it |that |these |there ",
        r"\b(?:recommended|immediate) action for xid|^(?:\[\w{1,12}\]:? ?)?\s{0,8}(?:#{1,4} |// |if |see (?:also |the |https?:)|hint: |tip: |note: |refer to "
        r"|possible (?:cause|reason)s?\b|solutions?: |for more |docs?: |(?:this|it|that|these|there)"
        r" (?:\w{1,12} )?(?:can|could|may|might|usually|often|typically) )",
    ),
    # a command, and the patterns that somebody looks for
    _ignore(
        "command",
        "grep|pattern|keyword|regex|searching|matches|+ |$ |timeout |trap |export |rm -",
        r"\bgrep\b|\b(?:patterns?|keywords?|regex(?:es|p)?)\W{1,3}[\[(\"'/]|\b0 matches\b"
        r"|^\s{0,4}(?:\+{1,3}|\$) [\w./]|^(?:timeout \d|trap '|export \w|rm -)",
    ),
    _ignore(
        "source-code",
        "raise |except |def |class |log",
        r"^\s{0,40}(?:raise [\w.]{1,80}\(|except \w|(?:async )?def \w{1,80}\(|class \w{1,80}[(:])"
        r"|\blog(?:ger|ging)?\.\w{3,12}\(",
    ),
    # what happened before, and is over
    _ignore(
        "past",
        "last |previous |earlier | ago|resolved|resum|reconnected|established|rejoined|restarted|closed again"
        "|incident ",
        r"\b\d{1,4} (?:days?|weeks?|months?) ago\b|\b(?:last|previous|earlier) (?:failure|run|attempt|crash)\b|\[resolved\]|\bincident \d{1,9} (?:was |is )?"
        r"(?:closed|resolved|healed)|\b(?:resum(?:ed|ing)|re-?established|reconnected|rejoined|restarted"
        r"|closed again)\b.{0,12} after ",
    ),
    # what would have been done
    _ignore(
        "dry-run",
        "dry|would ",
        r"[(\[]dry[-_ ]?run[)\]]|^dry[-_ ]?run: |\bwould (?:restart|cordon|drain|kill|quarantine|reboot"
        r"|be (?:killed|cordoned|drained|restarted|evicted|preempted|rebooted))\b",
    ),
    # messages that are left out, and what is set up for the day of a fault
    _ignore(
        "left-out",
        "similar|harmless|messages",
        r"\b(?:skipped|suppressed|filtered|ignored) (?:\S{1,20} ){0,3}(?:similar|messages)|known harmless",
    ),
    _ignore(
        "set-up",
        "handler|will dump|enabled|set to|for codes",
        r"\b(?:install|regist)\w{0,6}\b.{0,40}\bhandlers?\b(?!.{0,200}(?:error|fail|exception))"
        r"|\bhandlers? (?:is |are )?(?:installed|registered)"
        r"|\bwill dump (?:a )?traceback|\b(?:monitoring|damping|scrubbing|containment|detection)\b (?:is )?enabled"
        r"|\bthresholds? (?:is |was )?set to \d",
    ),
    # of a server, about what it has answered
    _ignore(
        "access-log",
        "http/",
        r"\"(?:get|post|put|head|delete|patch) \S{1,400} http/\d(?:\.\d)?\" [1-5]\d\d\b",
    ),
    # Kubernetes sends no requests to such a container, and does nothing else
    _ignore("not-ready-yet", "probe failed", r"readiness probe failed"),
)

# A rule matches the harmless message, not a word of it: a fault may have the same word, or be
# counted in the same line.
IGNORE_RULES = (
    # the BMC: a condition is over
    _ignore("deasserted", "deasserted", r"\| ?deasserted"),
    # a condition of a node that is not there: "ReadonlyFilesystem  False  FilesystemIsNotReadOnly"
    _ignore(
        "no-condition",
        "hasno|isnot|hasnot|false",
        r"\b\w{2,40}(?:hasno(?:t?[a-z]{4})|isnotreadonly|isnotshutdown)\w{0,40}"
        r"|\b\w{0,40}(?:deadlock|filesystem|shutdown|watch|pressure|problem|unavailable|error)"
        r"(?: {1,12}| ?[=:] ?|[ ,;]{1,3}status\W{1,3})false\b",
    ),
    # what somebody looks for in a cloud's log
    _ignore(
        "log-filter",
        "compute.instances",
        r"(?:\bfilter\b|log_id|operation\.producer|\bor\b).{0,200}compute\.instances"
        r"|compute\.instances\.\w{4,40}\W{1,3} or\b",
    ),
    # the verdict of a health tool, where no other verdict of the same line is a bad one
    _ignore(
        "healthy",
        "health|recommended",
        r"^(?!.{0,1000}(?:unhealthy|not ?healthy|\bfail|critical\b|degraded|unresponsive|\bhung\b)).{0,1000}?"
        r"(?:\b(?:is_?)?health(?:y|[_ ]?state|[_ ]?status)?\b\W{1,5}(?:healthy|ok|pass|good|true)\b"
        r"|recommended ?action\W{1,4}(?:none|ignore)\b)",
    ),
    # a kernel that is tried and left: "Ignoring this choice", "skipping this config"
    _ignore(
        "autotuning",
        "autotun|ignoring this choice|delay kernel",
        r"ignoring this (?:choice|config)|autotun\w{0,4}\b.{0,300}(?:ignor|skip|discard|invalid config"
        r"|not (?:valid|supported))|delay kernel timed out",
    ),
    # not where another count of the same line is over 0
    _ignore(
        "count-of-none",
        "error|failure",
        r"^(?!.{0,1000}(?:errors?|failures?)(?:\(s\))?(?: ?count\w{0,3})?\s{0,2}[:=]\s{0,3}[1-9])"
        r".{0,1000}?(?:"
        r"(?:errors?|failures?)(?:\(s\))?(?: ?count\w{0,3})?\s{0,2}[:=]\s{0,3}0(?![\w.]| in \S)"
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
    # a job that its scheduler preempts loses its nodes (taken-away); a failed task is no plan
    _ignore(
        "planned-end",
        "cancelled|time limit|requeue",
        r"cancelled at (?!.{0,60}(?:node failure|preemption|task failure))|due to (?:time limit|job requeue)"
        r"|(?:job|wall ?clock|wall|run) ?time limit",
    ),
    _ignore("task-terminated", "terminated", r"srun: error: .{0,60}: terminated\s*$"),
    _ignore(
        "corrected",
        "correct|edac|ce error|single",
        r"^(?!.{0,1000}(?:uncorrect(?:ed|able)|double[- ]bit|\bue\b)).{0,1000}?"
        r"(?:\bcorrect(?:ed|able) .{0,20}error"
        r"|severity[=:] ?correct(?:ed|able)|\d ce (?:error|memory)|error\(s\) corrected|single[- ]bit)",
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
        r"|carrier|nvidia|fabric|mount|imex|read-only))|acpi (?:error|warning|bios)|spi-nor"
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
    # torch looks a name up by IPv6, then by IPv4
    _ignore(
        "address-family",
        "errno: 97|hostname of the client socket cannot be|the ipv6 network addresses of",
    ),
    # what a server's ssh daemon prints when somebody leaves
    _ignore("ssh-daemon", "sshd", r"\bsshd(?:-session|-auth)?(?:\[\d|: )"),
    # UCX has a level for errors too
    _ignore("ucx-warning", "ucx", r"\bucx  ?(?:warn|diag)\b(?!.{0,30}async)", depth_max=DEVICE),
    # "nothing found, so the other way": not NCCL's, which names a fault of the machine
    _ignore(
        "fallback",
        "fall|instead|using ",
        r"^(?!.{0,400}nccl warn).{0,400}?\b(?:falls? ?back|falling back|(?:us(?:e|ing)|with) \S{1,60}"
        r" instead\b)",
        depth_max=FABRIC,
    ),
    # a server that takes the next port
    _ignore(
        "next-port",
        "trying|using|switching",
        r"\b(?:in use|occupied|taken|busy|unavailable)\b.{0,60}\b(?:trying|using|switching to) (?:the )?"
        r"(?:next|another|a (?:different|random|free)|port\b|\d)",
    ),
    _ignore(
        "sample-skipped",
        "skipping|dropping",
        r"(?:^|[:\]] ?)(?:skipping|dropping) (?:\w{1,12} )?(?:batch|sample|file|shard|record|document"
        r"|row|image|example|config|tactic|kernel)s?\b",
        depth_max=FABRIC,
    ),
    # programs that a model has written and a task runs and scores
    _ignore("scored", "reward", r"\breward\s?[=:]\s?-?\d", depth_max=HARDWARE),
    _ignore("tool-warning", "warning: ", r"^(?:\S{1,40}: )?warning: ", depth_max=FABRIC),
    # a count that a screen or a report shows
    _ignore(
        "no-alerts",
        "0",
        r"\b(?:alerts?|incidents?|occurrences?|events?|counts?|totals?)\s{0,8}[:=] {0,8}0(?![\w.])(?!.{0,400}"
        r"[:=] {0,8}[1-9])",
    ),
    # a sample of a metric whose value is 0
    _ignore("metric", " 0", r"^[a-z_][\w:.]{3,120}(?:\{.{0,1000}\})? 0(?:\.0)?\s*$"),
    # a line of settings, not of events
    _ignore(
        "setting",
        "true|false|none|null",
        r"^(?!(?:[a-z_]\w*\.)*[a-z_]\w{0,40}(?:error|exception): )[\w\s.'\"-]{1,100}[:=.] ?(?:true|false|none|null)\b,?\s*(?:#.{0,400})?$",
        depth_max=HARDWARE,
    ),
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
    # the error of a try that is not the last; a file system that tries again is away until then
    _ignore(
        "tried-again",
        "retry|attempt|tries|try ",
        r"\b(?:attempt|try|retry)(?: ?#| number)? ?\(?(\d{1,4}) ?(?:/|of|out of) ?(?!\1\b)\d"
        r"|\bretrying \S{1,80} in \d|[,;] (?:will retry|retrying)\b(?! \(|\.\.\.$)|\bretrying after\b"
        r"|\b(?:sleeping|waiting|backing off) .{0,24}before (?:the )?(?:next )?(?:retry|attempt|try)",
        depth_max=FABRIC,
    ),
    # the kernel aborts one request; if that fails, it logs "reset controller"
    _ignore(
        "io-aborted",
        "timeout, aborting|abort status",
        r"nvme\d{1,3}: (?:i/o .{0,60}timeout, aborting\b|abort status: 0x)",
    ),
    _ignore("module-unsigned", "module verification failed|is already registered, aborting"),
)
