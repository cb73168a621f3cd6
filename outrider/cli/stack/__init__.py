"""The services of ``outrider serve`` as child processes.

``plan`` turns settings into process specifications, ``preflight`` checks them before anything is started, ``process``
is one child, ``supervisor`` starts, restarts and stops the children in order, ``child`` runs inside each of them.
"""
