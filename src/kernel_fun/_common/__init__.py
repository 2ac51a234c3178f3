"""What every family shares. Nothing here imports torch, triton, cutlass or fla at module level."""
