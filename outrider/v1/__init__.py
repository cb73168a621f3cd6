"""Generated from ``proto/outrider/v1``; made by ``make proto``, checked for freshness by ``make check``."""
