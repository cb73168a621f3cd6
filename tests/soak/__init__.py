"""Random steps, many of them: what no case thought of. ``python -m tests.soak --help`` runs them without pytest."""
