"""Rules for lost nodes as others tell it: the BMC, filesystems, schedulers, clouds, health tools."""

from ....events.records import statuses
from .rule import HARDWARE, rules


def _one_of(*messages: str) -> str:
    """A pattern that matches any of these."""
    return "(?:" + "|".join(messages) + ")"


# The events of a BMC's log that mean a broken part: IPMI v2.0, tables 42-1 to 42-3, as ipmitool
# prints them. A fan or one of several power supplies may fail without harm.
_SEL_EVENTS = _one_of(
    r"(?:upper|lower) non-recoverable going",
    r"(?<!\bfan)(?<!un)(?:upper|lower) critical going",
    "transition to (?:critical from less|non-recoverable)",
    r"\bierr\b",
    "thermal trip",
    "frb[123]/",
    "uncorrectable",
    "machine check exception",
    "bus (?:fatal|uncorrectable) error",
    r"fatal nmi\b",
    r"pci [ps]err\b",
    r"(?:processor|memory device) disabled",
    r"\bparity\b(?! check)",
    "critical overtemperature",
    "drive fault",
    "in failed array",
    "power unit failure",
    "undetermined system hardware failure",
    "(?:run-time|os) critical stop",
    "os watchdog (?:reset|shut down|power)",
)
# The same by the BMCs of Dell, HPE and Lenovo, in sentences.
_BMC_SENTENCES = _one_of(
    r"a fatal error was detected on a component at bus",
    r"\bhas an internal error \(ierr\)",
    r"multi-?bit memory errors? (?:were |was |is )?detected",
    r"cpu \d{1,2} machine check error",
    r"uncorrectable (?:machine check exception|memory error threshold exceeded|pci express error)",
)
# An instance, as its cloud tells it. Google moves a machine (migrateOnHostMaintenance) or starts it
# (automaticRestart) without a loss; a rebalance recommendation of AWS is only advice.
_CLOUD_EVENTS = _one_of(
    r"compute\.instances\.(?:hosterror|preempted|guestterminate|terminateonhostmaintenance"
    r"|baremetalcaretakerpreempted)",
    "instance terminated by compute engine",
    "instance was preempted",
    r"\b(?:node|tpu|vm|instance|worker|resource)\b.{0,100}\bstate\W{1,3}preempted\b",
    "spotinterrupted",
    "spot (?:instance )?(?:interruption|termination) (?:warning|notice|was)",
    "terminatingoninterruption",
    "interruption triggered termination",
    "instance(?:unhealthy|terminating|stopping)",
    r"\binstance\b.{0,80}scheduled for (?:retirement|termination|decommission)",
    r"\binstance\b.{0,60} failed (?:\w{1,12} )?status checks?\b",
    "degradation of the underlying hardware",
    r"\b(?:instance|node|vm|machine|host)\b.{0,80}due to hardware (?:error|failure)",
)
# Kubernetes and Kueue (WorkloadEvicted and its reasons), Slurm: the nodes are taken away.
_TAKEN_AWAY = _one_of(
    r"preempted to accommodate a (?:higher priority )?workload",
    "evicteddueto(?:preempt|nodefail)",
    r"no replacement for (?:a |the )?failed node",
    "evict(?:ing|ed) workload due to (?:multiple )?node failures",
    r"preempted by (?:a )?pod \S",
    "preemptionbyscheduler",
    "deletionbytaintmanager",
    r"(?:taintmanager|nodecontroller)eviction .{0,200}marking for deletion",
    r"marking for deletion pod\b",
    r"deleting node .{0,80}(?:does not exist|no longer exists)",
    r"cancelled at .{0,60}due to preemption",
    r"low (?:realmemory|socket\*core)",
    "batch job complete failure",
    r"\bnode \S{1,80} is unresponsive as of",
)
# What stands for a bad node until somebody repairs it: node-problem-detector (permanent conditions),
# NVSentinel, AWS's node monitoring agent.
_CONDITIONS = _one_of(
    r"(?:kerneldeadlock|readonlyfilesystem|xfsshutdown|cperhardwareerrorfatal"
    r"|corruptdockeroverlay2|frequent\w{6,30}restart|(?:gpu|nvswitch)[a-z]{2,30}watch"
    r"|syslogs[a-z]{2,30})"
    r"(?: {1,12}| is now: |[= ]{0,2}status[:=] ?| ?[:=] ?)\W?true\b",
    r"\b(?:filesystemisreadonly|xfshasshutdown|dockerhung)\b",
    r"\b(?:gpu|nvswitch|nic|syslogs)\w{0,40}isnothealthy\b",
    r"\bnvidia(?:devicecountmismatch|doublebiterror|nvlinkerror|fabricerror|xid\d{1,3}error)\b",
    r"\bneuron(?:dma|\w{2,4}uncorrectable)error\b",
    r"\bfabricmanagernotrunning\b",
)

