"""Anthropic's Messages API: its bodies, the router's requests made from them, its answers, events and errors."""
