"""OpenAI-compatible servers of any make over HTTP, with one client: streamed completions, timed by its clock."""
