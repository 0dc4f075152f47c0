"""Fixtures that several floors share."""

import pytest


@pytest.fixture(scope="session")
def smollm():
    """The files of the default model, fetched on first use."""
    from models.catalog import locate

    return locate("SmolLM2-135M-Instruct", progress=False)
