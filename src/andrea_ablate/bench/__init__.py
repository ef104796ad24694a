"""Speed and memory: of a training step, and of each fused operation against what torch has."""
