"""Fakes, scripted ports and tiny models that tests share."""
