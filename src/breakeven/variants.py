"""The arms of `breakeven tune`: one for each draft length, made from a template or named by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from breakeven.errors import UsageError

__all__ = ["FIELDS", "Variant", "expand", "k_said"]

#: What may be varied, and the fields that stand for it in a template.
FIELDS = {"steps": "{steps}", "topk": "{topk}", "draft-tokens": "{draft_tokens}"}
_K = "{k}"


class Variant(NamedTuple):
    """An arm and what it drafts.

    Attributes:
        name, where: as of `--arm`.
        k: tokens along one path, the drafting steps; None if nobody said.
        topk: branches at each step; above 1 it drafts a tree.
        draft_tokens: tokens of a verify pass, the root among them, where the engine takes that apart.
    """

    name: str
    where: str
    k: int | None
    topk: int = 1
    draft_tokens: int | None = None

    @property
    def shape(self) -> str:
        """`steps/topk/draft tokens`."""
        return f"{self.k}/{self.topk}/{self.draft_tokens}"


def expand(
    arms: Sequence[tuple[str, str]], ks: Sequence[int] = (), vary: Mapping[str, Sequence[int]] | None = None
) -> tuple[list[Variant], list[str]]:
    """All arms, and in words what was left out.

    Args:
        arms: names and places; `{k}`, or the fields of what is varied, make an arm a template.
        ks: the draft lengths for a template; else those of the arms in their order.
        vary: for each of `FIELDS` the values to combine.

    Raises:
        UsageError: names, templates and numbers don't fit together.
    """
    if vary and ks:
        raise UsageError("--k and --vary contradict each other: --vary steps=… says the draft lengths")
    _check_once(ks)
    fields = [FIELDS[name] for name in vary] if vary else [_K]
    templates = [(name, where) for name, where in arms if any(field in name + where for field in (*fields, _K))]
    fixed = [Variant(name, where, k_said(name, where)) for name, where in arms if (name, where) not in templates]
    if not ks and not vary:
        if templates:
            raise UsageError(f"--arm {templates[0][0]} has {_K}: say which draft lengths with --k 0 1 2 3")
        return fixed, []
    if not templates:
        if vary:
            names = ", ".join(f"--arm {each.name}" for each in fixed) or "no --arm"
            raise UsageError(f"{names} has no {' and '.join(fields)}: put it where the server gets it")
        return _in_order(fixed, ks), []
    if len(templates) > 1:
        raise UsageError(f"--arm {templates[0][0]} and --arm {templates[1][0]} are both templates: give one")
    (template,) = templates
    for field in fields:
        if field not in template[1]:
            raise UsageError(f"--arm {template[0]}={template[1][:60]} has no {field} behind the '=': put it in")
    made, left_out = _triples(template, vary) if vary else ([_of_k(template, k) for k in ks], [])
    return [*fixed, *made], left_out


def k_said(name: str, where: str) -> int | None:
    """The draft length of an arm named by hand: `vllm:eagle3:2` or `pin:2@…` says it, or its name, as `off` or `k3`."""
    kind, _, rest = where.partition(":")
    if kind == "pin":
        pinned = rest.partition("@")[0]
        return int(pinned) if pinned.isdecimal() else None
    if kind == "vllm":
        drafter, _, tokens = rest.partition(":")
        if drafter in ("", "off") or tokens.isdecimal():
            return int(tokens or 0)
    if kind == "local" and rest.partition("@")[0] in ("", "none"):
        return 0
    found = re.fullmatch(r"k=?(\d+)", name)
    return 0 if name == "off" else int(found[1]) if found else None


def _check_once(ks: Sequence[int]) -> None:
    for k in ks:
        if list(ks).count(k) > 1:
            raise UsageError(f"--k {k} is given twice: give each draft length once")


def _in_order(fixed: Sequence[Variant], ks: Sequence[int]) -> list[Variant]:
    if len(ks) != len(fixed):
        one = f"--arm {fixed[0].name}" if fixed else "no --arm"
        raise UsageError(
            f"--k gives {len(ks)} draft lengths for {len(fixed)} arm{'s' * (len(fixed) != 1)}, and {one} has no {_K}: "
            f"put {_K} where the server gets the number of draft tokens, or name an arm for each"
        )
    for each, k in zip(fixed, ks, strict=True):
        if each.k not in (None, k):
            raise UsageError(f"--k says {k} for --arm {each.name}={each.where[:60]}, which drafts {each.k}")
    return [each._replace(k=k) for each, k in zip(fixed, ks, strict=True)]


def _of_k(template: tuple[str, str], k: int) -> Variant:
    name, where = template
    named = name.replace(_K, str(k)) if _K in name else f"{name}{k}"
    return Variant(named, where.replace(_K, str(k)), k)


def _triples(template: tuple[str, str], vary: Mapping[str, Sequence[int]]) -> tuple[list[Variant], list[str]]:
    if "steps" not in vary:
        raise UsageError("--vary needs steps=…: the number of drafting steps, 0 being off")
    made, left_out = [], []
    for values in product(*vary.values()):
        given = dict(zip(vary, values, strict=True))
        found = _triple(template, given)
        why = _impossible(found)
        if why is None:
            made.append(found)
        else:
            left_out.append(f"{found.shape} is left out: {why}")
    if not made:
        raise UsageError(f"--vary leaves no arm: {'; '.join(left_out)}")
    return made, left_out


def _triple(template: tuple[str, str], given: Mapping[str, int]) -> Variant:
    name, where = template
    named = name
    for field, value in given.items():
        named, where = named.replace(FIELDS[field], str(value)), where.replace(FIELDS[field], str(value))
    steps, topk = given["steps"], given.get("topk", 1)
    tokens = given.get("draft-tokens", steps + 1 if topk == 1 else None)
    if any(FIELDS[field] not in name for field in given):
        named += f"{'-' * bool(named)}{'-'.join(map(str, given.values()))}"
    return Variant(named, where, steps, topk, tokens)


def _impossible(arm: Variant) -> str | None:
    """Why SGLang can't draft so (0.5.23): `_handle_eagle_family` in `arg_groups/speculative_hook.py` makes a chain's
    draft tokens steps + 1; in `speculative/eagle_utils.py` a tree's are picked from topk + (steps - 1) * topk² beside
    the root.
    """
    steps, topk, tokens = arm.k or 0, arm.topk, arm.draft_tokens
    if steps < 1 or topk < 1:
        return "it needs a step and a branch at least; name the arm without speculation by hand (--arm off=…)"
    if tokens is None:
        return None
    if topk == 1 and tokens != steps + 1:
        return f"with top-k 1 the draft tokens are steps + 1, which is {steps + 1}"
    most = topk + (steps - 1) * topk**2 + 1
    if not 2 <= tokens <= most:
        return f"{steps} step{'s' * (steps > 1)} of top-k {topk} make 2 to {most} draft tokens"
    return None
