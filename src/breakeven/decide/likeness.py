"""Whether runs may be compared: what has to be the same, and what may differ and is told beside the verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from msgspec import Struct

from breakeven.decide.turns import load_of
from breakeven.errors import UsageError
from breakeven.records import LevelPlan, Manifest

__all__ = [
    "ConfigDifference",
    "check_alike",
    "check_servers",
    "common_loads",
    "config_differences",
    "lengths_compared",
    "speculation_of",
]

#: Names shown in an error line.
_SHOWN = 60

#: Flags by which breakeven started the server itself.
_STARTED = ("local", "vllm", "serve", "serve_on")


class ConfigDifference(Struct, frozen=True, kw_only=True):
    """Something of an engine that is not the same in an arm and the reference; None where it tells nothing."""

    name: str
    reference: Any
    other: Any


def check_alike(manifests: Mapping[str, Manifest], force: bool) -> list[str]:
    """Refuses runs that measured different things.

    Args:
        manifests: by arm, the reference first.
        force: compare them all the same.

    Returns:
        With `force`, a warning for each difference.

    Raises:
        UsageError: they differ and `force` is not set, or they can't be compared with it either: closed against open
            loops, no load in common, several lengths of answers.
    """
    plans = {name: manifest.levels for name, manifest in manifests.items()}
    _check_modes(plans)
    reference, *others = manifests
    found = []
    for other in others:
        differences = _differences(manifests[reference], manifests[other])
        if differences:
            found.append(f"{other} is unlike {reference}: {'; '.join(differences)}")
    if found and not force:
        raise UsageError(f"{'. '.join(found)}: measure them alike, or compare them all the same with --force")
    lengths = lengths_compared(plans)
    common_loads(plans, lengths)
    return [f"--force: {text}" for text in found]


def lengths_compared(plans: Mapping[str, Sequence[LevelPlan]]) -> dict[str, int]:
    """By arm the max-tokens of the levels that are compared: the one that all have, else each arm's only one.

    Raises:
        UsageError: there are several.
    """
    by_arm = {name: {plan.max_tokens for plan in own} for name, own in plans.items()}
    common = set.intersection(*by_arm.values())
    if len(common) == 1:
        return dict.fromkeys(by_arm, common.pop())
    for name, own in by_arm.items():
        if common or len(own) > 1:
            listed = ", ".join(map(str, sorted(common or own)))
            raise UsageError(f"{name} has answers of several lengths (--max-tokens {listed}): compare runs of one each")
    return {name: min(own, default=0) for name, own in by_arm.items()}


def common_loads(plans: Mapping[str, Sequence[LevelPlan]], lengths: Mapping[str, int]) -> list[float]:
    """The loads that all arms have, in rising order.

    Raises:
        UsageError: there is none.
    """
    names: dict[str, dict[float, str]] = {
        arm: {load_of(plan): plan.name for plan in own if plan.max_tokens == lengths[arm]} for arm, own in plans.items()
    }
    common = set.intersection(*(set(own) for own in names.values()))
    if not common:
        listed = "; ".join(f"{arm} has {', '.join(own[load] for load in sorted(own))}" for arm, own in names.items())
        raise UsageError(f"no load in common: {listed}; measure the same in each arm (--concurrency or --rate)")
    return sorted(common)


def check_servers(manifests: Mapping[str, Manifest], force: bool) -> list[str]:
    """Of three or more arms no two may be the same server: one of them was then named by mistake.

    Two arms may be: that is how an A/A comparison is made. Servers that breakeven started are never the same, whatever
    port they got.

    Returns:
        With `force`, a warning for each two that are.

    Raises:
        UsageError: two are and `force` is not set.
    """
    if len(manifests) < 3:
        return []
    found = []
    for (first, a), (second, b) in combinations(manifests.items(), 2):
        urls = [_running_server(manifest) for manifest in (a, b)]
        if urls[0] is not None and urls[0] == urls[1] and not config_differences(a, b):
            found.append(f"{first} and {second} are the same server ({urls[0]})")
    if found and not force:
        raise UsageError(f"{'; '.join(found)}: name each server once")
    return [f"--force: {text}" for text in found]


def config_differences(reference: Manifest, other: Manifest) -> tuple[ConfigDifference, ...]:
    """What tells the arms apart: engine, version, configuration, and how breakeven started or pinned them."""
    mine, its = _engine_facts(reference), _engine_facts(other)
    return tuple(
        ConfigDifference(name=name, reference=mine.get(name), other=its.get(name))
        for name in dict.fromkeys([*mine, *its])
        if mine.get(name) != its.get(name)
    )


def speculation_of(manifest: Manifest) -> dict[str, Any]:
    """What the server's configuration tells of speculation, by the engine's own names; empty where it tells nothing.

    `pinned_k` stands before it where the arm pinned one.
    """
    config, pin = _flat(manifest.target.get("config") or {}), str(manifest.flags.get("pin") or "")
    pinned = {"pinned_k": int(pin)} if pin.isdecimal() else {}
    return pinned | {name: value for name, value in config.items() if "specul" in name or name == "k"}


def _check_modes(plans: Mapping[str, Sequence[LevelPlan]]) -> None:
    modes = {name: sorted({plan.mode for plan in own}) for name, own in plans.items()}
    if len({mode for own in modes.values() for mode in own}) > 1:
        listed = "; ".join(f"{name} is {' and '.join(own)}" for name, own in modes.items())
        raise UsageError(
            f"closed and open loops can't be compared: {listed}; measure all with --concurrency or all with --rate"
        )


def _differences(reference: Manifest, other: Manifest) -> list[str]:
    found = []
    for name, look in _MUST_BE_SAME.items():
        mine, its = look(reference), look(other)
        if mine != its:
            found.append(f"{name} ({_short(mine)} against {_short(its)})")
    if reference.server_host is not None and other.server_host is not None:
        mine, its = _machine(reference.server_host), _machine(other.server_host)
        if mine != its:
            found.append(f"the server's machine ({_short(mine)} against {_short(its)})")
    mine, its = ({plan.max_tokens for plan in manifest.levels} for manifest in (reference, other))
    if mine.isdisjoint(its):
        found.append(f"--max-tokens ({_short(mine)} against {_short(its)})")
    return found


def _arrivals(manifest: Manifest) -> list[str]:
    return sorted({plan.arrivals for plan in manifest.levels})


def _ignore_eos(manifest: Manifest) -> bool:
    """As `BenchOptions.sampling` decides it: answers to random words would end anywhere."""
    asked = manifest.flags.get("ignore_eos")
    return str(manifest.prompts.get("source")).startswith("random:") if asked is None else bool(asked)


def _flag(name: str, default: object) -> Callable[[Manifest], object]:
    return lambda manifest: manifest.flags.get(name, default)


_MUST_BE_SAME: dict[str, Callable[[Manifest], object]] = {
    "the model": lambda manifest: manifest.model,
    "the prompts": lambda manifest: (manifest.prompts.get("source"), str(manifest.prompts.get("sha256"))[:12]),
    "the trace": lambda manifest: str(manifest.prompts.get("trace_sha256", ""))[:12],
    "--unique": _flag("unique", False),
    "--seed": lambda manifest: manifest.seed,
    "--arrivals": _arrivals,
    "--max-in-flight": lambda manifest: sorted({plan.max_in_flight or 0 for plan in manifest.levels}),
    "--no-ramp": lambda manifest: not manifest.flags.get("ramp", True),
    "--temperature": lambda manifest: float(manifest.flags.get("temperature", 0.0)),
    "--ignore-eos": _ignore_eos,
    "--extra-body": _flag("extra_body", {}),
    "--api": lambda manifest: manifest.target.get("api"),
    "the client's processor": lambda manifest: manifest.host.get("cpu"),
    "the client's cores": lambda manifest: manifest.host.get("cores"),
    "the server's place": lambda manifest: "beside the client" if manifest.target.get("loopback") else "elsewhere",
}


def _machine(host: Mapping[str, Any]) -> tuple[Any, ...]:
    """What makes a server's speed; a GPU's line ends with its driver, which may be newer."""
    gpus = [line.rpartition(",")[0] for line in host.get("gpus") or ()]
    return host.get("cpu"), host.get("cores"), gpus


def _short(value: object) -> str:
    if isinstance(value, set | list | tuple):
        value = " ".join(map(str, sorted(value) if isinstance(value, set) else value))
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def _running_server(manifest: Manifest) -> str | None:
    """The URL of a server that was there before; None for others, simulated ones included."""
    started = manifest.server_host is not None or any(manifest.flags.get(name) is not None for name in _STARTED)
    url = str(manifest.target.get("url", ""))
    return url if url.startswith("http") and not started else None


def _engine_facts(manifest: Manifest) -> dict[str, Any]:
    target, flags = manifest.target, manifest.flags
    started = {f"--{name}": flags[name] for name in _STARTED if flags.get(name) is not None}
    if flags.get("pin") is not None:
        started["pin"] = flags["pin"]
    known = {"engine": target.get("engine"), "version": target.get("version")}
    return known | started | _flat(target.get("config") or {})


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
