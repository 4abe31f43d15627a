"""Text to token ids and back: chat templates, tokenizer, detokenizer, stop strings."""