NODE_RULES = (
    *rules(
        statuses.LOST_CONNECTION,
        HARDWARE,
        (
            (
                "bmc-event",
                " | |fatal error was detected|ierr|multi-bit|multibit|machine check|uncorrectable",
                r"\b[0-9a-f]{1,6} ?\| ?\S{8,11} ?\| (?!.{0,60}\bfan\b.{0,60}\| \w{5} critical)"
                r".{0,120}\| ?[^|]{0,60}" + _SEL_EVENTS + r"[^|]{0,60}(?:\| ?asserted|$)"
                r"|watchdog\w? .{0,20}\| (?:hard reset|power (?:down|cycle)) {1,4}\| ?asserted|"
                + _BMC_SENTENCES,
            ),
            # a CPU that answers no interrupt any more
            ("hard-lockup", "lockup", r"\bhard lockup (?:on cpu|detected)|detected hard lockup"),
            # mcelog, after its decoding
            (
                "mcelog",
                "uncorrected error|processor context corrupt",
                r"\bmcelog\S{0,12}: (?:uncorrected error|processor context corrupt)\b"
                r"|^\s{0,8}(?:uncorrected error|processor context corrupt)\s{0,4}$",
            ),
            # the kernel gives a filesystem up; node-problem-detector has these as permanent
            (
                "filesystem-lost",
                "journal|shutting down filesystem|force_shutdown|remounting|forced readonly",
                r"\bsystemd-journald\[\d{1,7}\]: .{0,200}read-only file system|\baborting journal on device|\bdetected aborted journal|journal has aborted"
                r"|detected when updating journal superblock|\bxfs\b.{0,200}shutting down filesystem"
                r"|xfs_do_force_shutdown|(?:ext[234]|xfs|btrfs|jbd2)\b.{0,60}"
                r"(?:remounting filesystem read-only|forced readonly)",
            ),
            (
                "cloud-event",
                "compute.instances.|compute engine|preempted|spot|interruption|instance|retirement"
                "|decommission|termination|degradation of|due to hardware",
                _CLOUD_EVENTS,
            ),
            (
                "taken-away",
                "preempt|evict|marking for deletion|failed node|deleting node|taintmanager"
                "|low realmemory|low socket|batch job complete|unresponsive as of",
                _TAKEN_AWAY,
            ),
            (
                "node-condition",
                "true|filesystemisreadonly|xfshasshutdown|dockerhung|isnothealthy|nvidia|neuron"
                "|fabricmanagernotrunning",
                _CONDITIONS,
            ),
            # Ray's head node, about another node
            (
                "ray-node",
                "node timed out|health check failed|raylet",
                r"\bnode timed out: \w|\bnode \w{8,64}\b.{0,40} is dead because"
                r"|raylet .{0,60}missed too many heartbeats",
            ),
            # gpud, about the node's InfiniBand ports
            ("ports-missing", "linkup ports|ports must be", r"not enough linkup ports"),
        ),
    ),
    *rules(
        statuses.ECC_ERRORS,
        HARDWARE,
        (
            # "MCE 0x3f1c2d: Killing python3:22011 due to hardware memory corruption fault"
            ("memory-poisoned", "due to hardware memory corruption"),
            # AWS Neuron's driver: SRAM, HBM and NC_UNCORRECTABLE_ERROR, DMA_ERROR
            ("neuron-hardware", "neuron_hw_err=", r"neuron_hw_err=[a-z]"),
            # amdgpu_ras.c, amdgpu_ras_eeprom.c, kfd_int_process_v9.c
            (
                "amd-poison",
                "poison consumption|kick off gpu reset|exceed threshold|will not be initialized"
                "|bad page",
                r"ras poison consumption(?! handling (?:is )?(?:enabled|supported))"
                r"|kick off gpu reset|ras records:? ?\d{1,6} exceed threshold"
                r"|gpu will not be initialized",
            ),
            # torch_npu and CANN: HBM of a device, by name and by number
            (
                "npu-memory",
                "uce error|multi bit ecc|suspect mem|suspect_device|50705",
                r"\bhbm multi bit ecc error|\buce error\b|\bsuspect (?:device )?mem error"
                r"|(?:runtime result = |error code is )50705[345]\b",
            ),
            # DCGM's sentences (dcgm_errors.h) whose faults want a reset or a field diagnostic
            (
                "dcgm-memory",
                "faulty memory|memory mismatch was|miscompare|remapping|page retirements",
                r"found [1-9]\d{0,8} faulty memory elements|a memory mismatch was detected on gpu"
                r"|miscompare failure in the l1|row remapp?ings? (?:failed|are pending)"
                r"|pending page retirements together with a dbe",
            ),
        ),
    ),
    *rules(
        statuses.NVLINK_ERRORS,
        HARDWARE,
        (
            # "nvidia-smi nvlink -s", DCGM's sentences, the state of the NVLink fabric
            (
                "nvlink-missing",
                "<inactive>|nvlinks are up|nvswitch|fabric",
                r"\blink \d{1,2}: <inactive>|only \d{1,3} nvlinks are up out of"
                r"|detected fatal (?:errors on nvswitch|nvswitch sxid)"
                r"|nvswitch .{0,30}nvlink (?:port )?\d{1,3} is (?:currently )?down"
                r"|fabric check failed|\bfabric\b.{0,200}status: ?insufficient resources"
                r"|\bfabric\b.{0,200}fabric manager training error",
            ),
            (
                "npu-link",
                "link error|507056",
                r"\bhccs link error|(?:runtime result =|error code is) 507056\b",
            ),
        ),
    ),
    *rules(
        statuses.GPU_DRIVER_ERRORS,
        HARDWARE,
        (
            # the columns of nvidia-smi, when it cannot read a GPU
            (
                "smi-unreadable",
                "err!|[unknown error]|[gpu ",
                r"\berr!.{0,60}\berr!|[,:] ?\[(?:unknown error|gpu is lost|gpu requires reset)\]",
            ),
            # npu-smi's health: OK, Warning, Alarm, Critical, UNKNOWN (does not exist or not started)
            (
                "npu-health",
                "alarm|critical|unknown",
                r"\| \d{1,3} {1,8}(?:ascend\w{0,12}|\d{3}\w{1,5}) {1,24}\| {0,4}(?:critical|alarm|unknown) {0,20}\|"
                r"|\bhealth(?: status)? {2,40}: {0,2}(?:critical|alarm|unknown)\b",
            ),
            # NVSentinel tells what to do about a fault; DCGM's codes after dcgmerrorsmapping.csv
            (
                "sentinel",
                "recommended action|recommendedaction|errorcode",
                r"recommended ?action\W{1,4}(?:component_reset|reset_gpu|gpu_reset|node_re|restart_|replace_"
                r"|run_|contact_support|check_fm|drain)"
                r"|errorcode\W{1,3}(?:gpu_(?:temp_hw_slowdown|hw_power_brake)_violation|dcgm_fr_"
                r"(?:volatile_dbe|retired_pages|corrupt_inforom|power_unreadable|nvlink_down"
                r"|nvlink_crc|nvswitch_(?:fatal|down|nvlink_down)|thermal_viol|temp_viol"
                r"|faulty_memory|cuda_dbe|memory_mismatch|ecc_pending|l1tag_misc|row_remap_fail"
                r"|uncontained|dbe_|pending_row_remap|sxid|fabric_manager|nan_value"
                r"|device_count_mismatch))",
            ),
            # DCGM: ISOLATE, NVSentinel: RESET_GPU
            (
                "inforom-corrupt",
                "inforom",
                r"inforom is corrupt|corrupt inforom has been detected",
            ),
            (
                "dcgm-devices",
                "number of devices nvml",
                r"number of devices nvml returns is different",
            ),
            # dcgmi diag's table; its tests of software (Denylist, permissions) are not listed
            (
                "dcgm-diag",
                "fail",
                r"(?:^|\s)\| ?(?:gpu memory|memory|memtest|memory bandwidth|pcie|nvlink|nvbandwidth"
                r"|diagnostic|inforom|page retirement(?:/row remap)?|sm stress|targeted (?:stress|power)"
                r"|pulse test|eud(?: test)?) {1,60}\| {0,2}(?:pass - (?:gpus?: [\d, -]{1,60}|all)\s{0,8})?"
                r"fail\b",
            ),
            # drm_dev_wedged_event: "needs recovery", or "but recovered through reset"
            (
                "device-wedged",
                "wedged",
                r"device wedged, needs recovery|declaring device wedged|declared device \S{1,20} as wedged",
            ),
            (
                "tpu-unhealthy",
                "tpu",
                r"\btpu\b.{0,60}(?:is not healthy\b|\bunhealthy\b(?!.{0,12}\b0\b))|\btpu\b.{0,60}health\W{1,3}unhealthy",
            ),
        ),
    ),
)
"""Tried after the rules of rules/hardware.py, which find the same faults in other words."""
