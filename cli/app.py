"""The command table of `unicron`: options and help; each command imports its code when called."""

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.exceptions import Abort, TyperException

from ..events.errors import UnicronError, UsageError
from .terminal import console
from .terminal.options import (
    Ca,
    Checks,
    ChecksEvery,
    Form,
    Insecure,
    NodeArg,
    NodesArg,
    ProbePort,
    Reason,
    Since,
    SlotsArg,
    State,
    TaskArg,
    TasksArg,
    Url,
    complete_tasks,
    folder,
)

ALIASES = {
    "get": ["status"],
    "list": ["status"],
    "describe": ["status"],
    "top": ["status", "-w"],
    "cordon": ["drain"],
    "uncordon": ["undrain"],
}
"""What people of kubectl and Slurm type first, and what it means here."""
EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

app = typer.Typer(
    name="unicron",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="The self-healing control plane for large-model training.",
    epilog="A first look: unicron up, and in a second terminal "
    "unicron submit deploy/examples/demo.yaml.",
)
inject = typer.Typer(help="Inject a fault (up --allow-inject).")
token = typer.Typer(help="Tokens: who may do what on the cluster.")
certs = typer.Typer(help="A certificate, for those who have none.")
sealed = typer.Typer(help="The sealed log: segment files and snapshots; and its dead letters.")
model = typer.Typer(help="The model that a task has trained; needs no cluster, no GPU.")
slurm = typer.Typer(help="A cluster on nodes of Slurm (deploy/slurm).")
file_tools = typer.Typer()
# The help lists these groups in this order, after the commands of `app`.
app.add_typer(inject, name="inject")
app.add_typer(token, name="token")
app.add_typer(certs, name="certs")
app.add_typer(sealed, name="log")
app.add_typer(model, name="model")
app.add_typer(slurm, name="slurm")
app.add_typer(file_tools)

STATE: dict[str, tuple[Any, object]] = {"state": (State, None)}
CA: dict[str, tuple[Any, object]] = {"ca": (Ca, None)}
INSECURE: dict[str, tuple[Any, object]] = {"insecure": (Insecure, False)}
TARGET = STATE | {"url": (Url, None)} | CA | INSECURE
OUTPUT: dict[str, tuple[Any, object]] = {"output": (Form, "text")}


