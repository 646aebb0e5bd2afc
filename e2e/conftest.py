"""One scenario in a cluster, from installing to uninstalling: each module is a chapter of it, in this order."""

import logging
import os
import shutil

import pytest

CHAPTERS = (
    "test_install",
    "test_demo_pool",
    "test_engines_come_and_go",
    "test_parts_die",
    "test_pickers_are_replaced",
    "test_ready_examples",
    "test_envoy_gateway",
    "test_upgrade",
    "test_uninstall",
)
TEST_TIMEOUT_S = 900


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("KUBECONFIG") or not shutil.which("kubectl"):
        pytest.exit("e2e needs KUBECONFIG and kubectl: run `make e2e`", returncode=3)
    logging.getLogger("e2e").setLevel(logging.INFO)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: CHAPTERS.index(item.path.stem) if item.path.stem in CHAPTERS else -1)
    for item in items:
        item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
