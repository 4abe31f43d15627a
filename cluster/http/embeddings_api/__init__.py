"""OpenAI's Embeddings API: a vector for each input."""