def calls(
    group: typer.Typer,
    function: str,
    shared: Mapping[str, tuple[Any, object]] = (TARGET | OUTPUT),
    *,
    name: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command of the group with the options of the decorated function, which has no body, and
    with the `shared` ones. It calls `function`, a path below cli/, imported only then."""

    def declare(declared: Callable[..., None]) -> Callable[..., None]:
        def command(**given: Any) -> object:
            for stored in ("ca", "insecure"):  # by the options themselves
                given.pop(stored, None)
            if "state" in given:
                given["state"] = folder(given["state"])
            if "output" in given:
                form = given.pop("output")
                given["as_json"] = console.structured(form)
                given |= {"wide": True} if form == "wide" else {}
            module, _, called = function.rpartition(".")
            try:
                code: object = getattr(import_module(f".{module}", __package__), called)(**given)
            except UnicronError as error:
                error.hint = _addressed(error.hint, given.get("state"))
                raise
            return code

        signature = inspect.signature(declared, eval_str=True)
        vars(command)["__signature__"] = signature.replace(
            parameters=[
                *signature.parameters.values(),
                *(
                    inspect.Parameter(
                        option, inspect.Parameter.KEYWORD_ONLY, default=usual, annotation=annotation
                    )
                    for option, (annotation, usual) in shared.items()
                ),
            ]
        )
        group.command(name or declared.__name__, help=declared.__doc__)(command)
        return declared

    return declare


def _addressed(hint: str, state: Any) -> str:
    """The hint; if a command in it would go to the default cluster, with this command's folder."""
    from .commands.tasks import option_for

    option = option_for(state).strip() if state is not None else ""
    is_other = option and re.search(r"\bunicron [a-z]", hint) and "--state" not in hint
    return f"{hint} (with {option})" if is_other else hint


NOTIFY = "Send what needs a person to the webhook whose URL this file has"


@app.command()
def up(
    state: State = None,
    agents: Annotated[
        int | None, typer.Option(min=0, max=64, metavar="N", help="Agents (nodes) to run here [2].")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, max=64, metavar="K", help="Slots (GPUs) of each agent [2].")
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar="UNICRON_REDIS_URL",
            show_envvar=False,
            help="Your own Redis or Valkey [$UNICRON_REDIS_URL, else a private server].",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, metavar="PORT", help="HTTP port, 0: any free one [0]."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="The cluster's name [default].")
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Limits and priors, as YAML; an empty file: the defaults. The folder "
            "keeps a copy [the last one given].",
        ),
    ] = None,
    observe: Annotated[
        bool,
        typer.Option(
            "--observe", help="Decide and log everything, but give no orders [as the last time]."
        ),
    ] = False,
    act: Annotated[
        bool,
        typer.Option(
            "--act", help="Give orders, unlike --observe [as the last time; at first on]."
        ),
    ] = False,
    allow_inject: Annotated[
        bool,
        typer.Option("--allow-inject", help="Let unicron inject cause faults; never remembered."),
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NODE:]KEY=VALUE",
            help="rack or switch of all nodes here, or of one node; may be "
            "repeated; none: forget them [the last ones given].",
        ),
    ] = None,
    no_watch: Annotated[
        bool,
        typer.Option("--no-watch", help="Do not monitor the progress of ranks; never remembered."),
    ] = False,
    control_planes: Annotated[
        int | None,
        typer.Option(
            "--control-planes",
            min=1,
            max=5,
            metavar="N",
            help="Control planes: one leads, the others "
            "follow, and one of them takes over [as the last time; at first 1].",
        ),
    ] = None,
    run_as: Annotated[
        str | None,
        typer.Option(
            "--run-as",
            metavar="USER",
            help="Run ranks as this user, with no way to the cluster's "
            "secrets; none: as yourself [the last one given].",
        ),
    ] = None,
    checks: Annotated[
        Path | None,
        typer.Option(
            "--checks",
            metavar="DIR",
            help="Your own checks of the nodes, as of unicron agent; none: "
            "forget them [the last ones given].",
        ),
    ] = None,
    checks_every: Annotated[
        float | None,
        typer.Option(min=1, metavar="S", help="Seconds between two runs of each check [60]."),
    ] = None,
    notify: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"{NOTIFY}; none: send none [the last one given]."),
    ] = None,
    shared_password: Annotated[
        bool,
        typer.Option(
            "--shared-password",
            help="With --redis: let agents use the server with the password of "
            "the URL, if it does not let users be made; never remembered.",
        ),
    ] = False,
    ca: Ca = None,
    insecure: Insecure = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Run it in the background.")
    ] = False,
) -> None:
    """Start a cluster on this machine; Ctrl-C stops it."""
    from ..events.secret_environment import REDIS_URL, remove_secrets
    from .commands import up as command

    remove_secrets(REDIS_URL)  # given only to the processes that need it
    if observe and act:
        raise UsageError("--observe and --act do not go together", "give one of them, or neither")
    command.up(
        folder(state),
        command.UpOptions(
            num_agents=agents,
            num_slots=slots,
            redis_url=redis,
            port=port,
            cluster=cluster,
            policy=policy,
            observe=observe if observe or act else None,
            allow_inject=allow_inject,
            watch=not no_watch,
            labels=() if label == ["none"] else tuple(label or ()) or None,
            checks=command.kept(checks),
            checks_every_s=checks_every,
            shared_password=shared_password,
            insecure=insecure,
            run_as="" if run_as == "none" else run_as,
            num_control_planes=control_planes,
            notify=command.kept(notify),
        ),
        detach=detach,
    )


@calls(app, "commands.up.down", STATE)
def down() -> None:
    """Stop the cluster of this machine; its log stays."""


