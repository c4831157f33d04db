#!/usr/bin/env python3
"""A docker for tests: what kvtierd asks of the real one, without images and without a root file system of its own.

True to the real one where it matters here: a container is no descendant of the client, it is process 1 of a PID
namespace (where this user may make one), and of the client's environment it gets what ``-e`` names, nothing else.
Its state is beside the program: ``calls``, and NAME.json of every container that runs.
"""

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

HOME = Path(__file__).resolve().parent
CLONE_NEWPID = 0x20000000
WITH_VALUE = {"--name", "-v", "-e", "--device"}
IMAGE_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "OF_THE_IMAGE": "1"}


def parse(words):
    """(options with values, the other options, what follows)."""
    values, plain = [], []
    while words and words[0].startswith("-"):
        if words[0] in WITH_VALUE:
            values.append((words[0], words[1]))
            words = words[2:]
        else:
            plain.append(words[0])
            words = words[1:]
    return values, plain, words


def passed(values):
    names = [value for option, value in values if option == "-e"]
    return {name: os.environ[name] for name in names if name in os.environ}


def state(name):
    try:
        return json.loads((HOME / f"{name}.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def run(words):
    values, _, (_image, *command) = parse(words)
    name = dict(values)["--name"]
    if state(name):
        print(f"Conflict. The container name {name} is already in use", file=sys.stderr)
        return 125
    env = {**IMAGE_ENV, **passed(values)}
    hosts = HOME / f"{name}.hosts"  # a copy, as docker makes one
    hosts.write_bytes(Path("/etc/hosts").read_bytes())
    ended, write_end = os.pipe()
    if os.fork() == 0:  # what containerd's shim is to the real one
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        ctypes.CDLL(None).unshare(CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            os.close(write_end)
            try:
                os.execvpe(command[0], command, env)
            finally:
                os._exit(127)
        (HOME / f".{name}").write_text(json.dumps({"pid": pid, "env": env, "hosts": str(hosts)}))
        (HOME / f".{name}").replace(HOME / f"{name}.json")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (HOME / f"{name}.json").unlink()  # --rm
        os.write(write_end, str(code if code >= 0 else 128 - code).encode())
        os._exit(0)
    os.close(write_end)
    return int(os.read(ended, 16) or b"125")


def end(name, number, seconds):
    """Whether it has ended ``seconds`` after the signal at the latest."""
    found = state(name)
    if found is None:
        return True
    try:
        os.kill(found["pid"], number)
    except ProcessLookupError:
        pass
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if state(name) is None:
            return True
        time.sleep(0.02)
    return False


def main():
    verb, words = sys.argv[1], sys.argv[2:]
    with (HOME / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    if verb == "run":
        return run(words)
    name = words[-1]
    if verb == "exec":
        values, _, (name, *command) = parse(words)
    found = state(name)
    if found is None:
        print(f"Error: No such container: {name}", file=sys.stderr)
        return 1
    if verb == "exec":
        os.execvpe(command[0], command, {**found["env"], **passed(values)})
    if verb == "inspect":
        print(found["hosts"] if "{{.HostsPath}}" in words else found["pid"])
    elif verb == "stop":
        end(name, signal.SIGTERM, float(words[words.index("--time") + 1])) or end(name, signal.SIGKILL, 5)
    elif verb == "rm":
        end(name, signal.SIGKILL, 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
