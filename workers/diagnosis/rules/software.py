"""Rules for software errors and exited processes: Python, filesystems, launchers."""

import re

from ....events.records import statuses
from .rule import FABRIC, RAISED, TRACE, WRAPPER, Rule, rules

# An exception as Python prints it: a capitalised name, optionally after a prefix or a module.
_EXCEPTION = (
    r"(?:^|[\s\]>|:：│(])(?:(?:[a-z_]\w{0,40}\.){0,8}(?!Lustre)(?=\w{5})_?[A-Z]\w{0,60}"
    r"(?:Error|Exception|Failure|Exit|NotFound|Expired|Exhausted|Mismatch|Invalid)(?::|\(|\s*$)"
    # any class of a module of exceptions: torch._dynamo.exc.Unsupported, triton's OutOfResources
    r"|(?:[a-z_]\w{0,40}\.){1,6}_?(?:exc|errors?|exceptions?)\.[A-Z]\w{3,60}(?::|\(|\s*$))"
    r"|^(?:\[rank\d{1,6}\]: ?)?(?:Exception: (?!ignored|[Nn]one)\S|(?:zlib|struct|binascii|socket|select)\.error: |queue\.(?:Empty|Full)\s*$"
    r"|Stop(?:Async)?Iteration\s*$)"
)

