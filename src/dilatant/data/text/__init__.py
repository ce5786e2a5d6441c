"""Text: chat templates, tokenizers, and a sample as token ids with places for media."""
