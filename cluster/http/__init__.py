"""The HTTP front end: OpenAI's API."""
