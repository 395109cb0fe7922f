"""Rules for hardware faults: kernel, driver and CUDA messages, and NVIDIA XIDs."""

from ....events.records import statuses
from .rule import DEVICE, HARDWARE, KILLED, rules

# CUDA reports an error by name, number or text; the numbers were different before CUDA 10.1.
_CUDA_NUMBER = (
    r"(?:cuda (?:runtime )?error|cuda failure|cudaerror|cudasuccess|error|code)"
    r" ?[=:(]? ?"
)

MACHINE_RULES = (
    *rules(
        statuses.LOST_CONNECTION,
        HARDWARE,
        (
            (
                "kernel-panic",
                "kernel panic|not syncing:|rebooting in",
                r"kernel panic|not syncing:|rebooting in \d{1,6} sec",
            ),
            (
                "kernel-oops",
                "kernel bug at|bug: unable to handle|[#",
                r"kernel bug at|bug: unable to handle|(?:oops|fault|0x[0-9a-f]{1,16}): [0-9a-f]{1,8} \[#\d",
            ),
            (
                "machine-check",
                "machine check|hardware error]|mce broadcast",
                r"cpus not responding to mce broadcast|machine check exception|fatal machine check|machine check: \d{1,3} bank \d{1,3}: [abef][0-9a-f]{15}\b|hardware error\]: .{0,40}uncorrected"
                r"|event severity: fatal",
            ),
            (
                "pcie-fatal",
                "(fatal)|pciehp|aer: |dpc: ",
                r"uncorrect(?:ed|able) \(fatal\)(?! error(?:s|\(s\))? ?: ?0)"
                # of an NVIDIA GPU: pcie-gpu
                r"|\b(?:pcieport|mlx\d_core|bnxt_en|nvme|ice|i40e|ixgbe|irdma|efa|hfi1|cxi_ss1|amdgpu|habanalabs)"
                r" [0-9a-f:.]{7,12}: aer: (?:can't recover|device recovery failed)|dpc: (?:containment event|unmasked uncorrectable|err_fatal)"
                r"|pciehp: slot\(\S{1,12}\): (?:link down|card not present)",
            ),
            (
                "disk-lost",
                "disk failure on|failing i/o|failing array|nvme|offline device|dead device|offlined",
                r"disk failure on \S{1,60}(?: detected|, disabling)|no available path - failing i/o"
                r"|nvme\d{1,3}: (?:disabling (?:device|controller) after reset|removing after probe)"
                r" fail\w{3,4}|nvme\d{1,3}: (?:device not ready; aborting|failed to (?:reset|set up)|reset"
                r"(?:ting)? (?:controller )?failed|controller is dead|device is dead)"
                r"|rejecting i/o to (?:offline|dead) device|device offlined",
            ),
            (
                "disk-error",
                "i/o error|medium error|critical target|controller is down|reset controller|disable controller"
                "|critical warning|smart self-check|smart health",
                r"(?:blk_update_request|critical (?:medium|target)|buffer i/o error|print_req_error)"
                r".{0,40}(?:error|dev)|i/o error, dev |log i/o error|i/o error while writing superblock"
                r"|critical medium error|device: .{0,60}critical warning \(0x(?!00)|failed smart self-check|nvme\d{1,3}: (?:controller is down; will reset"
                r"|i/o .{0,60}timeout, (?:reset|disable) controller)"
                r"|nvme\d{1,3}n\d{1,3}: .{0,60}, i/o error \(sct",
            ),
            # the firmware of a NIC no longer answers, or its module is broken; NVSentinel's list
            # (docs/nic-health-monitor/syslog-detection-correlation.md) has the first four as fatal
            (
                "nic-lost",
                "mlx|bnxt|health|leak of a command|bus stuck",
                r"will cause a leak of a command|\bmlx\d_pci_err_detected\b|device's health compromised"
                r"|\bpoll_health:.{0,30}fatal error [1-9]|\bmlx\d.{0,90}(?:unrecoverable|\bassert_var"
                r"|firmware internal error|irisc not responding|handling bad device|in error state"
                r"|health recovery .{0,20}(?:abort|fail)|pci reads still not working)"
                r"|\bbnxt_en\b.{0,60}firmware (?:is not responding|hardware error|fatal)"
                r"|cable error, bus stuck",
            ),
            # a node that its scheduler takes out, a process there that nothing can end
            (
                "node-failed",
                "node fail|due to node failure|node_fail|not responding|notready"
                "|node not ready|nodelost|marked dead|marked as dead|lost communication with"
                "|is unreachable|preempt|pre-empt|node it was running on|shutting down|shutdown"
                "|kill task failed|not ending with signals|prolog|epilog|kubelet stopped|nodestatusunknown"
                "|unhealthynode|node health|spot|set to down|marked down|reboot|system is |nhc|set to "
                "|node has |node failed|dead or unavailable|nodediederror|setting node|kerneldeadlock"
                "|scheduled event|host_maintenance| due to ",
                r"node failure\b|due to node failure|node_fail\b|nodes? \S{1,80} not responding"
                r"|\bnodenotready\b|node \S{1,80} (?:is |status is now: )?(?:notready|not ready)"
                r"|\bnode (?:\S{1,80} )?is shutting down|\bnodeshutdown\b|imminent node shutdown|kubelet stopped posting"
                r"|nodestatusunknown|kill task failed|due to job not ending with signals"
                r"|(?:pro|epi)log (?:error\b|fail(?:ed|ure)|hung)|unhealthynodeexception"
                r"|\bnode \S{1,80} has been rebooted|unexpected(?:ly)? reboot|system is (?:going down for"
                r"|rebooting|powering (?:down|off))|\bnhc\b.{0,80}(?:\berror\b|fail|unable)|set to (?:state )?(?:drain"
                r"|down)\w{0,4}\b.{0,40}(?:\bnhc\b|fail|error)"
                r"|\bnode health ?check (?:has )?failed|spot (?:instance )?interruption"
                r"|nodes? \S{1,80} (?:was |is |been )?(?:set to |marked )down\b"
                r"|nodelost|node .{0,200}(?:has|was|is|been|beem) marked (?:as )?dead"
                r"|lost communication with a remote daemon|\bdown\* .{0,80}not responding|\b(?:node"
                r"|instance|host|machine|vm)s?\b.{0,40}\b(?:was|were|been|being|got) pre-?empted"
                r"|node it was running on is dead"
                # Ray about the node of a worker, its actor or its owner
                r"|nodediederror\b|(?:owner's|its|the) node (?:has |was )?(?:died|crashed|failed)\b"
                r"|\bnode .{0,40} (?:was|is) dead or unavailable"
                # slurmctld; Kubernetes; node-problem-detector
                r"|setting nodes? \S{1,80} state to (?:inval|drain|down|fail)|kubeletnotready"
                r"|kerneldeadlock\s{1,8}true"
                # clouds, about the machine
                r"|\bnodes? \S{1,80} (?:now |is )?(?:drain(?:ed|ing)|down) due to"
                r"|scheduled event (?:preempt|terminate|reboot|redeploy)|terminate_on_host_maintenance",
            ),
            (
                "overheated",
                "critical temperature|thermal shutdown",
                r"critical temperature reached|thermal shutdown",
            ),
        ),
    ),
    *rules(
        statuses.SILENT_CORRUPTION,
        HARDWARE,
        (("silent-corruption", "corruptionerror: silent data corruption"),),
    ),
    *rules(
        statuses.ECC_ERRORS,
        HARDWARE,
        (
            (
                "ecc-uncorrectable",
                "ecc|uncorrectable|sram threshold|poison is|bad page",
                r"[sd]ram uncorrectable\s{0,40}: ?[1-9]|uncorrectable (?:\w{1,8} )?(?:memory"
                r"|parity)\b(?!.{0,30}: ?0\b)|uncorrectable ecc|ecc.{0,3}uncorrectable"
                r"|uncorrectable.{0,30}ecc error|uncorrectable (?:[sd]ram|l[12]|hbm\d?) error(?!.{0,10}: ?0)|\bhbm uncorrectable"
                r"|sram threshold exceeded\s{0,40}: ?yes|\b[sd]ram uncorrectable error(?!s? ?:)"
                r"|(?:ecc|[sd]ram|hbm).{0,80}uncorrect(?:ed|able) (?:\w{1,8} )?errors?(?: count)? ?[:=]"
                r" ?[1-9]"
                r"|double[- ]bit ecc|ecc.{0,20}double[- ]bit|unrecovere?d? ?ecc|uncontained ecc"
                r"|ecc (?:page|row).{0,30}(?:fail|pending)"
                # amdgpu: error counts of a block of the GPU
                r"|[1-9]\d{0,9} (?:new )?uncorrectable hardware errors? detected in (?!total)"
                r"|\bpoison is (?:consumed|created)|bad pages? .{0,30}(?:reach|exceed)\w{0,3} .{0,12}threshold",
            ),
            (
                "ecc-double-bit",
                "dbe|double bit",
                r"\bdbe\b.{0,40}(?:error|detected|interrupt)|double[- ]bit error",
            ),
            (
                "ecc-remap-failed",
                "remap|retirement|retired page|rma",
                r"row[- ]remap\w{0,6} (?:failure|failed)(?!\w| ?(?:occurred ?)?: ?(?:no|0))"
                r"|remapping failure occurred\s{0,20}: ?yes|(?:page )?retirement (?:failure|failed)"
                r"|\bqualifies for rma\b|\brma (?:is )?(?:required|needed)\b",
            ),
            (
                "ecc-host-memory",
                "edac|memory failure:|hardware memory",
                r"edac (?:.{0,40}[1-9]\d{0,8}|mc\d{1,3}:) ue\b|memory failure: 0x|uncorrected hardware memory error",
            ),
            (
                "cuda-ecc",
                "(39)|214",
                _CUDA_NUMBER + r"(?:39|214)\b(?! ?[.:]\d)(?=.{0,60}ecc)|"
                r"(?:cuda failure|cudaerror|code=) ?214\b",
            ),
        ),
    ),
    *rules(
        statuses.NVLINK_ERRORS,
        HARDWARE,
        (
            ("nvlink-uncorrectable", "nvlink", r"uncorrectable nvlink|nvlink.{0,3}uncorrectable"),
            (
                "nvlink-peer-memory",
                "cuda_error_contained|cudaerrorcontained|peer gpu memory over nvlink",
            ),
            # severity 1 means fatal; the SOE is the processor of the switch
            (
                "nvswitch-sxid",
                "sxid",
                r"\bsxid\b.{0,60}, (?:fatal\b|severity 1\b|soe (?:halt|watchdog))",
            ),
            (
                "nvswitch-fatal",
                "nvswitch",
                r"nvswitch fatal|nvswitch(?:es)? .{0,80}(?:don't match|failed|aborting|uninitialized)",
            ),
            (
                "fabric-manager",
                "fabric|multicast team|gpu handle|imex|xgmi|nvlink sharp",
                r"aborting fabric manager|failed to find the gpu handle|multicast team request"
                r"|fabric ?manager.{0,80}(?:\berror\b|failed|exited|not (?:running|active)|abort)"
                r"|error in the fabric manager|fabric manager .{0,120}doesn't match|fabric (?:state|health).{0,20}(?:fail|unhealthy)"
                r"|fail\w{0,4} .{0,30}\bxgmi\b|bind\w{0,3} nvlink sharp|fabric (?:state|health) is not (?:healthy|completed)|imex.{0,60}(?:error|fail|degraded"
                r"|unavailable|unhealthy)|\bxgmi\b.{0,60}(?:fatal|\berror\b(?!.{0,12}: ?0)|link (?:is )?down"
                r"|failed)",
            ),
            (
                "nvlink-failed",
                "nvlink|nvl link",
                r"\bnvl link \d{1,3} (?:is )?(?:in )?(?:disabled|inactive|down|failed)"
                r"|nvlink\w{0,24}: gpu \S{1,12} unhealthy|nvlink_(?:down|crc_\w{4,8}_threshold"
                r"|error_(?:threshold|critical))|fail\w{0,4} to \w{1,12} nvlink"
                # not NVIDIA's linker, which has the same name
                r"|nvlink(?! {1,2}(?:fatal|error|warning|info) {0,4}:).{0,80}(?:fatal|fail"
                r"|fault|link (?:\d{1,2} )?(?:is )?(?:currently )?down|(?<!\b0 )inactive|timed? ?out|lane error"
                r"|flit error|crc error|replay error|recovery error)",
            ),
        ),
    ),
    *rules(
        statuses.INVALID_DMA_MAPPING,
        HARDWARE,
        (
            (
                "iommu-fault",
                "dmar|amd-vi|smmu|iommu|io_page_fault|swiotlb",
                # `fault`, but not "default", which the kernel logs for its IOMMU domain at each boot
                r"dmar: \[|dmar.{0,40}(?:(?<!de)fault|error)|io_page_fault|iotlb_inv_timeout"
                r"|amd-vi: event logged|completion-wait loop timed out|illegal_dev_table"
                r"|smmu.{0,60}(?:(?<!de)fault|event 0x)|not addressable by gpu"
                r"|iommu.{0,60}(?:(?<!de)fault|fail)|swiotlb.{0,60}(?:is full|overflow)",
            ),
            (
                "dma-mapping",
                "dma|iova",
                r"alloc\w{0,6} (?:\w{1,8} ){0,3}(?:iova|dma)\b.{0,40}fail"
                r"|dma[_ -]?map\w{0,20}.{0,20}(?:error|fail)|failed to (?:dma[- ]?)?map (?:dma|sg)"
                r"|invalid dma|dma.{0,20}mapping error|failed to map dma|dma fault",
            ),
            (
                "memory-registration",
                "reg_mr|reg_dmabuf_mr|umem|register|gdr_pin|regmr| mr|_p2p_",
                r"ibv_reg_(?:dmabuf_)?mr\w{0,12}.{0,90}(?:fail|error|bad address|cannot)"
                r"|umem.{0,6}get\S{0,4}:? failed|get_user_pages.{0,20}fail|umem get failed"
                r"|register\w{0,8} ?(?:rdma|gpu|gpu mr|mr|memory region)\w{0,16}\b.{0,20}(?:fail|error)"
                r"|(?:couldn't|failed to|unable to|cannot) (?:register|create|allocate"
                r"|reg) .{0,20}(?:gpu|memory region|\bmr\b|rdma mem)|(?:fail\w{0,4}"
                r"|unable) to register memory\b.{0,60}(?:bad address|for device)"
                r"|gdr_pin_buffer.{0,20}fail|nv(?:idia)?_p2p_\w{3,20}.{0,60}(?:fail|error)",
            ),
            # GPUDirect Storage: the kernel module; its library's log is software (cufile)
            (
                "direct-storage",
                "nvidia-fs|nvfs",
                r"nvidia-fs ?:.{0,120}(?:fail|error -?[1-9]|unable|cannot)|\bnvfs_\w{3,40}.{0,80}(?:fail"
                r"|error -?[1-9])",
            ),
            (
                "peer-memory",
                "peermem|peer_mem",
                r"(?:nvidia[-_]|nv_|amdgpu_)peer_?mem.{0,90}(?:\berror\b|fail|invalid|denied)",
            ),
        ),
    ),
    *rules(
        statuses.GPU_DRIVER_ERRORS,
        HARDWARE,
        (
            (
                "gpu-lost",
                "fallen off|is lost|device handle|gpu lost|no devices were found|gpu_is_lost|(rev ff)",
                r"fallen off the bus|gpu is lost|gpu_is_lost|unable to determine the device handle"
                r"|gpu lost\b|no devices were found|nvidia corporation .{0,100}\(rev ff\)",
            ),
            (
                "gpu-absent",
                "cuda-capable|tpu |slice_failure|/dev/accel|error interrupt|no cuda gpus|nodevice|no_device"
                "|no nvidia|rocm-capable|no hip gpus|/dev/nvidia|/dev/kfd|/dev/dri/render|/dev/davinci|/dev/neuron",
                r"tpu (?:driver |device )?initialization failed|slice_failure_\w|tpu session error"
                r"|/dev/accel\d.{0,60}fatal error|received error interrupt! fatal: true|no (?:cuda|rocm)-capable device|no (?:cuda|hip) gpus are available|(?:cuda"
                r"|hip)errornodevice|cuda_error_no_device|found no nvidia driver|no nvidia (?:gpu|driver"
                r"|graphics adapter)"
                # the kernel's file of one GPU is missing; a message names it first or last
                r"|/dev/{1,2}(?:nvidia\d|kfd|dri/render\w?\d|accel/?(?:accel)?\d|davinci\d|neuron\d)\w{0,3}"
                r"[)':]{0,3}.{0,12}(?:no such (?:file|device)|not found|does not exist)"
                r"|no such (?:file or directory|device)[^/]{1,12}/dev/(?:nvidia\d|kfd|dri/render"
                r"|davinci\d|neuron\d)",
            ),
            # the device or its heartbeat is gone: Ascend's EL0001 and 507010, habanalabs, AWS Neuron
            (
                "accelerator-lost",
                "lost heartbeat|device lost|el0001|507010|habanalabs|lost state|nrt_exec_hw_err|device_absent"
                "|neuron",
                r"device ?\[\d{1,3}\] lost heartbeat|reason=\[?(?:the device is )?lost heartbeat"
                r"|report device lost|\bel0001\b|device_absent|runtime result = 507010\b"
                r"|habanalabs .{0,40}(?:heartbeat failed|going to (?:hard[- ])?reset|not operational"
                r"|device is (?:dead|lost|unusable|in unusable state)|device cpu is stuck)|\bneuron\b.{0,40}reset failed|device is in lost state|\bnrt_exec_hw_err_\w",
            ),
            # the kernel module is not there, or finds no device
            (
                "driver-absent",
                "nvidia|amdgpu|habanalabs|driver installation|rock module",
                r"error validating driver installation|rock module is not loaded|(?:modprobe|insmod): (?:error|fatal): .{0,40}\b(?:nvidia"
                r"(?!.?(?:peer|fs|gdr))|amdgpu|habanalabs)|(?:failed|unable) to (?:load|insert) (?:the )?"
                r"(?:module )?(?:nvidia(?!.?(?:peer|fs|gdr))|amdgpu|habanalabs)|nvidia-uvm: failed to create"
                r"|could not insert '(?:nvidia(?!.?(?:peer|fs|gdr))|amdgpu|habanalabs)",
            ),
            (
                "nvml-failed",
                "nvml|nvidia-smi has failed|driver/library|driver not ",
                r"(?:amdgpu|rocm|nvidia(?!-fs)|\bgpu).{0,80}driver not (?:loaded|initialized)|failed to initialize nvml|driver/library version mismatch|nvidia-smi has failed"
                r"|nvml(?:_error_|error_?)(?:gpu_?is_?lost|driver_?not_?loaded|lib_?rm_?version"
                r"|reset_?required|gpu_?not_?found)|nvmlinit.{0,40}fail",
            ),
            (
                "driver-unfit",
                "system not yet|systemnotready|system_not_ready|drivermismatch"
                "|driver_mismatch|driver version is insufficient|insufficientdriver"
                "|forward compatibility|unsupported display driver|compatnotsupported"
                "|driver on your system is too old|api mismatch",
            ),
            (
                "driver-gsp",
                "gsp",
                r"\bgsp\b.{0,60}(?:timeout|fail|cannot|crash|error)|(?:cannot"
                r"|failed to|timeout).{0,60}\bgsp\b|_kgsp\w{0,40}:.{0,60}(?:fail|cannot|bad|unexpected)",
            ),
            (
                "driver-init",
                "rminitadapter|rm_init_adapter|nvidia_drm|nvidia-drm|nvidia: probe|: probe |none of the nvidia",
                r"nvidia[-_]drm.{0,160}(?:fail|\berror\b)|rminitadapter.{0,40}(?:fail|cannot)"
                r"|rm_init_adapter failed|nvidia: probe of .{0,40}failed"
                r"|nvidia [0-9a-f:.]{7,16}: probe .{0,40}failed|none of the nvidia devices",
            ),
            (
                "driver-locked",
                "rc watchdog|gpu is probably locked|gpu requires reset|err_reset_required"
                "|gpu reset required|node reboot required",
            ),
            # the container runtime, when it asks the driver for the GPUs; what an image requires of the
            # driver is software
            (
                "container-gpu",
                "nvidia-container-cli|unresolvable cdi",
                r"nvidia-container-cli\S{0,5}: (?:initialization|detection|device|driver) error"
                r"|nvidia-container-cli\S{0,5}: .{0,200}/(?:dev|proc/driver)/nvidia"
                r"|unresolvable cdi devices? \S{0,12}(?:nvidia|amd)\.com/gpu",
            ),
            # a scheduler that finds fewer GPUs than the node has
            (
                "gpu-count",
                "devices unavailable|no healthy devices|gres/gpu|unhealthy|device plugin|allocation devices"
                "|acceleratedhardwareready|gpumissing|gpus found|gpu found|gpu count|capacity changed",
                r"\b(\d{1,2}) gpus? found, expected (?!\1\b)\d|gpu count mismatch|/gpu\S{0,3} capacity changed from \d{1,3} to \d"
                r"|allocate failed due to device plugin|error getting list of preferred allocation devices"
                r"|devices unavailable for \S{0,4}(?:nvidia|amd|gpu\.intel|habana)\S{0,6}/"
                r"|no healthy devices.{0,80}(?:gpu|nvidia|amd\.com)|gres/gpu\S{0,20} count (?:reported )?(?:lower"
                r"|too low|changed from)|acceleratedhardwareready\W{1,12}false|\bgpumissing\s{1,8}true"
                r"|(?:\bgpu|nvidia\.com/gpu|device)\S{0,60} ?(?:has been |is |was |will go |went |marked "
                r"){1,2}(?:as )?unhealthy",
            ),
            (
                "persistence-daemon",
                "nvidia-persistenced",
                r"persistenced.{0,80}(?:fail|\berror\b|unable)",
            ),
            # health tools: NVRx, DCGM
            (
                "health-check",
                "health check|healthcheck|recovery action|requires a|reduced capacity|health system"
                "|peer-to-peer traffic|dcgm|fail - gpu",
                r"\bgpu\S{0,3} (?:\S{1,20} )?health ?check (?:has )?failed|\bgpu \S{1,40}: (?:requires (?:a"
                r" reset|a node reboot|peer-to-peer)|operating at reduced capacity)"
                r"|health ?check failed for device|\| fail - gpu|\bdcgm\w{0,4}\b.{0,60}\bfail(?:ed|ure)?\b(?! ?[:=] ?0)|recovery action (?:is|was|:|=|required:?) ?\W?(?:gpu|node|drain)[ _]?(?:reset|reboot|and"
                r"|p2p)|detected a failure in health system (?!nvlink|infiniband)",
            ),
            (
                "pcie-gpu",
                "nvidia",
                r"nvidia [0-9a-f:.]{7,16}: (?:aer: (?:can't recover|.{0,60}fatal)"
                r"|device has no aer-aware|.{0,12}change power state .{0,60}inaccessible)",
            ),
            # amdgpu; agrees with AMD's list of kernel messages (amd/node-scraper, dmesg)
            ("amd-lost", "device lost from bus"),
            (
                "amd-reset",
                "amdgpu|vram is lost|qcm fence|hw exception by gpu",
                r"gpu reset begin|vram is lost|gpu reset\(\d{1,4}\) failed|(?:asic"
                r"|mode[12]) reset failed|gpu reset end with ret = -?[1-9]|gpu recovery failed"
                r"|hw exception by gpu|failed to respon(?:d to|se) msg|ring \S{1,16} (?:timeout|(?:test"
                r"|reset) failed)|qcm fence wait loop timeout|be in (?:an )?unrecoverable state"
                r"|ip block:\w{2,20} is hung|failed to terminate tmr",
            ),
            # queues that the scheduler of the GPU (MES, HWS) does not give back
            (
                "amd-queue",
                "queue|kfd|cp gfx|suspend process|hws hang",
                r"fail\w{0,4} to (?:remove|evict|restore|resume|suspend|unmap|preempt|map|add) (?:\w{1,10} ){0,3}queues?\b"
                r"|queues? preemption (?:time|fail|unsuccess)|unsuccessful queues? preemption"
                r"|failed to (?:quiesce|suspend|resume|evict) (?:kfd|process pid)|freeing queue vital buffer"
                r"|failed to halt cp gfx|\bhws hang|hiq mqd's queue_doorbell",
            ),
            # SMU and PSP: the GPU's power and security processors
            (
                "amd-firmware",
                "amdgpu|powerplay|smu:|psp resume",
                r"\bsmu: (?:response:0x|i'm not done"
                r"|no response)|failed to send message 0x[0-9a-f]{1,8}, response 0x(?!1\b)"
                r"|failed to (?:dis|en)able \w{0,10} ?(?:smu|dpm) features|smc (?:is not ready"
                r"|engine is not correctly up)|psp (?:resume|create ring) failed|\b\w{4,10}"
                r" of ip block <\w{2,20}> failed",
            ),
            (
                "amd-init",
                "amdgpu",
                r"fatal error during gpu init|probe of \S{1,20} failed|probe with driver amdgpu failed",
            ),
            ("amd-ras", "uncorrectable hardware error(errevent"),
            (
                "driver-failed",
                "nvrm",
                r"nvrm:?(?!.{0,12}(?:nvassert|nvcheck|loading)).{0,160}(?:fail(?!over)|timed? ?out|fatal"
                r"|bad state|cannot (?!map mem)|not responding|may need to be reset|is hung"
                r"|critical error|no nvidia graphics|not called for|reported (?:an )?error|bad register read"
                r"|assigned to your nvidia device is invalid|bar\d is 0m|installed in this system is)",
            ),
        ),
    ),
    *rules(
        statuses.TASK_HANG,
        KILLED,
        (
            (
                "hung-task",
                "blocked for more than|state:d",
                r"task \S{1,80} blocked for more than \d{1,9} sec|\btask:\S{1,40} {1,16}state:d\b",
            ),
            ("soft-lockup", "soft lockup"),
            (
                "rcu-stall",
                "rcu",
                r"rcu\w{0,14}:? .{0,30}(?:self-)?detected (?:expedited )?stall"
                r"|rcu.{0,30}kthread (?:starved|timer wakeup)",
            ),
            (
                "nfs-writeback",
                "nfs_",
                r"(?:^|\s)nfs_(?:lock_and_join_requests|wb_all|page_async_flush|writepages_callback)\+0x",
            ),
        ),
    ),
    *rules(
        statuses.ILLEGAL_MEMORY_ACCESS,
        DEVICE,
        (
            (
                "cuda-illegal-address",
                "illegal memory access|illegaladdress|illegal_address|misaligned"
                "|warp illegal address|out of range address|memory access fault by gpu"
                "|invalid address space|invalid __global__|invaliddeviceaddress|aperture_violation",
            ),
            (
                "amd-page-fault",
                "page fault|protection_fault|gpu fault detected",
                r"\[(?:gfx|mm)hub\w{0,8}\] (?:no-)?(?:retry )?page fault|vm_(?:l2"
                r"|context1)_protection_fault_(?:status|addr)|gpu fault detected: \d",
            ),
            (
                "cuda-illegal-number",
                "700|(77)|error 77|716|(74",
                r"(?:cuda (?:runtime )?error"
                r"|cuda failure|cudaerror|code) ?[=:(]? ?(?:700|716|77)\b(?! ?[.:]\d)",
            ),
        ),
    ),
    *rules(
        statuses.EXITED_ABNORMALLY,
        KILLED,
        (
            (
                "oom-killer",
                "oom|out of memory|memory cgroup|memory limit|memory pressure|outofmemory|low on memory",
                r"system oom encountered|killed .{0,300}due to memory pressure|ray\.exceptions\.outofmemory"
                # not a counter, which may be 0
                r"|node running low on memory|oom[-_ ]?kill(?!\w{0,2}\W{1,3}\d|\w{0,12} 0\b)|out of memory: kill|cgroup out of memory|\boomkilled\b|oom_reaper: reaped"
                r"|task \d{1,7}: out of memory|out_of_memory state|exceeded (?:\w{3,4} )?memory limit",
            ),
            (
                "crashed",
                "segfault|segmentation fault|bus error|general protection|sigsegv|sigbus|sigill"
                "|illegal instruction (core|stack smashing|double free|heap corruption|free(): "
                "|malloc(): |corrupted size|floating point exception|munmap_chunk()|malloc_consolidate()"
                "|pure virtual method",
                r"segfault at|segmentation fault"
                r"|(?<!pcie )\bbus error|traps: .{0,60}general protection|\]:? general protection fault|\bsig(?:segv|bus|ill)\b"
                r"|illegal instruction \(core|stack smashing detected|double free or corruption"
                r"|heap corruption|free\(\): inv|malloc\(\): |corrupted size vs|floating point exception"
                r"|(?:munmap_chunk|malloc_consolidate)\(\): |pure virtual method called",
            ),
            (
                "worker-killed",
                "dataloader worker",
                r"dataloader worker.{0,60}(?:killed by signal|exited unexpectedly)",
            ),
        ),
    ),
    *rules(
        statuses.CUDA_ERRORS,
        DEVICE,
        (
            (
                "cuda-out-of-memory",
                "out of memory|outofmemory|out_of_memory|memory_allocation|resource_exhausted",
                r"resource_exhausted: .{0,60}out of memory|\(gpu_\d{1,3}\w{0,8}\) ran out of memory|cuda.{0,30}out of memory|outofmemoryerror|cuda_error_out_of_memory"
                r"|cudaerrormemoryalloc|hip out of memory",
            ),
            (
                "cuda-error",
                "cuda|hip error|hip failure|hiperror|nvrtc|launch failure|device-side assert|aicore|npu func"
                "|synapse|synstatus|habana exc"
                "|hsa_status_error|nccl warn hip|hiprtc_error|miopen(hip): error",
                r"cuda[- ](?:runtime |driver |kernel )?(?:error|failure"
                r"|exception)|cuda call failed|hiperror(?!_t|string|notready|nodevice)\w{3}|cudaerror(?!_t|string|notready|\s?=|\()\w{3}|cuda_error_(?!handl"
                r"|not_ready)\w{3}|unhandled cuda|ncclunhandledcuda|thcudacheck fail|== cudasuccess"
                r"|cuda-capable devices? ?(?:\(s\))? (?:is/)?are busy|hip (?:error|failure)"
                r"|cuda initialization: |nvrtc_error|nvrtc: err|unspecified launch failure"
                r"|aicore (?:execution )?(?:exception|times? ?out|error)|npu function error"
                r"|synapse error|\bsynstatus ?= ?(?:synstatus )?[1-9]|habana exception"
                r"|device-side assert|cuda ?malloc.{0,20}fail|triton error|cuda unknown error"
                r"|\bhsa_status_error|nccl warn hip\w{3,40} failed|\bhiprtc_error_\w|miopen\(hip\): error",
            ),
            (
                "cuda-assert",
                "assertion",
                r"\.cuh?:\d{1,6}: .{0,120}\bassertion\b.{0,300}fail"
                r"|block: \[\d.{0,30}thread: \[\d.{0,30}assertion",
            ),
            (
                "tensorflow-gpu",
                "gpu_event_mgr|gpu sync failed|gpu_util",
                r"gpu_event_mgr.{0,40}unexpected event status|gpu sync failed",
            ),
            (
                "nccl-cuda",
                "nccl warn|peer access",
                r"nccl warn.{0,120}\bcuda\b.{0,80}(?:fail|error"
                r"|not support)|failed to.{0,30}\bcuda\b|peer access is not supported",
            ),
            (
                "cuda-library",
                "cublas|cudnn|cusolver|cusparse|cufft|cutlass|curand|hipblas|rocblas|miopen|rocsolver|hipsparse",
                r"(?:cublas|cudnn|cusolver|cusparse|curand)_status_(?!success)\w{3}|(?:cudnn|cublas"
                r"|cusolver|cusparse|cufft|curand) ?(?:runtime )?error"
                r"|(?:hipblas(?:lt)?|rocblas|miopen|rocsolver|hipsparse)(?:_status_(?!success)\w{3}| error)"
                r"|check failed: .{0,40}_status_success|cufft_(?!success)\w{3,30}|cutlass error",
            ),
        ),
    ),
)


