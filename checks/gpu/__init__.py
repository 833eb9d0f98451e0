"""Builds, checks and times the CUDA kernels on a machine with a GPU: `entropy`; what is right, `answers`; launches
without Meridian, `driver`, and through it, `product`."""
