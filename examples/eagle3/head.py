"""The EAGLE-3 head: one decoder layer that drafts from the target model's own states (Li et al., arXiv 2503.01840).

At position i it takes the embedding of token i + 1 and the target's states at i, and predicts token i + 2. Its own
output before the last norm stands in for the target's states where those are not known yet: that is how it drafts on.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from target import Target, rotation, turned
from torch import Tensor, nn

__all__ = ["Head"]


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(weight.clone()), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self._eps)


class Head(nn.Module):
    """The drafter; it begins as the target's last layer. Its output matrix is the target's, and stays so.

    Args:
        target: the model to draft for.
        drafted: ids, ascending, of the tokens that it can draft.
    """

    def __init__(self, target: Target, drafted: Tensor) -> None:
        super().__init__()
        t, hidden, layer = target, target.hidden, target.layer(target.layers - 1)
        self._target, self.drafted = target, drafted
        attention = t.heads * t.width
        self.fc = self._linear(3 * hidden, hidden, std=0.004)
        with torch.no_grad():  # of the three states the last is nearest to what the layer is used to
            self.fc.weight[:, 2 * hidden :] += torch.eye(hidden)
        self.input_norm, self.hidden_norm = (
            Norm(torch.ones(hidden), t.eps),
            Norm(layer["input_layernorm.weight"], t.eps),
        )
        self.q, self.k, self.v = (self._attending(layer[f"self_attn.{name}_proj.weight"]) for name in "qkv")
        self.o = self._copied(layer["self_attn.o_proj.weight"], attention)
        self.mlp_norm = Norm(layer["post_attention_layernorm.weight"], t.eps)
        self.gate, self.up, self.down = (
            self._copied(layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up", "down")
        )
        self.norm = Norm(t.norm, t.eps)
        self.output = t.embedding[drafted]

    def _linear(self, inputs: int, outputs: int, std: float = 0.02) -> nn.Linear:
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.normal_(linear.weight, std=std)
        return linear

    def _copied(self, weight: Tensor, inputs: int | None = None) -> nn.Linear:
        linear = self._linear(inputs or weight.shape[1], weight.shape[0])
        linear.weight.data.copy_(weight)
        return linear

    def _attending(self, weight: Tensor) -> nn.Linear:
        """A projection of the next token's embedding beside the state, of which only the state's half is known."""
        linear = self._linear(2 * weight.shape[1], weight.shape[0])
        linear.weight.data[:, weight.shape[1] :].copy_(weight)
        return linear

    def combine(self, states: Tensor) -> Tensor:
        """The target's three states [batch, time, 3, hidden] as one [batch, time, hidden]."""
        return self.fc(states.flatten(2))

    def forward(
        self, tokens: Tensor, hidden: Tensor, step: int, cache: list[tuple[Tensor, Tensor]], first: int = 0
    ) -> Tensor:
        """One drafting step at all positions from `first` on at once; returns the output before the last norm.

        Args:
            tokens: [batch, time], at each position the token that was drafted or seen last.
            hidden: [batch, time, hidden], combined states, or this function's own output of the step before.
            step: 0 for the first; position i then stands at i + step.
            cache: keys and values of the steps before; this step's are appended.
            first: the position that `tokens` and `hidden` begin at; 0 in the first step, the same in all later ones.
        """
        t = self._target
        batch, time = tokens.shape
        x = torch.cat([self.input_norm(F.embedding(tokens, t.embedding)), self.hidden_norm(hidden)], -1)
        turn = rotation(t, torch.arange(time) + first + step)
        q = turned(self.q(x).view(batch, time, t.heads, t.width).transpose(1, 2), *turn)
        k = turned(self.k(x).view(batch, time, t.kv_heads, t.width).transpose(1, 2), *turn)
        v = self.v(x).view(batch, time, t.kv_heads, t.width).transpose(1, 2)
        cache.append(tuple(y.repeat_interleave(t.heads // t.kv_heads, 1) for y in (k, v)))
        attended = self._attend(q, cache, first).transpose(1, 2).flatten(2)
        hidden = hidden + self.o(attended)
        x = self.mlp_norm(hidden)
        return hidden + self.down(F.silu(self.gate(x)) * self.up(x))

    def _attend(self, q: Tensor, cache: list[tuple[Tensor, Tensor]], first: int) -> Tensor:
        """Position i sees what the target had seen up to i, and of each later step its own position's draft alone."""
        (k, v), *drafts = cache
        if not drafts:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        time, scale = k.shape[2], self._target.width**-0.5
        ahead = torch.full((time, time), -torch.inf).triu(1)[first:]
        seen = (q @ k.transpose(-1, -2)) * scale + ahead
        own = torch.stack([(q * key).sum(-1) * scale for key, _ in drafts], -1)
        weights = torch.cat([seen, own], -1).softmax(-1)
        return weights[..., :time] @ v + sum(
            weights[..., time + i, None] * value for i, (_, value) in enumerate(drafts)
        )

    def load(self, folder: Path) -> None:
        """Takes the weights of a saved head over; the tokens that can be drafted stay as they are."""
        tensors = load_file(folder / "model.safetensors")
        with torch.no_grad():
            for name, weight in self._weights().items():
                weight.copy_(tensors[name])

    def _weights(self) -> dict[str, Tensor]:
        """What is learned, by the names that it is saved under."""
        layer = {
            "hidden_norm": self.hidden_norm, "input_layernorm": self.input_norm,
            "post_attention_layernorm": self.mlp_norm, "self_attn.q_proj": self.q, "self_attn.k_proj": self.k,
            "self_attn.v_proj": self.v, "self_attn.o_proj": self.o, "mlp.gate_proj": self.gate, "mlp.up_proj": self.up,
            "mlp.down_proj": self.down,
        }  # fmt: skip
        weights = {f"midlayer.{name}.weight": module.weight for name, module in layer.items()}
        return weights | {"fc.weight": self.fc.weight, "norm.weight": self.norm.weight}

    def save(self, folder: Path) -> None:
        """Writes the head as vLLM and SGLang load it: weights in bf16, and `d2t`, target id minus draft id."""
        t = self._target
        folder.mkdir(parents=True, exist_ok=True)
        weights = self._weights() | {"lm_head.weight": self.output}
        tensors = {name: weight.detach().bfloat16().contiguous() for name, weight in weights.items()}
        in_draft = torch.zeros(t.vocabulary, dtype=torch.bool)
        in_draft[self.drafted] = True
        tensors |= {"d2t": self.drafted - torch.arange(len(self.drafted)), "t2d": in_draft}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": t.hidden,
            "intermediate_size": t.inner, "num_attention_heads": t.heads, "num_key_value_heads": t.kv_heads,
            "head_dim": t.width, "num_hidden_layers": 1, "vocab_size": t.vocabulary,
            "draft_vocab_size": len(self.drafted), "rms_norm_eps": t.eps, "hidden_act": "silu",
            "max_position_embeddings": t.longest, "rope_theta": t.theta, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
