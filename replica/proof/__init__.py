"""Proof that a checkpoint's class computes the same in Quire's engine as in transformers, before it is served."""
