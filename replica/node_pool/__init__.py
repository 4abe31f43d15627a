"""One pool of KV blocks in shared memory per node, which outlives the engines that fill it; imports no torch."""
