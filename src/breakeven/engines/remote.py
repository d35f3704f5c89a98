"""The server on another machine: `--serve-on HOST`, over ssh.

    with serve_on("gpu1", "vllm serve M --host 0.0.0.0 --port {port}", start_timeout_s=1200, say=print) as server:
        ...  # server.url is http://gpu1:PORT, without a tunnel, which would be in the numbers

One ssh connection asks what the machine is and which ports are taken; a second one holds the server as long as it
lives: its output is the log, and the end of its input, however it comes about, ends the server. The other machine
needs a POSIX shell. If it has Python as well, the same `guard` holds the server as on this one, and nothing that the
server starts escapes; without Python it is the server's process group that ends.

Scripts go to `sh -s` through standard input: whatever the login shell, nothing is quoted for it, and no secret
is in an argument that others see.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import select
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.engines import guard
from breakeven.engines.process import ServerProcess, is_healthy
from breakeven.engines.serve import STOP_GRACE_S, Command, Progress, Say, StartedServer, kept_log, parse_command
from breakeven.errors import EngineError, UsageError
from breakeven.host import GPU_QUERY, cpu_model, cuda_version, gpu_lines

__all__ = ["serve_on"]

SSH_VARIABLE = "BREAKEVEN_SSH"
"""Names the ssh command line where it isn't `ssh`, as in `ssh -F config`."""

# A master connection that the user holds may be used, as it may be the only way in; we leave none behind. Forwardings
# and a RemoteCommand of the user's configuration are for sessions of another kind.
_OPTIONS = shlex.split(
    "-T -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "
    "-o ControlMaster=no -o ClearAllForwardings=yes -o RemoteCommand=none"
)
_SSH_FAILED = 255  # ssh(1): the exit code where an error was its own
_ASK_LIMIT_S = 60.0
_ASK_FIRST_S = 5.0
_SSH_S = 10.0  # for ssh's own start and end
# Registered ports below those that Linux (32768) and Kubernetes (30000) give out by themselves.
_PORTS = range(20_000, 30_000)

_GET = "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"

_ASK = """
section() { printf '\\n@@ %s\\n' "$1"; }
{
section system; uname -sr
section machine; uname -m
section cores; nproc || getconf _NPROCESSORS_ONLN
section cpuinfo; sed -n '/^model name/{p;q;}' /proc/cpuinfo
section meminfo; sed -n '/^MemTotal/p' /proc/meminfo
section gpus; told=$(nvidia-smi GPU_QUERY) && echo "$told"
section nvidia-smi; nvidia-smi
section ports; cat /proc/net/tcp /proc/net/tcp6
section program; command -v PROGRAM
section end
} 2>/dev/null
"""

# Without Python, and then without setsid, the shell's own job control makes the group, where it can.
# The blank line keeps data under way: when the network is gone TCP gives up on it after a quarter of an hour (tcp(7),
# tcp_retries2), not after the two hours of its own keepalive, and sshd then ends our input.
_RUN = """
{
set -- COMMAND
(
    trap 'kill "$nap"; exit' TERM
    while sleep 30 >/dev/null & nap=$!; wait "$nap"; do echo || exit; done
) </dev/null 2>/dev/null &
ticker=$!
if python3 -I -c 'import ctypes' </dev/null >/dev/null 2>&1; then
    python3 -I -S -c GUARD 0 GRACE "$@"
    code=$?
else
    exec 3<&0
    setsid=$(command -v setsid) || set -m 2>/dev/null
    $setsid "$@" </dev/null 3<&- &
    server=$!
    signal() { kill "-$1" "-$server" || kill "-$1" "$server"; }
    end() {
        signal TERM
        waited=0
        while signal 0 && [ "$waited" -lt GRACE ]; do sleep 1; waited=$((waited + 1)); done
        signal KILL
    } >/dev/null 2>&1
    ( while read -r _; do :; done <&3; end ) >/dev/null 2>&1 &
    watch=$!
    exec 3<&-
    wait "$server"
    code=$?
    kill "$watch"
    end
fi
kill "$ticker"
exit "$code"
}
"""


class _Machine(NamedTuple):
    """What the other machine told: itself, its TCP ports that listen, whether it has the program."""

    description: dict[str, Any]
    listening: set[int]
    has_program: bool


@contextlib.contextmanager
def serve_on(
    host: str, command: str, *, start_timeout_s: float, say: Say, log_path: Path | None = None
) -> Iterator[StartedServer]:
    """Run `command` on a free port of `host`; yields once it is healthy from here, ends it and all it started.

    `host` is whatever `ssh` takes: a name, user@name, an alias of ~/.ssh/config. The log is kept as `serve` does.

    Raises UsageError for a host or command that can't be one; EngineError, with ssh's own words, if ssh doesn't let
    us in, and if the server can't be run, ends, stays silent or can't be reached from here.
    """
    template = parse_command(command)
    ssh = _Ssh(host)
    machine = ssh.ask(template)
    if not machine.has_program:
        raise EngineError(
            f"can't run {template.words[0]} on {host}: --serve needs the full path of a program there, "
            "or one on the PATH that `ssh` gives, which is shorter than a terminal's"
        )
    port = random.choice([port for port in _PORTS if port not in machine.listening])
    url = f"http://{ssh.address()}:{port}"
    with kept_log(log_path, template) as log:
        say(f"starting {template.shown()} on {host}, port {port}")
        with ServerProcess(
            ssh.command("exec sh -s"),
            url=url,
            start_timeout_s=start_timeout_s,
            patience_s=STOP_GRACE_S + guard.KILL_LIMIT_S + _SSH_S,
            stdin=_script(_RUN, template.at(port)),
            log_path=log,
            hidden=template.secrets,
            while_waiting=_Waiting(ssh, port, say),
        ) as process:
            yield StartedServer(process, template, machine.description)


