"""Grammars of structured output: judged in a process of their own, compiled, and followed token by token. No torch."""
