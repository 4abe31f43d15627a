"""Pure data of a request and of a step. No torch."""
