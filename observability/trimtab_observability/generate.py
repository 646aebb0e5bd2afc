"""Writes Trimtab's Grafana dashboards into the chart (`make generate`).

The one rule: the same definitions give the same files, byte for byte, so that a test can hold them against each other.

    python -m trimtab_observability.generate [ROOT]
"""

import json
import sys
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from trimtab_observability import fleet_page, picker_page, pool_page
from trimtab_observability.dashboard import Page, built

PAGES: Final[tuple[Page, ...]] = (fleet_page.PAGE, pool_page.PAGE, picker_page.PAGE)
FOLDER: Final = "charts/trimtab/dashboards"


def files() -> dict[str, str]:
    """What each file is to hold, by its path below the root."""
    return {
        f"{FOLDER}/{page.uid}.json": json.dumps(built(page), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"
        for page in PAGES
    }


def main() -> None:
    """Writes them."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd()
    for name, text in files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
        print(name)


if __name__ == "__main__":
    main()
