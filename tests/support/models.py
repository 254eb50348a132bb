"""Makes tiny random models of several families, as complete directories: weights, tokenizer and chat template."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

# Tiny models gain nothing from threads, and a busy machine makes them wait for each other.
torch.set_num_threads(1)

VOCAB_SIZE = 320
EOS_TOKEN_ID = 2
SLIDING_WINDOW = 24
"""Of the families that have one."""

_SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "The baton is passed from the runner that prefills to the runner that decodes.",
    "A block holds sixteen tokens, and a lease holds blocks until they are released.",
    "Once upon a time there was a worker with too many blocks and another with too few.",
]

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE},
    "qwen2": {"model_type": "qwen2", **_SHAPE},
    "qwen3": {"model_type": "qwen3", **_SHAPE},
    "gemma2": {
        "model_type": "gemma2",
        **_SHAPE,
        "num_hidden_layers": 4,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 20.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_SHAPE,
        "num_hidden_layers": 6,
        "sliding_window": SLIDING_WINDOW,
        "query_pre_attn_scalar": 8,
    },
    "phi3": {"model_type": "phi3", **{name: value for name, value in _SHAPE.items() if name != "head_dim"}},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024},
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, parent: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Path:
    """Writes a random model of one of `FAMILIES` and returns its directory. overrides: configuration fields."""
    torch.manual_seed(seed)
    fields = {
        **_FAMILIES[family],
        "vocab_size": VOCAB_SIZE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS_TOKEN_ID,
        # Wide enough that logits differ by much more than rounding.
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
        **overrides,
    }
    config = AutoConfig.for_model(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=[EOS_TOKEN_ID], pad_token_id=0)
    directory = parent / f"tiny-{family}"
    model.save_pretrained(directory)
    _tokenizer().save_pretrained(directory, save_jinja_files=False)
    return directory


@functools.cache
def _tokenizer() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer: any text goes, and most words are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=_CHAT_TEMPLATE,
    )
