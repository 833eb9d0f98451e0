"""One real vLLM engine on CPU for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness import Engine, make_engine, requests


@pytest.fixture(scope="session", autouse=True)
def stand_in(request: pytest.FixtureRequest) -> Iterator[None]:
    """With `--seams plug-ins`, schedulers of vLLM have plug-ins."""
    if request.config.getoption("seams") == "lists":
        yield
        return
    from plugin_stand_in import installed

    with installed():
        yield


@pytest.fixture(scope="session")
def engine(stand_in: None) -> Engine:
    """The engine, with `native:output-first`."""
    return make_engine()


@pytest.fixture(scope="session")
def stock_tokens(engine: Engine) -> list[list[int]]:
    """What stock vLLM generates for `requests(24)`."""
    with engine.using(None):
        return engine.generate(requests(24))


@pytest.fixture
def clean(engine: Engine) -> Engine:
    """Nothing in the prefix cache, and nobody known to the driver."""
    assert engine.run.engine.reset_prefix_cache() is not False
    engine.run.seen.clear()
    engine.run.by_name.clear()
    return engine
