"""Text: chat templates, tokenizers, and encoding of samples as token ids with placeholders for media."""
