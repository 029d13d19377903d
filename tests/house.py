"""Measure how much of the project a reader has to hold in mind; docs/architecture.md shows what this prints.

python tests/house.py
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = "common image_data schedulers conditions run_folder reporting generation training".split()
ROOMS += "evaluation preparation visualization".split()
SCRIPT = "train_unconditional"
# The functions that lead from the command to the loss, and what each calls to get there.
PATH_TO_LOSS = [
    (SCRIPT, "main", "execute"),
    ("training.setup", "execute", "train"),
    ("training.loop", "train", "learn"),
    ("training.loop", "learn", "loss"),
    ("schedulers.loss", "DiffusionLoss.__call__", "self.error"),
]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def read_modules() -> dict[str, ast.Module]:
    """Parse every file of the product, by its dotted name."""
    files = [*ROOT.glob("*.py"), *(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text()) for path in files}


def imports_of(module: ast.Module, modules: dict[str, ast.Module]) -> dict[str, str]:
    """Map the names that a module imports from the project at run time, however late, to the modules they are in."""
    typing_only = {
        id(node)
        for block in ast.walk(module)
        if isinstance(block, ast.If) and getattr(block.test, "id", "") == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = {}
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing_only:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in modules or node.module in modules:
                    found[alias.asname or alias.name] = submodule if submodule in modules else node.module
    return found


def reached_from(script: str, modules: dict[str, ast.Module]) -> set[str]:
    """List the modules that a script imports, directly or through others, itself among them."""
    reached, pending = set(), [script]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += imports_of(modules[name], modules).values()
    return reached


def functions_of(module: ast.Module) -> Iterator[tuple[str, Function]]:
    """Yield functions and methods with their names, as in `train` or `DiffusionLoss.draw`."""
    for node in module.body:
        if isinstance(node, Function):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{child.name}", child) for child in node.body if isinstance(child, Function))


def parameters_of(function: Function) -> int:
    """Count the parameters of a function, without self."""
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(argument.arg not in ("self", "cls") for argument in arguments)


def wide_functions(modules: dict[str, ast.Module]) -> list[str]:
    """Name the functions, wherever they are nested, with more than six parameters."""
    nodes = ((name, node) for name, module in modules.items() for node in ast.walk(module))
    return [f"{name}.{node.name}" for name, node in nodes if isinstance(node, Function) and parameters_of(node) > 6]


def names_before_loss(modules: dict[str, ast.Module]) -> list[str]:
    """List the names of the project, of functions, classes and methods alike, before the loss on the way to it."""
    # What the script does not import is not on its way, though a method elsewhere may have an attribute's name.
    reached = reached_from(SCRIPT, modules)
    every_name = (name for module in reached for name, _ in functions_of(modules[module]))
    methods = {name.partition(".")[2] for name in every_name if "." in name}
    names: dict[str, None] = {}
    for module_name, wanted, onward in PATH_TO_LOSS:
        module = modules[module_name]
        function = dict(functions_of(module))[wanted]
        known = {*imports_of(module, modules), *(getattr(node, "name", "") for node in module.body)}
        nodes = [node for statement in function.body for node in ast.walk(statement)]
        calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(onward)]
        before = [node for node in nodes if getattr(node, "lineno", 10**9) <= calls[-1].lineno]
        for node in sorted(before, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node, ast.Name) and node.id in known:
                names[node.id] = None
            elif isinstance(node, ast.Attribute) and node.attr in methods and ast.unparse(node.value) != "torch":
                names[node.attr] = None
    return list(names)


def lines_of(name: str) -> int:
    return len((ROOT / (name.replace(".", "/") + ".py")).read_text().splitlines())


def main() -> None:
    modules = read_modules()
    reached = reached_from(SCRIPT, modules)
    names = names_before_loss(modules)
    loop = dict(functions_of(modules["training.loop"]))["train"]
    call = dict(functions_of(modules["schedulers.loss"]))["DiffusionLoss.__call__"]
    print(f"product: {sum(map(lines_of, modules)):,} lines in {len(modules)} files")
    print(f"{SCRIPT}.py reaches {sum(map(lines_of, reached)):,} lines in {len(reached)} files")
    print(f"functions with more than 6 parameters: {', '.join(wide_functions(modules)) or 'none'}")
    print(f"training.loop.train: {loop.end_lineno - loop.lineno + 1} lines, {parameters_of(loop)} parameter")
    print(f"DiffusionLoss.__call__: {call.end_lineno - call.lineno + 1} lines")
    print(f"frames from the command to the loss: {len(PATH_TO_LOSS)}; names of the project on the way: {len(names)}")
    print("  " + ", ".join(names))


if __name__ == "__main__":
    main()
