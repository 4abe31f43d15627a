"""Who may import what: the policy code needs neither torch nor ray nor triton.

Two views of the same rule. The sources are read for the imports that run when a module is imported,
which names the culprit and the chain; a child process then imports every light module and looks at
what was really loaded.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("bench", "cluster", "kernels", "protos", "replica", "router")

# The modules that may load ray: Serve deployments and what talks to Serve.
RAY_MODULES = {
    "quire.cluster.app",
    "quire.cluster.ingress",
    "quire.cluster.local_serve",
    "quire.cluster.serve_config",
    "quire.replica.actor",
    "quire.replica.faulty_actor",
    "quire.replica.ray_metrics",
    "quire.router.bus",
    "quire.router.peers",
    "quire.router.serve_router",
    "quire.router.witness",
}
# The modules of replica/ that may load torch; all of kernels/ may but its __init__.
TORCH_MODULES = {
    "quire.replica.attention",
    "quire.replica.chains",
    "quire.replica.cuda_device",
    "quire.replica.device",
    "quire.replica.device_memory",
    "quire.replica.embedded.train",
    "quire.replica.fp8",
    "quire.replica.fuse",
    "quire.replica.fused",
    "quire.replica.fused_layer",
    "quire.replica.host_pool",
    "quire.replica.kv_pool",
    "quire.replica.kv_scales",
    "quire.replica.linear",
    "quire.replica.experts",
    "quire.replica.loader",
    "quire.replica.logprobs",
    "quire.replica.output_head",
    "quire.replica.fixed_products",
    "quire.replica.fixed_step",
    "quire.replica.pinned_memory",
    "quire.replica.placement",
    "quire.replica.probe",
    "quire.replica.device_sampler",
    "quire.replica.device_table",
    "quire.replica.sampling_arrays",
    "quire.replica.staging",
    "quire.replica.forward",
    "quire.replica.graph_cache",
    "quire.replica.queued_steps",
    "quire.replica.ragged_step",
    "quire.replica.step_sampler",
    "quire.replica.rotation",
    "quire.replica.runner",
    "quire.replica.runtime",
    "quire.replica.sampler",
    "quire.replica.sizing",
    "quire.replica.step_inputs",
    "quire.replica.step_outputs",
    "quire.replica.tiles",
    "quire.replica.token_counts",
    "quire.replica.transformers_models",
    "quire.replica.weights",
}
# transformers loads torch and triton when one of its models is imported.
HEAVY = {"ray": "ray", "torch": "torch", "triton": "torch", "transformers": "torch"}


def sources() -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(("quire", *parts)).removesuffix(".__init__")] = path
    return found


MODULES = sources()
MAY_DO_ALL = {name for name in MODULES if name.split(".")[1] == "bench"}


def top_level_imports(tree: ast.Module) -> Iterator[str]:
    """Names imported when the module is: not in functions, not under `if TYPE_CHECKING`."""
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
            imports = [*parents, *top_level_imports(ast.parse(MODULES[name].read_text()))]
            pending += [(other, f"{chain} -> {other}") for other in imports]
        elif library := HEAVY.get(name.split(".")[0]):
            found.setdefault(library, chain)
    return found


def allowed(module: str) -> set[str]:
    libraries = set()
    if module in RAY_MODULES or module in MAY_DO_ALL:
        libraries.add("ray")
    if module in TORCH_MODULES | MAY_DO_ALL or module.startswith("quire.kernels."):
        libraries.add("torch")
    return libraries


@pytest.mark.parametrize("module", MODULES)
def test_a_module_loads_only_what_it_may(module: str):
    too_heavy = chains(module).keys() - allowed(module)
    assert not too_heavy, [chains(module)[library] for library in too_heavy]


def test_the_lists_of_heavy_modules_are_not_stale():
    stale = {m for m in RAY_MODULES if m not in MODULES or "ray" not in chains(m)}
    stale |= {m for m in TORCH_MODULES if m not in MODULES or "torch" not in chains(m)}
    assert not stale


def test_importing_all_policy_code_loads_nothing_heavy():
    light = [name for name in MODULES if not allowed(name)]
    assert "quire.replica.scheduler" in light
    assert "quire.router.policy" in light
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
    """`serve run` puts the repository root on sys.path, where it is taken for the `kernels` package
    that transformers looks for: it must have a version below any real one and import nothing."""
    tree = ast.parse((ROOT / "kernels/__init__.py").read_text())
    assert [ast.unparse(node) for node in tree.body] == ["__version__ = '0.0.0'"]


# --------------------------------------------------------------------------------------------------
# What no module may do
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
# Ray's own settings, for the process that `quire serve` starts and for its REST API.
# gpu_run sets TRITON_INTERPRET for a rehearsal: Triton looks at it when it is imported. gpu_plan and gpu_rehearse set
# variables of the processes that they start, gpu_worker asks whether it is in one of pytest-xdist's. report reads the
# commit of a copy without git.
MAY_READ_ENVIRONMENT = {
    "quire.bench.gpu_plan",
    "quire.bench.gpu_rehearse",
    "quire.bench.gpu_run",
    "quire.bench.gpu_worker",
    "quire.bench.report",
    "quire.cluster.local_serve",
    "quire.cluster.serve_api",
    "quire.cluster.ray_proxies",  # `controller_options` has nothing but variables
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Code that runs code: unpickling, evaluation, shells, a checkpoint's own Python."""
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


@pytest.mark.parametrize("module", MODULES)
def test_no_module_runs_code_from_data(module: str):
    assert not list(unsafe(ast.parse(MODULES[module].read_text())))


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


@pytest.mark.parametrize("module", MODULES)
def test_the_environment_is_read_by_the_configuration_only(module: str):
    if module in MAY_READ_ENVIRONMENT:
        return
    reads = [
        ast.unparse(node)
        for node in ast.walk(ast.parse(MODULES[module].read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and ast.unparse(node) in ("os.environ", "os.getenv", "environ", "getenv")
    ]
    assert not reads
