"""Rules for network errors and timeouts: NCCL, gloo, torch's store, network drivers."""

from ....events.records import statuses
from .rule import CARRIER, FABRIC, RAISED, rules

NETWORK_RULES = (
    *rules(
        statuses.LINK_FLAPPING,
        FABRIC,
        (
            (
                "ib-port-error",
                "port error|port_err|port down|port_down",
                r"async event.{0,30}port error|port[_ ]err\b|ibv_event_port_err|state:? .{0,10}port_down",
            ),
            (
                "link-down",
                "link|carrier",
                r"(?:nic|eth\w{0,8}|ib\w{0,8}|en\w{1,16}|bond\w{0,8}|adapter"
                r"|net\w{0,8}|port \d{1,3}|slave \S{1,20})\)?,? ?:? (?:nic |port |physical )?link (?:is "
                r"|status |has gone |went )?(?:definitely |is )?down\b|nic link is down"
                r"|link status (?:definitely )?down|lost carrier|carrier (?:lost|is off|down)|link flap"
                r"|link (?:error recovery|downed)\w{0,10}.{0,20}(?:counter|incre)",
            ),
            (
                "link-cable",
                "cable|port module event|transceiver",
                r"cable (?:unplugged|error|removed|disconnected)"
                r"|port module event.{0,60}high temperature|transceiver .{0,30}(?:removed|error|fail)",
            ),
            ("bond-inactive", "without any active interface"),
            (
                "ib-port-state",
                "physical_state|phys state|port state|port 1 state|state: ",
                r"^\s{0,40}(?:physical )?state: {1,20}(?:down|polling|disabled)\b|state (?:changed to "
                r"|: )?down\b.{0,30}(?:physical_state|phys)|port \d{1,3} state changed.{0,30}down",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_NETWORK,
        FABRIC,
        (
            (
                "ib-completion",
                "completion|vendor err|wc_|retry exc|transport retry",
                r"got completion (?:from peer )?.{0,90}(?:status ?=|error) ?\d|vendor err \d"
                r"|ibv_wc_(?!success)\w{3}|(?:transport )?retry (?:count|counter|exc)\w{0,10} ?exceed"
                r"|retry_exc_err|completion with error",
            ),
            ("ib-call", "ibv_", r"\bibv_\w{2,30}.{0,60}(?:fail|error|unable)"),
            (
                "ib-async-event",
                "async",
                r"(?:got |ib )async (?:fatal )?event.{0,60}(?:error|fatal"
                r"|violation|catastrophic)|async fatal event",
            ),
            (
                "nic-failed",
                "mlx|netdev watchdog|hca|efa|bnxt|irdma|tx timeout|tx_timeout|tx unit hang"
                "|pcie link lost|reset adapter|infiniband ",
                r"netdev watchdog: .{0,60}timed out|tx[_ ]timeout|tx unit hang|pcie link lost"
                r"|reset adapter unexpectedly|(?:infiniband \w{2,16}|(?:efa|irdma|mlx\d_core"
                r"|bnxt_\w\w) [0-9a-f:.]{7,12}): .{0,60}(?:timeout|fail|didn't|isn't ready|not ready"
                r"|closed|abort)|mlx\d_\w{0,20}.{0,90}(?:health compromised|fatal error|synd 0x"
                r"|timeout\. will|command failed|device's health|internal error|failed with error"
                r"|is down\b)|\b(?:efa|bnxt_en|irdma)\w{0,8}.{0,90}(?:failed|fatal|reset)",
            ),
            (
                "ofi-request",
                "ofi|libfabric|fi_|ucx|ucs_",
                r"(?:net/ofi|libfabric|prov/|rxr_|efa_rdm).{0,120}(?:completed with error|\berr\b|error"
                r"|unreachable|failed)|ucx +error|ucs_err_|endpoint timeout|unresponsive receiver"
                r"|(?:net/)?ofi\b.{0,60}(?:couldn't|could not|unable)",
            ),
            (
                "no-route",
                "unreachable|no route|host is down|ehostunreach|enetunreach",
                r"no route to host|(?:network|host|destination) is unreachable|host is down|ehostunreach"
                r"|enetunreach|unreachable remote",
            ),
            (
                "name-resolution",
                "resolution|unknown host|getaddrinfo|not known|gai error|resolve",
                r"name resolution|unknown ?host|getaddrinfo|name or service not known|gai error"
                r"|nameresolutionerror|(?:could|can)(?: ?not|n't) resolve",
            ),
            (
                "storage-server-silent",
                "not responding|unresponsive client|lustre|lnet|ptlrpc|nfs|ceph|gpfs|endpoint shutdown",
                r"nfs: server \S{1,80} not responding|cannot send after transport endpoint"
                r"|evict\w{0,3} unresponsive client|lustre.{0,160}(?:was lost|timed out|network error"
                r"|evicted|rc = -1(?:0[4-9]|1\d)\b|failed: -1(?:0[4-9]|1\d)\b)|lnet.{0,90}(?:timed out"
                r"|error|failed)|(?:libceph|ceph).{0,60}(?:socket closed|connect error|timed? ?out"
                r"|session lost)",
            ),
        ),
    ),
    *rules(
        statuses.CONNECTION_RESET,
        RAISED,
        (
            (
                "connection-reset",
                "reset|closed by|broken pipe|epipe|connection abort|econnreset"
                "|econnaborted|errno 104|connectionclosed|connection was closed|connection closed"
                "|connection lost|disconnected|socket closed|stream removed|unexpected eof"
                "|remotedisconnected|likely closed|got 0 bytes|serverdisconnected|server shutdown",
                r"connection (?:was )?(?:forcibly )?reset|reset by (?:remote )?peer|econnreset"
                r"|errno[: ]*104\b|(?:connection|socket) (?:was )?closed (?:by|before)"
                r"|closed by (?:remote )?peer|broken ?pipe|epipe\b|econnaborted|connection abort"
                r"|connectionclosederror|remotedisconnected|(?:remote end|peer) (?:closed|disconnected)"
                r"|socket closed|stream removed|unexpected eof\b(?!, expected \d)|connection lost"
                r"|unexpectedly closed|likely closed|recv,? got 0 bytes|serverdisconnected"
                r"|server shutdown or crash",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.CONNECTION_REFUSED,
        RAISED,
        (
            (
                "connection-refused",
                "refused",
                r"connection ?(?:was )?refused|econnrefused|errno[: ]*111\b",
            ),
        ),
    ),
    *rules(
        statuses.NCCL_TIMEOUT,
        RAISED,
        (
            (
                "collective-timeout",
                "tim",
                r"collective operation timeout|timeout at (?:collective|nccl work)"
                r"|work ?nccl\(.{0,200}timed? ?(?:out|ing out)|monitoredbarrier|pass monitored barrier"
                r"|(?:gloo|unbound_buffer|/pair\.cc)(?!.{0,120}connect).{0,120}(?:timed? ?out|timeout)"
                r"|application timeout caused|timed out waiting \d{1,12} ?ms for (?:send|recv)|\b(?:nccl"
                r"|collective|all_?reduce|all_?gather|all_?to_?all|broadcast|reduce_?scatter"
                r"|barrier)\w{0,10}\b(?!.{0,120}connect).{0,80}(?:timed out|\btimeouts?(?: (?:error"
                r"|exceeded|after|of|reached|occur)|$))",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.OTHER_NETWORK,
        RAISED,
        (
            (
                "connect-timeout",
                "time|errno 110|etimedout|connect",
                r"connection ?timed ?out"
                r"|connection timeout|etimedout|errno[: ]*110\b|client socket has timed"
                r"|failed to connect|server socket on .{0,80}timed out|(?:read|connect) ?timed? ?out"
                r"|(?:connect|read)timeout(?:error)?|unable to connect|could ?n.t connect"
                r"|connect call failed|cannot connect|connection attempt failed|connection error"
                r"|connecterror|timed out.{0,20}connect|connecting to .{0,80}(?:timed out|fail)",
            ),
            (
                "store-timeout",
                "store|timed out|wait timeout|socket timeout",
                r"distst?ore\w{0,8}error|store.{0,40}(?:timed? ?out|timeout)"
                r"|timed out after \d.{0,40}waiting|timed out waiting for (?:clients|workers|rank|key"
                r"|other)|socket timeout|wait timeout after|barrier.{0,40}timed out",
            ),
            (
                "rendezvous",
                "rendezvous|distnetworkerror",
                r"rendezvous(?:connection|timeout|closed"
                r"|graceful)\w{0,12}|c10d store has failed|distnetworkerror",
            ),
            ("nccl-proxy", "proxy call to rank", r"proxy call to rank \d{1,7} failed \(connect\)"),
            (
                "gloo",
                "gloo|connectfullmesh",
                r"connectfullmesh|gloo/transport|\bgloo\b.{0,60}(?:fail|error)",
            ),
            (
                "http",
                "sslerror|protocolerror|chunkedencoding|clientpayload|clientoserror|bad gateway"
                "|gateway timeout|too many requests|server error",
            ),
            ("c10d", "[c10d]", r"\[c10d\].{0,300}(?:fail|error|timed out|unable|lost)"),
            ("address-in-use", "in use|eaddrinuse", r"address already in use|eaddrinuse"),
            (
                "remote-service",
                "deadline|unavailable|slowdown|endpoint|max retries|503|statuscode|rate",
                r"deadline[_ ]exceeded|statuscode\.unavailable|endpointconnectionerror"
                r"|max retries exceeded|service unavailable|slowdown[):]|reduce your request rate"
                r"|incompleteread|clientconnect\w{0,8}error",
            ),
        ),
    ),
    *rules(
        statuses.NCCL_TIMEOUT,
        CARRIER,
        (
            (
                "collective-watchdog",
                "nccl|watchdog|dump signal|inconsistency|flight recorder"
                "|timeout signal|collective timeout",
                r"exception \(either an error or timeout\)"
                r"|nccl operations have failed or timed out|to avoid data inconsistency"
                r"|dump signal (?:due to|from)|dump signal|nccl communicator was aborted"
                r"|last enqueued (?:nccl )?work|exception hit in nccl work|(?:global |a )timeout signal"
                r"|(?:failure|exception) detected by watchdog|due to collective timeout",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.TASK_HANG,
        CARRIER,
        (
            (
                "no-progress",
                "heartbeat|stuck|remainder of ranks|no progress|hang|hung|stall|deadlock"
                "|missing ranks|dump debug info",
                r"heartbeat monitor timed out|watchdog hang"
                r"|gil induced hang|waiting for remainder of ranks|no heartbeat of its watchdog"
                r"|watchdog got stuck|did not get (?:subsequent|initial) heartbeat"
                r"|not received? (?:a )?heartbeat|heartbeat (?:was )?(?:timed? ?out|missed|lost|timeout)"
                r"|hang (?:was )?detected|detect(?:ed|s) (?:a )?(?:hang|stall|deadlock)|(?:training|job"
                r"|task|rank|process|step|gpu)s? \S{0,12} ?(?:is |seems? |appears? "
                r"|has )?(?:to be )?(?:hung|hanging|stuck|stalled)\b|stuck for \d{1,9}"
                r"|without making progress|no progress (?:for|in)|workers? (?:are )?stuck"
                r"|\bstalled (?:ranks|ops):|\[missing ranks: \d|preparing to dump debug info",
            ),
        ),
    ),
    *rules(
        statuses.CONNECTION_RESET,
        CARRIER,
        (
            (
                "remote-exited",
                "remote|prematurely",
                r"remote process (?:has )?exit|ncclremoteerror|remote error\b|exiting prematurely",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.OTHER_NETWORK,
        CARRIER,
        (
            (
                "nccl-system",
                "system error|ncclsystemerror|system call",
                r"unhandled system error|ncclsystemerror|system call \(e\.g\. socket",
            ),
            (
                "nccl-socket",
                " warn |socket",
                r"(?:nccl|:\d{1,5}) warn.{0,60}(?:socket|bootstrap|net/"
                r"|proxy|accept|listen).{0,160}(?:fail|error|wrong|refus|unexpected|mismatch)"
                r"|bootstrap : no socket interface|\b(?:nccl)?socket[a-z]{4,20}(?:: "
                r"| poll)(?!.{0,80}success)",
            ),
            (
                "timed-out",
                "timed out|timeout|deadline",
                r"timed out\b|timeouterror|timeout ?(?:expired"
                r"|exceeded)|deadline[_ ]?exceeded|timeoutexception",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        CARRIER,
        (
            (
                "nccl-usage",
                "nccl|duplicate gpu",
                r"graph/\w{2,12}\.(?:cc|cu):\d{1,5} nccl warn"
                r"|nccl(?:internal|invalid)\w{0,12}|nccl error|nccl failure|duplicate gpu detected"
                r"|nccl warn.{0,200}(?:mismatch|invalid|unsupported|internal error)",
            ),
        ),
    ),
    *rules(
        statuses.OTHER_NETWORK,
        CARRIER,
        (
            (
                "nccl-warn",
                "nccl warn",
                r"nccl warn.{0,200}(?:fail|error|unable|could not|abort|timeout)",
            ),
            ("torch-backend", "distbackenderror|distnetworkerror|diststoreerror|disterror"),
        ),
    ),
)
