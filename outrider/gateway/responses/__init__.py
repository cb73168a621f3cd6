"""Response bodies of the HTTP API: chats, completions, errors, logprobs and usage, whole or as server-sent events."""
