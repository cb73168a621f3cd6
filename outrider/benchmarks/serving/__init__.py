"""End to end through a running coordinator: traffic, what its caller saw, and where the time of a step went.

Knows the SDK and nothing behind it: the services may run anywhere. A correctness gate runs first; while it is red no
figure is given.
"""
