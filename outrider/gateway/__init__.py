"""HTTP gateway: the OpenAI API in front of one or several coordinators.

Owns the meaning of request fields, the form of responses, and server-sent events. It reaches coordinators only through
the SDK, tokenizes prompts itself, and scales independently. Requires neither protobuf nor torch.
"""
