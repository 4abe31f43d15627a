"""What an engine runs on: sizes, measured memory, assembly."""
