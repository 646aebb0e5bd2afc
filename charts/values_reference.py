"""Writes docs/reference-values.md from the chart: what can be set, of which type, with which default (`make generate`).

The one rule: the page says what values.yaml and its schema say. The comment above a value is its description; one that
stands for the same thing everywhere (tolerations, labels, an image's tag) has it from WORDS.

    python charts/values_reference.py [ROOT]
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

Keys = tuple[str, ...]
"""Where a value stands."""
Node = dict[str, Any]
"""Of the schema."""
PAGE: Final = "docs/reference-values.md"
CHART: Final = "charts/trimtab"
HEAD: Final = """\
# Values of the chart

What `helm install trimtab charts/trimtab` takes by `--values` and `--set`; [install.md](install.md) says what for.
Generated from `charts/trimtab/values.yaml` and its schema, which refuses everything else.
"""
WORDS: Final = {
    "affinity": "As in a pod.",
    "annotations": "Its annotations.",
    "caSecretKey": "The key in it.",
    "create": "Make it. Without: `name` has to be there.",
    "digest": "`sha256:...`; beats the tag.",
    "duration": "How long it holds.",
    "enabled": "Whether there is one.",
    "existingSecretKey": "The key in it.",
    "extraEnv": "More environment variables, as in a container.",
    "extraVolumeMounts": "As in a container.",
    "extraVolumes": "As in a pod.",
    "https": "Port of the pod.",
    "interval": "How often is scraped.",
    "logLevel": "How much is logged.",
    "maxUnavailable": "A number, or a share such as `50%`.",
    "metricRelabelings": "As in the monitor.",
    "metrics": "Port of the pod.",
    "nodeSelector": "As in a pod.",
    "podAnnotations": "Annotations of its pods.",
    "podLabels": "Labels of its pods, besides the chart's.",
    "podSecurityContext": "As in a pod.",
    "priorityClassName": "As in a pod.",
    "pullPolicy": "When it is pulled.",
    "registry": "Before the repository.",
    "relabelings": "As in the monitor.",
    "renewBefore": "How long before its end it is renewed.",
    "replicas": "How many.",
    "repository": "Without registry and tag.",
    "resources": "As in a container.",
    "securityContext": "As in a container.",
    "tag": "The image's.",
    "tolerations": "As in a pod.",
}


def page(root: Path) -> str:
    """Markdown. Raises KeyError for a value that nobody describes."""
    chart = root / CHART
    text = (chart / "values.yaml").read_text()
    schema = json.loads((chart / "values.schema.json").read_text())
    comments = _comments(text)
    lines = [HEAD]
    alone: list[str] = []
    for name, value in yaml.safe_load(text).items():
        rows = list(_rows((name,), value, schema["properties"][name], schema["definitions"], comments))
        if len(rows) == 1 and rows[0].startswith(f"| `{name}` |"):
            alone += rows
            continue
        lines += [f"## {name}", ""]
        if about := comments.get((name,)):
            lines += [about, ""]
        lines += [*_table(rows), ""]
    first = [*_table(alone), ""]
    return "\n".join([lines[0], *first, *lines[1:]])


def _table(rows: list[str]) -> list[str]:
    return ["| value | type | default | |", "|---|---|---|---|", *rows]


def _rows(
    path: tuple[str, ...],
    value: Any,
    node: dict[str, Any],
    shared: dict[str, Any],
    comments: dict[tuple[str, ...], str],
) -> Iterator[str]:
    """One for each value; one without type for what several have in common."""
    kind = node.get("$ref", "").rpartition("/")[2]
    node = shared[kind] if kind else node
    name = ".".join(path)
    is_leaf = not isinstance(value, dict) or not value or "properties" not in node or kind == "resources"
    if is_leaf:
        about = comments.get(path) or WORDS[path[-1]]
        yield f"| `{name}` | {_type(node, shared)} | {_default(value)} | {_cell(about)} |"
        return
    if len(path) > 1 and path in comments:
        yield f"| **`{name}`** | | | {_cell(comments[path])} |"
    for key, inner in value.items():
        yield from _rows((*path, key), inner, node["properties"][key], shared, comments)


def _type(node: Node, shared: dict[str, Node]) -> str:
    if "$ref" in node:
        node = shared[node["$ref"].rpartition("/")[2]]
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    kind = node["type"]
    if isinstance(kind, list):
        return " or ".join(kind)
    if kind == "array":
        return f"list of {_type(node['items'], shared)}"
    if kind == "integer":
        low, high = node.get("minimum"), node.get("maximum")
        return f"integer, {low} to {high}" if high is not None else f"integer, at least {low}"
    return str(kind)


def _default(value: Any) -> str:
    if value in ("", {}, []) and not isinstance(value, bool):
        return ""
    text = yaml.safe_dump(value, default_flow_style=True, width=1 << 20, sort_keys=False).removesuffix("...\n").strip()
    return f"`{_cell(text)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _comments(text: str) -> dict[Keys, str]:
    """The lines right above each key, by its path."""
    found: dict[Keys, str] = {}
    above: list[str] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if comment := re.fullmatch(r" *# ?(.*)", line):
            above.append(comment[1])
            continue
        if key := re.fullmatch(r"( *)([A-Za-z]\w*):.*", line):
            depth = len(key[1])
            path = [*(entry for entry in path if entry[0] < depth), (depth, key[2])]
            if above:
                found[tuple(name for _, name in path)] = " ".join(above)
        above = []
    return found


def main(root: Path) -> None:
    path = root / PAGE
    text = page(root)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
