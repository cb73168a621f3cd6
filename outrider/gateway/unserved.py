"""Paths of OpenAI's and vLLM's APIs that are not served, and why."""

from __future__ import annotations

_TEXT_ALONE = "only text is generated; embeddings, scores and classes are not computed"
_NO_MEDIA = "only text is read and written"
_NOT_STORED = "nothing is stored"
_UNSERVED = {
    **dict.fromkeys(("embeddings", "rerank", "score", "pooling", "classify", "moderations"), _TEXT_ALONE),
    **dict.fromkeys(("audio", "images", "videos", "realtime"), _NO_MEDIA),
    **dict.fromkeys(
        ("files", "uploads", "batches", "fine_tuning", "assistants", "threads", "vector_stores", "conversations"),
        _NOT_STORED,
    ),
    "messages": "Anthropic's API is not served; /v1/chat/completions is",
    "load": "the gateway's load is outrider_http_requests_running of /metrics",
}


def unserved_path(path: str) -> str | None:
    """Why a known path is not served; None for any other."""
    parts = [part for part in path.split("/") if part and part not in ("v1", "v2")]
    return _UNSERVED.get(parts[0]) if parts else None
