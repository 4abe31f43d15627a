"""Low-rank adapters of PEFT: reading their folders, keeping them in memory, adding them to the products of a step."""
