"""Rules for what the kernel says of itself, its disks and its PCIe bus: each means a lost node."""

from ....events.records import statuses
from .rule import HARDWARE, rules

# The uncorrectable errors by their bit and name, short or long (drivers/pci/pcie/aer.c). Bits 15,
# 16 and 19 to 21 (aborts, ECRC, unsupported requests, ACS) tell of one request only.
_AER_NAMES = (
    r"\[ ?(?:4|5|1[23478]|22)\] {1,2}(?:dlp|data link protocol|sdes|surprise down|tlp|poisoned tlp|fcp"
    r"|flow control protocol|cmpltto|completion timeout|rxof|receiver overflow|malftlp|malformed tlp"
    r"|uncorrinterr|uncorrectable internal)\b"
)

KERNEL_RULES = rules(
    statuses.LOST_CONNECTION,
    HARDWARE,
    (
        # a fault in kernel mode (arch/x86/mm/fault.c, arch/arm64/mm/fault.c)
        (
            "kernel-fault",
            "kernel null pointer|unable to handle kernel|#pf: |[#|internal error: ",
            r"\bbug: kernel null pointer dereference|unable to handle kernel (?:null pointer|paging)"
            r"|#pf: (?:supervisor|error_code)|\b[0-9a-f]{4,16} \[#\d{1,4}\] (?:preempt|smp)"
            r"|\binternal error: (?:oops|synchronous external abort)",
        ),
        # its own data are damaged (lib/list_debug.c, mm/page_alloc.c, kernel/sched/core.c)
        (
            "kernel-damaged",
            "bug: |corruption|recursive fault|kernel stack is",
            r"\bbug: (?:bad page (?:state|map) in process|scheduling while atomic|kasan: |kfence: )"
            r"|\blist_(?:add|del) corruption|fixing recursive fault|kernel stack is corrupted",
        ),
        ("kernel-nmi", "nmi: ", r"\bnmi: (?:pci system error|iock error|memory parity)"),
        # a filesystem whose disk fails, or that has shut down (fs/xfs, fs/ext4, fs/jbd2, fs/btrfs);
        # damaged structures alone are filesystem-damaged
        (
            "filesystem-io",
            "xfs|ext|jbd2|btrfs|i/o failure|lost page write",
            r"\bxfs \([^)]{1,40}\): .{0,80}(?:has been shut down|log error|metadata i/o error"
            r"|xfs_log_force: error|writeback error|failing async write|please u\w{1,2}ount)"
            r"|\bext[234]-fs\b.{0,200}(?:i/o error|potential data loss|block allocation failed"
            r"|(?:cannot|unable to) read (?:block|inode|itable))"
            r"|\bjbd2: .{0,80}(?:\bi/?o errors?\b|error -\d)"
            r"|\bbtrfs\b.{0,200}io failure|lost page write due to i/?o error|uncorrectable i/o failure"
            r"|\bbtrfs\W{1,2} ?error\b.{0,100}errs: wr (?!0, rd 0, flush 0, corrupt 0)",
        ),
        # the disk has gone; a stopped array or loop device ends at 0 too
        (
            "disk-gone",
            "capacity change",
            r"\b(?:nvme\d|x?vd[a-z])\w{0,8}: .{0,30}change from [1-9]\d{0,20} to 0\b",
        ),
        # SCSI and SATA (drivers/scsi, drivers/ata)
        (
            "disk-command",
            "sense|hostbyte|ata|megaraid|mpt3sas|identify controller",
            r"sense key : (?:medium|hardware) error|add\. sense: unrecovered"
            r"|failed result: hostbyte=did_(?!ok)\w"
            r"|\bata\d{1,2}(?:\.\d\d)?: (?:failed command: |comreset failed|softreset failed|disabled\s*$"
            r"|error: \{ unc)|\bmegaraid_sas\b.{0,40}fatal: |\bmpt\dsas_cm\d: fault_state"
            r"|\bnvme\d{1,3}: identify controller failed",
        ),
        # arrays and mappings (drivers/md), not one of several paths; the answer to a wrong command has
        # "ioctl" or "table"
        (
            "disk-array",
            "md|device-mapper|dm-",
            r"\bmd: super_written gets error|\bmd/raid\S{1,20} .{0,40}(?:not correctable|not enough"
            r" operational|cannot continue|failed to run raid)"
            r"|\bmdadm\b.{0,40}\b(?:fail|failspare|degradedarray|devicedisappeared) ?event"
            r"|\bdevice-mapper: (?!table|ioctl|reload|remove|resume|create|multipath).{0,60}(?:\bfail(?:ed|ure|ing)\b"
            r"|\bi/o error|metadata error|aborting|corrupt)|\bdm-(?:integrity|verity|crypt)\b.{0,40}(?:"
            r"checksum failed|is corrupted|i/o error)",
        ),
        # an event of a link that the line calls fatal: pcie-fatal
        (
            "pcie-error",
            "dlp|protocol|sdes|surprise down|tlp|fcp|cmpltto|completion timeout|rxof|receiver overflow"
            "|uncorrinterr|uncorrectable internal",
            r"\b[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]: (?:aer: )?\s{0,8}" + _AER_NAMES,
        ),
        # a function that a reset or a change of power does not bring back (drivers/pci/pci.c)
        (
            "pcie-lost",
            "not ready|power state|device reset failed|link active not set",
            r"\bnot ready \d{2,7}ms after .{2,20}; giving up|refused to change power state"
            r"|aer: subordinate device reset failed|link active not set in \d",
        ),
        # a NIC whose driver does not load or recover it (mlx5/core/main.c, health.c; Intel, Broadcom)
        (
            "nic-absent",
            "mlx|adapter removed|hardware reset failed|probe",
            r"\bmlx5\w{0,6}\b.{0,60}(?:mlx5_(?:load_one|init_one|function_setup|cmd_init|pci_init|init_once)\b"
            r".{0,80}fail|(?:enable|init) hca failed|initializing command interface|firmware over \d{1,9} ms"
            r"|fw_fatal_reporter_err|mlx5_error_sw_reset|failed recovering|assert_(?:exit_ptr|callra))"
            r"|\bmlx\d_core: probe of \S{1,20} failed|\bmlx4_core\b.{0,30}internal error detected"
            r"|\b(?:ice|i40e|ixgbe|igb|bnxt_en) [0-9a-f:.]{7,12}\b.{0,30}(?:adapter removed|hardware reset failed)",
        ),
    ),
)
"""Tried after the rules of rules/hardware.py and before those of filesystems and the network."""
