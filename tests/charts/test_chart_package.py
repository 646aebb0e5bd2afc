"""What `helm package` puts into the archive, and the page that says what can be set."""

import io
import sys
import tarfile
from pathlib import Path

import yaml
from helm import CHART, ROOT, Helm

sys.path.insert(0, str(ROOT / "charts"))

from values_reference import PAGE, page


def test_the_package_holds_what_the_chart_links_to(helm: Helm, tmp_path: Path) -> None:
    helm.done("package", CHART, "--destination", tmp_path)
    (archive,) = tmp_path.glob("trimtab-*.tgz")
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as tar:
        # No links: the archive is unpacked where the project is not.
        assert all(member.isfile() for member in tar)
        packed = {member.name: tar.extractfile(member) for member in tar}
        for path in sorted((ROOT / "crds").glob("*.yaml")):
            file = packed[f"trimtab/files/crds/{path.name}"]
            assert file is not None
            assert file.read() == path.read_bytes()
        assert "trimtab/files/operator-rbac.yaml" in packed
    values = {"store": {"valkey": {"auth": {"existingSecret": "s"}}}}
    assert helm.objects(values, chart=archive) == helm.objects(values)


def test_the_sources_are_links_and_not_copies() -> None:
    for name, source in (("crds", "crds"), ("operator-rbac.yaml", "manifests/operator-rbac.yaml")):
        link = CHART / "files" / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / source


def test_chart_and_package_have_one_version() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{about["appVersion"]}"\n' in project
    assert about["version"] == about["appVersion"]


def test_the_reference_page_is_generated_from_the_chart() -> None:
    assert (ROOT / PAGE).read_text() == page(ROOT), "make generate"
