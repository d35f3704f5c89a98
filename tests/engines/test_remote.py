"""`--serve-on`: against a real sshd on loopback."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import breakeven
from breakeven.engines.process import free_port
from breakeven.engines.remote import serve_on
from breakeven.errors import EngineError, UsageError
from breakeven.host import describe_machine
from tests.engines.processes import GROUP, PYTHONPATH, TREE, has_run, marked, new_marker, within

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
MISSING = [name for name, path in (("sshd", SSHD), ("ssh", shutil.which("ssh"))) if path is None]
needs_sshd = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
pytestmark = [on_linux, needs_sshd]

SECRET = "sk-7f3a-very-secret"
TOOLS = "cat env getconf nproc sed setsid sh sleep uname".split()
BARE = ("no python", "no python, no setsid")

#: What ends there, and how many processes it is: with Python all that descends from the server, and the guard.
RIDDANCE = [("python", TREE, 5), ("no python", GROUP, 4)]

HOLDER = """
import sys, time
from tests.engines.processes import has_run, within
from breakeven.engines import remote
remote.STOP_GRACE_S = 1.0
with remote.serve_on("box", sys.argv[1], start_timeout_s=30, say=print) as server:
    assert within(20, lambda: has_run(server.log_tail(9)))
    print("all up", flush=True)
    time.sleep(600)
"""


class Sshd(NamedTuple):
    """A running sshd; `config` is for `ssh -F`."""

    directory: Path
    config: Path


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """sshd under our own account on a free port, which lets in one key."""
    directory = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user", "stranger"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True)
    shutil.copy(directory / "user.pub", directory / "authorized_keys")
    port = free_port()
    host_key = (directory / "host.pub").read_text()
    places = ["127.0.0.1", "127.0.0.2"]
    (directory / "known_hosts").write_text("".join(f"[{place}]:{port} {host_key}" for place in places))
    (directory / "changed_hosts").write_text(f"[127.0.0.1]:{port} {(directory / 'stranger.pub').read_text()}")
    config = directory / "ssh_config"
    config.write_text(client_config(directory, port))
    log = directory / "sshd.log"
    assert SSHD is not None
    with separated(), log.open("wb") as output:
        command = [SSHD, "-D", "-e", "-f", str(server_config(directory, port))]
        with subprocess.Popen(command, stdout=output, stderr=output) as process:
            try:
                if not within(10, lambda: answers(port)):
                    pytest.skip(f"sshd does not run here: {log.read_text()[-500:]}")
                yield Sshd(directory, config)
            finally:
                process.terminate()


@contextlib.contextmanager
def separated() -> Iterator[None]:
    """As root, sshd wants an empty directory of its own (Debian's and Fedora's is /run/sshd, or in /usr/share)."""
    directory = Path("/run/sshd")
    make = os.geteuid() == 0 and not directory.exists()
    if make:
        directory.mkdir(0o755)
    yield
    if make:
        directory.rmdir()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def server_config(directory: Path, port: int) -> Path:
    path = directory / "sshd_config"
    path.write_text(
        f"Port {port}\nListenAddress 0.0.0.0\nHostKey {directory}/host\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {directory}/authorized_keys\nStrictModes no\nPermitRootLogin yes\nUseDNS no\n"
        "PasswordAuthentication no\nKbdInteractiveAuthentication no\n"
    )
    return path


def client_config(directory: Path, port: int) -> str:
    return (
        "Host box\n  HostName 127.0.0.1\n"
        "Host elsewhere\n  HostName 127.0.0.2\n"
        f"Host stranger\n  HostName 127.0.0.1\n  IdentityFile {directory}/stranger\n"
        f"Host changed\n  HostName 127.0.0.1\n  UserKnownHostsFile {directory}/changed_hosts\n"
        "Host unknown\n  HostName no-such-host.invalid\n"
        f"Host closed\n  HostName 127.0.0.1\n  Port {free_port()}\n"
        f"Host * !stranger\n  IdentityFile {directory}/user\n"
        f"Host *\n  User {getpass.getuser()}\n  Port {port}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {directory}/known_hosts\n  GlobalKnownHostsFile none\n  StrictHostKeyChecking yes\n"
        "  RemoteCommand echo mine\n"
    )


@pytest.fixture
def box(sshd: Sshd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sshd:
    """The sshd, with breakeven's ssh reading its configuration, and its logs among the test's files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("BREAKEVEN_SSH", f"ssh -F {shlex.quote(str(sshd.config))}")
    return sshd


