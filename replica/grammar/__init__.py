"""Grammars of structured output: checked in a separate process, compiled, and followed token by token. No torch."""
