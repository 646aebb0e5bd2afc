"""Which form of content a chat template takes: one string, or OpenAI's list of parts.

The one rule: the answer is the engine's `auto`. A template that loops over a message's content takes parts; any other
takes a string. It is read off the syntax tree, by following names that were set from `messages` and from a message's
content, and parameters of macros that are called with one; nothing is rendered.
"""

from collections.abc import Iterator

from jinja2 import nodes

from trimtab_core.chat_messages import ContentFormat
from trimtab_core.chat_template import parse_template


def content_format_of(source: str) -> ContentFormat:
    """The format of the template `source`. `NotRenderable` where it does not parse."""
    tree = parse_template(source)
    return "openai" if any(True for _ in _loops_over_content(tree)) else "string"


def _reads(node: nodes.Node | None, name: str, field: str | None = None) -> bool:
    """Whether `node` is the variable `name` (or its `field`), possibly sliced, filtered or tested."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if field is not None:
        item = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == field
        if not item and not (isinstance(node, nodes.Getattr) and node.attr == field):
            return False
        assert isinstance(node, nodes.Getitem | nodes.Getattr)
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _names_for_messages(tree: nodes.Template) -> list[str]:
    """`messages` and every name that is set from it, from those, and so on."""
    names = ["messages"]
    for name in names:
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, name) and isinstance(assign.target, nodes.Name) and assign.target.name not in names:
                names.append(assign.target.name)
    return names


def _names_for_message(tree: nodes.Template) -> list[str]:
    """Names that loops over the messages give to each message."""
    lists = _names_for_messages(tree)
    return [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    ]


def _loops_over_content(tree: nodes.Template) -> Iterator[nodes.For]:
    message_names = _names_for_message(tree)
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        parameters = _content_parameters(tree, macro, message_names)
        for loop in macro.find_all(nodes.For):
            in_macros.setdefault(id(loop), set()).update(parameters)
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in message_names):
            yield loop
        elif isinstance(loop.iter, nodes.Name):
            # Outside of macros the name alone is taken as a sign: `{% set content = message.content %}` is common.
            known = in_macros.get(id(loop))
            if loop.iter.name in known if known is not None else loop.iter.name == "content":
                yield loop


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, message_names: list[str]) -> set[str]:
    """The macro's parameters that some call gives a message's content."""
    names = [parameter.name for parameter in macro.args]
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((word.key, word.value) for word in call.kwargs)]
        found.update(
            parameter
            for parameter, value in given
            if parameter in names and any(_reads(value, name, "content") for name in message_names)
        )
    return found
