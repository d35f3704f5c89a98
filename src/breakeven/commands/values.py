"""What flags may hold: argparse types that say in one line what was wanted."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from typing import Any

from breakeven.errors import UsageError
from breakeven.load.pace import check_arrivals

__all__ = [
    "api_key",
    "arm",
    "arrivals",
    "between",
    "checked",
    "count",
    "extra_body",
    "header",
    "label",
    "number",
    "rate",
    "seconds",
    "share",
    "temperature",
]


def api_key(variable: str | None) -> str | None:
    """The key that a variable holds; without a name the usual one, which need not be set."""
    key = os.environ.get(variable or "OPENAI_API_KEY")
    if variable is not None and not key:
        raise UsageError(f"--api-key-env {variable}: this variable is not set")
    return key


def checked(convert: Callable[[str], Any], is_good: Callable[[Any], bool], wanted: str) -> Callable[[str], Any]:
    """An argparse type: converts, checks, and says what was wanted."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return value

    return parse


def _to_seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    if match is None:
        raise ValueError(text)
    return float(match[1]) * {None: 1, "s": 1, "m": 60, "min": 60, "h": 3600}[match[2]]


def _to_json(text: str) -> Any:
    import json

    return json.loads(text)


def _to_header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search(r"[\r\n\0]", value):
        raise ValueError(text)
    return name, value.strip()


count = checked(int, lambda value: 1 <= value <= 10**7, "a whole number from 1")
number = checked(int, lambda value: 0 <= value <= 10**9, "a whole number from 0")
seconds = checked(_to_seconds, lambda value: value > 0, "a time above 0, such as 90, 90s, 20m or 1h")
rate = checked(float, lambda value: 1e-4 <= value <= 1e6, "a number above 0, such as 0.5")
share = checked(float, lambda value: 0 < value < 1, "a share between 0 and 1, such as 0.05")
temperature = checked(float, lambda value: 0 <= value <= 10, "a temperature from 0 to 10")
arrivals = checked(check_arrivals, bool, "poisson, constant or gamma:CV with CV from 0.01 to 100")
_json_object = checked(_to_json, lambda value: isinstance(value, dict), "a JSON object, such as '{\"top_p\": 0.9}'")
#: Fields of a request that are not for --extra-body, and why.
_OURS = {
    "max_tokens": "use --max-tokens",
    "model": "use --model",
    "prompt": "use --prompts",
    "messages": "use --prompts",
}
_OURS |= {"text": "use --prompts", "temperature": "use --temperature", "ignore_eos": "use --ignore-eos"}
_OURS |= {"stream": "breakeven always streams"}


def extra_body(text: str) -> dict[str, Any]:
    """Fields of a request that are not ours to set."""
    fields: dict[str, Any] = _json_object(text)
    for name, why in _OURS.items():
        if name in fields:
            raise argparse.ArgumentTypeError(f"{name} can't be set here: {why}")
    return fields


label = checked(str, lambda value: bool(re.fullmatch(r"[\w.=+-]+", value)), "a name of letters, digits and .=+-_")


def _to_arm(text: str) -> tuple[str, str]:
    name, equals, where = text.partition("=")
    if not equals or not where or not re.fullmatch(r"[\w.+-]+", name):
        raise ValueError(text)
    return name, where


arm = checked(
    _to_arm, bool, "an arm: NAME=http://…, NAME=pin:4@http://…, NAME=local:…, NAME=vllm:… or NAME=serve:COMMAND"
)


def _to_range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon:
        raise ValueError(text)
    return int(low), int(high)


between = checked(_to_range, lambda ends: 1 <= ends[0] < ends[1] <= 10**5, "a range LOW:HIGH, such as 1:256")


def header(text: str) -> tuple[str, str]:
    """A name and a value."""
    # The value may be a secret, so that the text is not quoted back.
    try:
        return _to_header(text)
    except ValueError:
        raise argparse.ArgumentTypeError("needs the form 'Name: value'") from None
