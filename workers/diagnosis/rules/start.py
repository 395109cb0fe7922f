"""Rules for a start that fails: launchers, command lines, ports in use, images, shared memory."""

from ....events.records import statuses
from .rule import FABRIC, RAISED, rules

START_RULES = (
    *rules(
        statuses.OTHER_SOFTWARE,
        FABRIC,
        (
            # a registry may be away for a while; the reason that follows is the registry's
            (
                "image-pull",
                "imagepull|errimage|pull image|pulling image|pull access denied|manifest unknown"
                "|manifest for|invalidimagename|image reference",
                r"imagepullbackoff|errimage(?:never)?pull|invalidimagename|couldn't parse image reference|(?:failed to|error) pull(?:ing)?"
                r" image|pull access denied|manifest unknown|manifest for \S{1,200} not found",
            ),
            # NCCL, torch and Open MPI map memory that the processes of a node share
            (
                "shared-memory",
                "shared memory|/dev/shm|shm_open|shmget|shmat",
                r"(?:error|fail\w{0,4}|unable|cannot|could not).{0,40}(?:shared memory (?:segment"
                r"|file|object|region)|/dev/shm/)|\b(?:shm_open|shmget|shmat)\b.{0,40}(?:fail|error)",
            ),
        ),
        can_pass=True,
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        RAISED,
        (
            # what pdsh, mpirun and DeepSpeed's runner reach the nodes by
            (
                "ssh",
                "ssh: |ssh_exchange|kex_exchange|host key verification",
                r"\bssh: (?:connect to host|could not resolve hostname)"
                r"|\b(?:ssh|kex)_exchange_identification: |host key verification failed",
            ),
            # the old process may still hold its port
            ("address-in-use", "in use|eaddrinuse", r"address already in use|eaddrinuse"),
        ),
        can_pass=True,
    ),
    *rules(
        statuses.OTHER_SOFTWARE,
        FABRIC,
        (
            # Open MPI's and PRRTE's help texts; Slurm's answers to a request
            (
                "launcher",
                "slots available|reliably start|was unable to|executable file|mpi_init|orte_init"
                "|prte_init|no executable|already filled|submission failed|unable to allocate"
                "|unable to create step|unable to create job|raylet",
                r"not enough slots available in the system|failed to (?:register worker to|launch local) raylet|(?:orte|prte|mpi\w{2,4}|prterun|orterun|open mpi) was unable to (?:reliably start|launch"
                r"|start|find the specified executable)|unable to find the specified executable"
                r"|it looks like \w{3,8}_init failed|no executable was specified|all nodes which are"
                r" allocated for this job are already filled|batch job submission failed|(?:srun"
                r"|salloc|sbatch): error: unable to (?:allocate resources|create (?:step|job))",
            ),
            # argparse, click, absl, getopt, gflags, Hydra: of every program the same words
            (
                "usage",
                "error: |unrecognized|unknown|invalid option|no such option|missing option|overrid"
                "|got unexpected extra",
                r"(?:^|[\])>] ?)\S{1,80}: error: (?:unrecognized arguments|the following arguments are"
                r" required|argument \S|ambiguous option|one of the arguments|expected (?:one|at least)"
                r"|too few arguments|invalid choice)|(?:^|\s)error: (?:no such option|missing"
                r" (?:option|argument|parameter)|invalid value for|no such command|got unexpected extra)"
                r"|flags parsing error|unknown command[- ]line flag|\bunrecognized option\b"
                r"|(?:^|\s)\S{1,80}: (?:unknown|invalid|illegal) option\b|could not override '",
            ),
            # Hydra and OmegaConf, about a configuration or a class that it names
            (
                "hydra",
                "error executing job|error locating target|error in call to target|error merging"
                "|error instantiating|error parsing override|primary config|is not in struct",
                r"\berror (?:executing job with overrides: |locating target '|in call to target|merging override"
                r"|instantiating|parsing override)|primary config \w{4,10} not found|key '\S{1,80}' is not in"
                r" struct",
            ),
            # the runtimes below Open MPI; that they do not reach each other is mpi-transport
            (
                "mpi-runtime",
                "orte_error_log|prte error|opal error|fatal error in |error occurred in mpi",
                r"\b(?:orte_error_log|prte error|opal error): (?!unreach|lost|timeout)\w"
                r"|\bfatal error in p?mpi_init|\*{3} an error occurred in p?mpi_",
            ),
            (
                "sandbox-runtime",
                "sandbox runtime|no runtime for",
                r"failed to get sandbox runtime|no runtime for .{1,40} is configured",
            ),
        ),
    ),
    *rules(
        statuses.CUDA_ERRORS,
        FABRIC,
        (
            # AWS Neuron's runtime; its NRT_EXEC_HW_ERR is a lost device
            (
                "neuron-runtime",
                "nrt_",
                r"\bnrt_[a-z]\w{2,30}\b.{0,60}\bfailed to\b|\bstatus ?= ?nrt_(?!success|exec_hw)\w",
            ),
            # Ascend: the runtime's 5070xx, and what a core of the device met
            (
                "npu-core",
                "core exception|core timeout|core time out|execute failed|runtime result"
                "|error code is|aicpu",
                r"(?:vector|cube|aicore|ai|aicpu|mix) ?core (?:exception|time ?out)"
                r"|(?:runtime result =|error code is) 5070(?!10|5[3-6])\d\d\b|\brt[a-z]\w{2,40} execute failed"
                r"(?!.{0,60}(?:stream sync timeout|lost heartbeat))|\baicpu (?:exception|timeout)",
            ),
        ),
    ),
)
"""Tried before the rules of the network: a start is not mended by new connections."""
