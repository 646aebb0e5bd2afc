"""Both helms. Where there is none the tests are skipped, and say so; in CI they fail."""

import pytest
from helm import Helm, helm_of


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return helm_of(request.param, tmp_path_factory.mktemp(f"helm{request.param}"))


@pytest.fixture(scope="session")
def helm3(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    return helm_of(3, tmp_path_factory.mktemp("helm3-alone"))


@pytest.fixture(scope="session")
def helm4(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Where both would do the same."""
    return helm_of(4, tmp_path_factory.mktemp("helm4-alone"))
