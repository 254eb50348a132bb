"""Names the files that are a model's text side, and bounds them: what a worker gives a router that lacks the model.

Owns: the names, which are the only ones that such a transfer may have, and its sizes. Weights are not among them.
Never: reads or writes a file.
"""

from __future__ import annotations

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEXT_FILES = (TOKENIZER, TOKENIZER_CONFIG, CONFIG, CHAT_TEMPLATE)
"""All files of a model directory that `services/router/text/tokenisation.py` reads. Not every model has each."""
MOST_TEXT_BYTES = 64 << 20
"""The most bytes of all these files together. The largest tokenizers in use have half of it."""
MOST_PART_BYTES = 256 << 10
"""The most bytes of a file in one message."""
