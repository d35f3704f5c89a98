"""A word-level tokenizer for the null server's output, since vLLM, SGLang and guidellm count with a tokenizer.

ENV/bin/python benchmarks/tokenizer.py DIR        # ENV: any environment that holds `tokenizers`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>"]
#: What the null server says (breakeven.engines.null.api), and made-up words for the peers' random prompts.
WORDS = ["alpha", "bravo", "delta", "hotel", "march", "pearl", "river", "stone", "tiger", "vivid", "wheat"]


def main(directory: Path) -> None:
    words = [*SPECIAL, *WORDS, *(f"w{i}" for i in range(4096))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    config = names | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 131072}
    config["chat_template"] = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "special_tokens_map.json").write_text(json.dumps(names))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(words)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
