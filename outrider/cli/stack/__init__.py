"""The three services as child processes of one command.

``plan`` turns settings into process specifications, ``preflight`` refuses what cannot work before anything is started,
``process`` is one child, ``supervisor`` starts, restarts and stops them in order, ``child`` runs inside each of them.
"""
