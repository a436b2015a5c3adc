"""Make a model folder of a given shape without weights and without any download.

PYTHON_OF_VLLM benchmarks/h200/make_shape.py {llama-3.1-8b,small} FOLDER

Writes config.json and a tokenizer; `vllm serve FOLDER --load-format dummy` gives it random
weights. Batching, KV cache, streaming and the time of a step do not depend on what the weights are.
"""

from __future__ import annotations

import itertools
import json
import string
import sys
from pathlib import Path
from typing import Any, Final

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "llama-3.1-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
    },
    # what benchmarks/cpu_server/make_model.py makes, for a test of everything on a CPU
    "small": {
        "vocab_size": 512,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
    },
}
"""Of Llama-3.1-8B as its published config.json has it."""

COMMON: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    # the tokenizer's own, which are not Llama's
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def parameters(shape: dict[str, Any]) -> int:
    """Weights of a Llama of that shape, embeddings and head included."""
    hidden, kv = shape["hidden_size"], shape["num_key_value_heads"] * shape["head_dim"]
    attention = 2 * hidden * shape["num_attention_heads"] * shape["head_dim"] + 2 * hidden * kv
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    embeddings = 2 * shape["vocab_size"] * hidden
    return int(shape["num_hidden_layers"] * layer + embeddings + hidden)


def write_config(name: str, folder: Path) -> None:
    """Write config.json, which has everything but the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = COMMON | SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_tokenizer(name: str, folder: Path) -> None:
    """Write a tokenizer that knows a text for every id that the model can emit."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu_server"))
    from make_model import make_tokenizer  # type: ignore[import-not-found]

    shape = SHAPES[name]
    tokenizer = make_tokenizer()
    known = len(tokenizer)
    fillers = ("".join(word) for word in itertools.product(string.ascii_lowercase, repeat=4))
    tokenizer.add_tokens(list(itertools.islice(fillers, shape["vocab_size"] - known)))
    assert len(tokenizer) == shape["vocab_size"]
    tokenizer.model_max_length = shape["max_position_embeddings"]
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SHAPES:
        raise SystemExit(f"accepted is {{{','.join(SHAPES)}}} FOLDER")
    write_config(sys.argv[1], Path(sys.argv[2]))
    write_tokenizer(sys.argv[1], Path(sys.argv[2]))
    print(f"{sys.argv[2]}: {parameters(SHAPES[sys.argv[1]]) / 1e6:.0f} M parameters, no weights")