@calls(app, "commands.serve.agent", TARGET)
def agent(
    node: Annotated[str, typer.Option(metavar="NAME", help="This node's name [the host's].")] = "",
    slots: Annotated[
        int, typer.Option(min=0, max=64, metavar="K", help="Slots here; 0: one for each GPU.")
    ] = 0,
    advertise: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS|INTERFACE",
            help="Where other nodes reach the ranks of this one [the "
            "address from which it reaches the control plane].",
        ),
    ] = "",
    host: Annotated[str, typer.Option("--host", hidden=True)] = "",  # the name before 0.3
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="The place of this node: rack=NAME or switch=NAME; may be repeated.",
        ),
    ] = None,
    redis: Annotated[
        str,
        typer.Option(
            metavar="URL",
            envvar="UNICRON_REDIS_URL",
            show_envvar=False,
            help="The log, if this node cannot use the address that the control plane gives "
            "[$UNICRON_REDIS_URL].",
        ),
    ] = "",
    no_watch: Annotated[
        bool,
        typer.Option(
            "--no-watch",
            help="Do not monitor the progress of ranks: no stall, no straggler is reported.",
        ),
    ] = False,
    probe_port: ProbePort = None,
    checks: Checks = None,
    checks_every: ChecksEvery = 60,
    checks_limit: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds that one run may take.")
    ] = 30,
    run_as: Annotated[
        str,
        typer.Option(
            "--run-as",
            metavar="USER",
            help="Run ranks as this user, with no way to the agent's "
            "secrets [the agent's: ranks are then trusted as the operator].",
        ),
    ] = "",
    kubernetes: Annotated[
        str,
        typer.Option(
            "--kubernetes",
            metavar="NAME",
            help="This node's name in Kubernetes: its labels are rack "
            "and switch, its conditions and taints are checks.",
        ),
    ] = "",
    drain_limit: Annotated[
        float,
        typer.Option(
            "--drain-limit",
            min=0,
            metavar="S",
            help="At SIGTERM drain this node first, and wait so "
            "many seconds at most until its ranks have left [0: end them at once].",
        ),
    ] = 0,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Have the running agent of this node execute itself again, as after an "
            "upgrade. Its ranks run on.",
        ),
    ] = False,
) -> None:
    """Run the agent of one node; it joins the control plane by HTTP."""


@calls(app, "commands.serve.control_plane", STATE | CA | INSECURE, name="control-plane")
def control_plane(
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS|INTERFACE",
            help="Where it listens; beyond this machine also at the next port, for the log.",
        ),
    ] = "127.0.0.1",
    advertise: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where other hosts reach it [where it listens].")
    ] = "",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65534, metavar="PORT", help="0: any, but 8420 beyond this machine."
        ),
    ] = 0,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Its certificate for https://, and after it that of the authority."
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    cluster: Annotated[str, typer.Option(metavar="NAME")] = "default",
    policy: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    observe: Annotated[bool, typer.Option("--observe")] = False,
    allow_inject: Annotated[bool, typer.Option("--allow-inject")] = False,
    shared_password: Annotated[bool, typer.Option("--shared-password")] = False,
    segments: Annotated[
        str,
        typer.Option(
            metavar="FOLDER|URL", help="Where the sealed log is kept [log in the state folder]."
        ),
    ] = "",
    notify: Annotated[Path | None, typer.Option(metavar="FILE", help=f"{NOTIFY}.")] = None,
    name: Annotated[str, typer.Option(hidden=True)] = "control-plane",  # `up` has several
) -> None:
    """Run the control plane of several hosts; `up` is for one machine.

    The log is on a private server, or on that of $UNICRON_REDIS_URL. If another control plane of
    the log leads, this one follows.
    """


@app.command()
def submit(
    jobs: Annotated[
        list[Path], typer.Argument(metavar="JOB.yaml...", help="Job specs; -: standard input.")
    ],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only show the layout, the speed and the memory for numbers of "
            "slots, and with a cluster the plan that would follow.",
        ),
    ] = False,
    state: State = None,
    url: Url = None,
    ca: Ca = None,
    insecure: Insecure = False,
    output: Form = "text",
) -> None:
    """Submit tasks. While `up` starts, it waits."""
    from .commands import submit_dry_run, tasks

    as_json = console.structured(output)
    if not dry_run:
        tasks.submit(folder(state), url, jobs, as_json=as_json)
        return
    for number, job in enumerate(jobs):
        console.lines([""] * bool(number and not as_json))
        submit_dry_run.dry_run(folder(state), url, job, as_json=as_json)


@calls(app, "commands.status.status", TARGET)
def status(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|PATTERN|tasks|nodes",
            autocompletion=complete_tasks,
            help="A task's name or id, a pattern of names, or the word tasks or nodes.",
        ),
    ] = "",
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh every second.")] = False,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="SEQ|TIME",
            help="As it was after that record, or at that time, for example 2026-11-27T02:10:00Z.",
        ),
    ] = "",
    only: Annotated[
        Literal[
            "waiting",
            "starting",
            "running",
            "degraded",
            "healing",
            "saving",
            "finishing",
            "finished",
            "failed",
            "cancelled",
        ]
        | None,
        typer.Option("--only", help="Only tasks in this state."),
    ] = None,
    output: Annotated[
        Literal["text", "wide", "json", "yaml"],
        typer.Option("-o", "--output", help="text, wide: more columns of tasks, or json or yaml."),
    ] = "text",
) -> None:
    """Show the cluster, one task, or all tasks or nodes."""


