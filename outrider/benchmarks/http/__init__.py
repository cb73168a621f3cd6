"""OpenAI-compatible servers over HTTP, whoever made them, with one client: streamed completions, timed by its clock."""
