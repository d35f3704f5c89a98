"""The target model, small and plain: a Llama whose inner states can be had, for many sequences at a time on a CPU.

All in float32: processors without instructions for bfloat16 are ten times slower with it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Cache", "Target", "rotation", "turned"]


class Cache:
    """Keys and values of so many sequences side by side, [layer, sequence, head, position, width] each."""

    def __init__(self, target: Target, sequences: int, longest: int) -> None:
        shape = (target.layers, sequences, target.kv_heads, longest, target.width)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)


class Target:
    """A Llama with tied embeddings, from the folder of a Hugging Face checkpoint."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        if config["model_type"] != "llama" or not config["tie_word_embeddings"]:
            raise SystemExit(f"{folder}: this example needs a Llama whose output matrix is its embedding's")
        self.hidden, self.vocabulary, self.layers = (
            config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")
        )
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.inner, self.eps = config["intermediate_size"], config["rms_norm_eps"]
        self.theta, self.longest = config["rope_parameters"]["rope_theta"], config["max_position_embeddings"]
        self.width = self.hidden // self.heads
        #: The layers before which vLLM and SGLang look, by default, for what they give to an EAGLE-3 drafter.
        self.seen = (2, self.layers // 2, self.layers - 3)
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("model."): weight.float() for name, weight in weights.items()}
        self.embedding, self.norm = self.weights["embed_tokens.weight"], self.weights["norm.weight"]

    def layer(self, number: int) -> dict[str, Tensor]:
        """The weights of a layer by their names in it."""
        start = f"layers.{number}."
        return {name.removeprefix(start): w for name, w in self.weights.items() if name.startswith(start)}

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, rows: slice) -> Tensor:
        """Reads tokens on; returns the states at each, [sequence, token, 4, hidden]: before `seen` and the last norm.

        Args:
            tokens: [sequence, token].
            positions: of the tokens, same shape; what stands in the cache before them is seen.
            cache: gets their keys and values.
            rows: the sequences' places in the cache.
        """
        x, states = self.embedding[tokens], []
        cos, sin = rotation(self, positions[:, None])
        time = int(positions.max()) + 1
        hidden_from = torch.arange(time) > positions[..., None]  # [sequence, token, time]
        places = (torch.arange(cache.keys.shape[1])[rows, None], slice(None), positions)
        for number in range(self.layers):
            if number in self.seen:
                states.append(x)
            w = self.layer(number)
            y = F.rms_norm(x, (self.hidden,), w["input_layernorm.weight"], self.eps)
            q, k, v = (self._heads(F.linear(y, w[f"self_attn.{name}_proj.weight"])) for name in "qkv")
            q, k = turned(q, cos, sin), turned(k, cos, sin)
            keys, values = cache.keys[number], cache.values[number]
            keys[places], values[places] = k.transpose(1, 2), v.transpose(1, 2)
            y = _attend(q, keys[rows, :, :time], values[rows, :, :time], hidden_from)
            x = x + F.linear(y, w["self_attn.o_proj.weight"])
            y = F.rms_norm(x, (self.hidden,), w["post_attention_layernorm.weight"], self.eps)
            y = F.silu(F.linear(y, w["mlp.gate_proj.weight"])) * F.linear(y, w["mlp.up_proj.weight"])
            x = x + F.linear(y, w["mlp.down_proj.weight"])
        return torch.stack([*states, x], 2)

    def logits(self, states: Tensor) -> Tensor:
        """[…, vocabulary] of states before the last norm […, hidden]."""
        return F.linear(F.rms_norm(states, (self.hidden,), self.norm, self.eps), self.embedding)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)


def rotation(target: Target, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of Llama's rotary embedding, [*positions, width]."""
    rates = target.theta ** (-torch.arange(0, target.width, 2) / target.width)
    angles = (positions[..., None] * rates).repeat(*[1] * positions.dim(), 2)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries or keys at their positions."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden_from: Tensor) -> Tensor:
    """Grouped attention without copies of keys and values; q is [sequence, heads, token, width]."""
    sequences, heads, tokens, width = q.shape
    groups = keys.shape[1]
    q = q.reshape(sequences, groups, -1, width)  # the heads of a group stand under each other
    scores = (q @ keys.transpose(-1, -2)) * width**-0.5
    scores = scores.view(sequences, heads, tokens, -1).masked_fill(hidden_from[:, None], -torch.inf)
    mixed = scores.softmax(-1).view(sequences, groups, heads // groups * tokens, -1) @ values
    return mixed.view(sequences, heads, tokens, width).transpose(1, 2).flatten(2)
