"""Ring Attention."""
