"""KDA in torch on any device: the CPU product, and the twin every GPU kernel is tested against.

Chunks of 64 tokens; decays only ever multiply (docs/kda.md), so any log gate <= 0 is ordinary. Work is
done on tiles of a few chunk-heads at a time, which bounds memory and keeps the operands in cache. One
compute dtype per call: float64 if any input is float64, else float32.
"""
