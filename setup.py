"""The part of the build that pyproject.toml cannot say: the native modules, where there is a cargo to build them.

The one rule: an installation without them works. No cargo: the reference core and the gRPC library's server are
installed. A build that fails: the same, loudly, and the reason stays beside the package, where whoever starts a process
reads it again.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from setuptools import setup

REASON_CHARS_MAX = 4_000


@dataclass(frozen=True)
class Module:
    """One native module."""

    name: str
    crate: str
    sources: str
    """The folder that holds its package in the source tree."""
    reason: str
    """The file that says why it is not there although cargo was; the package reads it."""
    what: str
    instead: str

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]


MODULES = (
    Module(
        name="trimtab_core._native",
        crate="core/native/trimtab-py/Cargo.toml",
        sources="core",
        reason="_native_failed.txt",
        what="native core",
        instead="reference",
    ),
    Module(
        name="trimtab_extproc._front",
        crate="extproc/native/trimtab-front-py/Cargo.toml",
        sources="extproc",
        reason="_front_failed.txt",
        what="native front",
        instead="gRPC library's server",
    ),
)


def native() -> dict[str, object]:
    """What `setup` has to be told where the native modules are to be built."""
    from setuptools_rust import Binding, RustExtension, Strip, build_rust

    class BuildNative(build_rust):
        """Builds each, or says why not."""

        def run_for_extension(self, ext: RustExtension) -> None:
            build = self.get_finalized_command("build_ext")
            module = next(module for module in MODULES if module.name in ext.target.values())
            folder = Path(module.sources if build.inplace else build.build_lib, module.package)
            reason = folder / module.reason
            reason.unlink(missing_ok=True)
            try:
                super().run_for_extension(ext)
            except Exception as error:
                folder.mkdir(parents=True, exist_ok=True)
                reason.write_text(str(error)[-REASON_CHARS_MAX:])
                line = "!" * 80
                print(
                    f"{line}\nThe {module.what} was not built; the {module.instead} is used:\n{error}\n{line}",
                    file=sys.stderr,
                )

    return {
        "cmdclass": {"build_rust": BuildNative},
        "rust_extensions": [
            RustExtension(
                module.name,
                path=module.crate,
                args=["--locked"],
                binding=Binding.PyO3,
                py_limited_api=True,
                debug=False,
                quiet=True,
                optional=True,
                strip=Strip.Debug,
            )
            for module in MODULES
        ],
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**(native() if shutil.which("cargo") else {}))
