"""Traces: what a service was once sent, and when. The columns of published ones are known."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from breakeven.errors import UsageError

__all__ = ["TraceRequest", "read_trace"]


class TraceRequest(NamedTuple):
    """One request of a trace: when it came (seconds after the first), tokens in and out.

    `blocks` names the blocks of 512 tokens that the prompt begins with, where the trace says which requests share them.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


class _Format(NamedTuple):
    """How a family of traces names its columns, and what turns its times into seconds."""

    at: str
    input_tokens: str
    output_tokens: str
    seconds: Callable[[Any], float]


#: More tokens than any model reads or writes.
_MOST_TOKENS = 10**7
#: Further than this from zero, in seconds, is no time of a trace (the year 5138, for a date).
_FARTHEST_S = 1e11


def _from_date(value: Any) -> float:
    moment = datetime.fromisoformat(str(value).strip())
    # Without a zone it is UTC: in this machine's own an hour might be missing, or there twice.
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


_FORMATS = (
    # github.com/Azure/AzurePublicDataset: TIMESTAMP is "2023-11-16 18:15:46.6805900", in 2024 with +00:00 behind it.
    _Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", _from_date),
    # github.com/kvcache-ai/Mooncake: JSON lines, milliseconds, hash_ids of prefix blocks.
    _Format("timestamp", "input_length", "output_length", lambda value: float(value) / 1e3),
    # github.com/HPMLL/BurstGPT: seconds.
    _Format("Timestamp", "Request tokens", "Response tokens", float),
    _Format("at_s", "input_tokens", "output_tokens", float),
)
_KNOWN = "; ".join(f"{f.at}, {f.input_tokens}, {f.output_tokens}" for f in _FORMATS)


def read_trace(path: str) -> list[TraceRequest]:
    """The requests of a trace, in the order of their times; those without any output are left out.

    Args:
        path: a CSV file with a header, or JSON lines.

    Raises:
        UsageError: it can't be read, its columns are none of those known, or a value is impossible.
    """
    try:
        text = Path(path).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--trace {path}: {why}; give CSV or JSON lines") from None
    if text.lstrip().startswith("["):
        raise UsageError(f"--trace {path}: a JSON array; it needs one JSON object a line: jq -c '.[]' {path}")
    requests: list[TraceRequest] = []
    form: _Format | None = None
    for number, row in _rows(path, text):
        form = form or _format_of(path, row)
        request = _request(path, number, row, form)
        if request.output_tokens:
            requests.append(request)
    if not requests:
        raise UsageError(f"--trace {path}: no request in it that has output")
    requests.sort(key=lambda request: request.at_s)
    first_s = requests[0].at_s
    return [request._replace(at_s=request.at_s - first_s) for request in requests]


def _rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    if not text.lstrip().startswith("{"):
        yield from _csv_rows(path, text)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise UsageError(f"--trace {path}: line {number}: {error}; it needs a JSON object") from None


def _csv_rows(path: str, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    # strict: a quote that is left open would swallow the rest of the file
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    names: list[str] = []
    try:
        for cells in filter(any, reader):
            if not names:
                names = [name.strip() for name in cells]
            elif len(cells) != len(names):
                raise csv.Error(f"{len(cells)} cells under {len(names)} names")
            else:
                yield reader.line_num, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise UsageError(f"--trace {path}: line {reader.line_num}: no CSV: {error}") from None


def _format_of(path: str, row: Mapping[str, Any]) -> _Format:
    for form in _FORMATS:
        if {form.at, form.input_tokens, form.output_tokens} <= row.keys():
            return form
    there = " ".join(", ".join(row).split()) or "none"
    raise UsageError(f"--trace {path}: its columns are {there[:200]}; known are {_KNOWN}")


def _request(path: str, number: int, row: Mapping[str, Any], form: _Format) -> TraceRequest:
    try:
        at_s = form.seconds(row[form.at])
        if not abs(at_s) <= _FARTHEST_S:
            raise ValueError(at_s)
        tokens_in, tokens_out = (_tokens(row[name]) for name in (form.input_tokens, form.output_tokens))
    except (KeyError, TypeError, ValueError, OverflowError):
        wanted = f"{form.at}, {form.input_tokens} and {form.output_tokens}"
        raise UsageError(f"--trace {path}: line {number}: no time and numbers of tokens in {wanted}") from None
    try:
        blocks = msgspec.convert(row.get("hash_ids") or (), tuple[int, ...])
    except msgspec.ValidationError:
        raise UsageError(f"--trace {path}: line {number}: hash_ids is no list of whole numbers") from None
    return TraceRequest(at_s, max(1, tokens_in), tokens_out, blocks)


def _tokens(value: Any) -> int:
    tokens = float(value)
    if not 0 <= tokens <= _MOST_TOKENS:
        raise ValueError(value)
    return int(tokens)
