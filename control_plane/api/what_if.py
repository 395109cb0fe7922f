"""What other weights, policy fields and policies would have earned: `unicron simulate --from-log`
on the log so far, in a process of its own, one at a time."""

import asyncio
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

from ...events.decoding import from_json
from ...events.errors import UnicronError
from ...events.log import archive
from ...events.log.port import ReaderPort
from .messages import WhatIf, WhatIfAnswer, WhatIfResult
from .requests import Refusal

LIMIT_S = 120.0
"""Of one simulation, with the reading of the log."""
PAGE_RECORDS = 1_000


class WhatIfs:
    """The answer is kept until the next simulation begins."""

    def __init__(self) -> None:
        self.answer = WhatIfAnswer(state="none", limit_s=LIMIT_S)
        self._task: asyncio.Task[None] | None = None

    def start(self, asked: WhatIf, log: ReaderPort, begins: str, last_seq: int) -> WhatIfAnswer:
        """Simulate the log until `last_seq`; `begins`: the state before its first record, as text.
        Raises Refusal if another simulation runs."""
        if self.answer.state in ("reading", "simulating"):
            raise Refusal(409, "a simulation runs already", "wait for its answer")
        self.answer = WhatIfAnswer(
            state="reading", limit_s=LIMIT_S, last_seq=last_seq, began_s=time.time()
        )
        self._task = asyncio.create_task(
            self._run(
                self.answer,
                log,
                begins,
                [
                    *(f"--policy={name}" for name in asked.policies),
                    *(f"--set=weight.{name}={weight:g}" for name, weight in asked.weights.items()),
                    *(f"--set=policy.{name}={value}" for name, value in asked.fields.items()),
                ],
            )
        )
        return self.answer

    async def _run(
        self, answer: WhatIfAnswer, log: ReaderPort, begins: str, words: list[str]
    ) -> None:
        process, answer.read_seq = None, log.first_seq - 1
        try:
            with tempfile.TemporaryDirectory(prefix="unicron-what-if-") as folder:
                path = Path(folder) / "log.jsonl"
                async with asyncio.timeout(LIMIT_S):
                    with archive.create(
                        path, cluster="what-if", code="", begins=begins, first_seq=log.first_seq
                    ) as writer:
                        while answer.read_seq < answer.last_seq:
                            for record in await log.read(
                                after=answer.read_seq, num_max=PAGE_RECORDS
                            ):
                                writer.add(record)
                                answer.read_seq = record.seq
                    answer.state = "simulating"
                    process = await asyncio.create_subprocess_exec(
                        "nice",
                        sys.executable,
                        "-P",
                        "-m",
                        "unicron.cli.main",
                        "simulate",
                        "--from-log",
                        str(path),
                        "-o",
                        "json",
                        *words,
                        stdin=DEVNULL,
                        stdout=PIPE,
                        stderr=PIPE,
                    )
                    out, errors = await process.communicate()
            answer.why = errors.decode(errors="replace").replace(str(path), "the log").strip()
            if not process.returncode:
                answer.result = from_json(out, WhatIfResult)
        except (TimeoutError, UnicronError) as error:
            answer.why = str(error) or f"it took more than {LIMIT_S:g} s"
        finally:
            if process is not None and process.returncode is None:
                process.kill()
            answer.took_s = time.time() - answer.began_s
            answer.state = "failed" if answer.result is None else "done"
