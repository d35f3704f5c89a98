"""Loads that stay, on real servers: what does each arm make of so many requests in flight?

    python benchmarks/levels.py --arm off=vllm: --arm on=vllm:eagle3:2 --arm auto=vllm:eagle3:auto@0,1,2,3 \\
        --phase 1x4:chat 8x16:chat 32x64:chat --blocks 6

At a level `32x64:chat` 32 requests are in flight all the time, and a block ends when 64 more were answered: nothing
drains between blocks. All arms are asked the same prompts in the same order, for answers of half to one and a half
`--max-tokens` by turns, so that they don't all end at once. A block's rate is what the server counted in the time of
its turns (`turns.py`). First the last arm does some blocks alone, in which a policy settles, then all do one; neither
is in a figure. The report is that of `swinging.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from swinging import Phase, answer, options, report, started, tell, work
from turns import Turns

from breakeven.engines.identify import choose_model, identify
from breakeven.engines.metrics import Scraper
from breakeven.engines.process import ServerProcess
from breakeven.load.prompts import Prompt

#: The fractional part of the golden ratio: its multiples are spread evenly.
_GOLDEN = 0.6180339887


class Arm:
    """A server that is asked all the time.

    Attributes:
        answered: how many requests so far.
    """

    def __init__(self, server: ServerProcess, in_flight: int) -> None:
        identity = identify(server.url, {})
        self._server, self._model = server, choose_model(identity, None)
        self._pool = ThreadPoolExecutor(in_flight)
        self._scraper = Scraper(identity, {})
        self._asked: list[Future[int]] = []
        self.answered = 0

    def ask(self, questions: Sequence[tuple[Prompt, int]]) -> None:
        """Puts prompts, and how many tokens of an answer are wanted, into its queue."""
        for prompt, most in questions:
            self._asked.append(self._pool.submit(answer, self._server, self._model, prompt, most))
            self._asked[-1].add_done_callback(self._count)

    def _count(self, _: Future[int]) -> None:
        self.answered += 1

    def tokens(self) -> float:
        """What it has generated so far, by its own count."""
        found = self._scraper.scrape()
        if found is None or found.generation_tokens is None:
            raise RuntimeError(f"{self._server.url}: {self._scraper.reason or 'no count of tokens'}")
        return found.generation_tokens

    def drop(self) -> None:
        """Forgets what it was not asked yet."""
        for each in self._asked:
            each.cancel()

    def is_done(self) -> bool:
        """Whether nothing is in flight."""
        return all(each.done() for each in self._asked)

    def close(self) -> None:
        """Ends; raises what a request raised."""
        self._pool.shutdown()
        self._scraper.close()
        for each in self._asked:
            if not each.cancelled():
                each.result()


def rates_at(
    servers: Mapping[str, ServerProcess], turns: Turns, phase: Phase, blocks: int, alone: int, most: int
) -> list[dict[str, float]]:
    """Tokens a second of each arm in each block of a level."""
    *_, last = servers
    arms = {name: Arm(server, phase.in_flight) for name, server in servers.items()}
    size = phase.requests
    # One more block is asked than counts at either end: the first one fills the servers, the last one keeps them full.
    prompts = work([phase._replace(requests=size * (alone + blocks + 2))], seed=phase.in_flight)[0]
    questions = [(prompt, round(most * (0.5 + j * _GOLDEN % 1))) for j, prompt in enumerate(prompts)]
    found = []
    try:
        arms[last].ask(questions)
        turns.run(0, lambda name: name != last or arms[last].answered >= alone * size)
        for name in arms.keys() - {last}:
            arms[name].ask(questions[alone * size :])
        wanted = {name: alone * size if name == last else 0 for name in arms}
        for number in range(blocks + 1):
            wanted = {name: answers + size for name, answers in wanted.items()}
            found.append(_block(arms, turns, number, wanted))
            tell(number, phase, found[-1])
        for arm in arms.values():
            arm.drop()
        turns.run(0, lambda name: arms[name].is_done())
    except BaseException:
        turns.free()  # else the pools wait for answers that get no turn
        raise
    finally:
        for arm in arms.values():
            arm.close()
    return found[1:]


def _block(arms: Mapping[str, Arm], turns: Turns, number: int, wanted: Mapping[str, int]) -> dict[str, float]:
    """Goes on until each arm has answered so many; their tokens a second meanwhile."""
    before = {name: arm.tokens() for name, arm in arms.items()}
    took_s = turns.run(number, lambda name: arms[name].answered >= wanted[name])
    return {name: (arm.tokens() - before[name]) / took_s[name] for name, arm in arms.items()}


def main() -> None:
    """Measures and prints."""
    parser = options(__doc__)
    parser.add_argument("--alone", type=int, default=1, help="blocks that the last arm does alone before (1)")
    args = parser.parse_args()
    with started(args) as (servers, turns):
        rates: dict[str, list[list[float]]] = {name: [[] for _ in range(args.blocks)] for name in servers}
        for done, phase in enumerate(args.phase, 1):
            for number, block in enumerate(rates_at(servers, turns, phase, args.blocks, args.alone, args.max_tokens)):
                for name, rate in block.items():
                    rates[name][number].append(rate)
            report(rates, args.phase[:done])


if __name__ == "__main__":
    main()
