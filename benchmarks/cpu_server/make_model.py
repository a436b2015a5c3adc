"""Make a small model with random weights that vLLM serves on a CPU, without any download.

.venv-vllm/bin/python benchmarks/cpu_server/make_model.py FOLDER

For batching, KV cache, streaming and structured output random weights behave like trained ones,
and the time of a step is what the model's size makes it: about 90 million parameters take 20 ms
a step on two cores, so that the engine and not the client is the bottleneck, as on a GPU.
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>"]
VOCABULARY = 512
MAX_MODEL_LEN = 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose every token is printable ASCII: no chunk ends within a character."""
    printable = string.ascii_letters + string.digits + string.punctuation + " \n"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    shown = [byte_level.pre_tokenize_str(char)[0][0] for char in printable]
    assert set(shown) <= set(letters)
    tokens = SPECIAL_TOKENS + shown
    merges = []
    for first in string.ascii_lowercase:
        for second in string.ascii_lowercase:
            if len(tokens) < VOCABULARY:
                merges.append((first, second))
                tokens.append(first + second)
    tokenizer = Tokenizer(
        BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        additional_special_tokens=SPECIAL_TOKENS[3:],
        model_max_length=MAX_MODEL_LEN,
        chat_template=CHAT_TEMPLATE,
    )


def make_model() -> LlamaForCausalLM:
    """A Llama of 8 layers with random weights in bfloat16, always the same."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = make_model()
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    print(f"{folder}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
