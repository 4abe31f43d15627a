"""The HTTP front end, with OpenAI's API."""
