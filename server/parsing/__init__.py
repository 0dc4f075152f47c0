"""What a model writes -> content, reasoning and tool calls, while it is being written.

One file per format; registry.py lists them. A parser is a state machine fed with text as it comes; whatever
the cut of the text, what it says joins to the same.
"""
