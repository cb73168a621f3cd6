"""The HTTP gateway: OpenAI's API in front of one or several coordinators.

Owns HTTP: what a request's fields mean, what an answer looks like, server-sent events. It reaches coordinators through
the SDK alone, tokenizes prompts itself, and scales by itself. Knows no session, no protobuf and no torch.
"""
