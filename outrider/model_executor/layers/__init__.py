"""Layers of a decoder: linear, attention, feed-forward, normalisation, rotary embedding, token embedding.

A layer owns its parameters, names the checkpoint's tensors that fill them, and computes. It knows one path: which
kernel computes a step is chosen by the linear method (``linear``) and by the operations in ``outrider.kernels``.
"""