@calls(app, "commands.tail.tail", TARGET)
def tail(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new records as they arrive.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, metavar="SEQ", help="Only after this seq.")] = 0,
    since: Since = None,
    kind: Annotated[
        list[str] | None, typer.Option(metavar="K", help="Only this kind; may be repeated.")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="T", help="Only this task.")] = None,
    node: Annotated[str | None, typer.Option(metavar="N", help="Only this node.")] = None,
    incident: Annotated[str | None, typer.Option(metavar="I", help="Only this incident.")] = None,
    output: Annotated[
        Literal["text", "json", "jsonl", "yaml"],
        typer.Option("-o", "--output", help="text, yaml, or jsonl: one JSON object a line."),
    ] = "text",
) -> None:
    """Read the log: one record a line."""


@calls(app, "commands.incident.incident")
def incident(
    which: Annotated[
        str,
        typer.Argument(
            metavar="ID", help="For example 41 or inc-41 [the newest].", show_default=False
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="One line for each.")] = False,
    since: Since = None,
) -> None:
    """Show a fault: evidence, decision, plans, phases, cost, remaining steps."""


@calls(app, "commands.history.history")
def history(
    since: Since = None,
) -> None:
    """Show by day what slots were used for, and lost to faults; also MTBF and WAF."""


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def megatron(
    script: Annotated[
        Path,
        typer.Argument(
            metavar="SCRIPT", help="A pretraining script in a clone of Megatron-LM, unmodified."
        ),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS...", help="The arguments of the script.", show_default=False),
    ] = None,
) -> None:
    """Run Megatron-LM's pretrain_gpt.py: as a job's command it heals in memory.

    Without an agent the script runs unchanged.
    """
    from .commands import megatron as command

    command.megatron(script, words or ())


@calls(app, "commands.tasks.cancel")
def cancel(
    task: TasksArg,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; it goes into the log.")] = "",
) -> None:
    """Cancel tasks."""


@calls(app, "commands.tasks.wait")
def wait(
    task: TasksArg,
    until: Annotated[
        Literal["running", "healed", "finished"],
        typer.Option("--for", help="healed: it runs, and no incident of it is open."),
    ] = "finished",
    timeout_s: Annotated[
        float | None,
        typer.Option("--timeout", min=0, metavar="S", help="Fail after so many seconds [never]."),
    ] = None,
) -> None:
    """Wait until tasks run, have healed or have finished; exits with 1 if one cannot any more."""


@calls(app, "commands.logs.logs", TARGET)
def logs(
    task: TaskArg,
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new lines as they arrive.")
    ] = False,
    lines: Annotated[
        int | None,
        typer.Option("--tail", min=0, metavar="N", help="Only the last N lines of each attempt."),
    ] = None,
    since: Since = None,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of each rank the attempt before the newest.")
    ] = False,
) -> None:
    """Show what a task's ranks printed, from the files here or by the agents of other hosts.

    Lines have no times: --since leaves out attempts that ended before.
    """


