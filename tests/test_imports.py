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
    "quire.cluster.local.local_serve",
    "quire.cluster.config.serve_config",
    "quire.replica.serving.actor",
    "quire.replica.serving.faults.faulty_actor",
    "quire.replica.serving.ray_metrics",
    "quire.router.transport.bus",
    "quire.router.transport.peers",
    "quire.router.transport.serve_router",
    "quire.router.transport.witness",
}
# The modules of replica/ that may load torch; all of kernels/ may but its __init__.
TORCH_MODULES = {
    "quire.replica.model.attention",
    "quire.replica.model.fusion.layer_chains",
    "quire.replica.device.cuda_device",
    "quire.replica.device.device",
    "quire.replica.startup.device_memory",
    "quire.replica.embedded.train",
    "quire.replica.model.fp8",
    "quire.replica.model.fusion.fuse_pass",
    "quire.replica.model.fusion.fused_parts",
    "quire.replica.model.fusion.fused_layer",
    "quire.replica.device.host_pool",
    "quire.replica.device.kv_pool",
    "quire.replica.model.kv_scales",
    "quire.replica.model.deterministic.deterministic_linear",
    "quire.replica.model.deterministic.deterministic_experts",
    "quire.replica.model.loader",
    "quire.replica.sampling.logprobs",
    "quire.replica.model.output_head",
    "quire.replica.model.deterministic.fixed_products",
    "quire.replica.runner.fixed_step",
    "quire.replica.device.pinned_memory",
    "quire.replica.model.placement",
    "quire.replica.model.fusion.probe",
    "quire.replica.runner.device_sampler",
    "quire.replica.runner.device_table",
    "quire.replica.sampling.sampling_arrays",
    "quire.replica.device.staging",
    "quire.replica.runner.forward",
    "quire.replica.runner.graph_cache",
    "quire.replica.runner.queued_steps",
    "quire.replica.runner.ragged_step",
    "quire.replica.sampling.step_sampler",
    "quire.replica.model.fusion.rope_cache",
    "quire.replica.runner.runner",
    "quire.replica.startup.runtime",
    "quire.replica.sampling.sampler",
    "quire.replica.startup.sizing",
    "quire.replica.runner.step_inputs",
    "quire.replica.runner.step_outputs",
    "quire.replica.model.deterministic.tiles",
    "quire.replica.sampling.token_counts",
    "quire.replica.model.transformers_models",
    "quire.replica.model.weights",
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
    "tests.perf.gpu_plan",
    "tests.perf.gpu_rehearse",
    "tests.perf.gpu_run",
    "tests.perf.gpu_worker",
    "quire.cluster.bench.report",
    "quire.cluster.local.local_serve",
    "quire.cluster.local.serve_api",
    "quire.cluster.proxies.ray_proxies",  # `controller_options` has nothing but variables
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
