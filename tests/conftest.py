"""Fixtures that several floors share."""

import os
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the engine, but before any test imports torch
with suppress(ImportError):
    import triton  # noqa: F401 - else kernels.dispatch would leave it out on machines without a GPU


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


# How long an example takes says more of what else the machine does.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("suite"))  # make test-long
settings.load_profile("suite")
