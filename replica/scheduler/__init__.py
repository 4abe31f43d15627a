"""What each step computes: queues, admission, preemption, offload, measured speeds. No torch."""
