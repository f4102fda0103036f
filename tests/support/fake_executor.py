"""An executor for tests of the process layer: its "author code" misbehaves on request.

`python -m tests.support.fake_executor --fd N --parent PID` says `Hello` and then does what the job
name of each `Run` says; the slice is the argument of that job.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from typing import NoReturn

from rowlock.runtime import messages, processes
from rowlock.runtime.channel import Channel
from rowlock.runtime.watchdog import boottime_ns

COMMAND = [sys.executable, "-m", "tests.support.fake_executor"]

_PYTHON = [sys.executable, "-I", "-S", "-c"]
_LOOP = [*_PYTHON, "import time\nwhile True: time.sleep(0.001)"]
_DAEMON = f"""
import subprocess, time
print(subprocess.Popen({_LOOP!r}, stdout=subprocess.DEVNULL).pid, flush=True)
while True: time.sleep(0.001)
"""
_DAEMONISE = f"""
import subprocess
daemon = {[*_PYTHON, _DAEMON]!r}
daemon = subprocess.Popen(daemon, start_new_session=True, stdout=subprocess.PIPE)
print(daemon.pid, int(daemon.stdout.readline()))
"""


def run(job: str, argument: str = "", *, attempt: int = 1) -> messages.Run:
    """A `Run` that this executor understands."""
    return messages.Run(
        attempt=attempt,
        job=job,
        execution_id="11111111-1111-1111-1111-111111111111",
        instance_key="test",
        step="main",
        partition_id=attempt,
        key=str(attempt),
        claim_token="22222222-2222-2222-2222-222222222222",
        attempt_number=1,
        slice=argument,
        parameters="{}",
        checkpoint=None,
        handshake=False,
    )


def _family() -> dict[str, int]:
    """Processes in every place where author code can leave one; each runs until it is killed."""
    # Double fork and setsid: the executor is no ancestor of the daemon any more.
    daemon, its_child = map(int, subprocess.check_output([*_PYTHON, _DAEMONISE]).split())
    return {
        "child": subprocess.Popen(_LOOP).pid,
        "in its own session": subprocess.Popen(_LOOP, start_new_session=True).pid,
        "with an empty environment": subprocess.Popen(_LOOP, start_new_session=True, env={}).pid,
        "daemon": daemon,
        "child of the daemon": its_child,
    }


def _tick(path: str) -> NoReturn:
    """Author code with an effect outside the database: the file holds the time of the last one."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    while True:
        os.pwrite(fd, boottime_ns().to_bytes(8, "little"), 0)
        time.sleep(0.001)


def _perform(channel: Channel, job: str, argument: str, attempt: int) -> str:
    if job == "family":
        return json.dumps(_family())
    if job == "tick":
        channel.send(messages.Ready(attempt=attempt))
        _tick(argument)
    elif job == "regex":  # one call into C that holds the GIL for hours
        channel.send(messages.Ready(attempt=attempt))
        re.match(r"(a+)+$", "a" * 60 + "b")
    elif job == "big integer":
        channel.send(messages.Ready(attempt=attempt))
        pow(int(argument), 10**9)
    elif job == "exit":
        os._exit(int(argument))
    elif job == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif job == "fork":  # a process that keeps the channel open
        if (pid := os.fork()) == 0:
            signal.pause()
        return str(pid)
    return argument


def main() -> None:
    """Serve until the supervisor is gone or says `Exit`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    processes.die_with_parent(arguments.parent)
    channel = Channel(socket.socket(fileno=arguments.fd))
    channel.send(messages.Hello(pid=os.getpid()))
    while True:
        message = channel.receive()
        if message is None or isinstance(message, messages.Exit):
            return
        if isinstance(message, messages.Run):
            result = _perform(channel, message.job, message.slice, message.attempt)
            channel.send(
                messages.Completed(attempt=message.attempt, result=result, committed=False)
            )


if __name__ == "__main__":
    main()
