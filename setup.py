"""The part of the build that pyproject.toml cannot say: the native core, where there is a cargo to build it.

The one rule: an installation without it works. No cargo: the reference core is installed. A build that fails: the same,
loudly, and the reason stays beside the package, where whoever starts a process reads it again.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup

CRATE = "core/native/trimtab-py/Cargo.toml"
PACKAGE = "trimtab_core"
REASON = "_native_failed.txt"
"""Why the native core is not there although cargo was; `trimtab_core.selection` reads it."""
REASON_CHARS_MAX = 4_000


def native() -> dict[str, object]:
    """What `setup` has to be told where the native core is to be built."""
    from setuptools_rust import Binding, RustExtension, Strip, build_rust

    class BuildCore(build_rust):
        """Builds it, or says why not."""

        def run_for_extension(self, ext: RustExtension) -> None:
            build = self.get_finalized_command("build_ext")
            folder = Path("core", PACKAGE) if build.inplace else Path(build.build_lib, PACKAGE)
            reason = folder / REASON
            reason.unlink(missing_ok=True)
            try:
                super().run_for_extension(ext)
            except Exception as error:
                folder.mkdir(parents=True, exist_ok=True)
                reason.write_text(str(error)[-REASON_CHARS_MAX:])
                line = "!" * 80
                print(
                    f"{line}\nThe native core was not built; the reference is used:\n{error}\n{line}", file=sys.stderr
                )

    return {
        "cmdclass": {"build_rust": BuildCore},
        "rust_extensions": [
            RustExtension(
                f"{PACKAGE}._native",
                path=CRATE,
                args=["--locked"],
                binding=Binding.PyO3,
                py_limited_api=True,
                debug=False,
                quiet=True,
                optional=True,
                strip=Strip.Debug,
            )
        ],
        "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
    }


setup(**(native() if shutil.which("cargo") else {}))
