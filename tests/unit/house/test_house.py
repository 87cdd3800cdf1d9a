"""House rules that neither ruff, mypy nor import-linter can check alone."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


# --- deciding and explaining need no torch --------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        "steelyard",
        "steelyard.hardware",
        "steelyard.ir",
        "steelyard.passes",
        "steelyard.plan_files",
        "steelyard.plans",
        "steelyard.predict",
        "steelyard.search",
        "steelyard.report",
        "steelyard.trades",
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    probe = (
        f"import sys, pkgutil, importlib, {module} as room\n"
        # Import each module of the package, not only those that its __init__ imports.
        f"if {module!r} != 'steelyard':\n"
        "    for found in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "print(*sorted({'torch', 'triton'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == []


@pytest.mark.parametrize(
    "module",
    [
        "steelyard.measure.links.background_load",
        "steelyard.measure.links.worker",
        "steelyard.run.step",
    ],
)
def test_processes_that_measure_and_step_do_not_import_dynamo(module: str) -> None:
    """Importing it takes as long as all other imports together; only capture needs it."""
    probe = f"import sys, {module}; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["False"], run.stderr


@pytest.mark.parametrize("collects", [True, False])
def test_importing_does_not_change_the_garbage_collector(collects: bool) -> None:
    probe = (
        f"import gc; gc.enable() if {collects} else gc.disable()\n"
        "seen = []; gc.callbacks.append(lambda phase, info: seen.append(phase))\n"
        "from steelyard import api\n"
        "print(gc.isenabled(), len(seen), api.plan.__name__)"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    enabled, num_seen, called = run.stdout.split()
    assert (enabled, called) == (str(collects), "plan"), run.stderr
    # Otherwise the collector would scan half a million objects hundreds of times.
    assert int(num_seen) < 20


# --- private names of torch enter only through _torch/ -------------------------------------------

REFUSED = (
    "import torch._dynamo",
    "import torch._dynamo as dynamo",
    "from torch import _dynamo",
    "from torch._functorch.aot_autograd import aot_export_joint_with_descriptors",
    "from torch._inductor import config",
    "import torch; torch._C._get_tracing_state()",
    "from torch._subclasses.fake_tensor import FakeTensorMode",
    "from torch._ops import OpOverload",
    "import torch._guards",
    "from torch._higher_order_ops.effects import with_effects",
    "import torch._logging",
    "from torch.fx.experimental import _config",
    "from torch.fx.experimental._backward_state import BackwardState",
    "from torch.utils import _pytree as pytree",
    "import torch.utils._pytree as pytree",
    "from torch.utils._python_dispatch import TorchDispatchMode",
    "import torch; torch.utils._pytree.tree_map(len, [])",
    "import torch.distributed._functional_collectives as collectives",
    "from torch.distributed import _symmetric_memory",
    "from torch.distributed.tensor._dtensor_spec import DTensorSpec",
    "from torch.distributed._composable.fsdp import fully_shard",
    "from torch.testing._internal.distributed.fake_pg import FakeStore",
)
ALLOWED = (
    "import torch; torch.__version__",
    "import torch; torch.ops._c10d_functional.all_reduce",
    "from torch.fx.experimental.symbolic_shapes import ShapeEnv",
    "from torch.distributed.tensor import Shard",
    "from steelyard._torch import FakeTensorMode",
)


def ruff(rule: str, name: str, snippet: str) -> bool:
    """Return whether ruff, with this project's settings, accepts the snippet in that file."""
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            f"--select={rule}",
            f"--stdin-filename={name}",
            "-",
        ],
        cwd=ROOT,
        input=snippet + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode in (0, 1), run.stderr
    assert (run.returncode == 1) == (rule in run.stdout), run.stdout + run.stderr
    return run.returncode == 0


def test_ruff_refuses_private_torch_everywhere_but_in_its_folder() -> None:
    for name in ("src/steelyard/run/step.py", "tests/torch/run/test_step.py", "benchmarks/step.py"):
        passed = {line: ruff("TID251", name, line) for line in REFUSED[:2]}
        assert not any(passed.values()), passed
    passed = {line: ruff("TID251", "src/steelyard/run/step.py", line) for line in REFUSED + ALLOWED}
    assert [line for line in REFUSED if passed[line]] == []
    assert [line for line in ALLOWED if not passed[line]] == []
    assert ruff("TID251", "src/steelyard/_torch/dynamo.py", "\n".join(REFUSED))


