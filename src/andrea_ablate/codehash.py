"""What code a choice stands for, as a hash: it enters a run's name, so that an edited class makes new runs.

It covers a class or function and whatever that uses from its own module, however deep. It does not cover other classes
of that module, what is imported (our own numerics have `config.NUMERICS_VERSION`), comments, docstrings, annotations
and layout. It is the same in every process, on every machine and in every version of Python that we support.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import sys
from collections import defaultdict
from functools import cache
from typing import Any

from andrea_ablate.registry import ConfigError


@cache
def code_hash(item: Any) -> str:
    """Hash the code of a class or function. Raises ConfigError for one that no file defines."""
    try:
        definitions = _definitions(inspect.getsource(sys.modules[item.__module__]))
        waiting = [item.__qualname__.split(".")[0]]  # of a class inside a function all of the function
    except (AttributeError, KeyError, OSError, TypeError) as error:
        raise ConfigError(f"{item!r} has no source file to name its runs by; define it in a module") from error
    reached: dict[str, Any] = {}
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = [_plain(statement) for statement in definitions[name]]
            used = (node for statement in definitions[name] for node in ast.walk(statement))
            waiting += [node.id for node in used if isinstance(node, ast.Name) and node.id in definitions]
    return hashlib.blake2b(json.dumps(reached, sort_keys=True).encode(), digest_size=8).hexdigest()


@cache
def _definitions(source: str) -> dict[str, list[ast.stmt]]:
    """The statements of a module by the names that they bind, imports left out."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            ast.get_docstring(node) is not None
        ):
            del node.body[0]
        for field in {"annotation", "returns"}.intersection(node._fields):
            setattr(node, field, None)
    found: dict[str, list[ast.stmt]] = defaultdict(list)
    for statement in tree.body:
        for name in _bound(statement):
            found[name].append(statement)
    return dict(found)


def _bound(statement: ast.stmt) -> set[str]:
    named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if isinstance(statement, named):
        return {statement.name}
    nodes = list(ast.walk(statement))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.name for node in nodes if isinstance(node, named)}


def _plain(node: Any) -> Any:
    """A syntax tree as lists. What is empty is left out, because newer versions of Python add fields."""
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return [type(node).__name__, *([name, _plain(value)] for name, value in fields)]
    return [_plain(item) for item in node] if isinstance(node, list) else repr(node)
