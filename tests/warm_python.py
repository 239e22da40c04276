"""Runs Python commands in forks of one process that has imported the large libraries, which takes 6 seconds each time.

The command `python` that `warm_python` writes takes a script, `-c`, `-m` or `-`. Each fork imports the project's own
modules itself, from where it runs.
"""

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

LIBRARIES = ("sentence_transformers", "transformers.modeling_utils", "sklearn.linear_model")
COMMAND = """#!{python} -ISs
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
words = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [words], [0, 1, 2])
server.shutdown(socket.SHUT_WR)
sys.exit(int(server.recv(9) or 1))
"""


@contextmanager
def warm_python(folder: Path, env: dict[str, str]) -> Iterator[Path]:
    """Yields a new folder with the command `python`, whose forks begin with the environment `env`."""
    folder.mkdir()
    address = f"\0warm python {os.getpid()} {folder.name}"
    (folder / "python").write_text(COMMAND.format(python=sys.executable, address=address))
    (folder / "python").chmod(0o755)
    command, pipe = [sys.executable, __file__, address[1:]], subprocess.PIPE
    env = env | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # CUDA itself does not survive a fork
    with subprocess.Popen(command, env=env, stdout=pipe) as server:
        try:
            assert server.stdout and server.stdout.readline() == b"ready\n"
            yield folder
        finally:
            server.kill()


def serve(address: str) -> None:
    """Answers each connection with the exit code of its command, which a fork of a fork runs."""
    for name in LIBRARIES:
        __import__(name)
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{address}")
    server.listen()
    print("ready", flush=True)
    while True:
        client, _ = server.accept()
        with suppress(ChildProcessError):  # those that have ended
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork():
            client.close()
            continue
        server.close()
        if not (child := os.fork()):
            return run(client)
        _, status = os.waitpid(child, 0)
        client.send(str(os.waitstatus_to_exitcode(status) & 255).encode())
        os._exit(0)


def run(client: socket.socket) -> None:
    """Runs a command as Python would, with the files, the folder and the environment of the client."""
    words, files, _, _ = socket.recv_fds(client, 1 << 16, 3)
    while more := client.recv(1 << 16):
        words += more
    client.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    (first, *arguments), folder, environment = json.loads(words)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[0] = ""
    if first == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first in ("-c", "-"):
        code = arguments.pop(0) if first == "-c" else sys.stdin.read()
        sys.argv, sys.modules["__main__"] = [first, *arguments], ModuleType("__main__")
        exec(code, sys.modules["__main__"].__dict__)  # noqa: S102
    else:
        sys.argv, sys.path[0] = [first, *arguments], str(Path(first).parent.absolute())
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
