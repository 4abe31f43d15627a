"""Recurrent layers in the kernels of `quire.kernels.recurrence`, where they equal the modules of transformers."""
