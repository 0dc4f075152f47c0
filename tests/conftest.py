"""Fixtures that several floors share."""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine, but before any test imports torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that load the default model or start a server process as slow."""
    for item in items:
        if not {"smollm", "live", "start"}.isdisjoint(item.fixturenames):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def smollm():
    """The files of the default model, fetched on first use."""
    from models.catalog import locate

    return locate("SmolLM2-135M-Instruct", progress=False)


@pytest.fixture(scope="session")
def smollm_reference(smollm):
    """transformers' own model of the default model's weights, loaded once: it takes seconds."""
    from tests.models.harness import transformers_llama

    return transformers_llama(smollm.weights)


settings.register_profile("long")  # make test-long
