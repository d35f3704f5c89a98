"""A tuned table for the terminal, Markdown, CSV or JSON: what was measured, the table in words, flags, and the gain."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Mapping, Sequence

import msgspec

from breakeven.decide.export import Exported
from breakeven.decide.gain import Gain, ProfileGain
from breakeven.decide.schedule import Range, Schedule
from breakeven.decide.tuned import ArmRate, Tuned, TunedLevel
from breakeven.decide.words import knee_words
from breakeven.options import Format
from breakeven.report.grid import NONE, Head, aligned, block, number, piped

__all__ = ["Price", "render_tuned", "table_words"]

_WIDTH = 110
_NAMES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
_LIMITS = {"vllm": "--max-num-seqs", "sglang": "--max-running-requests"}


class Price(msgspec.Struct, frozen=True):
    """What the machine costs: so much an hour for each GPU. Prices have the unit that they were given in."""

    gpu_hour: float
    gpus: int = 1

    def per_million(self, tokens_per_s: float) -> float:
        """The cost of a million output tokens at this throughput."""
        return self.gpu_hour * self.gpus / (tokens_per_s * 3600 / 1e6)


_Column = tuple[Head, Callable[[TunedLevel], str]]


def render_tuned(tuned: Tuned, exported: Exported | None, form: Format, price: Price | None = None) -> str:
    """What came out in the given form, ending in a newline. CSV has one row for each load and arm."""
    if form == "json":
        return _json(tuned, exported, price)
    if form == "csv":
        return _csv(tuned)
    parts = ["\n".join(_table(tuned, price, form)), _answer(f"{tuned.why_not or table_words(tuned)}.", form)]
    if exported is not None and exported.flags and exported.engine != "json":
        parts.append(_flags(exported, form))
    listed = {
        "Borders:": _borders(tuned.schedule),
        "Largest batch worth allowing:": _limit(tuned),
        "Gain over the profile:": _over_profile(tuned, price),
        "Notes:": [*_tied(tuned), *(exported.notes if exported else ()), *tuned.warnings],
    }
    return "\n\n".join([*parts, *(block(title, items, form) for title, items in listed.items() if items)]) + "\n"


def table_words(tuned: Tuned) -> str:
    """`Draft 3 tokens up to 8 requests in the batch, 1 from 9 to 20, none from 21`, without the full stop."""
    assert tuned.schedule is not None
    ranges = tuned.schedule.ranges
    if len(ranges) == 1:
        k = ranges[0].k
        return f"{'Draft no token' if not k else f'Draft {_tokens(k)}'} at every load that was measured"
    first, *others = ranges
    unit = "requests in the batch" if tuned.schedule.batch_from == "running" else "requests in flight"
    rest = ", ".join(f"{each.k or 'none'} {_span(each, each is others[-1])}" for each in others)
    opening = f"Draft {_tokens(first.k)}" if first.k else "Draft nothing"
    return f"{opening} up to {first.hi} {unit}, {rest}"


def _tokens(k: int) -> str:
    return f"{k} token{'s' * (k > 1)}"


def _span(each: Range, is_last: bool) -> str:
    return f"from {each.lo}" if is_last else f"from {each.lo} to {each.hi}" if each.hi > each.lo else f"at {each.lo}"


def _table(tuned: Tuned, price: Price | None, form: Format) -> list[str]:
    columns: list[_Column] = [
        (Head("", "C"), lambda level: f"{level.load:g}"),
        (Head("", "batch"), lambda level: number(level.batch)),
        *(_rate_column(place, shape.name) for place, shape in enumerate(tuned.arms)),
        (Head("", "best", left=True), lambda level: level.best or NONE),
    ]
    if tuned.schedule is not None:
        columns += [(Head("", "table", left=True), lambda level: level.arm or NONE)]
        columns += [_gain_column(arm) for arm in (tuned.off, tuned.on) if arm is not None]
        if price is not None:
            columns += _price_columns(tuned, price)
    heads, cells = zip(*columns, strict=True)
    lay = piped if form == "markdown" else aligned
    return lay(heads, [[cell(level) for cell in cells] for level in tuned.levels])


def _rate_column(place: int, name: str) -> _Column:
    def cell(level: TunedLevel) -> str:
        rate = level.rates[place]
        if rate.value is None:
            return NONE
        half = 0.0 if rate.ci95 is None else (rate.ci95.high - rate.ci95.low) / 2
        return f"{number(rate.value)}{f' ±{number(half)}' if half > 1e-9 * rate.value else ''}"

    return Head("tok/s", name), cell


def _gain_column(arm: str) -> _Column:
    def cell(level: TunedLevel) -> str:
        return NONE if level.gains is None else _percent(level.gains.gains[arm])

    return Head("table against", arm), cell


def _percent(gain: Gain) -> str:
    """`+12 % (+9 to +15)`; a table beside five arms has no room for more."""
    if gain.is_same:
        return "="
    ends = [] if gain.ci95 is None else [gain.ci95.low, gain.ci95.high]
    shown, *around = (f"{100 * (ratio - 1):+.0f}" for ratio in (gain.ratio, *ends))
    return f"{shown} %" + (f" ({' to '.join(around)})" if around else "")


def _price_columns(tuned: Tuned, price: Price) -> list[_Column]:
    def column(arm: str) -> _Column:
        place = [shape.name for shape in tuned.arms].index(arm)
        return Head("cost of 1M tokens", arm), lambda level: _cost(price, level.rates[place].value)

    def own(level: TunedLevel) -> str:
        return _cost(price, None if level.gains is None else level.gains.rate)

    return [
        (Head("cost of 1M tokens", "table"), own),
        *(column(arm) for arm in (tuned.off, tuned.on) if arm is not None),
    ]


def _cost(price: Price, rate: float | None) -> str:
    return NONE if not rate else number(price.per_million(rate))


def _gain(gain: Gain) -> str:
    if gain.is_same:
        return "the same"
    ends = "" if gain.ci95 is None else f" ({gain.ci95.low:.3f} to {gain.ci95.high:.3f})"
    return f"{gain.ratio:.3f}{ends}"


def _answer(sentence: str, form: Format) -> str:
    text = sentence[0].upper() + sentence[1:] if sentence.startswith(("no ", "of ")) else sentence
    return f"**{text}**" if form == "markdown" else textwrap.fill(text, _WIDTH, break_on_hyphens=False)


def _flags(exported: Exported, form: Format) -> str:
    title = f"Flags for {_NAMES[exported.engine]}:"
    files = [f"{name}:\n{text.rstrip()}" for name, text in exported.files.items()]
    if form == "markdown":
        return "\n\n".join([title, f"```\n{exported.flags}\n```", *(f"```\n{text}\n```" for text in files)])
    return "\n\n".join([f"{title}\n{exported.flags}", *files])


def _borders(schedule: Schedule | None) -> list[str]:
    if schedule is None:
        return []
    return [
        f"at {upper.lo}, from K={lower.k} to K={upper.k}: with a dead band, up at {border.up} and down at {border.down}"
        for lower, upper, border in zip(schedule.ranges, schedule.ranges[1:], schedule.borders, strict=False)
    ]


def _limit(tuned: Tuned) -> list[str]:
    found = tuned.limit
    if found is None:
        return []
    flag = _LIMITS.get((tuned.schedule.engine or "") if tuned.schedule else "", "the engine's largest batch")
    if found.kind == "found" and found.load is not None:
        return [f"{flag} {-(-found.load // 1):.0f}: beyond it throughput grows by less than 5 %; {knee_words(found)}"]
    if found.kind == "at_or_above_highest":
        return [f"not reached: throughput still grows at {found.load:.0f} requests, the most that were measured"]
    return [knee_words(found)]


def _over_profile(tuned: Tuned, price: Price | None) -> list[str]:
    over = tuned.over_profile
    if over is None:
        return []
    by_arm = {gain.arm: gain for gain in over.gains}
    drafting = [by_arm[shape.name] for shape in tuned.arms if shape.k and shape.name in by_arm]
    on = max(drafting, key=lambda gain: gain.static, default=None)
    profile = over.profile
    lines = [f"{profile.source}: {number(profile.mean)} requests in flight on average, idle {100 * profile.idle:.0f} %"]
    if tuned.off in by_arm:
        lines.append(_static_words("always off", by_arm[tuned.off], price))
    if on is not None:
        lines.append(_static_words("always on, at its best", on, price))
    if over.outside > 0:
        lines.append(
            f"{100 * over.outside:.0f} % of the time lies outside the loads that were measured; there the nearest one "
            "stands in"
        )
    return lines


def _static_words(what: str, gain: ProfileGain, price: Price | None) -> str:
    cost = ""
    if price is not None and gain.static and gain.tuned:
        mine, its = (number(price.per_million(rate)) for rate in (gain.tuned, gain.static))
        cost = f", {mine} for a million tokens instead of {its}"
    return (
        f"against {what} ({gain.arm}): {_gain(gain.gain)}, {number(gain.tuned)} tok/s instead of {number(gain.static)}"
        f"{cost}"
    )


def _tied(tuned: Tuned) -> list[str]:
    return [f"{' and '.join(others)} can't be told apart from {arm} at its loads" for arm, others in tuned.tied.items()]


def _json(tuned: Tuned, exported: Exported | None, price: Price | None) -> str:
    found = msgspec.to_builtins(tuned, str_keys=True)
    if exported is not None:
        found["export"] = msgspec.to_builtins(exported._asdict())
    if price is not None:
        found["price"] = msgspec.to_builtins(price)
        for level in found["levels"]:
            level["cost_per_million"] = _costs(level["rates"], level["gains"], price)
    return msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n"


def _costs(
    rates: Sequence[Mapping[str, float | None]], gains: Mapping[str, float] | None, price: Price
) -> dict[str, float]:
    found = {str(rate["arm"]): price.per_million(rate["value"]) for rate in rates if rate["value"]}
    return found | ({"table": price.per_million(gains["rate"])} if gains else {})


def _csv(tuned: Tuned) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["load", "batch", "arm", "k", "topk", "draft_tokens", "tok_s", "low", "high", "in_table"])
    shapes = {shape.name: shape for shape in tuned.arms}
    for level in tuned.levels:
        for rate in level.rates:
            shape = shapes[rate.arm]
            own = [shape.k, shape.topk, shape.draft_tokens, rate.value, *_ends(rate), int(rate.arm == level.arm)]
            writer.writerow([level.load, level.batch, rate.arm, *own])
    return out.getvalue()


def _ends(rate: ArmRate) -> tuple[float | None, float | None]:
    return (None, None) if rate.ci95 is None else (rate.ci95.low, rate.ci95.high)
