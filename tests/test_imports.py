"""Rules of the package's structure: imports between folders, heavy libraries, sizes, unsafe code, device checks.

Policy folders must import neither torch nor ray nor triton. Two tests check that: one reads the import statements, so
it can name the chain of modules; the other imports every light module in a child process and looks at the loaded
libraries.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_MODULES = 15  # in a folder, `__init__` and generated code aside
MAX_LINES = 500  # in a module
TOP_FOLDERS = ("cluster", "kernels", "protos", "replica", "router")

# From the bottom up: a module may import from its own folder and from entries above it in this list. `replica.config`,
# `replica.option_conflicts`, `replica.option_fields`, `replica.speculation_options` and `replica.host_machine` are
# modules.
LAYERS = (
    "protos",
    "kernels",
    "kernels.cpu",
    "kernels.recurrence",
    "kernels.adapters",
    "kernels.rows",
    "kernels.attention",
    "kernels.sampling",
    "router",
    "router.text",
    "router.chat",
    "router.index",
    "router.policy",
    "router.fleet",
    "router.admission",
    "router.explain",
    "router.trace",
    "router.transport",
    "router.scoring",
    "router.adapters",
    "router.request",
    "replica.host_machine",
    "replica.builtin_model",
    "replica.grammar",
    "replica.node_pool",
    "replica.kv_cache",
    "replica.kv_transport",
    "replica.option_fields",
    "replica.speculation_options",
    "replica.option_conflicts",
    "replica.config",
    "replica.core",
    "replica.speculation",
    "replica.request_table",
    "replica.scheduler",
    "replica.checkpoint",
    # Entries below may import torch.
    "replica.sampling",
    "replica.device",
    "replica.model.stored",
    "replica.model.layers",
    "replica.model.sharded",
    "replica.model",
    "replica.model.fusion",
    "replica.model.recurrence",
    "replica.model.deterministic",
    "replica.adapters",
    "replica.runner.graphs",
    "replica.runner",
    "replica.startup",
    "replica.ranks",
    "replica.proof",
    "replica",
    # Entries below may import ray.
    "replica.serving",
    "replica.serving.faults",
    "cluster.auth",
    "cluster.api_common",
    "cluster.http",
    "cluster.http.messages_api",
    "cluster.http.responses_api",
    "cluster.http.decisions_api",
    "cluster.http.embeddings_api",
    "cluster.http.adapters_api",
    "cluster.page",
    "cluster.grpc",
    "cluster.proxies",
    "cluster.config",
    "cluster.tls",
    "cluster.tracing",
    "cluster.local",
    "cluster.bench.load",
    "cluster.bench.engines",
    "cluster.bench.results",
    "cluster.bench",
    "cluster.top",
    "cluster",
)
# Entries that load no torch but hold no policy.
NO_POLICY = {
    "replica.checkpoint",
    "replica.config",
    "replica.option_fields",
    "replica.speculation_options",
    "replica.option_conflicts",
    "replica.builtin_model",
    "replica.host_machine",
    "router.transport",
}
# Folders and modules that may load ray: Serve deployments and clients of Serve.
RAY = (
    "quire.cluster.app",
    "quire.cluster.config.serve_config",
    "quire.cluster.ingress",
    "quire.cluster.local",
    "quire.cluster.tls.listener_actor",
    "quire.cluster.tls.tls_listeners",
    "quire.replica.serving",
    "quire.router.transport",
)
# Folders and modules that may load torch.
TORCH = (
    "quire.kernels",
    "quire.replica.adapters",
    "quire.replica.device",
    "quire.replica.model",
    "quire.replica.proof",
    "quire.replica.ranks",
    "quire.replica.runner",
    "quire.replica.sampling",
    "quire.replica.startup",
)
# transformers loads torch and triton when one of its models is imported.
HEAVY = {"ray": "ray", "torch": "torch", "triton": "torch", "transformers": "torch"}


def sources() -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {}
    for folder in TOP_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("quire", *parts)).removesuffix(".__init__")] = path
    return found


MODULES = sources()


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Names that are imported with the module, so not in functions and not under `if TYPE_CHECKING`."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide the package they mean"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


@cache
def loaded_by(module: str) -> tuple[str, ...]:
    return tuple(top_level_imports(ast.parse(MODULES[module].read_text())))


@cache
def chains(module: str) -> dict[str, str]:
    """Each heavy library that importing `module` loads, with the chain that leads to it."""
    found: dict[str, str] = {}
    seen, pending = set(), [(module, module)]
    while pending:
        name, chain = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in MODULES:
            parts = name.split(".")
            parents = [".".join(parts[:n]) for n in range(2, len(parts))]
            pending += [(other, f"{chain} -> {other}") for other in (*parents, *loaded_by(name))]
        elif library := HEAVY.get(name.split(".")[0]):
            found.setdefault(library, chain)
    return found


def is_below(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def allowed(module: str) -> set[str]:
    rules = {"ray": RAY, "torch": TORCH}
    return {library for library, names in rules.items() if is_below(module, names)}


def layer(module: str) -> str:
    """The entry of `LAYERS` to which a module belongs."""
    name = module.removeprefix("quire.")
    folder = name if MODULES[module].name == "__init__.py" else name.rpartition(".")[0]
    return name if name in LAYERS else folder


@cache
def all_imports(module: str) -> frozenset[str]:
    """Modules of Quire that a module imports anywhere, also in functions and under `if TYPE_CHECKING`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else node.module for name in whole]
        else:
            continue
        found.update(name for name in names if name in MODULES and name != module)
    return frozenset(found)