@calls(app, "commands.replay.replay")
def replay(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="FILE|DIR", help="An exported log, or a state folder."),
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="The running cluster's log.")] = False,
    until: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Stop after it.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Decide again and compare.")] = False,
    incident: Annotated[
        str | None, typer.Option("--incident", metavar="ID", help="Show this incident's page.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            metavar="A B",
            help="Compare the digests of the tasks of two files, or of two "
            "tasks of FILE or --live.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fold a log to its final state; needs no server and no torch."""


@calls(app, "commands.replay.export", TARGET)
def export(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; must not exist.")],
) -> None:
    """Write the running cluster's log to a file, as JSON lines."""


PrintOnly = Annotated[bool, typer.Option("--print", help="Only print the URL.")]


@calls(app, "commands.dashboard.open_page", TARGET, name="open")
def open_page(
    role: Annotated[
        Literal["view", "operate"],
        typer.Option(help="What the browser may do, at most what your token may."),
    ] = "operate",
    print_only: PrintOnly = False,
) -> None:
    """Open the dashboard in a browser, by a URL that works once, within a minute."""


@calls(app, "commands.dashboard.view", {})
def view(
    path: Annotated[
        Path, typer.Argument(metavar="FILE|DIR", help="An exported log, or a state folder.")
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 0,
    print_only: PrintOnly = False,
) -> None:
    """Show a log in a browser, as the dashboard showed it; needs no cluster."""


@calls(app, "commands.doctor.doctor", STATE | OUTPUT)
def doctor(
    only_support: Annotated[
        bool,
        typer.Option(
            "--support", help="Only list which features of Megatron heal in memory, and why."
        ),
    ] = False,
) -> None:
    """Check what this machine provides and lacks; list what heals in memory."""


OfflineFile = Annotated[
    Path | None,
    typer.Option(
        "--offline",
        metavar="FILE",
        help="Plan the tasks of this file, YAML or JSON, without a cluster; -: standard input.",
    ),
]
PlanSeq = Annotated[
    int | None,
    typer.Option(
        "--seq", min=1, metavar="N", help="The plan that was in force after record N of the log."
    ),
]


@app.command()
def plan(
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without", metavar="NODE", help="Dry run: the node is drained; may be repeated."
        ),
    ] = None,
    slots: Annotated[
        list[int] | None,
        typer.Option(
            "--with",
            min=1,
            max=100_000,
            metavar="N",
            help="Dry run: N more slots (GPUs), in new nodes of the most common size.",
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="TASK=W", help="Dry run: the task has weight W; may be repeated."
        ),
    ] = None,
    submit: Annotated[
        Path | None,
        typer.Option("--submit", metavar="JOB.yaml", help="Dry run: this job is submitted."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Apply the dry run, if --check still matches.")
    ] = False,
    check: Annotated[
        int | None,
        typer.Option(
            "--check",
            min=0,
            metavar="INPUT",
            help="The input that the dry run printed: if it has changed since, nothing is done.",
        ),
    ] = None,
    offline: OfflineFile = None,
    seq: PlanSeq = None,
    reason: Reason = "",
    state: State = None,
    url: Url = None,
    ca: Ca = None,
    insecure: Insecure = False,
    output: Form = "text",
) -> None:
    """Show which task gets how many GPUs, why, and the alternatives; or a dry run."""
    from .commands import plan as commands_plan
    from .commands import plan_offline

    if len(slots or ()) > 1:
        raise UsageError("--with is given more than once", "give the sum of them")
    asked = commands_plan.PlanOptions(
        without=tuple(without or ()),
        slots=slots[0] if slots else None,
        weights=tuple(weight or ()),
        submit=submit,
        apply=apply,
        check=check,
        seq=seq,
        reason=reason,
    )
    if offline is not None:
        if asked != commands_plan.PlanOptions() or url or ca or state is not None:
            raise UsageError("--offline goes with -o alone", "unicron plan --offline FILE")
        plan_offline.plan(offline, as_json=console.structured(output))
        return
    commands_plan.plan(folder(state), url, asked, as_json=console.structured(output))


RankArg = Annotated[
    int | None,
    typer.Argument(
        min=0, metavar="RANK", help="Its rank [the highest that trains].", show_default=False
    ),
]


@calls(app, "commands.operate.set_weight", name="set-weight")
def set_weight(
    task: TaskArg,
    weight: Annotated[
        float,
        typer.Argument(
            metavar="WEIGHT", help="Only its ratio to other tasks' weights matters; 1 is usual."
        ),
    ],
    reason: Reason = "",
) -> None:
    """Set the weight of a task; a new plan follows."""


@calls(app, "commands.operate.move_checkpoints", name="checkpoint")
def checkpoint(
    task: TaskArg,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FOLDER|URL",
            help="Where its checkpoints go from now on; what is published stays where it is.",
        ),
    ],
    reason: Reason = "",
) -> None:
    """Save a task's checkpoints to another folder, for example if the disk is full."""


@calls(app, "commands.operate.drain")
def drain(
    node: NodesArg,
    down: Annotated[
        bool,
        typer.Option(
            "--down", help="The machine is off: tasks that were only there start elsewhere."
        ),
    ] = False,
    reason: Reason = "",
) -> None:
    """Remove the tasks from nodes; no iteration is lost."""


