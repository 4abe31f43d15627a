"""The commands of `quire bench`: serve, offline, compare."""
