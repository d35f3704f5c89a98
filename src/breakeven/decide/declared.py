"""The K that a server under a policy may use, declared as vLLM wants them, and its drafter.

Such a server asks the policy in place of its table, so that which K stands where matters little: only where the policy
fails to get the load does the table decide. But vLLM takes no K that isn't in it, and captures no CUDA graphs for one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from breakeven.decide.export import UNKNOWN, vllm_drafter
from breakeven.decide.schedule import Range, Schedule
from breakeven.errors import UsageError

__all__ = ["METHODS", "SMALLEST_DEFAULT", "TABLE_TO", "declared", "drafter"]

#: vLLM's drafters that take another K at each step (0.32, `GPUModelRunner.propose_draft_token_ids`), and whether they
#: have a model of their own to load.
METHODS = {
    "ngram": False,
    "suffix": False,
    "mtp": False,
    "eagle": True,
    "eagle3": True,
    "draft_model": True,
    "medusa": True,
}
#: Batch sizes in a table where nobody says how many requests the server holds; vLLM's last K goes on beyond.
TABLE_TO = 256
#: The fewest that it holds if not told (0.32, `EngineArgs.get_batch_defaults`, a CPU): what stands beyond is dropped.
SMALLEST_DEFAULT = 128


def declared(ks: Sequence[int], most: int, schedule: Schedule | None = None) -> tuple[Range, ...]:
    """The table from 1 to `most` with each of the K in it.

    Args:
        ks: the K that may be used.
        most: the largest batch.
        schedule: its K stand where they are, as far as there is room. Without one the smallest K stands everywhere but
            at the first batch sizes, which the others share, the largest first.

    Raises:
        UsageError: there are more K than batch sizes.
    """
    if len(set(ks)) > most:
        raise UsageError(
            f"--max-num-seqs {most}: vLLM wants a batch size for each of the {len(set(ks))} K: {len(set(ks))} or more"
        )
    table = [schedule.k_at(batch) if schedule else min(ks) for batch in range(1, most + 1)]
    for k in sorted(set(ks) - set(table), reverse=True):
        table[_place(table, k)] = k
    runs = [list(run) for _, run in groupby(range(most), key=table.__getitem__)]
    return tuple(Range(run[0] + 1, run[-1] + 1, table[run[0]]) for run in runs)


def _place(table: Sequence[int], k: int) -> int:
    """Where in a table, a K for each batch size, one more K hurts least.

    Its neighbours are about equally fast at a border, and a K between them is hardly slower there. Beside that it goes
    to the batches of the nearest K: a larger one to the smallest batch, where drafts cost least, a smaller one to the
    largest. The last batch size is never taken: it is that of a full server, and its K goes on beyond the table.
    """
    held = Counter(table)
    reached = min(len(table), SMALLEST_DEFAULT) - 1
    free = [place for place in range(reached) if held[table[place]] > 1]

    def harm(place: int) -> tuple[bool, int, int]:
        here, beside = table[place], table[max(place - 1, 0) : place + 2]
        is_between = any(min(here, other) < k < max(here, other) for other in beside)
        return not is_between, abs(k - here), place if k > here else -place

    return min(free, key=harm)


def drafter(schedule: Schedule | None, method: str | None = None, model: str | None = None) -> dict[str, Any]:
    """vLLM's settings of the drafter: what was asked for, and what the schedule says of the same one.

    Raises:
        UsageError: nobody tells the method, vLLM has no such one or can't switch it, or its model is missing.
    """
    known = {} if schedule is None else {n: v for n, v in vllm_drafter(schedule).items() if v != UNKNOWN}
    chosen, names = method or known.get("method"), ", ".join(METHODS)
    if chosen is None:
        untold = "" if schedule is None else ", and the schedule doesn't tell its drafter"
        raise UsageError(f"--method is missing{untold}: give one of {names}")
    if chosen not in METHODS:
        whose = "--method" if method else "the schedule's drafter"
        raise UsageError(f"{whose} {chosen}: vLLM switches none of that name: give --method, one of {names}")
    found = known if known.get("method") == chosen else {}
    found |= {"method": chosen} | ({"model": model} if model else {})
    if METHODS[chosen] and not found.get("model"):
        raise UsageError(f"--method {chosen} needs --draft-model, the folder or name of its model")
    if model and chosen in ("ngram", "suffix"):
        raise UsageError(f"--draft-model says nothing beside --method {chosen}, which has no model")
    return found
