"""The Serve deployment around one engine."""