@pytest.fixture(params=["python", *BARE])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """PATH=… of a machine with Python, or with only what POSIX has (and setsid, or not)."""
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        if found and not (tool == "setsid" and request.param == BARE[1]):
            (tmp_path / "bin" / tool).symlink_to(found)
    if request.param == "python":
        (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (tmp_path / "bin" / "python3").chmod(0o755)
    return f"PATH={shlex.quote(str(tmp_path / 'bin'))}"


PYTHON = shlex.quote(sys.executable)
SOURCES = shlex.quote(str(Path(breakeven.__file__).parents[1]))
NULL_SERVER = f"PYTHONPATH={SOURCES} {PYTHON} -m breakeven.engines.null --port {{port}}"


def no_word(_: str) -> None:
    pass


def script(tmp_path: Path, code: str) -> str:
    (tmp_path / "server.py").write_text(code)
    return f"{PYTHON} {shlex.quote(str(tmp_path / 'server.py'))}"


def test_a_command_is_served_there_and_described(box: Sshd, path: str) -> None:
    said: list[str] = []
    with serve_on("box", f"{path} {NULL_SERVER}", start_timeout_s=30, say=said.append) as server:
        hello = json.loads(server.log_tail(1)[0])
        assert server.exit_code() is None
        description = server.describe()
    assert server.url == f"http://127.0.0.1:{hello['port']}"
    assert said[0].endswith(f"on box, port {hello['port']}")
    assert description["host"] == describe_machine() | {"gpus": [], "cuda": None}
    assert not answers(hello["port"])


@pytest.mark.parametrize(("path", "tree", "count"), RIDDANCE, indirect=["path"])
def test_the_other_machine_is_rid_of_the_server_when_its_time_is_over(
    box: Sshd, path: str, tree: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakeven.engines.remote.STOP_GRACE_S", 1.0)
    marker = new_marker()
    command = f"{path} {script(tmp_path, tree)} {{port}} {marker}"
    with serve_on("box", command, start_timeout_s=30, say=no_word) as server:
        assert within(20, lambda: has_run(server.log_tail(9)))
        assert len(marked(marker)) == count
    assert marked(marker) == []


@pytest.mark.parametrize(("path", "tree", "count"), RIDDANCE, indirect=["path"])
def test_the_other_machine_is_rid_of_the_server_when_we_are_killed_outright(
    box: Sshd, path: str, tree: str, count: int, tmp_path: Path
) -> None:
    marker = new_marker()
    command = [sys.executable, "-c", HOLDER, f"{path} {script(tmp_path, tree)} {{port}} {marker}"]
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as holder:
        assert holder.stdout is not None
        assert any(line == "all up\n" for line in holder.stdout)
        alive = marked(marker)
        holder.kill()
    assert len(alive) == count + 1  # the holder
    assert within(30, lambda: marked(marker) == [])


@pytest.mark.parametrize("path", ["python"], indirect=True)
def test_the_other_machine_is_rid_of_the_server_when_the_connection_is_cut(box: Sshd, path: str) -> None:
    marker = new_marker()
    with serve_on("box", f"{path} {NULL_SERVER} --model {marker}", start_timeout_s=30, say=no_word) as server:
        assert marked(marker)
        for pid in marked(str(box.config)):
            if Path(f"/proc/{pid}/comm").read_text() == "ssh\n":
                os.kill(pid, signal.SIGKILL)
        assert within(20, lambda: marked(marker) == [])
        assert within(20, lambda: server.exit_code() == 128 + signal.SIGKILL)


@pytest.mark.parametrize("path", ["python", "no python"], indirect=True)
def test_a_server_that_ends_there_is_seen_here(box: Sshd, path: str, tmp_path: Path) -> None:
    command = f"{path} {script(tmp_path, 'import sys; print(len(sys.argv)); raise SystemExit(3)')} {{port}} 'a  b'"
    with (
        pytest.raises(EngineError, match=r"^the server exited with 3 before it answered; its log \(.*\) ends: 3$"),
        serve_on("box", command, start_timeout_s=30, say=no_word),
    ):
        pass


def test_a_server_that_only_its_own_machine_reaches_is_said_to_be_so_with_the_mend(
    box: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("breakeven.engines.remote._ASK_FIRST_S", 0.5)
    marker = new_marker()
    with (
        pytest.raises(
            EngineError, match=r"healthy on elsewhere itself, but http://127.0.0.2:\d+ can't be .*--host 0.0.0.0"
        ),
        serve_on("elsewhere", f"{NULL_SERVER} --model {marker}", start_timeout_s=40, say=no_word),
    ):
        pass
    assert marked(marker) == []


def test_a_server_that_listens_on_all_addresses_is_reached_without_a_tunnel_or_a_secret_shown(box: Sshd) -> None:
    command = f"HF_TOKEN={SECRET} {NULL_SERVER} --host 0.0.0.0"
    with serve_on("elsewhere", command, start_timeout_s=30, say=no_word) as server:
        assert server.url.startswith("http://127.0.0.2:")
        assert marked(SECRET) == []  # no secret is in an argument, which others could see
        assert server.describe()["command"].startswith("HF_TOKEN=*** ")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("stranger", r"Permission denied \(publickey\)"),
        ("changed", "Host key verification failed"),
        ("unknown", "Could not resolve hostname no-such-host.invalid"),
        ("closed", "Connection refused"),
    ],
)
def test_an_ssh_that_does_not_get_in_is_told_in_its_own_words_with_the_mend(box: Sshd, host: str, words: str) -> None:
    with (
        pytest.raises(
            EngineError, match=f"--serve-on {host}: ssh failed: .*{words}.*make `ssh -o BatchMode=yes {host} true`"
        ) as caught,
        serve_on(host, NULL_SERVER, start_timeout_s=30, say=no_word),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_an_account_without_a_shell_is_told_so(box: Sshd) -> None:
    keys = box.directory / "authorized_keys"
    open_to_all = keys.read_text()
    keys.write_text(f'command="echo no shell here" {open_to_all}')
    try:
        with (
            pytest.raises(EngineError, match="box runs no commands over ssh: --serve-on needs an account with a shell"),
            serve_on("box", NULL_SERVER, start_timeout_s=30, say=no_word),
        ):
            pass
    finally:
        keys.write_text(open_to_all)


def test_a_program_that_the_other_machine_lacks_is_named_with_the_mend(box: Sshd) -> None:
    with (
        pytest.raises(
            EngineError, match="can't run no-such-server on box: --serve needs the full path of a program there"
        ),
        serve_on("box", "no-such-server {port}", start_timeout_s=30, say=no_word),
    ):
        pass


def test_a_missing_ssh_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BREAKEVEN_SSH", "no-such-ssh")
    with (
        pytest.raises(
            EngineError, match=r"can't run no-such-ssh, which --serve-on needs, .*: install OpenSSH's client"
        ),
        serve_on("box", NULL_SERVER, start_timeout_s=30, say=no_word),
    ):
        pass


@pytest.mark.parametrize("host", ["", "-oProxyCommand=id", "two words"])
def test_what_is_no_host_is_refused(host: str) -> None:
    with (
        pytest.raises(UsageError, match=r"--serve-on .* names no machine"),
        serve_on(host, "x {port}", start_timeout_s=1, say=no_word),
    ):
        pass
