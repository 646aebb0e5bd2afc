"""All benchmarks, one after the other; each writes its figures as JSON into `bench/results/`.

python bench/run.py [--quick]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


CORE_SCRIPTS = ("decision", "core_parts", "restart")
PEERS_PYTHON = "BENCH_PEERS"
"""Names a Python that has the peers of `peer_selectors.py`; without it they are left out."""


def core(*, quick: bool) -> None:
    """Scripts that print one JSON object a line; their lines go to files of their names."""
    commands = {name: [sys.executable, HERE / f"{name}.py"] for name in CORE_SCRIPTS}
    commands["decision"].append("--json")
    if peers := os.environ.get(PEERS_PYTHON):
        tokenizer = HERE.parent / "lab" / "trimtab_lab" / "data" / "tiny_model" / "tokenizer.json"
        commands["peer_selectors"] = [peers, HERE / "peer_selectors.py", "--tokenizer", tokenizer]
    for name, command in commands.items():
        run = subprocess.run([*command, *(["--quick"] if quick else [])], check=True, stdout=subprocess.PIPE, text=True)
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        (RESULTS / f"{name}.json").write_text(json.dumps(lines, indent=1) + "\n")
        print(run.stdout, end="", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short runs: to see that they work, not for figures")
    quick = parser.parse_args().quick
    RESULTS.mkdir(exist_ok=True)
    print("1/4 the core", flush=True)
    core(quick=quick)
    print("2/4 exchanges", flush=True)
    if shutil.which("cargo"):
        options = ["--seconds", "2", "--rounds", "1"] if quick else []
        subprocess.run(
            [sys.executable, HERE / "exchanges.py", "--json", RESULTS / "exchanges.json", *options], check=True
        )
    else:
        print("no cargo: its gateway cannot be built; left out", flush=True)
    print("3/4 hop", flush=True)
    options = ["--seconds", "3", "--rounds", "1"] if quick else []
    subprocess.run([sys.executable, HERE / "hop.py", "--json", RESULTS / "hop.json", *options], check=True)
    print("4/4 prediction", flush=True)
    options = ["--requests", "100", "--rates", "8", "--seconds", "8", "--no-replicas"] if quick else []
    subprocess.run(
        [sys.executable, HERE / "prediction.py", "--json", RESULTS / "prediction.json", *options], check=True
    )


if __name__ == "__main__":
    main()
