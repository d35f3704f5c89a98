"""What `breakeven doctor` found, as a table for people or as JSON."""

from __future__ import annotations

import textwrap
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

__all__ = ["Diagnosis", "Finding", "on_machine", "on_server", "render_diagnosis"]

#: Width of a line on a terminal.
_WIDTH = 110
_TITLES = {"machine": "This machine", "server": "The server"}

State = Literal["ok", "note", "problem", "unknown"]


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    A `problem` spoils or prevents a measurement as asked for; a `note` is something to know when reading the numbers;
    `unknown` is what can't be looked at here. `mend` says what to change, the command where there is one. `numbers`
    has what the words are made of.
    """

    area: Literal["machine", "server"]
    name: str
    state: State
    finding: str
    mend: str | None = None
    numbers: dict[str, Any] = field(default_factory=dict)


def on_machine(name: str, state: State, finding: str, mend: str | None = None, /, **numbers: Any) -> Finding:
    """A finding on this machine."""
    return Finding(area="machine", name=name, state=state, finding=finding, mend=mend, numbers=numbers)


def on_server(name: str, state: State, finding: str, mend: str | None = None, /, **numbers: Any) -> Finding:
    """A finding on the server."""
    return Finding(area="server", name=name, state=state, finding=finding, mend=mend, numbers=numbers)


class Diagnosis(Struct, frozen=True, kw_only=True):
    """All findings, those on this machine first."""

    findings: list[Finding]

    @property
    def has_problems(self) -> bool:
        """Whether any finding is a problem; the command then exits with 1."""
        return any(finding.state == "problem" for finding in self.findings)


def render_diagnosis(diagnosis: Diagnosis, form: Literal["table", "json"]) -> str:
    """The diagnosis in the given form, ending in a newline."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(diagnosis), indent=2).decode() + "\n"
    width = max((len(finding.name) for finding in diagnosis.findings), default=0)
    blocks = []
    for area, title in _TITLES.items():
        findings = [finding for finding in diagnosis.findings if finding.area == area]
        if findings:
            blocks.append("\n".join([title, *(_lines(finding, width) for finding in findings)]))
    return "\n\n".join([*blocks, _verdict(diagnosis)]) + "\n"


def _lines(finding: Finding, width: int) -> str:
    """State and name in columns of their own, then what was found; the mend on a line below."""
    head = f"  {finding.state:<7}  {finding.name:<{width}}  "
    indent = " " * len(head)
    lines = _wrapped(finding.finding, head, indent)
    if finding.mend:
        lines += _wrapped(finding.mend, f"{indent}> ", f"{indent}  ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, later: str) -> list[str]:
    # Commands and URLs are to be copied: no word is cut.
    return textwrap.wrap(
        text, _WIDTH, initial_indent=first, subsequent_indent=later, break_long_words=False, break_on_hyphens=False
    )


def _verdict(diagnosis: Diagnosis) -> str:
    counts = {state: sum(f.state == state for f in diagnosis.findings) for state in ("problem", "note", "unknown")}
    told = [f"{count} {state}{'s' * (count > 1 and state != 'unknown')}" for state, count in counts.items() if count]
    return ", ".join(told) or "all is well"