@calls(app, "commands.operate.undrain")
def undrain(node: NodesArg, reason: Reason = "") -> None:
    """Allow tasks on drained nodes again."""


@calls(app, "commands.operate.lift")
def lift(node: SlotsArg, reason: Reason = "") -> None:
    """Give back what failed: slots as n1/0, after a check of the device, or all of a node and its
    quarantine."""


@calls(app, "commands.operate.ack")
def ack(incident: Annotated[str, typer.Argument(metavar="INCIDENT")], reason: Reason = "") -> None:
    """Say that you know of an incident: it no longer needs a person."""


@calls(app, "commands.operate.freeze")
def freeze(reason: Reason = "") -> None:
    """Pause healing: decide and log, order nothing."""


@calls(app, "commands.operate.unfreeze")
def unfreeze(reason: Reason = "") -> None:
    """Resume healing, and act on the faults since the freeze."""


@calls(app, "commands.operate.handover")
def handover() -> None:
    """Let another control plane lead, as before an upgrade of this one's host."""


@calls(inject, "commands.operate.inject_rank", name="rank")
def inject_rank(task: TaskArg, rank: RankArg = None, reason: Reason = "") -> None:
    """Kill one rank of a task."""


@calls(inject, "commands.operate.inject_rank", name="stop")
def inject_stop(
    task: TaskArg,
    rank: RankArg = None,
    stop_s: Annotated[
        float,
        typer.Option(
            "--for",
            min=0.0,
            max=86_400.0,
            metavar="S",
            show_default=False,
            help="Continue the rank after this many seconds [never].",
        ),
    ] = 0.0,
    reason: Reason = "",
) -> None:
    """Stop one rank of a task where it is, so that it hangs."""


@calls(inject, "commands.operate.inject_node", name="node")
def inject_node(node: NodeArg, reason: Reason = "") -> None:
    """Kill a node's agent with all its ranks."""


TokenArg = Annotated[
    str, typer.Argument(metavar="NAME", help="The name of a token, or of an enrolled node.")
]


@calls(token, "commands.token.create", name="create")
def token_create(
    role: Annotated[
        Literal["view", "operate", "admin"] | None,
        typer.Option(
            "--role",
            help="view: read. operate: also submit, cancel, drain, weights, freeze. admin: "
            "also tokens, agents that join, injected faults.",
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="For a new host: print the command that starts its agent."),
    ] = False,
    node: Annotated[
        str, typer.Option(metavar="NAME", help="With --join: it enrols the node of that name only.")
    ] = "",
    uses: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="With --join: the number of nodes that it enrols."),
    ] = 1,
    expires: Annotated[
        str,
        typer.Option(
            "--expires", metavar="TIME", help="For example 30d or 12h [never; --join: 24h]."
        ),
    ] = "",
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="WHO",
            help="Whose it is; it goes into the log with each request [your login name].",
        ),
    ] = "",
    reason: Reason = "",
) -> None:
    """Print a new token; only its hash is kept."""


@calls(token, "commands.token.show", name="list")
def token_list() -> None:
    """List the tokens and the enrolled nodes, without their secrets."""


@calls(token, "commands.token.rotate", name="rotate")
def token_rotate(name: TokenArg, reason: Reason = "") -> None:
    """Print a new secret for a token; the old one ends now."""


@calls(token, "commands.token.revoke", name="revoke")
def token_revoke(name: TokenArg, reason: Reason = "") -> None:
    """End a token, or the identity of a node, now."""


Segments = Annotated[
    str,
    typer.Option("--segments", metavar="FOLDER|URL", help="The folder [log in the state folder]."),
]


@calls(sealed, "commands.sealed.status", name="status")
def log_status(segments: Segments = "") -> None:
    """Show what is sealed, and what the loss of the server's disk would cost now."""


@calls(sealed, "commands.sealed.verify", STATE, name="verify")
def log_verify(segments: Segments = "") -> None:
    """Read every segment and snapshot; say which records are gone."""


@calls(sealed, "commands.sealed.restore", STATE, name="restore")
def log_restore(segments: Segments = "") -> None:
    """Fill an empty server (the private one, or $UNICRON_REDIS_URL) with the sealed log."""


@calls(sealed, "commands.sealed.prune", STATE, name="prune")
def log_prune(
    keep: Annotated[
        float, typer.Option("--keep", min=0, metavar="DAYS", help="Records that are younger stay.")
    ],
    segments: Segments = "",
) -> None:
    """Remove old segments and snapshots for ever; what a start or restore needs stays."""