def test_every_folder_has_its_layer():
    assert {layer(module) for module in MODULES} - {""} <= set(LAYERS)


def test_nothing_imports_upward():
    levels = {module: LAYERS.index(layer(module)) for module in MODULES}
    assert not [
        f"{module} imports {name}"
        for module in MODULES
        for name in all_imports(module)
        if levels[name] > levels[module]
    ]


def test_no_modules_import_one_another():
    """There are no cycles, not even of imports for types."""
    waiting = {module: set(all_imports(module)) for module in MODULES}
    while free := {module for module, needs in waiting.items() if not needs}:
        waiting = {m: needs - free for m, needs in waiting.items() if m not in free}
    assert not waiting


def test_no_two_modules_have_the_same_name():
    names = [
        module.rpartition(".")[2] for module, path in MODULES.items() if path.name != "__init__.py"
    ]
    assert sorted(set(names)) == sorted(names)


FOLDERS = {path.parent for path in (*MODULES.values(), *(ROOT / "tests/perf").rglob("*.py"))}


def test_a_folder_has_few_modules():
    counts = {
        str(folder): len(
            {path.stem for path in folder.glob("*.py") if "_pb2" not in path.name} - {"__init__"}
        )
        for folder in FOLDERS
    }
    assert not {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_a_module_is_short():
    counts = {
        module: len(path.read_text().splitlines())
        for module, path in MODULES.items()
        if "_pb2" not in module
    }
    assert not {module: count for module, count in counts.items() if count > MAX_LINES}


def test_mypy_is_strict_where_policy_is():
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (strict,) = [one["module"] for one in overrides if one.get("disallow_untyped_defs")]
    without_torch = LAYERS[: LAYERS.index("replica.sampling")]
    policy = {name for name in without_torch if name.startswith(("router.", "replica."))}
    assert set(strict) == {f"quire.{name}.*" for name in {"protos", *policy} - NO_POLICY}


def test_a_module_loads_only_what_it_may():
    assert not [
        chain
        for module in MODULES
        for library, chain in chains(module).items()
        if library not in allowed(module)
    ]


def test_the_lists_of_heavy_folders_are_not_stale():
    for names, library in ((RAY, "ray"), (TORCH, "torch")):
        for name in names:
            assert any(library in chains(m) for m in MODULES if is_below(m, (name,))), name


def test_importing_all_policy_code_loads_nothing_heavy():
    light = [name for name in MODULES if not allowed(name)]
    assert "quire.replica.scheduler.scheduler" in light
    assert "quire.router.policy.policy" in light
    code = f"""
import importlib, sys
for name in {light}:
    importlib.import_module(name)
    loaded = sys.modules.keys() & {{"ray", "torch", "triton"}}
    assert not loaded, f"{{name}} loads {{loaded}}"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_kernels_init_holds_only_a_version():
    """`serve run` puts the repository on sys.path, where transformers takes the folder for its `kernels` package.

    The folder's version must therefore be below any real one, and its `__init__` must import nothing.
    """
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert [ast.unparse(node) for node in tree.body] == ["__version__ = '0.0.0'"]


# --------------------------------------------------------------------------------------------------
# Unsafe code and environment variables
# --------------------------------------------------------------------------------------------------

UNSAFE_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "torch.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
}
# They read Ray's settings, for the process that `quire serve` starts and for its REST API; `report` reads the commit of
# a copy without git; `serve_command` the key of the server that gets the load.
MAY_READ_ENVIRONMENT = {
    "quire.cluster.bench.results.report",
    "quire.cluster.bench.serve_command",
    "quire.cluster.local.local_serve",
    "quire.cluster.local.serve_api",
    "quire.cluster.top.top_command",  # the key
    "quire.cluster.tracing.collector",  # OpenTelemetry's variables
    "quire.cluster.proxies.ray_proxies",  # `controller_options` are environment variables
    "quire.replica.checkpoint.cache_folder",  # the folder of a machine, not an option of an engine
    "quire.replica.model.sharded.rank_group",  # the interface of NCCL
    "quire.replica.ranks.leading_ranks",  # the GPUs that this process sees, for the ranks that it starts
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Find code that runs code: unpickling, evaluation, shells, a checkpoint's Python."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        yield from (n for n in names if n.split(".")[0] in UNSAFE_IMPORTS)
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in UNSAFE_CALLS:
            yield ast.unparse(node)
        for keyword in node.keywords:
            is_off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and not is_off:
                yield ast.unparse(node)


def test_no_module_runs_code_from_data():
    assert not [
        f"{module}: {call}"
        for module, path in MODULES.items()
        for call in unsafe(ast.parse(path.read_text()))
    ]


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval('1')",
        "exec(text)",
        "torch.load(path)",
        "yaml.load(text, Loader=yaml.SafeLoader)",
        "subprocess.run(command, shell=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=flag)",
    ],
)
def test_the_search_for_unsafe_code_finds_it(code: str):
    assert list(unsafe(ast.parse(code)))


def test_the_search_for_unsafe_code_lets_ordinary_code_pass():
    code = "model.eval()\nre.compile('a')\nf(p, trust_remote_code=False)\nyaml.safe_load(text)"
    assert not list(unsafe(ast.parse(code)))


def test_the_environment_is_read_by_the_configuration_only():
    assert not [
        f"{module}: {ast.unparse(node)}"
        for module in MODULES.keys() - MAY_READ_ENVIRONMENT
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node) in ("os.environ", "os.getenv", "environ", "getenv")
    ]


# --------------------------------------------------------------------------------------------------
# Modules that may check the kind of device
# --------------------------------------------------------------------------------------------------

DEVICE_NAMES = {"cpu", "cuda", "triton"}
DEVICE_FLAGS = {"is_immediate", "is_cuda", "is_cpu", "is_on_gpu", "is_available"}
# Each chooses an object once, except for the last three. Modules named `cpu_`, `cuda_` and `gpu_` serve one kind of
# device.
DEVICE_CHECKS = {
    "quire.replica.device.open_device": 2,  # the device, and memory of the KV pool on it
    "quire.replica.runner.runner": 3,  # the kernels; whether steps are computed or queued
    "quire.replica.proof.verdicts": 1,  # on which devices a class is proven
    "quire.replica.startup.runtime": 1,  # whether memory is measured
    "quire.replica.startup.pool_place": 2,  # the default size of the node's pool
    "quire.replica.model.sharded.rank_group": 2,  # the library that joins ranks, and whether its calls must be ended
    "quire.replica.ranks.leading_ranks": 1,  # how long that library needs its file
    "quire.replica.ranks.following_rank": 1,  # whether memory is measured
    "quire.replica.ranks.rank_runners": 1,  # whether steps are computed or queued
    "quire.replica.startup.rank_sizing": 1,  # whether ranks share its memory
    "quire.replica.startup.sizing": 3,  # how it is sized; `auto` takes a GPU if there is one
    "quire.replica.model.stored.weights": 2,  # a tensor on the host is read in place, one on a GPU by pinned memory
    "quire.replica.host_machine": 1,  # free memory of the GPU or of the host
    "quire.replica.engine": 1,  # routers are told the threads of a CPU
}


def device_checks(tree: ast.AST) -> list[str]:
    """Comparisons with the name of a device or backend, and uses of a device's flags."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            constants = [x for side in sides for x in ast.walk(side) if isinstance(x, ast.Constant)]
            if "sys.modules" in ast.unparse(node):
                continue
            if any(constant.value in DEVICE_NAMES for constant in constants):
                found.append(ast.unparse(node))
            elif ast.unparse(node.left).endswith("workspace"):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            # `torch.distributed.is_available` is about a library.
            if node.attr in DEVICE_FLAGS and not ast.unparse(node.value).endswith("distributed"):
                found.append(ast.unparse(node))
    return found


def test_what_depends_on_the_device_is_chosen_in_few_places():
    found = {
        module: device_checks(ast.parse(path.read_text()))
        for module, path in MODULES.items()
        if ".replica." in module
        and not module.rpartition(".")[2].startswith(("cpu_", "cuda_", "gpu_"))
    }
    assert {module: len(checks) for module, checks in found.items() if checks} == DEVICE_CHECKS, (
        found
    )


@pytest.mark.parametrize(
    "code",
    [
        'device.type == "cpu"',
        'backend != "triton"',
        'x.device in ("cuda", "meta")',
        "if device.is_immediate: pass",
        "step.workspace is None",
        "torch.cuda.is_available()",
    ],
)
def test_the_search_for_device_checks_finds_it(code: str):
    assert device_checks(ast.parse(code))
