"""The supervisor's end of one real executor process, played by a test."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from rowlock.runtime.channel import Channel
from rowlock.runtime.executor_process import executor_command
from rowlock.runtime.messages import (
    Completed,
    Failed,
    Finish,
    Finished,
    Go,
    Hello,
    Message,
    Plan,
    Ready,
    Run,
)
from tests.support.supervisor import environment

MessageT = TypeVar("MessageT")

EXECUTION = "11111111-1111-1111-1111-111111111111"
TOKEN = "22222222-2222-2222-2222-222222222222"


class Peer:
    """Starts an executor and speaks to it."""

    def __init__(self, *imports: str, env: Mapping[str, str] | None = None) -> None:
        """Start it and wait for its Hello.

        Args:
            imports: Modules with jobs; none means the jobs of `author_jobs`.
            env: Variables beside those of this process.
        """
        ours, theirs = socket.socketpair()
        modules = imports or ("tests.support.author_jobs",)
        self.output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self.stdout = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        with theirs:
            self.process = subprocess.Popen(
                [
                    *executor_command(modules),
                    "--fd",
                    str(theirs.fileno()),
                    "--parent",
                    str(os.getpid()),
                ],
                env={**environment(), **(env or {})},
                pass_fds=[theirs.fileno()],
                stdout=self.stdout,
                stderr=self.output,
                start_new_session=True,
            )
        self.channel = Channel(ours)
        ours.settimeout(30)  # a test that waits longer has failed
        self._attempts = itertools.count(1)
        try:
            self.hello = self.next(Hello)
        except BaseException:
            self.close()
            raise

    def send(self, *messages: Message) -> None:
        """Send messages in order."""
        for message in messages:
            self.channel.send(message)

    def next(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind."""
        message = self.channel.receive()
        assert isinstance(message, kind), f"{message}\n{self.text()}"
        return message

    def ended(self) -> bool:
        """Wait for the end of the stream; True when nothing came before it."""
        return self.channel.receive() is None

    def a_run(self, how: str, value: Any = None, *, job: str = "test.author", **other: Any) -> Run:
        """An attempt at a slice of `author_jobs`, with a number of its own."""
        number = next(self._attempts)
        run = Run(
            attempt=number,
            job=job,
            execution_id=EXECUTION,
            instance_key="test",
            step="main",
            partition_id=number,
            key=f"key {number}",
            claim_token=TOKEN,
            attempt_number=1,
            slice=json.dumps({"how": how, "with_": value}),
            parameters='{"factor": 3}',
            checkpoint=None,
            handshake=job == "test.once",
        )
        return replace(run, **other)

    def a_plan(self, factor: int, *, job: str = "test.planned", cluster: str = "[]") -> Plan:
        """A request for a plan."""
        return Plan(
            attempt=next(self._attempts),
            job=job,
            execution_id=f"plan of {factor}",
            step="main",
            parameters=json.dumps({"factor": factor}),
            cluster=cluster,
        )

    def a_finish(self, factor: int, *, job: str = "test.planned", **other: Any) -> Finish:
        """A request for finish()."""
        finish = Finish(
            attempt=next(self._attempts),
            job=job,
            execution_id=f"finish of {factor}",
            epoch=1,
            parameters=json.dumps({"factor": factor}),
            counts='{"total": 3, "completed": 3, "failed": 0, "cancelled": 0}',
        )
        return replace(finish, **other)

    def completed(self, work: Run) -> Completed:
        """Send an attempt, answer its handshake, and expect it to complete."""
        self.send(work)
        self._shake_hands(work)
        answer = self.next(Completed)
        assert answer.attempt == work.attempt
        return answer

    def failed(self, work: Run | Plan | Finish) -> Failed:
        """Send an attempt, answer its handshake, and expect it to fail."""
        self.send(work)
        self._shake_hands(work)
        answer = self.next(Failed)
        assert answer.attempt == work.attempt
        return answer

    def finished(self, work: Finish) -> Finished:
        """Send a finish and expect it to succeed."""
        self.send(work)
        answer = self.next(Finished)
        assert answer.attempt == work.attempt
        return answer

    def _shake_hands(self, work: Message) -> None:
        if isinstance(work, Run) and work.handshake:
            assert self.next(Ready).attempt == work.attempt
            self.send(Go(attempt=work.attempt))

    def text(self) -> str:
        """What the executor has written to standard error so far."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def printed(self) -> str:
        """What reached the standard output that it was started with."""
        self.stdout.seek(0)
        return self.stdout.read().decode(errors="replace")

    def close(self) -> None:
        """End the executor, whatever it does."""
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.output.close()
        self.stdout.close()


def error_of(answer: Failed) -> dict[str, str]:
    """The error that a failure reports."""
    found: dict[str, str] = json.loads(answer.error)
    return found