@calls(sealed, "commands.dead_letters.dead_letters", name="dead-letters")
def log_dead_letters(
    drop: Annotated[
        list[str] | None,
        typer.Option(
            "--drop", metavar="N|all", help="Remove letter N for ever; again for others, or all."
        ),
    ] = None,
    replay: Annotated[
        list[int] | None,
        typer.Option(
            "--replay",
            min=0,
            metavar="N",
            help="Send letter N to the intake again, after a change of version for example. "
            "It is checked as any report.",
        ),
    ] = None,
    reason: Reason = "",
) -> None:
    """List what the control plane has received from nodes and rejected: when, from whom, why."""


SlurmNodes = Annotated[list[str], typer.Argument(metavar="NODE...", help="Names in Slurm.")]


@calls(slurm, "commands.slurm.grow", TARGET, name="grow")
def slurm_grow(
    num: Annotated[int, typer.Argument(min=1, metavar="N", help="Nodes that shall join.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- OPTIONS", help="Options of sbatch, as -p PARTITION.", show_default=False
        ),
    ] = None,
) -> None:
    """Submit a job of Slurm whose nodes join the cluster."""


@calls(slurm, "commands.slurm.follow", TARGET, name="follow")
def slurm_follow(
    tasks: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="TASK...",
            help="It ends when these tasks, by their ids, have ended [never].",
            show_default=False,
        ),
    ] = None,
    both_ways: Annotated[
        bool,
        typer.Option(
            "--both-ways",
            help="Also drain in Slurm a node that is quarantined here; needs the rights "
            "of an operator of Slurm.",
        ),
    ] = False,
    every: Annotated[
        float, typer.Option(min=1, metavar="S", help="Seconds between two looks.")
    ] = 5,
) -> None:
    """Drain the nodes that Slurm drains or marks down, until it uses them again."""


@calls(slurm, "commands.slurm.enter", TARGET, name="enter")
def slurm_enter(names: SlurmNodes) -> None:
    """Wait until the agents on these nodes have joined, and allow tasks there."""


@calls(slurm, "commands.slurm.leave", TARGET, name="leave")
def slurm_leave(names: SlurmNodes, reason: Reason = "") -> None:
    """Drain these nodes, and wait until no task is there."""


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="A task's output, its latest, or a checkpoint in it: a folder or a URL.",
    ),
]


@calls(model, "commands.model.info", OUTPUT, name="info")
def model_info(path: Checkpoint) -> None:
    """Show what the model of a checkpoint is: sizes, iteration, loss."""


@calls(model, "commands.model.generate", {}, name="generate")
def model_generate(
    path: Checkpoint,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The beginning of the text.")],
    tokens: Annotated[
        int,
        typer.Option(
            min=1, max=1_000_000, metavar="N", help="The most tokens (bytes) that follow."
        ),
    ] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, metavar="T", help="0: always the most probable token.")
    ] = 0.8,
) -> None:
    """Generate text with the model of a checkpoint, on the CPU."""


@calls(model, "commands.model.export", {}, name="export")
def model_export(
    path: Checkpoint,
    target: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to; must not exist.")],
) -> None:
    """Write the model for Hugging Face's transformers: a GPT-2, its tokens bytes."""


@certs.command("init")
def certs_init(
    host: Annotated[
        list[str],
        typer.Option(
            "--host",
            metavar="NAME|ADDRESS",
            help="The control plane's, as others name it; may be repeated.",
        ),
    ],
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="For the files [certs in the cluster's folder]."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the certificate, not the authority.")
    ] = False,
) -> None:
    """Make an authority, unless the folder has one, and a certificate of the control plane."""
    from .commands import certs as command

    command.init(directory or folder(None).path / "certs", host, force=force)


@calls(file_tools, "commands.classify.classify", OUTPUT)
def classify(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A log, or on each line a JSON object with `text` (or a log's "
            "`event`, `msg`, `message`, ...); none, or -: standard input.",
        ),
    ] = None,
) -> None:
    """Classify lines of error text: status, severity, and the rule that matched."""


@calls(file_tools, "commands.locate.locate", OUTPUT)
def locate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DUMP...",
            help="Flight-recorder dumps (a file for each rank, or one file), or "
            "folders of them: the folder of each node.",
        ),
    ],
) -> None:
    """Name the ranks that a hung job waits for, from PyTorch's flight-recorder dumps."""


