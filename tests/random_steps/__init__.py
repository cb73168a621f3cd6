"""Random steps, many of them: what no case thought of. ``python -m tests.random_steps`` takes any number."""
