"""fa4 inside other frameworks, one module each; none is imported unless asked for.

Importing a module changes nothing: its `register` does.
"""
