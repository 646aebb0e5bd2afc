"""The few pieces of Envoy's expression language (CEL) that our configuration needs, and the two messages around them.

Its one rule: syntax only; what an expression is for is said where it is used. Envoy 1.40 takes expressions in
matchers as trees, not as text, and `envoy-data-plane` leaves the two messages out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import betterproto2
from envoy_data_plane.cel.expr import Constant, Expr, ExprCall, ExprIdent, ExprSelect, ParsedExpr
from envoy_data_plane.google.protobuf import Any
from envoy_data_plane.message_pool import default_message_pool
from envoy_data_plane.xds.core.v3 import TypedExtensionConfig
from envoy_data_plane.xds.type.matcher.v3 import MatcherMatcherListPredicate, MatcherMatcherListPredicateSinglePredicate
from envoy_data_plane.xds.type.v3 import CelExpression

_PACKAGE: Final = "xds.type.matcher.v3"


@dataclass(eq=False, repr=False)
class CelMatcher(betterproto2.Message):
    """`xds.type.matcher.v3.CelMatcher`."""

    expr_match: CelExpression | None = betterproto2.field(1, betterproto2.TYPE_MESSAGE, optional=True)  # noqa: RUF009 - its way


@dataclass(eq=False, repr=False)
class HttpAttributesCelMatchInput(betterproto2.Message):
    """`xds.type.matcher.v3.HttpAttributesCelMatchInput`."""


default_message_pool.register_message(_PACKAGE, "CelMatcher", CelMatcher)
default_message_pool.register_message(_PACKAGE, "HttpAttributesCelMatchInput", HttpAttributesCelMatchInput)


def attribute(name: str, *fields: str) -> Expr:
    """`name.field...`."""
    expression = Expr(ident_expr=ExprIdent(name=name))
    for field in fields:
        expression = Expr(select_expr=ExprSelect(operand=expression, field=field))
    return expression


def item(container: Expr, key: str) -> Expr:
    """`container['key']`."""
    return _call("_[_]", container, Expr(const_expr=Constant(string_value=key)))


def equal(one: Expr, other: Expr) -> Expr:
    """`one == other`; where either does not exist it is no match."""
    return _call("_==_", one, other)


def holds(expression: Expr) -> MatcherMatcherListPredicate:
    """The predicate that the expression is true of the request and its response."""
    # The evaluator tells nodes apart by their numbers.
    for number, node in enumerate(_nodes(expression), start=1):
        node.id = number
    matcher = CelMatcher(expr_match=CelExpression(cel_expr_parsed=ParsedExpr(expr=expression)))
    return MatcherMatcherListPredicate(
        single_predicate=MatcherMatcherListPredicateSinglePredicate(
            input=TypedExtensionConfig(name="attributes", typed_config=Any.pack(HttpAttributesCelMatchInput())),
            custom_match=TypedExtensionConfig(name="expression", typed_config=Any.pack(matcher)),
        )
    )


def _call(function: str, *arguments: Expr) -> Expr:
    return Expr(call_expr=ExprCall(function=function, args=list(arguments)))


def _nodes(expression: Expr) -> list[Expr]:
    nodes = [expression]
    if expression.select_expr is not None and expression.select_expr.operand is not None:
        nodes += _nodes(expression.select_expr.operand)
    if expression.call_expr is not None:
        for argument in expression.call_expr.args:
            nodes += _nodes(argument)
    return nodes