@file_tools.command()
def simulate(
    scenario: Annotated[
        Path | None,
        typer.Option(
            "--scenario",
            metavar="FILE",
            help="A YAML file: cluster, tasks, policies, a trace of "
            "faults, and how long (docs/guides/simulate.md).",
        ),
    ] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            "--from-log",
            metavar="FILE",
            help="Instead of a scenario: the faults in a cluster's log "
            "(written by `export`), with other settings.",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With --from-log: weight.TASK=2, or policy.FIELD=VALUE, "
            "a field of the policy file.",
        ),
    ] = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME", help="With --from-log: a policy other than Unicron's."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            "--log", metavar="FILE", help="Write the log of the policy `unicron`, as `export` does."
        ),
    ] = None,
    output: Form = "text",
) -> None:
    """Simulate the WAF of each policy: the decider on a virtual clock, no cluster."""
    from .simulate import compare

    if recorded is not None:
        if scenario is not None or log is not None:
            raise UsageError(
                "--scenario and --log do not go with --from-log",
                f"unicron simulate --from-log {recorded}",
            )
        from .simulate import from_log

        from_log.from_log(
            recorded,
            settings=settings or (),
            policies=policies or (),
            as_json=console.structured(output),
        )
        return
    if scenario is None:
        raise UsageError(
            "nothing to simulate", "unicron simulate --scenario FILE, or --from-log FILE"
        )
    if settings or policies:
        raise UsageError(
            "--set and --policy go with --from-log",
            "a scenario names its policies, and their constants",
        )
    compare.simulate(scenario, log=log, as_json=console.structured(output))


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        from unicron import __version__

        console.out(f"unicron {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.lines(context.get_help().splitlines())
        raise typer.Exit


def run_command(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. An error is one line and a hint on stderr."""
    first, rest = list(arguments[:1]), arguments[1:]
    try:
        words = [*(ALIASES.get(first[0], first) if first else ()), *rest]
        code: object = app(args=words, prog_name="unicron", standalone_mode=False)
    except UnicronError as error:
        console.error(str(error), error.hint)
        return error.exit_code
    except TyperException as error:
        if _is_negative_weight(error):
            from .commands.operate import WEIGHT, WEIGHT_HINT

            console.error(WEIGHT, WEIGHT_HINT)
        else:
            command = getattr(getattr(error, "ctx", None), "command_path", "unicron")
            console.error(_plain_words(error.format_message()).rstrip("."), f"{command} --help")
        return EXIT_USAGE
    except (KeyboardInterrupt, Abort):
        return EXIT_INTERRUPTED
    except console.PipeClosed:
        # otherwise the interpreter prints an error when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_DONE
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        console.error(
            f"{place}{(error.strerror or str(error)).lower()}", "check the path and its rights"
        )
        return EXIT_USAGE if error.filename else EXIT_FAILED
    except MemoryError as error:
        error.__traceback__ = None  # it holds what has filled the memory
        console.error(
            f"{' '.join(['unicron', *first])} needs more memory than this process may take",
            "ulimit -v and free -m say how much that is; if it reads a file or folder of others, "
            "that may be made to fill the memory",
        )
        return EXIT_FAILED
    except Exception:
        from .cluster import answers

        if (refusal := answers.refusal()) is not None:
            console.error(str(refusal), refusal.hint)
            return refusal.exit_code
        raise  # a fault of Unicron
    return code if isinstance(code, int) else EXIT_DONE


def _plain_words(message: str) -> str:
    """Typer's error message in plain words, without the names of types."""
    for theirs, ours in (
        ("Value error, ", ""),
        ("Input should be greater than or equal to", "must be at least"),
        ("Input should be less than or equal to", "must be at most"),
        (
            "Input should be a valid integer, unable to parse string as an integer",
            "not a whole number",
        ),
        ("Input should be a valid number, unable to parse string as a number", "not a number"),
    ):
        message = message.replace(theirs, ours)
    return message


def _is_negative_weight(error: TyperException) -> bool:
    """True if typer read a negative weight as an unknown option."""
    option = str(getattr(error, "option_name", ""))
    return (
        getattr(getattr(error, "ctx", None), "info_name", "") == "set-weight"
        and option[:1] == "-"
        and option[1:2] in tuple("0123456789.")
    )