def test_ruff_refuses_module_level_torch_imports_in_trades() -> None:
    lazily = "def enact():\n    import torch\n    return torch"
    assert not ruff("TID253", "src/steelyard/trades/recompute.py", "import torch")
    assert not ruff("TID253", "src/steelyard/trades/recompute.py", "from torch import nn")
    assert ruff("TID253", "src/steelyard/trades/recompute.py", lazily)
    assert ruff("TID253", "src/steelyard/run/step.py", "import torch")


def private_torch_names(source: str) -> Iterator[str]:
    """Yield every dotted name below torch with a private part, by import or by attribute.

    Operators are not Python names: names below `torch.ops` belong to graphs and are ignored.
    """
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    used: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                used.append(name.name)
                bound[name.asname or name.name.split(".")[0]] = (
                    name.name if name.asname else name.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for name in node.names:
                used.append(f"{node.module}.{name.name}")
                bound[name.asname or name.name] = used[-1]
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            used.append(".".join([bound[node.id], *reversed(parts)]))
    for name in used:
        first, *rest = name.split(".")
        private = [part for part in rest if re.match(r"_(?!_)", part)]
        if first == "torch" and private and rest[0] != "ops":
            yield name


def test_no_private_name_of_torch_outside_its_folder() -> None:
    # ruff checks the modules that are configured; this test checks the rest, such as
    # torch._foreach_add.
    assert [line for line in REFUSED if not list(private_torch_names(line))] == []
    assert [line for line in ALLOWED if list(private_torch_names(line))] == []
    assert list(private_torch_names("import torch as t\nt._foreach_add([], 1)"))
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("src", "tests", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        # The tests of private names have to use those names.
        if path.parent != ROOT / "src/steelyard/_torch"
        and path != ROOT / "tests/torch/test_private_names.py"
        for name in private_torch_names(path.read_text(encoding="utf-8"))
    }
    assert sorted(found) == []


# --- an exported name is not hidden by a file of the same name ------------------------------------


def hidden(init: str, room: str, files: set[str]) -> list[str]:
    """Return names that a package's ``__init__`` takes from one of its files while another file
    has the same name. An import of that other file replaces the name, and no type checker
    notices it."""
    return [
        name.asname or name.name
        for node in ast.walk(ast.parse(init))
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if (called := name.asname or name.name) in files
        and node.module not in (room, f"{room}.{called}")
    ]


def test_no_exported_name_is_hidden_by_a_module() -> None:
    line = "from steelyard.search.cluster.explain import told"
    assert hidden(line, "steelyard.search", {"told", "deep_told"}) == ["told"]
    assert hidden(line, "steelyard.search", {"deep_told"}) == []
    own = "from steelyard.predict.slowdown import slowdown"
    assert hidden(own, "steelyard.predict", {"slowdown"}) == []
    found = {
        path.parent.name: names
        for path in (ROOT / "src").rglob("__init__.py")
        if (
            names := hidden(
                path.read_text(encoding="utf-8"),
                ".".join(path.parent.relative_to(ROOT / "src").parts),
                {x.stem for x in path.parent.iterdir() if x.suffix == ".py" or x.is_dir()},
            )
        )
    }
    assert found == {}


# --- nothing in the repository depends on one machine ---------------------------------------------

OF_ONE_MACHINE = re.compile(
    r"(?<![\w.~})*])/(?:work|opt|root|home|Users)/\w"
    r"|\bpypi\.(?:org|python)|files\.pythonhosted|download\.pytorch|registry\.npmjs|deb\.debian"
    r"|conda\.anaconda|--(?:extra-)?index[-]url|--find[-]links|--trusted[-]host|\bPIP_[A-Z]*(?:URL|HOST)"
)


def files_of_the_repository() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, which knows what is ours")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split("\0") if (path := ROOT / name).is_file()]


def test_no_path_of_one_machine_and_no_registry_host() -> None:
    assert OF_ONE_MACHINE.search("see " + "/wo" + "rk/thing")
    assert OF_ONE_MACHINE.search("file://" + "/op" + "t/wheels")
    assert not OF_ONE_MACHINE.search("docs/work/thing, https://example.org/opt/thing")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for path in files_of_the_repository()
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if OF_ONE_MACHINE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("name", ["setup", "demo", "check", "test", "bench", "docs"])
def test_the_scripts_are_there(name: str) -> None:
    assert (ROOT / "scripts" / name).is_file()


def test_scripts_are_executable_and_stop_at_the_first_error() -> None:
    scripts = [*ROOT.glob("scripts/*"), *ROOT.glob(".githooks/*"), ROOT / ".ci/run"]
    for script in scripts:
        assert os.access(script, os.X_OK), f"{script.name} is not executable"
        text = script.read_text(encoding="utf-8")
        assert text.startswith("#!/usr/bin/env bash\n"), f"{script.name} names another shell"
        assert "\nset -euo pipefail\n" in text, f"{script.name} would go on after an error"


def test_no_folder_with_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """Pytest silently skips folders with certain names: ``dist`` was one of them."""
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    assert Path("tests/system/dist") in folders
    left_out = pytestconfig.getini("norecursedirs")
    for folder in folders:
        for part in folder.parts:
            assert not any(fnmatch(part, pattern) for pattern in left_out), folder


@pytest.mark.xdist_group("together")
def test_tests_of_a_group_run_on_one_worker(request: pytest.FixtureRequest) -> None:
    """Otherwise each worker would make the expensive fixtures.

    In the past, groups were silently ignored.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith("@together")


# --- nothing is unpickled -------------------------------------------------------------------------

_UNPICKLING_CALLS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
}  # fmt: skip
# multiprocessing pickles what goes through its pipes and queues; torch's checkpoints and remote
# calls pickle their metadata.
_UNPICKLING_MODULES = (
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve",
    "multiprocessing", "concurrent.futures.process", "torch.multiprocessing",
    "torch.distributed.checkpoint", "torch.distributed.rpc", "torch.package",
)  # fmt: skip
_UNPICKLING_NAMES = ("torch.load", "torch.save", "np.load", "numpy.load")


def unpickling(text: str) -> list[str]:
    """Yield the calls in a source file that pickle or unpickle, as far as names show."""
    found = []
    for node in ast.walk(ast.parse(text)):
        named = []
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            named = [ast.unparse(node)]
        for name in named:
            is_module = any(name == m or name.startswith(f"{m}.") for m in _UNPICKLING_MODULES)
            last = name.rpartition(".")[2]
            if is_module or name in _UNPICKLING_NAMES or last in _UNPICKLING_CALLS:
                found.append(name)
    return found


@pytest.mark.parametrize("tree", ["src", "benchmarks", "examples", "scripts"])
def test_nothing_pickles(tree: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / tree).rglob("*.py"))
        if (names := unpickling(path.read_text()))
    }
    assert found == {}


def test_no_test_uses_collectives_of_objects() -> None:
    found = [
        (path.name, name)
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for name in unpickling(path.read_text())
        if name.rpartition(".")[2] in _UNPICKLING_CALLS and path.name != "impostor.py"
    ]
    assert found == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.multiprocessing as mp",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Pipe",
        "from torch.distributed import all_gather_object",
        "import torch.distributed as dist; dist.broadcast_object_list([])",
        "from torch.distributed import checkpoint",
        "import torch.distributed.checkpoint as dcp",
        "import torch; torch.load('x')",
        "import torch; torch.save({}, 'x')",
        "import torch; torch.distributed.checkpoint.save({})",
    ],
)
def test_pickling_code_is_detected(snippet: str) -> None:
    assert unpickling(snippet)


# --- unit tests need no torch ---------------------------------------------------------------------

_IMPORTS_ALL = """
import importlib, sys
from pathlib import Path

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers"}:
            raise ImportError(f"{name} was imported")

sys.meta_path.insert(0, Refused())
for path in sorted(Path("tests/unit").rglob("test_*.py")):
    try:
        importlib.import_module(".".join(path.with_suffix("").parts))
    except ImportError as error:
        print(path, error)
"""


def test_unit_tests_import_no_torch() -> None:
    """This is checked for imports at the top; a few commands that they run may import it."""
    run = subprocess.run(
        [sys.executable, "-c", _IMPORTS_ALL], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stdout + run.stderr
