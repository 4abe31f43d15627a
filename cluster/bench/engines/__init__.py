"""Engines in processes of their own, compared in turns, and the machine's floor under them."""
