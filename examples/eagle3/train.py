"""Trains the head, by the training-time test of EAGLE-3: it learns from its own drafts as it will have to use them.

Usage: train.py MODEL WORK OUT [--epochs N] [--start HEAD]

Reads what answers.py wrote; writes the head to OUT. Every tenth conversation is held out. Started again, it goes on
from WORK/checkpoint.pt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from head import Head
from target import Target
from torch import Tensor

#: Tokens that the head can draft: 4,864 make it 16 MB.
DRAFTED = 4864
#: Drafts a position that are learned, and what the loss of each counts against the one before.
DRAFTS, DECAY = 3, 0.8
#: Of the loss, the share of the target's most likely token; the rest is its whole distribution.
HARD = 1 / 3
#: Tokens in a step, padding included; the peak of the learning rate, and steps until it is reached.
TOKENS, RATE, WARMUP = 2048, 1.5e-3, 30
#: Steps between two looks at what is held out, each with a checkpoint.
LOOK = 100
SEED = 1


class Conversation(NamedTuple):
    """One line of answers.jsonl; its states begin at token `start` of states.bin."""

    tokens: list[int]
    opening: int
    prompt: int
    start: int


class Data:
    """Conversations and their states, read from the disk when they are needed."""

    def __init__(self, work: Path, hidden: int) -> None:
        states = np.memmap(work / "states.bin", dtype=np.int16, mode="r")
        self.states = states[: len(states) // (4 * hidden) * 4 * hidden].reshape(-1, 4, hidden)
        entries = [json.loads(line) for line in (work / "answers.jsonl").read_text().splitlines()]
        starts = np.cumsum([0, *(len(entry["tokens"]) for entry in entries)])
        found = [
            Conversation(e["tokens"], e["opening"], e["prompt"], int(s)) for e, s in zip(entries, starts, strict=False)
        ]
        random.Random(SEED).shuffle(found)
        self.held_out, self.learned = found[::10], [c for i, c in enumerate(found) if i % 10]

    def batch(self, conversations: list[Conversation]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [batch, time], states [batch, time, 4, hidden], and two masks [batch, time].

        The first mask has the user's text and the answer, the second the answer alone, from the last position before.
        """
        shape = len(conversations), max(len(c.tokens) for c in conversations)
        tokens, said = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        answered = torch.zeros(shape, dtype=torch.bool)
        states = torch.zeros(*shape, *self.states.shape[1:])
        for row, c in enumerate(conversations):
            length = len(c.tokens)
            tokens[row, :length] = torch.tensor(c.tokens)
            read = torch.from_numpy(self.states[c.start : c.start + length].copy())
            states[row, :length] = read.view(torch.bfloat16).float()
            said[row, c.opening : length] = True
            answered[row, c.prompt - 1 : length] = True
        return tokens, states, said, answered

    def batches(self, epoch: int) -> list[list[Conversation]]:
        """All that is learned from, cut into steps of conversations of like length, in an order of the epoch's own."""
        dice = random.Random(f"{SEED} {epoch}")
        conversations = sorted(self.learned, key=lambda c: len(c.tokens) * dice.uniform(0.9, 1.1))
        found = _cut(conversations)
        dice.shuffle(found)
        return found


def _cut(conversations: list[Conversation]) -> list[list[Conversation]]:
    batches: list[list[Conversation]] = [[]]
    for conversation in conversations:
        longest = max(len(c.tokens) for c in [*batches[-1], conversation])
        if batches[-1] and longest * (len(batches[-1]) + 1) > TOKENS:
            batches.append([])
        batches[-1].append(conversation)
    return batches