ENDED_RULES = (
    *rules(
        statuses.EXITED_ABNORMALLY,
        WRAPPER,
        (
            (
                "child-ended",
                "processexitedexception|processraisedexception|childfailederror"
                "|signalexception|calledprocesserror|actordiederror|workercrashederror|rayactorerror"
                "|brokenprocesspool|mpi_abort was invoked|exiting improperly|exited due to process rank",
            ),
            (
                "worker-died",
                "died|crash|unexpectedly exit|exited immediately|worker group failed|failed to start"
                "|.py failed",
                r"(?:worker|actor|rank|process|trainer|owner)\w{0,10}(?:'s node)? .{0,40}(?:died"
                r"|crashed)\b(?! ?[=:])|unexpectedly exits|exited immediately|worker group failed|(?:worker|actor"
                r"|rank|process|trainer)\w{0,10} (?:\w{1,12} )?failed to start|\w\.py failed\b(?! ?[=:])",
            ),
            # Kubernetes about a container that ends again and again
            (
                "container-ended",
                "back-off|backoff|crashloop|containererror|containercannotrun|liveness|replica|container"
                "|  error  ",
                r"container (?:rank \d{1,6} status )?failed\b(?! to)|\b\d{1,3}/\d{1,3} {2,}error {2,}\d|back-?off ?limit ?exceeded|failed because \d{1,6} \w{1,20} replica"
                r"|back-?off restarting failed|crashloopbackoff|runcontainererror|containercannotrun"
                r"|fail\w{0,3} (?:liveness|startup) probe, will be restarted",
            ),
            (
                "evicted",
                "evicted|low on resource",
                r"low on resource|reason:? ?evicted|\b(?:pod"
                r"|container|worker)\S{0,40} .{0,60}\bevicted\b|\bevicted\b {2,}\d+ {2,}",
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
                "no space left|quota|enospc|errno 28]|errno 122]|file system is full|disk is full",
                r"no space left|(?:disk |inode |storage )?quota (?:is |was |limit )?exceeded|edquot\b"
                r"|enospc\b|errno (?:28|122)\]|(?:file ?system|disk) is full",
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
                "nfs-state",
                "nfs",
                r"\bnfs4?_\w{1,40}: (?!.{0,40}\b(?:no|0|without) fail).{0,40}"
                r"\bfail(?:ed|ure)\b(?! ?[:=])|\bnfs\w{0,40}.{0,30}reclaim.{0,12} failed\b"
                r"|\bnfs.{0,60}\berror -?[1-9]|\bnfs.{0,40}state manager.{0,40} failed\b",
            ),
            (
                "mount-gone",
                "transport endpoint|lustreerror|fuse|mount",
                r"transport endpoint|lustreerror: |\bfuse\b.{0,40}(?:error|crash)|fail\w{0,4} to mount\b"
                r"|mount process exited|\bmount\.\w{2,12}: .{0,120}(?:fail|timed out|refused|no route"
                r"|not responding)|mountvolume\.\w{1,30} failed|unable to attach or mount volumes",
            ),
            (
                "checkpoint-write",
                "pytorchstreamwriter|unexpected pos|checkpoint",
                r"pytorchstreamwriter failed|unexpected pos \d{1,18} vs \d"
                r"|failed to (?:save|write|upload) .{0,20}checkpoint"
                r"|checkpoint .{0,40}(?:save|write|upload) failed",
            ),
        ),
        can_pass=True,
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        FABRIC,
        (
            (
                "read-only",
                "read-only|erofs",
                r"read-only file ?system|remounting filesystem read-only"
                r"|erofs\b|forced readonly|remounting .{0,30}read-only",
            ),
            (
                "filesystem-damaged",
                "ext4-fs error|xfs|btrfs|structure needs|beyond end of device|corrupt",
                r"ext[234]-fs error|xfs.{0,60}(?:corruption|shut(?:ting)? ?down|metadata (?:i/o|corrupt)|internal error"
                r"|error -?\d)|btrfs.{0,30}(?:error|critical)|structure needs cleaning"
                r"|access beyond end of device",
            ),
            (
                "files-exhausted",
                "file-max|too many open files|emfile|enfile",
                r"file-max limit|too many open files|emfile\b|enfile\b",
            ),
            (
                "checkpoint-io",
                "pytorchstream|inline_container|checkpoint|safetensor|unexpected eof|state_dict|copying a param",
                r"(?:missing|unexpected) key\(s\) in state_dict|size mismatch for \S{1,200}: copying a param"
                r"|pytorchstreamreader failed|enforce fail at inline_container"
                r"|unexpected eof, expected \d{1,18} more bytes"
                r"|(?:corrupt\w{0,4}|invalid|incomplete|truncated) (?:\S{1,20} )?checkpoint"
                r"|checkpoint .{0,60}(?:corrupt|incomplete|truncated)|failed to (?:load|read)"
                r" .{0,20}checkpoint|checkpoint .{0,40}load failed",
            ),
            # a container or a job step that the runtime could not start
            (
                "container-start",
                "oci runtime|shim task|containerd task|runc |pyxis|enroot|spank|nvidia-container-cli"
                "|hooks.d|cdi|podsandbox|pod sandbox|task launch|launch failed|error response from"
                "|fatal:   |start container|select device driver|admissionerror|allocate failed due to",
                r"^fatal: {3}\S|oci runtime (?:create|exec|start) failed|failed to create (?:shim|containerd) task"
                r"|failed to (?:start|create) container|runc (?:create|run) failed"
                r"|\bpyxis: .{0,80}(?:fail|couldn't|\berror\b|cannot|denied)|\benroot\S{0,12}:? .{0,60}"
                r"(?:fail|\berror\b)|spank\w{0,8}[: ].{0,80}fail|spank plugin stack|hooks\.d/\S{1,40} exited"
                r"|nvidia-container-cli\S{0,5}: |failed ?(?:to )?create ?pod ?sandbox|task launch for"
                r" .{0,40} failed|application launch failed|error response from daemon"
                r"|could not select device driver|unexpectedadmissionerror|allocate failed due to",
            ),
            (
                "cufile",
                "cufio|cufile",
                r"\berror +cuf\w{2,4}\S{0,10}:\d|cufile\w{0,24}.{0,20}(?:error|failed)(?! cufile success)",
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
                "sh: |shared object|undefined symbol|glibc|command not found|no module named|no such file"
                "|cannot find -l",
                r"\b(?:ba|da|z)?sh: .{0,200}no such file or directory|cannot open shared object file: no such|undefined symbol|\bld\S{0,5}: cannot find -l"
                r"|execve\(\): .{0,200}no such file"
                r"|glibc\w{0,3}_\d\S{0,12}' not found|command not found|no module named"
                r"|can't open file .{0,200}no such file",
            ),
            # "ptxas fatal   : Value 'sm_120' is not defined", and the same of nvcc and nvlink
            (
                "compiler",
                "ptxas|nvcc|nvlink|fatbinary|cicc|hipcc|collect2|ninja: build|fatal error: |failed: ",
                r"\b(?:ptxas|nvcc|nvlink|fatbinary|cicc|hipcc)\b.{0,200}\b(?:fatal|error) {0,4}:"
                r"|collect2: error|ninja: build stopped|\bfatal error: \S{1,100}: no such file|^failed: \S{1,200}\.s?o\b",
            ),
            # Ascend's codes: a letter for the layer, and the number; EI are the collectives'
            (
                "cann-code",
                "e",
                r"(?:^|[\s\]])e(?:[a-z]\d{4}|\d{5}): \S",
            ),
            # of C, Rust and Go
            (
                "assertion",
                "assertion|panic|check failed: ",
                r"\.(?:c|cc|cpp|cxx|h|hpp):\d{1,6}: .{0,200}\bassertion\b.{0,300}failed|\bassertion failed:"
                r"|\bthread '.{0,60}' panicked at|^panic: |(?:\bf\d{4} \d\d:\d\d:|(?:^|[\s:])f \S{1,100}\.cc:).{0,200}\] check failed: ",
            ),
            (
                "permission-denied",
                "permission denied|eacces|not permitted|host key",
                r"permission denied|eacces\b|operation not permitted|host key verification failed",
            ),
            (
                "memory-short",
                "cannot allocate memory|bad_alloc|enomem|defaultcpuallocator|unable to allocate"
                "|temporarily unavailable|omp: error|start new thread|thread creation",
                r"\bomp: error #\d|can't start new thread|thread creation failed|\b(?:fork|pthread_create|thread|clone)\b.{0,80}resource temporarily unavailable|cannot allocate memory|unable to allocate [\d.]{1,12} ?.i?b\b|std::bad_alloc|enomem\b|defaultcpuallocator: can",
            ),
            (
                "size-mismatch",
                "size mismatch|shape|mismatch",
                r"size mismatch for|shape mismatch"
                r"|collectives? .{0,60}mismatch|mismatch between collective",
            ),
        ),
    ),
    # CUDA's and ROCm's libraries by a status or a text alone; rules/hardware.py has the statuses by name.
    # At this depth a library that is left for another is harmless.
    *rules(
        statuses.CUDA_ERRORS,
        RAISED,
        (
            (
                "gpu-library",
                "cublas|cudnn|cufft|cusparse|cusolver|curand|cutlass|cutensor|nvrtc|nvjitlink|hipblas"
                "|hipfft|hipsparse|hiprand|rocblas|miopen|rccl_status|nvml",
                r"\b(?:cu(?:blas|dnn|fft|sparse|solver|rand|tensor)|nvrtc|nvjitlink|hip(?:blas|fft|sparse|rand)"
                r"|rocblas|miopen)\w{0,40}\b(?:\(.{0,60}\))?[^,;]{0,24}(?:(?<!tests )\bfailed\b(?! to (?:load|find|open|import)| (?:tests?|count|cases?)|\s?[:=]\s?0)"
                r"|ran into an error|\berror:? (?:code |status )?[1-9]\d{0,3}\b(?!\.)|\breturned (?:status |error )?[1-9])"
                r"|\b(?:cublas|cudnn|cufft|cusparse|cusolver|hipblas)(?:lt)? ?status\W{1,3}[1-9]"
                r"|\bcutlass (?:cannot|failed)|\bnvmlerror_(?!notsupported)\w|\bnvml_error_(?!not_supported)\w"
                r"|\bnvml[a-z]\w{4,40}(?:\(.{0,60}\))? failed",
            ),
            (
                "cuda-driver-call",
                "culaunch|cumodule|cumem|cuctx|custream|cuevent|cudevice|cufunc|cutensormap|cuinit|cuget"
                "|curesult|kernel launch failed|hip",
                r"\bcu(?:launch|module|mem|ctx|stream|event|device|func|tensormap|init|get)[a-z0-9_]{0,40}"
                r"(?:\(.{0,60}\))? (?:failed|returned (?:error |cuda_)?[1-9])|\bcuresult\W{1,3}[1-9]"
                r"|\bkernel launch failed\b(?! count)"
                r"|\bhip(?:graph|module|launch|mem|malloc|stream|event|device)[a-z]{0,30}(?:\(.{0,60}\))? failed\b",
            ),
            # cudaGetErrorString's texts
            (
                "cuda-told",
                "gpuassert: |no kernel image is available|too many resources requested for launch|invalid device ordinal"
                "|device kernel image is invalid|an illegal instruction was encountered|hardware stack error"
                "|launch timed out and was terminated|invalid device function",
                r"^(?!.{0,400}(?:skipping|invalid device ordinal -?\d))",
            ),
            ("c10-cuda-raised", "exception raised from c10_cuda_check"),
            ("tensorrt", "error code", r"\berror code \d{1,2}: (?:cuda|cublas|cudnn|myelin)"),
        ),
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        RAISED,
        (
            # DeepSpeed's ZeRO-3, when the ranks' modules run in another order than traced
            ("zero-trace", "in the parameter fetch queue to be"),
            ("torch-assert", "internal assert failed"),
        ),
    ),
    Rule(
        statuses.OTHER_SOFTWARE,
        "exception",
        RAISED,
        (
            "error",
            "exception",
            "failure",
            "exit",
            "notfound",
            "expired",
            "exhausted",
            "mismatch",
            "invalid",
            "exc.",
            "queue.",
            "stop",
        ),
        re.compile(_EXCEPTION),
    ),
    *rules(
        statuses.EXITED_ABNORMALLY,
        WRAPPER,
        (
            (
                "signal",
                "signal|sig|fatal python|failing at address|killed|code=dumped|aborted|core dumped|dumped core|code 1|exitcode|terminate called"
                "|wterm",
                r"exit ?code\s{0,3}:?\s{0,3}-\d|exit (?:code|status):? (?:13[4-9]|14[0-3])\b|(?:killed"
                r"|terminated|died|interrupted|exited|ended)\W{0,3}.{0,30}(?:by|with"
                r"|on) .{0,12}sig(?:nal)?|signal:? (?:[469]|11|7)\b|\bsig(?:kill|abrt|quit|hup|xcpu)\b"
                r"|code=(?:killed|dumped)|wtermsig [1-9]|core dumped|dumped core|fatal python error|terminate called"
                # Open MPI of a crashed rank
                r"|process received signal|\] signal code: \w|failing at address: 0x"
                # a shell and srun print the word alone, after a colon or a process's number
                r"|(?:^|[:\]>] ?)\s{0,20}(?:\d{1,9} )?killed\s{0,4}(?:$|\.|[:(] ?[\w(])|\d {1,8}killed {2,}\S"
                r"|\bkilled (?:as a result|process \d)|(?:^|[:\]>)] ?|\*{3} |\d )\s{0,20}aborted\b\s{0,4}"
                r"(?:$|[(.!]|at \d)|\d {1,8}aborted {2,}\S|\b(?:job|task|process|program|rank \d{1,6})"
                r" (?:has been |was |is |got )?aborted\b|got (?:a )?(?:fatal )?signal\b",
            ),
            (
                "exit-code",
                "exit|returned non-zero|non-zero status|return code",
                r"exit ?code\s{0,3}:?\s{0,8}[1-9]\d{0,2}\b|exited with (?:exit )?(?:code|status) ?[1-9]"
                r"|exit status:? [1-9]|exited with [1-9]|return ?code ?[:=]? ?-?[1-9]"
                r"|non-?zero (?:exit )?(?:status|code)|exit code:? [1-9]",
            ),
            # multiprocessing, Lightning, Ray, vLLM, systemd about a process of theirs
            (
                "process-ended",
                "terminated with|unexpectedly|abnormally|prematurely|abruptly|process-|code=exited|fatal error"
                "|exited",
                r"-- process \d{1,6} terminated with|\bterminated with (?:exit )?(?:code|status):? -?[1-9]"
                r"|\b(?:exited|terminated|ended|stopped|quit) (?:unexpectedly|abnormally|prematurely|abruptly)"
                r"|^\W{0,4}process \w{0,20}process-[\d:]{1,12}:\s*$|code=exited, status=[1-9]"
                r"|\bencountered a fatal error|first task exited \d",
            ),
            # launchers, schedulers and trainers about the job
            (
                "job-failed",
                "failed|crashed|task failure|errored|mpi|bad termination|srun: fatal|make: |make[|exception in thread"
                "|hit an exception|backoff limit",
                r"^(?:.{0,200}[\]:>*)] ?)?(?:the )?(?:job|training|run|experiment|pipeline|task|trial|workflow)"
                r" (?:job |run |process |loop |'\S{1,80}' |has ){0,2}(?:failed|crashed)(?:\s*$|[.!:,](?! ?0)| with"
                r" (?:an )?(?:exception|error)| due to)|job has reached the specified backoff limit"
                r"|\btrial task failed|\btrial \S{1,60} errored|due to task failure"
                r"|\bengine ?core\w{0,8} (?:initialization failed|failed to start)|engine core initialization failed"
                r"|called mpi_abort\(|bad termination of one of your|\bfatal error in (?:p?mpi_|internal_)\w"
                r"|root cause \(first observed failure\)|\bsrun: fatal: "
                r"|\bmake(?:\[\d\])?: \*{3} .{1,200}(?:error [1-9]|stop\.)"
                r"|exception in thread (?:\"|thread-\d|\S{1,60}:\s*$)|\bhit an exception\b(?! handler)"
                r"|\b(?:finished|ended|failed) with status:? failed\b|\bjobstate=failed\b",
            ),
            (
                "worker-dead",
                "dead|killed",
                r"^(?!.{0,400}\b(?:if|when|unless) ).{0,4000}?(?:worker|actor|rank|process|trainer|job"
                r"|\btask|\bpod|container|pid)\w{0,10} .{0,40}(?:is dead(?!: ?[0f])|(?:was|been|got|being) killed"
                r"(?! by user))",
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
                r"|in case|where|falls? ?back|falling back|retrying|skipping)\b).{0,4096}?(?:(?:\b[nr]ccl|rdma"
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
                r"(?:^|(?<!rpc)[\s\[(])(?:fatal )?error[:\])].{0,120}(?:fail|cannot|can't"
                r"|unable|invalid|not found|expired|missing|unknown|unexpected|abort)",
            ),
        ),
    ),
)
"""Only the pattern of `exception` sees the original line: class names are capitalised."""
