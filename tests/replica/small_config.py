"""The engine configuration that tests of the control plane start from."""

from __future__ import annotations

from quire.replica.config import EngineConfig


def small_config(**changes: object) -> EngineConfig:
    """64 blocks of 8 tokens on the CPU, no margin, with a prefix cache."""
    values = dict(
        model_name="m",
        revision="r",
        device="cpu",
        dtype="float32",
        vocab_size=1000,
        eos_token_ids=(2,),
        max_model_len=512,
        block_size=8,
        num_blocks=64,
        max_batch_tokens=64,
        max_running_requests=16,
        max_waiting_requests=32,
        safety_margin=0.0,
        scheduler="fifo",
        max_prefill_ms=None,
        resume_margin=0.0,
        prefix_caching=True,
        deterministic=True,
        num_threads=1,
    )
    return EngineConfig(**{**values, **changes})
