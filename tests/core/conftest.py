"""Both cores under the same tests: what a test module imports as `Scheduler`, `BlockChains` or `hash_chunks` is the
reference's on one run and the native core's on the other."""

from collections.abc import Iterator

import pytest
from native_core import NATIVE, needs_native

REPLACED = ("BlockChains", "Scheduler", "hash_chunks")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_marked = any("core" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if not is_marked and any(hasattr(metafunc.module, name) for name in REPLACED):
        cores = ["reference", pytest.param("native", marks=needs_native)]
        metafunc.parametrize("core", cores, indirect=True, scope="module")


@pytest.fixture(scope="module", autouse=True)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the core under test; the reference where a test does not ask."""
    name = getattr(request, "param", "reference")
    with pytest.MonkeyPatch.context() as patch:
        for replaced in REPLACED if name == "native" else ():
            if hasattr(request.module, replaced):
                patch.setattr(request.module, replaced, getattr(NATIVE, replaced))
        yield name
