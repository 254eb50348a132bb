"""Has the text side of models: prompts into tokens, and tokens into text."""
