"""The shape of the import graph: no file imports itself by way of others."""

import grimp

GRAPH = grimp.build_graph("steelyard", cache_dir=None)


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count too."""
    rest = {
        module: set(GRAPH.find_modules_directly_imported_by(module)) for module in GRAPH.modules
    }
    # What imports nothing that is left is in no circle; what stays is in one, or leads to one.
    while free := [module for module, imports in rest.items() if not imports & rest.keys()]:
        for module in free:
            del rest[module]
    assert not rest, f"imports that lead back to where they began, among: {sorted(rest)}"
