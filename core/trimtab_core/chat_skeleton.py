"""Chats that a template only wraps: their text without running the template again.

The one rule: a skeleton is used only where the template's syntax proves it right. Of a template that prints a message's
content, and otherwise asks at most whether it is empty or a text (no filter, no function, no comparison sees one), the
rest of the text depends on the roles alone, for contents that are not empty; so the text around them is rendered once
for each row of roles and kept. A template that does more, however little, is rendered each time.

Bounds: `SKELETONS_MAX` rows of roles for each template, of at most `MESSAGES_MAX` messages; when they are full, all go.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import nodes

SKELETONS_MAX = 1_024
MESSAGES_MAX = 256
_MARK = re.compile("\ue000trimtab:([0-9]+):a\ue001")
PLAIN_ROLES = frozenset({"system", "user", "assistant"})
"""Roles of the messages that may be asked for: others are clients' inventions, or more than a role."""
_KNOWN = (
    nodes.Template,
    nodes.Output,
    nodes.TemplateData,
    nodes.For,
    nodes.If,
    nodes.Assign,
    nodes.NSRef,
    nodes.Name,
    nodes.Const,
    nodes.Getattr,
    nodes.Getitem,
    nodes.Slice,
    nodes.BinExpr,
    nodes.UnaryExpr,
    nodes.Concat,
    nodes.Compare,
    nodes.Operand,
    nodes.CondExpr,
    nodes.List,
    nodes.Tuple,
    nodes.Break,
    nodes.Continue,
    nodes.Filter,
    nodes.Test,
    nodes.Call,
    nodes.Keyword,
)
"""Whatever else a template has, it is not looked into."""
_FILTERS = frozenset(
    {"capitalize", "count", "default", "length", "lower", "string", "title", "tojson", "trim", "upper"}
)
_FUNCTIONS = frozenset({"namespace", "raise_exception", "range"})
_LOOP_FIELDS = frozenset({"first", "last", "index", "index0", "revindex", "revindex0", "length"})
_TYPE_TESTS = frozenset({"defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number"})
_PRINTED = (nodes.Output, nodes.Add, nodes.Concat)

Skeleton = tuple[str | int, ...]
"""Texts, and between them the places of messages whose contents stand there."""


class Skeletons:
    """Those of one template. May be asked on any thread."""

    def __init__(self, tree: nodes.Template) -> None:
        self.is_usable = is_transparent(tree)
        self._kept: dict[object, Skeleton | None] = {}

    def text(
        self,
        roles: tuple[str, ...],
        contents: Sequence[str],
        variables: tuple[tuple[str, str], ...],
        render: Callable[[list[dict[str, Any]]], str],
    ) -> str | None:
        """The text for messages with nothing but role and content, no content empty; None: it has to be rendered.

        `variables`: all that `render` tells the template besides the messages.
        """
        if not self.is_usable or len(roles) > MESSAGES_MAX or not all(contents):
            return None
        key = roles, variables
        if key in self._kept:
            skeleton = self._kept[key]
        else:
            skeleton = _skeleton(roles, render)
            if len(self._kept) >= SKELETONS_MAX:
                self._kept.clear()
            self._kept[key] = skeleton
        return None if skeleton is None else _filled(skeleton, contents)


def _filled(skeleton: Skeleton, contents: Sequence[str]) -> str:
    return "".join([part if isinstance(part, str) else contents[part] for part in skeleton])


def _skeleton(roles: tuple[str, ...], render: Callable[[list[dict[str, Any]]], str]) -> Skeleton | None:
    def marked(letter: str) -> tuple[list[str], str]:
        contents = [f"\ue000trimtab:{at}:{letter}\ue001" for at in range(len(roles))]
        return contents, render([{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)])

    (contents, text), (other_contents, other_text) = marked("a"), marked("b")
    parts = _MARK.split(text)
    skeleton = tuple(int(part) if place % 2 else part for place, part in enumerate(parts))
    # Text of anybody else's that looks like a mark, or that is another each time, shows itself here.
    is_right = _filled(skeleton, contents) == text and _filled(skeleton, other_contents) == other_text
    return skeleton if is_right else None


