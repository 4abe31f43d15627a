"""OpenAI's Decisions API: a probability for each allowed answer to questions about an input."""
