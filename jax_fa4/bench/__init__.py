"""Measuring jax_fa4: speed against other implementations, memory, compile time. ``python -m jax_fa4 bench``."""
