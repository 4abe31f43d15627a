"""A checkpoint's files: the model's shape and what is stored, before any weight is loaded. No torch."""
