"""Any command as the server: `--serve "vllm serve M --port {port}"`.

    with serve(command, start_timeout_s=1200, say=print) as server:
        ...  # server.url answers here; on leaving, nothing that the command started is left

The command is split as a shell would, but no shell runs it. Only `{port}` in it is replaced: other braces are JSON.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.engines.process import ServerProcess, free_port
from breakeven.errors import EngineError, RunError, UsageError
from breakeven.host import describe_machine

__all__ = ["Command", "Progress", "Say", "StartedServer", "kept_log", "parse_command", "serve"]

Say = Callable[[str], None]

STOP_GRACE_S = 10.0
SAY_EVERY_S = 10.0
SHOWN = 100  # characters of a log's line

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
# Options and variables whose value is a secret. "--tokenizer" and "--max-tokens" are none.
_SECRET_NAME = re.compile(r"key$|secret|passw|credential|token$", re.IGNORECASE)
# With what is around it: a short one alone may be anywhere in a log.
_PASSWORD = re.compile(r"://[^\s/@:]*(:[^\s/@]+@)")
#: What is shorter is a placeholder, as in `--api-key EMPTY`.
_SECRET_AT_LEAST = 8
_MASK = "***"


class Command(NamedTuple):
    """A command to serve: its words, the variables set before it, and what of both must not be shown."""

    words: tuple[str, ...]
    environment: dict[str, str]
    secrets: tuple[str, ...]

    def at(self, port: int) -> Command:
        """The command with `{port}` replaced wherever it stands."""

        def put(text: str) -> str:
            return text.replace("{port}", str(port))

        return Command(tuple(map(put, self.words)), {n: put(v) for n, v in self.environment.items()}, self.secrets)

    def shown(self) -> str:
        """The command as one line that holds no secret."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return masked(" ".join(words + [word if "{port}" in word else shlex.quote(word) for word in self.words]), self)


class StartedServer:
    """A server that was started from a command, on this machine or on another; it is ended by who yields it."""

    def __init__(self, process: ServerProcess, command: Command, machine: dict[str, Any]) -> None:
        self._process, self._command, self._machine = process, command, machine
        self.url = process.url

    @property
    def log_path(self) -> Path:
        """The log while it is written, with whatever secrets the server tells there."""
        return self._process.log_path

    def log_tail(self, lines: int) -> list[str]:
        """The log's last `lines` lines that are not blank."""
        return self._process.log_tail(lines)

    def exit_code(self) -> int | None:
        """None while the server runs; then its exit code, 128 + N after signal N."""
        return self._process.exit_code()

    def save_log(self, path: Path) -> None:
        """Copy the log as far as it is written, without the secrets that the command holds.

        Raises RunError where there is no room for it.
        """
        try:
            path.write_text(masked(self.log_path.read_text("utf-8", "replace"), self._command), "utf-8")
        except OSError as error:
            raise RunError(f"the server's log, {path}, can't be written: {error.strerror}") from None

    def describe(self) -> dict[str, Any]:
        """For the manifest: `command` without secrets, and `host`, what the server's machine is."""
        return {"command": self._command.shown(), "host": self._machine}


class Progress:
    """Says now and then how long a server has been waited for, and what its log says."""

    def __init__(self, say: Say) -> None:
        self._say, self._next_s = say, SAY_EVERY_S

    def __call__(self, server: ServerProcess, waited_s: float) -> None:
        if waited_s < self._next_s:
            return
        self._next_s = waited_s + SAY_EVERY_S
        last = "".join(server.log_tail(1)) or "(empty)"
        cut = last if len(last) <= SHOWN else last[:SHOWN] + "…"
        self._say(f"waiting for the server, {waited_s:.0f} s; its log: {cut}")


@contextlib.contextmanager
def serve(command: str, *, start_timeout_s: float, say: Say, log_path: Path | None = None) -> Iterator[StartedServer]:
    """Run `command` on a free port of this machine; yields once it is healthy, ends it and all it started.

    The log is written to `log_path`; without one to a temporary file, which stays only where the start failed.

    Raises UsageError for a command that can't be one, EngineError if it can't be run, ends or stays silent.
    """
    template = parse_command(command)
    port = free_port()
    ready = template.at(port)
    with kept_log(log_path, template) as log:
        say(f"starting {template.shown()} on port {port}")
        with _run(ready, port, start_timeout_s, Progress(say), log) as process:
            yield StartedServer(process, template, describe_machine())


def parse_command(text: str) -> Command:
    """Split the command; words of the form NAME=value before the program are its environment.

    Raises UsageError if the quoting is broken, nothing is there to run or no `{port}` is in it.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"the command to serve can't be split, {str(error).lower()}: check --serve's quotes") from None
    environment = {}
    while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
        environment[assignment[1]] = assignment[2]
        del words[0]
    if not words:
        raise UsageError('there is no command to serve: give one, as in --serve "vllm serve MODEL --port {port}"')
    if not any("{port}" in word for word in (*words, *environment.values())):
        raise UsageError(
            f"the command to serve, {words[0]} …, has no {{port}}: write it where the server takes its port, "
            'as in --serve "vllm serve MODEL --port {port}"'
        )
    return Command(tuple(words), environment, tuple(_secrets(words, environment)))


def masked(text: str, command: Command) -> str:
    """The text without the command's secrets."""
    for secret in command.secrets:
        text = text.replace(secret, _MASK)
    return text


@contextlib.contextmanager
def kept_log(path: Path | None, command: Command) -> Iterator[Path]:
    """`path`, or a temporary file that is left behind where the body ends with EngineError, which names it.

    What is left behind is without the command's secrets.
    """
    if path is not None:
        yield path
        return
    directory = Path(tempfile.mkdtemp(prefix="breakeven-"))
    log, keep = directory / "server.log", False
    try:
        yield log
    except EngineError:
        keep = log.exists()
        if keep:
            log.write_text(masked(log.read_text("utf-8", "replace"), command), "utf-8")
        raise
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)


def _run(command: Command, port: int, start_timeout_s: float, progress: Progress, log: Path) -> ServerProcess:
    environment = os.environ | command.environment
    program = command.words[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise EngineError(
            f"can't run {program}: --serve needs a program that is on PATH, or the full path of one "
            "(no shell reads ~, $ or &&, unless the command is sh -c '…')"
        )
    return ServerProcess(
        command.words,
        url=f"http://127.0.0.1:{port}",
        start_timeout_s=start_timeout_s,
        stop_grace_s=STOP_GRACE_S,
        env=environment,
        log_path=log,
        hidden=command.secrets,
        while_waiting=progress,
    )


def _secrets(words: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """The values of options and variables whose names say so, and the passwords of URLs."""
    named = [*environment.items(), *_named(words)]
    for name, value in named:
        if _SECRET_NAME.search(name) and len(value) >= _SECRET_AT_LEAST:
            yield value
    for text in (*words, *environment.values()):
        yield from _PASSWORD.findall(text)


def _named(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and values, as `--name value`, `--name=value` or, for `env`, `NAME=value`; those of `sh -c '…'` too."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if re.search(r"\s", word):
            yield from _named(_script_words(word))
        if equals or name.startswith("-"):
            yield name, value if equals else following


def _script_words(script: str) -> list[str]:
    """The words of a shell's script, as far as they can be told apart."""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return list(lexer)
    except ValueError:  # its quotes are odd
        return script.split()
