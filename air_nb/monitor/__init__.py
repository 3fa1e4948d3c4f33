"""What the GPUs of this machine do and who has them: sampling in a process of its own, choosing, locking, a text table.

Only the sampling process (`process`, `nvml`) talks to the driver. The rest runs in the kernel and never imports pynvml.
"""
