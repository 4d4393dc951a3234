"""The parameters of a method, read from its source.

Importing a criterion loads MXNet, which takes a second; ``train.py --help`` shows the options of
all losses and must answer at once.
"""

from __future__ import annotations

import ast
import functools
import sys
from importlib import machinery, util
from typing import Any


def parameters(path: str, method: str) -> dict[str, Any]:
    """Return the parameters of a method and their defaults, None where one has no default.

    Parameters
    ----------
    path : str
        Of the class, such as ``dsoftmax.losses.criteria.ArcFace``.
    method : str

    Examples
    --------
    >>> parameters("dsoftmax.losses.criteria.CosFace", "__init__")
    {'self': None, 'scale': None, 'm3': 0.35}
    """
    module, _, name = path.rpartition(".")
    arguments = _find_method(module, name, method).args
    positional = arguments.posonlyargs + arguments.args
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    return {argument.arg: node and _value(node, module) for argument, node in pairs}


@functools.lru_cache(maxsize=None)
def _read(module: str) -> ast.Module:
    with open(_find(module).origin, encoding="utf-8") as file:
        return ast.parse(file.read())


def _find(module: str) -> machinery.ModuleSpec:
    """Find a module, without importing the package it is in as `util.find_spec` does."""
    package = module.rpartition(".")[0]
    if package in sys.modules:
        return util.find_spec(module)
    return machinery.PathFinder.find_spec(module, _find(package).submodule_search_locations)


def _find_method(module: str, name: str, method: str) -> ast.FunctionDef:
    classes = {node.name: node for node in _read(module).body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        return _find_method(_imported_from(name, module), name, method)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef) and node.name == method:
            return node
    return _find_method(module, classes[name].bases[0].id, method)


def _imported_from(name: str, module: str) -> str:
    for node in _read(module).body:
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            return node.module
    raise NameError(f"{module} has no {name}")


def _value(node: ast.expr, module: str) -> Any:
    """Compute a default, which may use constants of its module and of those it imports from."""
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    constants = {name: _constant(name, module) for name in names}
    expression = compile(ast.Expression(node), module, "eval")
    return eval(expression, {"__builtins__": {}}, constants)


def _constant(name: str, module: str) -> Any:
    for node in _read(module).body:
        if isinstance(node, ast.Assign) and name in {getattr(x, "id", "") for x in node.targets}:
            return _value(node.value, module)
    return _constant(name, _imported_from(name, module))
