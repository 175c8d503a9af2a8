"""The planner that mixes: keep, recompute, offload and encode, chosen for every storage at once."""
