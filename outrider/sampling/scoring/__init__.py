"""Scores of the target's K+1 positions, in the form that each session's acceptance rule needs.

``fused`` is what the sampler calls: kernels on a GPU, and ``score`` for all else. ``forms`` has the four forms, and
``contract`` what a request has to keep to.
"""
