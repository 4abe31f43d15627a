"""CUDA graphs: captured steps, and the policy which steps are captured."""
