"""Rules for network errors and timeouts: NCCL, gloo, torch's store, expert exchange, drivers."""

from ....events.records import statuses
from .rule import CARRIER, FABRIC, RAISED, rules

NETWORK_RULES = (
    *rules(
        statuses.LINK_FLAPPING,
        FABRIC,
        (
            (
                "ib-port-error",
                "port error|port_err|port down|port_down|port flap|port drop|down too long|are active",
                r"async (?:error )?event.{0,30}port error|port[_ ]err\b|ibv_event_port_err|state:? .{0,10}port_down"
                # gpud
                r"|\bib port (?:flap|drop)\b.{0,40}\bdown\b|device\(s\) down too long"
                r"|\bonly \d{1,3} ports?(?:\(s\))? (?:is|are) active",
            ),
            (
                "link-down",
                "link|carrier",
                # after the name of an interface, or as the whole message of a driver
                r"(?:\b(?:nic|hsn\d|cxi\d|eth\w{0,8}|ib\w{0,8}|en\w{1,16}|bond\w{0,8}|adapter"
                r"|net\w{0,8}|port:? \d{1,3}|slave \S{1,20})\)?,? ?:?|[\w\])]:) (?:nic |port |physical )?link"
                r" (?:is |becomes |status |has gone |went )?(?:definitely |is )?down\b(?! ?(?:events?|counts?)?\s?[:=])"
                r"|nic link is down|\bsm port is down"
                r"|link status (?:definitely )?down|lost carrier|carrier (?:lost|is off|down)|link flap"
                r"|link[_ ](?:error[_ ]recovery|downed)\w{0,10}.{0,20}(?:counter(?!.{0,4}\b0)|incre|rose|grew"
                r"|exceed)",
            ),
            (
                "link-cable",
                "cable|port module event|transceiver",
                r"cable (?:unplugged|error|removed|disconnected)"
                r"|port module event.{0,60}high temperature|transceiver .{0,30}(?:removed|error|fail)",
            ),
            ("bond-inactive", "without any active interface"),
            # UFM and its subnet manager, about a port of the fabric
            (
                "fabric-port",
                "link went down|considered by sm|ufm|unhealthy port|port isolat",
                r"\blink went down\b|considered by sm as unhealthy|\bufm\b.{0,80}(?:(?:link|port|node"
                r"|switch) is down\b|unhealthy|\bisolated|flapping)|\bunhealthy (?:ib )?port\b"
                r"(?!.{0,30}clear)",
            ),
            (
                "ib-port-state",
                "physical_state|phys state|port state|port 1 state|state: |from active",
                r"^\s{0,40}(?:physical )?state: {1,20}(?:down|polling|disabled)\b|state (?:changed to "
                r"|: )?down\b.{0,30}(?:physical_state|phys)|port \d{1,3} state changed.{0,30}down"
                r"|port \d{1,3}.{0,20}state: {0,2}(?:down|polling|disabled)\b|went from active to (?:down|init)"
                r"|port state .{0,30}\bto .{0,6}(?:down|init|polling|disabled)",
            ),
        ),
        can_pass=True,
    ),
    # each waits for the tokens of the others, so a timeout tells of a wait
    *rules(
        statuses.NCCL_TIMEOUT,
        FABRIC,
        (
            (
                "exchange-timeout",
                "deep_ep|deepep|mori|uccl|nccl_ep|nccl ep|nvshmem|rocshmem|ibgda|dispatch|combine",
                r"(?:deep_?ep|\bmori\b|\bmori[:_-]\w|\buccl|\bnccl[_ ]ep\b|nvshmem|rocshmem|ibgda)"
                r"(?!.{0,160}(?:connect|bootstrap|\btime\w{0,12} ?[=:] ?\d|will time)).{0,160}"
                r"\b(?:timeout|timed? out)\b"
                r"|\b(?:dispatch|combine) (?:\S{1,16} ){0,3}(?:receiver?|sender?|forwarder|wait"
                r"|barrier)\w{0,2} (?:\S{1,16} ){0,2}(?:timeout|timed out)\b",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.OTHER_NETWORK,
        FABRIC,
        (
            (
                "ib-completion",
                "completion|vendor err|vendor_err|wc_|retry exc|retry count|syndrome|error cqe",
                r"infiniband retry count between|got completion (?:from peer )?.{0,90}(?:status ?=|error) ?\d|vendor[ _]err(?: |:|=)\s?(?:0x)?\d"
                r"|ibv_wc_(?!success)\w{3}|(?:transport )?retry (?:count|counter|exc)\w{0,10} ?exceed"
                r"|retry_exc_err|completion with error|vendor[_ ]synd\w{0,5} ?:? ?0x|\berror cqe\b"
                r"|(?:send|receive|recv|work) completion error"
                r"|poll_one:\d.{0,40}syndrome",
            ),
            # UCX's lines are named by the file that prints them; what a queue pair met (ib_mlx5_log.c)
            (
                "ucx-line",
                ".c:| on mlx| on bnxt| on irdma",
                r"\b(?:ud|rc|dc|ib|tcp|ucp|uct|pml_ucx|osc_ucx|mm|rdmacm|wireup|flush|rndv|sockcm"
                r"|cm|srd|efa|gga)\w{0,24}\.c:\d{1,5}\s{1,6}(?:ucx\s{1,3})?(?:fatal|error)\b"
                r"|\b(?:local|remote|memory|bad|transport|receive|rnr)[\w -]{0,40} on \w{2,16}:\d{1,2}"
                r"/(?:ib|roce)\b|\bib_mlx5_log\.c:\d{1,5}\s{1,6}(?:rc|dci?|ud)\S{0,4} qp 0x\w{1,10} wqe",
            ),
            # mlx5's kernel driver: "QP 51291 error: local length error (0x8e 0x0 0x0)"
            ("qp-error", " error: ", r"\bqp \d{1,9} error: \w"),
            # torch_npu: a collective that its retries did not save
            ("hccl-retry", "hccl op retry failed|suspect remote error"),
            # Open MPI's TCP and InfiniBand layers
            (
                "mpi-transport",
                "btl_|oob_|tcp_peer|tcp connect|openfabrics|mpi tcp|pml add procs|pmix|prte |orte |orte_|opal ",
                r"\bbtl_(?:tcp|openib|ofi|usnic)\w{0,20}\b.{0,120}(?:fail|error|refus|timed out|reset)"
                r"|failed to tcp connect to a peer|\btcp_peer_\w{2,24}: .{0,60}fail"
                r"|inbound mpi tcp connection request|pml add procs failed"
                r"|openfabrics .{0,40}failed to (?:initialize|create)"
                r"|\b(?:(?:pmix|prte|opal) error|orte_error_log): (?:unreach|lost[-_ ]conn|timeout)"
                r"|(?:orte|prte) does not know how to route a message"
                r"|\bpmix_err_(?:unreach|lost_connection|comm_failure)",
            ),
            # IP over InfiniBand
            (
                "ipoib",
                "ib",
                r"\bib\w{0,8}\d{1,3}\w{0,8}: (?:transmit timeout|timing out; \d|failed (?:send|to) )",
            ),
            (
                "ib-call",
                "ibv",
                r"\b(?:ibv_(?!fork)\w{2,30}|\w{0,12}ibverbs\w{0,8}).{0,60}(?:fail|error|unable)",
            ),
            # the memory that processes share across nodes: its connections, not its heap
            (
                "shmem-transport",
                "shmem|ibgda|ibrc|transport|init.cu|null value|bootstrap_",
                r"(?:nvshmem|rocshmem|\bibgda|\bibrc).{0,160}(?:fail(?!ed, continuing)|unable|non-zero"
                r" status: -?[1-9]|\berror\b)|(?:ibgda|ibrc|transport|init)\w{0,12}\.(?:cpp|cu|cc):\d{1,6}"
                r": (?:non-zero status: -?[1-9]|null value)|init failed for (?:remote )?transport"
                r"|\bbootstrap_\w{2,12}\.c\w{0,2}:.{0,80}(?:truncated|fail|\berror\b|unable|null value|non-zero)",
            ),
            (
                "ib-async-event",
                "async",
                r"(?:got |ib )async (?:fatal )?event.{0,60}(?:error|fatal"
                r"|violation|catastrophic)|async fatal event",
            ),
            (
                "nic-failed",
                "mlx|netdev watchdog|hca|efa|bnxt|irdma|tx timeout|tx_timeout|tx unit hang"
                "|pcie link lost|reset adapter|infiniband |ionic|erdma|hns|cxi|ena |gve |ice |i40e"
                "|ixgbe|rdma_rxe|siw|hfi1|opa",
                r"netdev watchdog: .{0,60}timed out|tx[_ ]timeout|tx unit hang|pcie link lost"
                r"|reset adapter unexpectedly|(?:infiniband \w{2,16}|\b(?:efa|irdma|mlx\d_core"
                r"|bnxt_\w\w|ionic\w{0,5}|erdma|hns3|hns_roce\w{0,6}|ena|gve|ice|i40e|ixgbe|hfi1"
                r"|cxi\w{0,8}) [0-9a-f:._]{7,12}):? .{0,60}(?:timeout|timed out|fail"
                r"|didn't|isn't ready|not ready"
                r"|closed|abort)|mlx\d_\w{0,20}.{0,90}(?:health compromised|fatal error|synd 0x"
                r"|timeout\. will|command failed|device's health|internal error|failed with error"
                r"|is down\b)|\b(?:efa|bnxt_\w\w|irdma)\w{0,8}.{0,90}(?:failed|fatal|reset|abnormal ae_id)"
                r"|\bena\b.{0,60}(?:tx|packet) \S{0,3} ?(?:that )?(?:wasn't|hasn't|was not) complete"
                r"|\bcxi\w{0,8}\b.{0,90}(?:fail|\berror\b|fatal|fault|timed? ?out"
                r"|retry handler)"
                r"|\bhfi1\b.{0,60}(?:fatal|freeze|fail)",
            ),
            (
                "ofi-request",
                "ofi|libfabric|fi_|ucx|ucs_|transport error|ptlte|prov/|rxr_|efa_rdm|endpoint timeout",
                r"(?:net/ofi|libfabric|prov/|rxr_|efa_rdm).{0,120}(?:completed with error|\berr\b|error"
                r"|unreachable|failed|busy)|ucx +error(?! handling)|ucs_err_|transport error: |endpoint timeout"
                r"|unresponsive receiver|ptlte_not_found"
                r"|(?:net/)?ofi\b.{0,60}(?:couldn't|could not|unable|failed|error)"
                r"|ofi_\w{2,40}.{0,60}(?:fail|error)|\bfi_\w{2,24}(?:\(\))?:? .{0,40}(?:failed|error)"
                r"|\bucx\b.{0,60}(?:failed|unreachable|timed? ?out)",
            ),
            # a table of the kernel is full, or memory for sockets is
            (
                "kernel-table-full",
                "overflow|conntrack|table full|cache|tcp: |orphaned|unregister_netdevice",
                r"(?:neighbou?r|arp|ndisc|route|dst|fib)\w{0,8} (?:table|cache)\S? (?:overflow|is full"
                r"|full)|(?:neighbou?r|arp)\w{0,10}: .{0,30}overflow|conntrack: .{0,20}table full"
                r"|table full, dropping packet|tcp: (?:out of memory|too many orphaned)"
                r"|unregister_netdevice: waiting for",
            ),
            (
                "scheduler-rpc",
                "zero bytes|slurm|rpc|munge",
                r"zero bytes were transmitted|unable to contact slurm|(?:slurm_(?:receive|send|persist|open"
                r"|msg)\w{0,24}|slurmctld|slurmdbd).{0,120}(?:fail|\berror\b|unable|timed? ?out)(?!.{0,40}"
                r"(?:invalid|node ))|couldn't forward rpc|ping rpc timeout",
            ),
            (
                "no-route",
                "unreachable|no route|host is down|ehostunreach|enetunreach",
                r"no route to host|(?:network|host|destination) is unreachable|host is down|ehostunreach"
                r"|enetunreach|unreachable remote",
            ),
            (
                "name-resolution",
                "resolution|unknown host|unknownhost|getaddrinfo|not known|gai error|resolve|resolving"
                "|no such host|eai_again|host not found|host name|server misbehaving",
                r"(?:failure|fail\w{0,3}|error) in name resolution|name ?resolution ?(?:error|fail)"
                r"|unknown ?host|getaddrinfo|name or service not known|gai error|(?:could|can)(?: ?not"
                r"|n't) resolve|fail\w{0,4} (?:to resolve|resolving)|no such host\b|eai_again"
                r"|host not found|could not translate host name|server misbehaving",
            ),
            (
                "gpfs",
                "mmfs|gpfs|disk lease|lost membership",
                r"\bmmfs\w{0,8}\b.{0,30}\[[ex]\](?!.{0,120}(?:no space|quota))|\[e\] lost membership in cluster|disk lease .{0,30}(?:expired"
                r"|overdue)|(?:gpfs|mmfs\w{0,4}).{0,120}(?:lost connection|lease|expel|unmounted by the"
                r" system|forced unmount|panic|not responding|timed? ?out)",
            ),
            (
                "storage-unhealthy",
                "health_check|mount director|storage",
                r"lustre health_check not healthy|unreachable mount director|storage\w{0,20} probe"
                r" (?:timed out|issues)|storage\w{0,12} (?:is )?(?:unreachable|unavailable|not reachable)",
            ),
            (
                "storage-client",
                "weka|beegfs|gluster|daos|vast|juicefs|alluxio|moosefs|panfs|gcsfuse|s3fs|0-vol|rpc-clnt"
                "|has not responded|rbd|iscsi",
                r"(?:weka|beegfs|gluster|\bdaos|\bvast\b|juicefs|alluxio|moosefs|panfs|gcsfuse|s3fs)"
                r"(?!.{0,160}\btime\w{0,12} ?[=:] ?\d).{0,160}(?:not respond|communication error|suspended"
                r"|timed ?out|unreachable|disconnect|cannot connect|no connection)"
                r"|has not responded in the last \d|\brbd\d{1,3}: encountered watch error"
                r"|\biscsi.{0,24}connection\d{1,3}:\d{1,3}: (?:ping timeout|detected conn error)",
            ),
            (
                "subnet-manager",
                "opensm|osm_|rdma_cm|librdmacm|tcp connection|daemon has unexpectedly",
                r"(?:opensm|\bosm_\w{2,20}).{0,30}\berr \w{4}|rdma_cm_event_(?:unreachable|rejected"
                r"|disconnected|device_removal|\w{4,8}_error)|librdmacm: fatal|unable to complete a tcp"
                r" connection|daemon has unexpectedly failed",
            ),
            (
                "storage-server-silent",
                "not responding|unresponsive client|lustre|lnet|ptlrpc|nfs|ceph|gpfs|endpoint shutdown",
                r"nfs: server \S{1,80} not responding|cannot send after transport endpoint"
                r"|evict\w{0,3} unresponsive client|lustre.{0,160}(?:was lost|timed out|network error"
                r"|(?<!\b0 were )evicted|rc = -1(?:0[4-9]|1\d)\b|failed(?::| with) -1(?:0[4-9]|1\d)\b)|lnet.{0,90}(?:timed out"
                r"|error|failed)|(?:libceph|ceph).{0,60}(?:socket closed|connect error|timed? ?out"
                r"|session lost|reconnect denied|\bhung\b|blocklisted|blacklisted|(?:osd|mon|mds)\S{0,6} down\b)",
            ),
        ),
        can_pass=True,
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
                "|remotedisconnected|likely closed|got 0 bytes|serverdisconnected|server shutdown"
                "|connection broken|not alive|unexpectedly closed|error: eof",
                r"connection (?:was )?(?:forcibly )?reset|reset by (?:remote )?peer|econnreset"
                r"|errno[: ]*104\b|(?:connection|socket) (?:was )?closed (?:by|before)"
                r"|closed by (?:remote )?peer|broken ?pipe|epipe\b|econnaborted|connection abort"
                r"|connectionclosederror|remotedisconnected|(?:remote end|peer) (?:closed|disconnected)(?! gracefully)"
                r"|socket closed|stream removed|unexpected eof\b(?!, expected \d)|connection lost"
                # TensorPipe: the other end has closed
                r"|\berror: eof \(this error originated"
                r"|unexpectedly closed|(?:peer|process|rank|worker|server) (?:has )?unexpectedly disconnected|likely closed|recv,? got 0 bytes|serverdisconnected"
                r"|server shutdown or crash|(?:session|peer|endpoint) .{0,60}is not alive|connection broken (?:while|by|during)",
            ),
        ),
        second_hand=True,
        can_pass=True,
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
        can_pass=True,
    ),
    *rules(
        statuses.NCCL_TIMEOUT,
        RAISED,
        (
            (
                "collective-timeout",
                "tim|ei0002|monitoredbarrier",
                # Ascend waits for its stream, which waits for the others
                r"reason=\[?stream sync timeout|stream synchronize timeout|collective operation timeout|timeout at (?:collective|nccl work)"
                r"|\bei0002\b|notify register times? out|hccl.{0,80}(?:times? out|timed out|timeout(?!\s?[=:]"
                r"|[_ ](?:is|of|interval)))|work ?[nhr]ccl\(.{0,200}timed? ?(?:out|ing out)"
                r"|monitoredbarrier|pass monitored barrier"
                r"|(?:gloo|unbound_buffer|/pair\.cc)(?!.{0,120}connect).{0,120}(?:timed? ?out|timeout)"
                r"|application timeout caused|timed out waiting \d{1,12} ?ms for (?:send|recv)|\b(?:nccl"
                r"|collective|all[_-]?reduce|all[_-]?gather|all[_-]?to[_-]?all|broadcast|reduce[_-]?scatter"
                r"|barrier)\w{0,10}\b(?!.{0,120}connect).{0,80}(?:timed out|\btimeouts?(?: (?:error"
                r"|exceeded|after|of|reached|occur)|: (?!\d)|$))",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.OTHER_NETWORK,
        RAISED,
        (
            # between prefill and decode: NIXL, Mooncake, UCCL, SGLang
            (
                "kv-transfer",
                "nixl|gennotif|xferreq|loadremotemd|mooncake|kvtransfer|kv chunk|kvcache"
                "|transfer_fail|transfer failed for|rpc_fail|transfer_|worker_pool|rdma_|uccl|kvpoll",
                r"\bnixl_err_(?:backend|remote_disconnect|unknown|canceled)\b"
                r"|\bnixl(?:backend|remotedisconnect|unknown|canceled)error\b"
                r"|\bnixl\b.{0,60}(?:transfer|handshake|notif)\w{0,12} .{0,30}(?:fail|error)"
                r"|\b(?:gennotif|(?:post|create|make)xferreq|getxferstatus|loadremotemd|fetchremotemd"
                r"|sendlocalmd|checkremotemd)\b.{0,80}(?:fail|\berror|no (?:specified|potential|available)"
                r"|could not|unable|not found)|\bkvtransfererror\b(?!.{0,200}not alive)"
                r"|failed to (?:send (?:kv|aux|state)|get kvcache|receive all kvs)"
                r"|\b(?:transfer|rpc)_fail\b|(?:transfer_\w{1,20}|worker_pool|rdma_\w{1,16}"
                r"|multi_transport|tcp_transport)\.(?:cpp|h):\d{1,5}\].{0,80}(?:fail(?:ed|ure)?\b|\berror\b"
                r"|timed out|timeout (?:waiting|after|exceeded|expired))|mooncake.{0,40}(?:fail(?:ed|ure)\b|\berror: )"
                r"|\buccl\b.{0,60}(?:fail\w{0,4} to|\berror: |unable to)"
                r"|\bclient\.cpp:\d{1,5}\] transfer(?: failed for|_incomplete)",
            ),
            (
                "connect-timeout",
                "time|errno 110|etimedout|connect|complete transfer",
                r"connection ?timed ?out"
                r"|connection timeout|etimedout|errno[: ]*110\b|client socket has timed"
                r"|failed to connect|server socket on .{0,80}timed out|(?:read|connect) ?timed? ?out"
                r"|(?:connect|read)timeout(?:error)?|unable to connect|could ?n.t connect"
                r"|(?:cannot|failed to|unable to|couldn't) (?:make|establish|open) (?:a )?connection"
                r"|fail\w{0,4} to complete transfers?\b|connect call failed|cannot connect|connection attempt failed|connection error"
                r"|connecterror|timed out.{0,20}connect|connecting to .{0,80}(?:timed out|fail)",
            ),
            # torchcomms and CTran
            (
                "comm-aborted",
                "comm aborted|commremoteerror|commtimeout|comminternalerror|commsystemerror",
                r"\bcomm aborted\b|\bcomm(?:remote|internal|system)error\b|\bcommtimeout\b",
            ),
            (
                "store-timeout",
                "store|timed out|wait timeout|socket timeout",
                r"distst?ore\w{0,8}error|store.{0,40}(?:timed? ?out|timeout)"
                r"|timed out after \d.{0,40}waiting|timed out waiting for (?:clients|workers|rank|key"
                r"|other)|socket timeout|wait timeout(?: after|\s*$)|barrier.{0,40}timed out",
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
                r"connectfullmesh|\bgloo::(?:\w{0,8}exception|enforcenotmet)|gloo/transport|\bgloo\b.{0,60}(?:fail|error)",
            ),
            (
                "http",
                "sslerror|protocolerror|chunkedencoding|clientpayload|clientoserror|bad gateway"
                "|gateway time|too many requests|server error",
                r"sslerror|protocolerror|chunkedencoding|clientpayload|clientoserror|bad gateway"
                r"|gateway time-?out|too many requests|\bserver error\b",
            ),
            ("c10d", "[c10d]", r"\[c10d\].{0,300}(?:fail|error|timed out|unable|lost)"),
            (
                "address-absent",
                "requested address|eaddrnotavail",
                r"cannot assign requested address|eaddrnotavail",
            ),
            (
                "remote-service",
                "deadline|unavailable|slowdown|slow down|endpoint|max retries|statuscode|status code"
                "|rate|incompleteread|clientconnect|an error occurred (|http|50|429|serviceunavail"
                "|gatewaytimeout|toomanyrequests|internalservererror|deadlineexceeded",
                r"deadline[_ ]exceeded|statuscode\.unavailable|endpointconnectionerror"
                r"|max retries exceeded|service unavailable|slowdown[):]|reduce your request rate"
                r"|\bserviceunavailable\b|\bgatewaytimeout\b|\btoomanyrequests\b|\binternalservererror\b"
                r"|\bdeadlineexceeded\b|rate limit exceeded|ratelimiterror|incompleteread|clientconnect\w{0,8}error"
                r"|an error occurred \((?:slowdown|internalerror|serviceunavailable|requesttimeout"
                r"|throttl\w{0,12}|requestlimitexceeded|50\d|429)\)"
                r"|(?:http(?:error)?(?: error| status)?(?: code)?|status[_ ]?code|returned error)"
                r"\W{1,3}(?:50[0234]|429)\b(?![.\w])",
            ),
            (
                "socket-timeout",
                "i/o timeout|handshake timeout|socket times out|ei0006|getting socket",
                r"\bi/o timeout\b|handshake timeout|getting socket times out|\bei0006\b",
            ),
        ),
        can_pass=True,
    ),
    *rules(
        statuses.NCCL_TIMEOUT,
        CARRIER,
        (
            (
                "collective-watchdog",
                "nccl|watchdog|dump signal|signal dumping|inconsistency|flight recorder"
                "|timeout signal|collective timeout",
                r"exception \(either an error or timeout\)"
                r"|nccl operations have failed or timed out|to avoid data inconsistency"
                r"|dump signal|to signal dumping|nccl communicator was aborted"
                r"|last enqueued (?:nccl )?work|exception hit in nccl work|(?:global |a )timeout signal"
                r"|(?:failure|exception) detected by watchdog|due to collective timeout",
            ),
        ),
        second_hand=True,
    ),
    # where torch's library raised it: the head of a C++ backtrace (torch/csrc/distributed/c10d)
    *rules(
        statuses.NCCL_TIMEOUT,
        CARRIER,
        (
            (
                "c10d-timeout-raised",
                "exception raised from",
                r"exception raised from (?:checktimeout|checkandsetexception|ncclcommwatchdog\w{0,12}"
                r"|watchdoghandler|runloop|heartbeatmonitor) at \S{1,200}processgroup",
            ),
        ),
        second_hand=True,
    ),
    *rules(
        statuses.OTHER_NETWORK,
        CARRIER,
        (
            (
                "c10d-raised",
                "exception raised from",
                r"exception raised from (?:recv|send|checkfornccl|throwtimeout|dowait|wait|try|connect"
                r"|handleconn|broadcastuniquenccl|getncclcomm|query|ping|check|get|set|add)\w{0,30}"
                r" at \S{1,200}/c10d/(?:utils|socket|tcpstore|processgroup|nccl|store)",
            ),
        ),
        second_hand=True,
        can_pass=True,
    ),
    *rules(
        statuses.CONNECTION_RESET,
        CARRIER,
        (
            (
                "remote-exited",
                "remote|prematurely|another task|fatal errors|leader|coordinator|heartbeats|raylet"
                "|exception on one of the ranks|coordination service",
                r"remote process (?:has )?exit|ncclremoteerror|remote error\b|exiting prematurely"
                # JAX's coordination service; Ray, whose daemon on the node has closed the socket
                r"|tasks are unhealthy \(stopped sending heartbeats|rayletclient\].{0,60}connection closed"
                r"|another task died|remote task has failed|distributed service detected fatal errors"
                r"|(?:leader|coordinator) (?:task )?(?:was preempted|died)|caused by an exception on one of the ranks"
                r"|coordination service (?:agent )?.{0,40}(?:\bfailed\b|unavailable|is in error)",
            ),
        ),
        second_hand=True,
        can_pass=True,
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
                r"|\bstalled (?:ranks|ops):|\[missing ranks: \d|(?:preparing|attempting) to dump debug info",
            ),
        ),
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
                r"|proxy|accept|listen).{0,160}(?:fail|error|wrong|refus|unexpected|mismatch|truncated)"
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
        can_pass=True,
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        CARRIER,
        (
            (
                "nccl-usage",
                "nccl|duplicate gpu",
                r"graph/\w{2,12}\.(?:cc|cu|h):\d{1,5} nccl warn"
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
                r"nccl warn.{0,200}(?:fail|error|unable|could not|abort|timeout|\bno [\w ]{2,20} found"
                r"|not found)",
            ),
            ("torch-backend", "distbackenderror|distnetworkerror|diststoreerror|disterror"),
        ),
        can_pass=True,
    ),
)