# --- XIDs, NVIDIA's numbers of GPU faults, and the status of each ---
#
# Source: NVIDIA's catalogue of XIDs, r590; the complete table is tests/data/xid_catalog.csv. The
# status follows from the "immediate action" of the catalogue. Reset, reboot and replace mean a
# fault of the GPU or link; "restart the application" a CUDA error; "ignore" that it is harmless. The
# catalogue gives no action for 162 to 172. 162 to 165 tell of the power smoothing's wear, and 170 of an
# interrupt; 171 and 172 add to 48; in 166 to 169 the device or its link has failed by the description.

_SPANS = {
    statuses.GPU_DRIVER_ERRORS: "1-7 9-10 12 15-24 26-30 33-36 42 46-47 49-59 61-62 65 73 78-79 81 87 90-91 109-120 "
    "122-125 138 143 151 158 167-169",
    statuses.CUDA_ERRORS: "8 11 25 32 39-41 43 60 68-72 75-77 80 82-86 88-89 96-105 126-135 139 142 159",
    statuses.ILLEGAL_MEMORY_ACCESS: "13 31",
    statuses.ECC_ERRORS: "48 64 94-95 140 156 171-172",
    statuses.NVLINK_ERRORS: "74 136 144-150 155 166",
    statuses.EXITED_ABNORMALLY: "45",
    "": "14 37-38 44 63 66-67 92-93 106-108 121 137 141 152-154 157 160-165 170",
}


def _numbers(spans: str) -> list[int]:
    ends = [[int(number) for number in span.split("-")] for span in spans.split()]
    return [number for end in ends for number in range(end[0], end[-1] + 1)]


XIDS: dict[int, str] = {
    number: status for status, spans in _SPANS.items() for number in _numbers(spans)
}
"""XID -> status; "": harmless. 154 and the NVLink XIDs also need their text: see `xid_status`."""
NVLINK_5 = range(144, 151)
RECOVERY_ACTION_CODE = 154


def xid_status(xid: int, text: str) -> str:
    """The status of an XID, by its number and the lower-case text after it; "": harmless, unknown.
    The text of XIDs 144 to 150 says whether the error is fatal; that of XID 154 names the recovery
    action that the driver requests: any but none means that the node must be drained."""
    if xid in NVLINK_5 and ("nonfatal" in text or "non-fatal" in text):
        return ""
    if xid == RECOVERY_ACTION_CODE:
        _, found, action = text.rpartition(" to ")
        return statuses.GPU_DRIVER_ERRORS if found and "none" not in action[:24] else ""
    return XIDS.get(xid, "")