class _Ssh:
    """Runs ssh to one host."""

    def __init__(self, host: str) -> None:
        if not host or host.startswith("-") or host.split() != [host]:
            raise UsageError(f"--serve-on {host!r} names no machine: give what `ssh` takes, as in user@gpu1")
        self.host = host
        self._words = shlex.split(os.environ.get(SSH_VARIABLE, "ssh"))

    def command(self, *words: str, options: Sequence[str] = ()) -> list[str]:
        """ssh's command line that runs `words` there."""
        return [*self._words, *_OPTIONS, *options, self.host, *words]

    def address(self) -> str:
        """The host's name or address in a URL, aliases of ssh's configuration resolved."""
        told = self._run([*self._words, "-G", self.host])
        name = next(line.split()[1] for line in told.splitlines() if line.startswith("hostname "))
        return f"[{name}]" if ":" in name else name

    def ask(self, command: Command) -> _Machine:
        """Ask what the machine is, and for the program of `command`."""
        told = self._run(self.command("exec sh -s"), _script(_ASK, command))
        sections = dict(re.findall(r"^@@ (\S+)\n(.*?)(?=^@@ |\Z)", told, re.MULTILINE | re.DOTALL))
        if "end" not in sections:
            raise EngineError(f"{self.host} runs no commands over ssh: --serve-on needs an account with a shell there")
        text = {name: section.strip() for name, section in sections.items()}
        return _Machine(_description(text), _listening(text["ports"]), bool(text["program"]))

    def healthy_there(self, port: int) -> bool:
        """Whether the server is healthy at the machine's own 127.0.0.1; asks through ssh, which can carry it."""
        return is_healthy(lambda path: self._status_there(port, path))

    def _status_there(self, port: int, path: str) -> int | None:
        tunnel = self.command(options=["-W", f"127.0.0.1:{port}"])
        pipe = subprocess.PIPE
        with subprocess.Popen(
            tunnel, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0, start_new_session=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(_GET.format(path=path, port=port).encode())
            # Its input stays open until the answer is there: a server may take the end of it for ours.
            ready, _, _ = select.select([process.stdout], [], [], _SSH_S)
            status = re.match(rb"HTTP/1\.\d (\d{3})", os.read(process.stdout.fileno(), 64)) if ready else None
            process.kill()
        return int(status[1]) if status else None

    def _run(self, command: list[str], stdin: bytes = b"") -> str:
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, timeout=_ASK_LIMIT_S, start_new_session=True
            )
        except OSError as error:
            raise EngineError(
                f"can't run {command[0]}, which --serve-on needs, {error.strerror}: install OpenSSH's client"
            ) from None
        except subprocess.TimeoutExpired:
            raise EngineError(f"{self.host} did not answer over ssh within {_ASK_LIMIT_S:g} s (--serve-on)") from None
        if done.returncode == _SSH_FAILED:
            words = " ".join(done.stderr.decode(errors="replace").strip().splitlines()[-1:]) or "it said nothing"
            raise EngineError(
                f"--serve-on {self.host}: ssh failed: {words.strip()}; it must get in without a question: "
                f"make `ssh -o BatchMode=yes {self.host} true` work"
            )
        return done.stdout.decode(errors="replace")


class _Waiting:
    """Progress, and now and then a look from the other side: is the server up, but not for us?"""

    def __init__(self, ssh: _Ssh, port: int, say: Say) -> None:
        self._ssh, self._port, self._progress = ssh, port, Progress(say)
        self._ask_s = _ASK_FIRST_S

    def __call__(self, server: ServerProcess, waited_s: float) -> None:
        self._progress(server, waited_s)
        if waited_s < self._ask_s:
            return
        self._ask_s = waited_s * 2
        if self._ssh.healthy_there(self._port) and not server.is_healthy():
            host, port = self._ssh.host, self._port
            raise EngineError(
                f"the server is healthy on {host} itself, but {server.url} can't be reached from here: let it listen "
                "on all addresses (--host 0.0.0.0 in --serve), or open the firewall; or start it yourself and measure "
                f"through `ssh -L {port}:127.0.0.1:PORT {host}` with --server-url http://127.0.0.1:{port}"
            )


def _script(script: str, command: Command) -> bytes:
    """The script with its words in capitals filled in, and the command's environment before it."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in command.environment.items())
    values = {
        "GPU_QUERY": " ".join(GPU_QUERY),
        "PROGRAM": shlex.quote(command.words[0]),
        "COMMAND": shlex.join(command.words),
        "GUARD": shlex.quote(Path(guard.__file__).read_text("utf-8")),
        "GRACE": f"{STOP_GRACE_S:.0f}",
    }
    return (exports + re.sub("|".join(values), lambda word: values[word[0]], script)).encode()


def _description(told: Mapping[str, str]) -> dict[str, Any]:
    """The same fields as `host.describe_machine`; None where the machine doesn't tell."""
    kib = re.search(r"\d+", told["meminfo"])
    return {
        "cpu": cpu_model(told["cpuinfo"]) or told["machine"],
        "cores": int(told["cores"]) if told["cores"].isdigit() else None,
        "memory_gib": round(int(kib[0]) / 2**20, 1) if kib else None,
        "system": told["system"],
        "gpus": gpu_lines(told["gpus"]),
        "cuda": cuda_version(told["nvidia-smi"]),
    }


def _listening(table: str) -> set[int]:
    """The local ports in state 0A (listen) of /proc/net/tcp and tcp6, proc(5)."""
    return {int(port, 16) for port in re.findall(r":([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ", table)}
