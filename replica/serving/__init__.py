"""The Ray shell around one engine."""
