"""All benchmarks, one after the other; each writes its figures as JSON into `bench/results/`.

python bench/run.py [--quick]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs: to see that they work, not for figures")
    quick = parser.parse_args().quick
    RESULTS.mkdir(exist_ok=True)
    print("1/2 decision", flush=True)
    decision = subprocess.run(
        [sys.executable, HERE / "decision.py", "--json", *(["--decisions", "30"] if quick else [])],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [json.loads(line) for line in decision.stdout.splitlines()]
    (RESULTS / "decision.json").write_text(json.dumps(lines, indent=1) + "\n")
    print(decision.stdout, end="")
    print("2/2 hop", flush=True)
    options = ["--seconds", "3", "--rounds", "1"] if quick else []
    subprocess.run([sys.executable, HERE / "hop.py", "--json", RESULTS / "hop.json", *options], check=True)


if __name__ == "__main__":
    main()