def drafts(
    head: Head, target: Target, tokens: Tensor, states: Tensor, said: Tensor, answered: Tensor
) -> tuple[Tensor, list[float]]:
    """The loss of a batch, and of each draft position the share of the target's choices met, all before it met too.

    First drafts are learned everywhere that somebody speaks, later ones in answers, where drafts are made; the shares
    are of answers.
    """
    with torch.no_grad():  # what the target says of the token after each position, over what can be drafted
        wanted = F.rms_norm(states[:, :, 3], (target.hidden,), target.norm, target.eps) @ head.output.T
        choice = (target.logits(states[:, :, 3]) if not head.training else wanted).argmax(-1)
        if not head.training:  # ids of the whole vocabulary: a choice that can't be drafted can't be met
            places = torch.full((target.vocabulary,), -1)
            places[head.drafted] = torch.arange(len(head.drafted))
            choice = places[choice]
    hidden, cache = head.combine(states[:, :, :3]), []
    loss, met, shares = torch.zeros(()), torch.ones_like(answered), []
    for step in range(DRAFTS):
        # At position i it has seen the target up to i, takes token i + 1 + step, and drafts the one after that.
        first = int(answered.any(0).nonzero()[0]) if step else 0
        counts = answered if step else said
        ahead = F.pad(tokens, (0, step + 1))[:, step + 1 :]
        hidden = head(ahead[:, first:], hidden[:, first - tokens.shape[1] :], step, cache, first)
        at = (F.pad(counts, (0, step + 1))[:, step + 1 :] & counts).nonzero(as_tuple=True)
        then = at[0], at[1] + step + 1
        logits = F.linear(head.norm(hidden[at[0], at[1] - first]), head.output)
        soft = F.cross_entropy(logits, wanted[then].softmax(-1))
        hard = F.cross_entropy(logits, choice[then].clamp(min=0))
        loss = loss + DECAY**step * ((1 - HARD) * soft + HARD * hard)
        right = torch.zeros_like(answered)
        right[at] = logits.argmax(-1) == choice[then]
        met = met & right
        shares.append(float(met[answered & F.pad(answered, (0, step + 1))[:, step + 1 :]].float().mean()))
    return loss, shares


def most_frequent(data: Data, count: int, vocabulary: int) -> Tensor:
    """The ids, ascending, of the tokens that stand most often in the answers that are learned from."""
    often = torch.zeros(vocabulary, dtype=torch.long)
    for conversation in data.learned:
        often += torch.bincount(torch.tensor(conversation.tokens[conversation.prompt :]), minlength=vocabulary)
    picked = often.topk(count).indices.sort().values
    share = float(often[picked].sum() / often.sum())
    print(f"train: {len(data.learned)} conversations, {int(often.sum())} tokens of answers, {share:.1%} of {count} ids")
    return picked


@torch.no_grad()
def held_out(head: Head, target: Target, data: Data) -> list[float]:
    """`drafts`' shares over what is held out."""
    head.eval()
    found = [
        drafts(head, target, *data.batch(batch))[1]
        for batch in _cut(sorted(data.held_out, key=lambda c: len(c.tokens)))
    ]
    head.train()
    return [sum(shares) / len(found) for shares in zip(*found, strict=True)]


def main() -> None:
    """Trains, from the beginning or from where it was."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--start", type=Path, help="a head to go on from, in place of the target's last layer")
    args = parser.parse_args()
    torch.manual_seed(SEED)
    target = Target(args.model)
    data = Data(args.work, target.hidden)
    head = Head(target, most_frequent(data, DRAFTED, target.vocabulary))
    if args.start:
        head.load(args.start)
    matrices = [p for p in head.parameters() if p.ndim == 2]
    norms = [p for p in head.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}], lr=RATE, betas=(0.9, 0.95)
    )
    batches = [batch for epoch in range(args.epochs) for batch in data.batches(epoch)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, len(batches)))
    first = _resume(args.work / "checkpoint.pt", head, optimizer, schedule)
    began_s, recent = time.monotonic(), None
    for step, batch in enumerate(batches[first:], first + 1):
        loss, shares = drafts(head, target, *data.batch(batch))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent = [0.95 * old + 0.05 * new for old, new in zip(recent or shares, shares, strict=True)]
        left_s = (time.monotonic() - began_s) / (step - first) * (len(batches) - step)
        print(
            f"train: step {step}/{len(batches)}, met {_shown(recent)}, {left_s / 60:.0f} min left", end="\r", flush=True
        )
        if step % LOOK == 0 or step == len(batches):
            shown = _shown(held_out(head, target, data))
            print(f"train: step {step}/{len(batches)}, met {_shown(recent)}; held out {shown}")
            state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
            torch.save(state | {"step": step}, args.work / "checkpoint.new")
            os.replace(args.work / "checkpoint.new", args.work / "checkpoint.pt")
            head.save(args.out)


def _rate(step: int, steps: int) -> float:
    """A short rise, then a cosine to a fiftieth."""
    return min(1.0, (step + 1) / WARMUP) * (0.02 + 0.49 * (1 + math.cos(math.pi * min(1.0, step / steps))))


def _resume(
    path: Path, head: Head, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LambdaLR
) -> int:
    if not path.exists():
        return 0
    state = torch.load(path)
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["step"])


def _shown(shares: list[float]) -> str:
    return "/".join(f"{share:.3f}" for share in shares)


if __name__ == "__main__":
    main()
