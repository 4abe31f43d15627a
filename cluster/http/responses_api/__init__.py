"""OpenAI's Responses API without stored state: `POST /v1/responses`."""
