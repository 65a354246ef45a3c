"""Others' published kernels, compiled unchanged, beside ours on the software GPU."""
