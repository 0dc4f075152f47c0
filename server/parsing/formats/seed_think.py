"""<seed:think>…</seed:think>: Seed-OSS."""

from server.parsing.reasoning import ReasoningParser


class SeedThinkParser(ReasoningParser):
    """Reasoning in tags with a prefix."""

    name = "seed_oss"
    markers = template_signs = ("<seed:think>", "</seed:think>")
