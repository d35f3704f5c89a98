"""What an engine's process is told about its policy: `BREAKEVEN_*` variables, or a file that one of them names."""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from breakeven.errors import UsageError

__all__ = ["DEFAULT_PORT", "Control", "read_control"]

DEFAULT_PORT = 9310


class Control(NamedTuple):
    """How a server is controlled.

    Attributes:
        policy: as `decide.modes.policy_of` reads it.
        host, port: where the control page listens.
        key: what a pin has to show; None where none is asked for, which only loopback may have.
        state: a file that keeps what was learned from one start to the next.
        objective_ms: the time per output token that is promised.
        untried: whether an engine's version that nobody has tried is taken.
        deep: whether a step of K = 0 may leave the drafter alone (`act.deep`).
    """

    policy: str = "auto"
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    key: str | None = None
    state: Path | None = None
    objective_ms: float | None = None
    untried: bool = False
    deep: bool = False


def read_control(environment: Mapping[str, str] = os.environ) -> Control:
    """Reads the variables `BREAKEVEN_POLICY`, `_HOST`, `_PORT`, `_KEY`, `_STATE`, `_OBJECTIVE_MS`, `_UNTRIED`, `_DEEP`.

    `BREAKEVEN_CONFIG` names a JSON file with the same in small letters, of which a variable overrides its own.

    Raises:
        UsageError: one of them can't be, in one line that names it.
    """
    names = Control._fields
    said: dict[str, Any] = _read_file(environment["BREAKEVEN_CONFIG"]) if environment.get("BREAKEVEN_CONFIG") else {}
    said |= {name: text for name in names if (text := environment.get(f"BREAKEVEN_{name.upper()}"))}
    control = Control(
        policy=str(said.get("policy", "auto")),
        host=str(said.get("host", Control._field_defaults["host"])),
        port=int(_number(said, "port", DEFAULT_PORT, 0, 65535)),
        key=str(said["key"]) if "key" in said else None,
        state=Path(said["state"]) if "state" in said else None,
        objective_ms=_number(said, "objective_ms", 0, 0.001, 1e6) if "objective_ms" in said else None,
        untried=_is_set(said, "untried"),
        deep=_is_set(said, "deep"),
    )
    if control.key is None and not _is_loopback(control.host):
        raise UsageError(
            f"BREAKEVEN_HOST={control.host}: others than this machine may pin K there: set BREAKEVEN_KEY too, "
            "or listen on 127.0.0.1"
        )
    return control


def _read_file(name: str) -> dict[str, Any]:
    try:
        said = json.loads(Path(name).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"BREAKEVEN_CONFIG={name}: not to be read as JSON: {error}") from None
    unknown = set(said) - set(Control._fields) if isinstance(said, dict) else {"no object"}
    if unknown:
        raise UsageError(f"BREAKEVEN_CONFIG={name}: {', '.join(sorted(unknown))}: it has {', '.join(Control._fields)}")
    return dict(said)


def _number(said: Mapping[str, Any], name: str, default: float, lowest: float, highest: float) -> float:
    text = said.get(name, default)
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = float("nan")
    if not lowest <= number <= highest or (name == "port" and number != int(number)):
        raise UsageError(f"BREAKEVEN_{name.upper()}={text}: a number from {lowest:g} to {highest:g} is needed")
    return number


def _is_set(said: Mapping[str, Any], name: str) -> bool:
    return str(said.get(name, "")).lower() in ("1", "true", "yes")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
