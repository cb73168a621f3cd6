"""Exploration: steps taken to learn prices and acceptance, held to a share of the time by their measured price.

Four kinds exist. While decoding is plain, a *probe* lets a few sessions draft to measure acceptance
(``acceptance_probe``), and a *trial* lets all sessions speculate where speculative rounds of about so many rows are
hardly known (``trials``). While decoding is speculative, a trial decodes a few plain rounds, and one round in some has
another draft length (``length_planner``).
"""
