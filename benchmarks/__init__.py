"""Measures air_nb as the user of a notebook meets it, against torchrun and other peers in the same run.

``python -m benchmarks NAME`` from the checkout, in the environment that air_nb is installed in; never installed itself.
"""
