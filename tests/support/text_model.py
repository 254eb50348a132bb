"""A model directory as the router sees it: tokenizer, template and configuration, without weights."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CONTEXT_TOKENS = 512
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["the baton is passed from the runner that prefills to the runner that decodes", "a block holds tokens"]


def byte_tokenizer() -> Tokenizer:
    """Any text is representable; most words are several tokens, other scripts several per character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    return tokenizer


def write_model(
    folder: pathlib.Path,
    *,
    template: str | None = TEMPLATE,
    context_tokens: int = CONTEXT_TOKENS,
    special_tokens: Sequence[str] = (),
) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(list(special_tokens))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": context_tokens}
    (folder / "config.json").write_text(json.dumps(config))
    special = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