def is_transparent(tree: nodes.Template) -> bool:
    """Whether the template's syntax shows that it prints the messages' contents and nothing else."""
    messages = {
        node.target.name
        for node in tree.find_all(nodes.For)
        if isinstance(node.target, nodes.Name) and _is_messages(node.iter)
    }
    return _is_plain(tree, (), messages)


def _is_messages(node: nodes.Node) -> bool:
    """`messages`, or a slice of it."""
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        node = node.node
    return isinstance(node, nodes.Name) and node.name == "messages"


def _is_plain(node: nodes.Node, above: tuple[nodes.Node, ...], messages: set[str]) -> bool:
    if not isinstance(node, _KNOWN):
        return False
    if not _is_allowed(node, above, messages):
        return False
    return all(_is_plain(child, (*above, node), messages) for child in node.iter_child_nodes())


def _is_allowed(node: nodes.Node, above: tuple[nodes.Node, ...], messages: set[str]) -> bool:
    parent = above[-1] if above else None
    if isinstance(node, nodes.Name):
        if node.ctx != "load":
            # A name for a message is given by its loop alone; the list and the loop keep theirs.
            is_loop = isinstance(parent, nodes.For) and parent.target is node and _is_messages(parent.iter)
            return is_loop if node.name in messages else node.name not in ("messages", "loop")
        if node.name in messages:
            return _field(parent, node) is not None
        if node.name == "messages":
            return _is_list_use(node, above)
        return node.name != "loop" or (isinstance(parent, nodes.Getattr) and parent.attr in _LOOP_FIELDS)
    if isinstance(node, nodes.For):
        return not node.recursive
    if isinstance(node, nodes.Filter):
        return node.name in _FILTERS
    if isinstance(node, nodes.Call):
        return (
            isinstance(node.node, nodes.Name)
            and node.node.name in _FUNCTIONS
            and not (node.dyn_args or node.dyn_kwargs)
        )
    if isinstance(node, nodes.Getattr | nodes.Getitem) and _field(node, node.node) == "content":
        # Whatever it is the content of.
        return _is_printed(above) or _is_asked_for(node, above)
    if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Const | nodes.Slice):
        # A field whose name is not written down could be the content; a place in the list is none.
        return isinstance(node.node, nodes.Name) and node.node.name == "messages"
    return True


def _field(parent: nodes.Node | None, node: nodes.Node) -> str | None:
    """The field that `parent` takes of `node`."""
    if isinstance(parent, nodes.Getattr) and parent.node is node:
        return parent.attr
    if isinstance(parent, nodes.Getitem) and parent.node is node and isinstance(parent.arg, nodes.Const):
        return parent.arg.value if isinstance(parent.arg.value, str) else None
    return None


def _is_list_use(node: nodes.Name, above: tuple[nodes.Node, ...]) -> bool:
    """The whole list: looped over, counted, or asked for a field of one message."""
    parent, grandparent = above[-1], above[-2] if len(above) > 1 else None
    if isinstance(parent, nodes.For):
        return parent.iter is node
    if isinstance(parent, nodes.Filter):
        return parent.node is node and parent.name in ("length", "count") and not parent.args
    if isinstance(parent, nodes.Getitem) and parent.node is node:
        if isinstance(parent.arg, nodes.Slice):
            return isinstance(grandparent, nodes.For) and grandparent.iter is parent
        return _field(grandparent, parent) is not None
    return False


def _is_printed(above: tuple[nodes.Node, ...]) -> bool:
    """Whether what stands there goes into the text as it is."""
    for node in reversed(above):
        if not isinstance(node, _PRINTED):
            return False
        if isinstance(node, nodes.Output):
            return True
    return False


def _is_asked_for(node: nodes.Node, above: tuple[nodes.Node, ...]) -> bool:
    """Whether all that matters of it there is that it is a text, and not empty."""
    parent = above[-1]
    if isinstance(parent, nodes.Test):
        return parent.node is node and parent.name in _TYPE_TESTS and not parent.args
    for node_above in reversed(above):
        if isinstance(node_above, nodes.And | nodes.Or | nodes.Not):
            node = node_above
        else:
            return isinstance(node_above, nodes.If | nodes.CondExpr) and node_above.test is node
    return False
