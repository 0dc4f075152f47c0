"""Splits the text of a model into content, reasoning and tool calls, incrementally.

formats/ has one file per format and lists them. A parser is a state machine fed with text as it comes; its
events add up to the same message however the text is cut.
"""
