"""The application's arguments and the Serve config around them: what is refused, and how."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray.serve
import tokenizers
import yaml
from grpc._cython import cygrpc
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from quire.cluster.config import serve_config
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError, did_you_mean
from quire.cluster.config.default_config import default_config
from quire.cluster.config.engine_section import EngineArgs, SpeculationArgs
from quire.cluster.config.router_section import RouterArgs
from quire.cluster.config.scaling_sections import AutoscalingArgs, ReplicaResources, RouterResources
from quire.cluster.config.session_section import SessionArgs
from quire.cluster.grpc import grpc_servicers
from quire.cluster.proxies.ray_settings import (
    DEPLOYMENT_VARIABLES,
    REQUEST_TIMEOUT_VARIABLE,
    SERVE_DEFAULTS,
)
from quire.replica.config import EngineArgs as ReplicaEngineArgs
from quire.replica.config import EngineOptions, SizingError, check_args
from quire.replica.speculation_options import SpeculationOptions

ROOT = Path(__file__).parents[3]
TLS = {"certificate_file": "tls.crt", "key_file": "tls.key"}
CLUSTER_YAML = (ROOT / "cluster.yaml").read_text()
SECTIONS = (
    AppConfig,
    AutoscalingArgs,
    EngineArgs,
    SpeculationArgs,
    RouterArgs,
    SessionArgs,
    ReplicaResources,
    RouterResources,
)
FIELDS = [(model, name) for model in SECTIONS for name in model.model_fields]
FIELD_IDS = [f"{model.__name__}.{name}" for model, name in FIELDS]


def problems_of(args: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args)
    return {problem.path: problem.message for problem in caught.value.problems}


# --------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "name"), FIELDS, ids=FIELD_IDS)
def test_every_field_has_a_description_and_a_default(model: type[BaseModel], name: str):
    info = model.model_fields[name]
    assert info.description
    assert info.description.endswith(".")
    assert not info.is_required()


UNITS = ("_tokens", "_ms", "_s", "_bytes", "_gib")
COUNTS = (
    "num_blocks",
    "num_threads",
    "num_cpus",
    "num_gpus",
    "replicas",
    "routers",
    "max_migrations",
    "max_cached_graphs",
    "min_replicas",
    "max_replicas",
    "target_requests",
    "migration_burst",
    "max_watchers",
    "max_watchers_per_client",
    "reduction_splits",
)
# Names that the field's engines share; the description states the unit.
STANDARD_TERMS = {
    "block_size": "Tokens",
    "max_model_len": "tokens",
    "q_padding": "tokens",
    "kv_padding": "tokens",
    "max_memory_percent": "Fraction",
    "target_kv_in_use": "Fraction",
    "safety_margin": "Fraction",
    "max_share": "fraction",
    "resume_margin": "Fraction",
    "prefill_share": "Fraction",
    "max_tokens_default": "tokens",
    "tensor_parallel": "processes",
    "max_loaded_adapters": "adapters",
    "max_adapter_rank": "rank",
}


@pytest.mark.parametrize(("model", "name"), FIELDS, ids=FIELD_IDS)
def test_a_number_has_its_unit_in_its_name(model: type[BaseModel], name: str):
    annotation = model.model_fields[name].annotation
    kinds = set(typing.get_args(annotation)) or {annotation}
    if not kinds & {int, float}:
        return
    if name in STANDARD_TERMS:
        assert STANDARD_TERMS[name] in model.model_fields[name].description
        return
    is_count = name in COUNTS or re.fullmatch(
        r"max_\w+_(requests|strings|decisions)|\w+_threads", name
    )
    assert is_count or name.endswith(UNITS)


@pytest.mark.parametrize(("model", "name"), FIELDS, ids=FIELD_IDS)
def test_a_unit_in_the_name_is_the_unit_of_the_description(model: type[BaseModel], name: str):
    words = {
        "_ms": "Milliseconds",
        "_s": "Seconds",
        "_bytes": "bytes",
        "_gib": "GiB",
        "_tokens": "tokens",
    }
    for suffix, word in words.items():
        if name.endswith(suffix) and not name.endswith("_ms" if suffix == "_s" else "\0"):
            assert word in model.model_fields[name].description


def test_the_engine_section_has_every_option_of_the_engine_and_those_of_its_actor():
    theirs = {f.name: f.default for f in dataclasses.fields(EngineOptions)}
    mine = {name: f.default for name, f in EngineArgs.model_fields.items()}
    nested = SpeculationOptions(**mine["speculation"].model_dump())
    assert mine | {"speculation": nested} == theirs | {
        "fault_injection": False,
        "heartbeat_ms": 100,
    }
    app = {n: AppConfig.model_fields[n].default for n in ("model", "revision", "device", "dtype")}
    app["session_max_share"] = SessionArgs().max_share
    whole = {f.name: f.default for f in dataclasses.fields(ReplicaEngineArgs)}
    assert theirs | app == whole
    assert AppConfig().engine.engine_options() == theirs


def out_of_bounds() -> Iterator[tuple[str, Any]]:
    """Each option of the engine with values beyond its bounds, from the declaration."""
    for path, field in option_paths():
        for kind, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if kind in field.metadata:
                yield path, field.metadata[kind] + step
        if path != "speculation.draft_model":  # any text
            yield path, "no such choice"
        yield path, float("nan")


def option_paths() -> Iterator[tuple[str, dataclasses.Field]]:
    for field in dataclasses.fields(EngineOptions):
        yield field.name, field
    for field in dataclasses.fields(SpeculationOptions):
        yield f"speculation.{field.name}", field


def nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(("name", "value"), list(out_of_bounds()))
def test_yaml_and_the_engine_refuse_the_same_values(name: str, value: Any):
    assert f"got {value!r}" in problems_of({"engine": nested(name, value)})[f"engine.{name}"]
    with pytest.raises(SizingError, match=f"^{name} must be .*got {re.escape(repr(value))}$"):
        check_args(ReplicaEngineArgs(**nested(name, value)))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"block_size": 48}, "must be a power of two from 8 to 256, got 48"),
        (
            {"safety_margin": 0.4, "resume_margin": 0.3},
            "resume_margin (0.3) must be at least safety_margin (0.4)",
        ),
        (
            {"num_blocks": 9, "kv_cache_gib": 2.0},
            "num_blocks (9) and kv_cache_gib (2.0) both set the size of the KV cache; give one of them",
        ),
        (
            {"tensor_parallel": 4, "reduction_splits": 2},
            "tensor_parallel (4) and reduction_splits (2) must be powers of two, in ascending order",
        ),
        (
            {"speculation": {"method": "draft_model"}},
            "speculation.draft_model is None; method 'draft_model' needs a checkpoint",
        ),
        (
            {"speculation": {"method": "ngram", "draft_model": "small"}},
            "speculation.draft_model ('small') is for the method draft_model only, got method 'ngram'",
        ),
    ],
)
def test_yaml_and_the_engine_refuse_the_same_combinations(args: dict[str, Any], message: str):
    assert message in problems_of({"engine": args}).values()
    with pytest.raises(SizingError, match=re.escape(message)):
        check_args(ReplicaEngineArgs(**args))


def test_yaml_without_quotes_turns_speculation_off():
    args = yaml.safe_load("engine: {speculation: {method: off}}")
    assert AppConfig.from_args(args).engine.speculation.method == "off"


def test_the_actor_gets_the_options_of_speculation():
    args = AppConfig.from_args({"engine": {"speculation": {"method": "ngram"}}})
    sent = dataclasses.asdict(ReplicaEngineArgs(**args.engine.engine_options()))
    assert ReplicaEngineArgs(**sent).speculation == SpeculationOptions(method="ngram")


def test_the_defaults_are_within_their_bounds():
    check_args(ReplicaEngineArgs())


def test_defaults_serve_the_embedded_model_on_two_replicas():
    config = AppConfig.from_args({})
    assert (config.model, config.replicas, config.routers) == ("embedded", 2, 2)
    assert config.model_name == "embedded"
    reserved = config.replicas * config.replica_resources.num_cpus
    reserved += config.routers * config.router_resources.num_cpus
    assert reserved <= 1, "must fit a machine with one core"


def test_a_config_cannot_be_changed():
    config = AppConfig.from_args({})
    with pytest.raises(ValidationError, match="frozen"):
        config.engine.block_size = 16


@pytest.mark.parametrize(
    ("args", "name"),
    [
        ({"model": "Qwen/Qwen3-8B"}, "Qwen/Qwen3-8B"),
        ({"model": "/models/qwen3/"}, "qwen3"),
        ({"model": "./qwen3"}, "qwen3"),
        ({"model": "/models/qwen3", "served_model_name": "mine"}, "mine"),
    ],
)
def test_model_name(args: dict[str, Any], name: str):
    assert AppConfig.from_args(args).model_name == name


def mapping_paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple]:
    for name, info in model.model_fields.items():
        yield model, prefix, name
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from mapping_paths(info.annotation, (*prefix, name))


def misspelt(name: str, at: int, double: bool) -> str:
    return name[:at] + (name[at] * 2 if double else "") + name[at + 1 :]


@given(st.sampled_from(list(mapping_paths(AppConfig))), st.integers(0), st.booleans())
def test_a_typo_is_refused_with_the_nearest_name(place: tuple, at: int, double: bool):
    model, prefix, name = place
    typo = misspelt(name, at % len(name), double)
    if typo in model.model_fields:
        return
    # "num_pus" is as near to num_cpus as to num_gpus.
    nearest = {
        field
        for field in model.model_fields
        if typo in {misspelt(field, i, double) for i in range(len(field))}
    }
    args: dict[str, Any] = {typo: 1}
    for part in reversed(prefix):
        args = {part: args}
    message = problems_of(args)[".".join((*prefix, typo))]
    assert message in {f"unknown key; did you mean {field!r}?" for field in nearest}


def test_a_key_like_no_other_lists_what_is_known():
    message = problems_of({"router_resources": {"zzz": 1}})["router_resources.zzz"]
    assert message == "unknown key; known: memory_gib, num_cpus"


def numeric_fields() -> Iterator[tuple[tuple[str, ...], typing.Any]]:
    for _, prefix, name in mapping_paths(AppConfig):
        info = AppConfig
        for part in prefix:
            info = info.model_fields[part].annotation
        field = info.model_fields[name]
        if {int, float} & (set(typing.get_args(field.annotation)) or {field.annotation}):
            yield (*prefix, name), field


@pytest.mark.parametrize(
    ("path", "field"), [pytest.param(p, f, id=".".join(p)) for p, f in numeric_fields()]
)
def test_bounds_nan_and_other_types_are_refused_by_path_and_value(path, field):
    def message(value: Any) -> str:
        args: Any = value
        for part in reversed(path):
            args = {part: args}
        return problems_of(args)[".".join(path)]

    bounds = {type(m).__name__.lower(): m for m in field.metadata}
    assert "ge" in bounds or "gt" in bounds, "a number without a lower bound"
    low = bounds["ge"].ge - 1 if "ge" in bounds else bounds["gt"].gt
    assert f"got {low!r}" in message(low)
    for kind, offset in (("le", 1), ("lt", 0)):
        if kind in bounds:
            high = getattr(bounds[kind], kind) + offset
            assert f"got {high!r}" in message(high)
            assert str(getattr(bounds[kind], kind)) in message(high)
    for wrong in (float("nan"), float("inf"), "8", True, [1]):
        assert f"got {wrong!r}" in message(wrong)


@pytest.mark.parametrize(("written", "read"), [("on", "on"), ("off", "off"), ("auto", "auto")])
def test_on_and_off_are_what_they_say_though_yaml_reads_booleans(written: str, read: str):
    engine = yaml.safe_load(f"async_batching: {written}")
    assert EngineArgs.model_validate(engine).async_batching == read


@given(st.integers(8, 256))
def test_block_size_is_a_power_of_two(value: int):
    args = {"engine": {"block_size": value}}
    if value in (8, 16, 32, 64, 128, 256):
        assert AppConfig.from_args(args).engine.block_size == value
        assert 64 % value == 0 or value % 64 == 0
    else:
        assert f"got {value}" in problems_of(args)["engine.block_size"]


@pytest.mark.parametrize(
    ("args", "path", "words"),
    [
        ({"device": "cdua"}, "device", ["'cdua'", "did you mean 'cuda'?"]),
        ({"dtype": "bf16"}, "dtype", ["'bf16'", "'bfloat16'"]),
        ({"engine": None}, "engine", ["a mapping", "None"]),
        ({"model": "a/b/c"}, "", ["'a/b/c'", "folder", "Hugging Face"]),
        ({"model": ""}, "model", ["at least 1 character", "''"]),
        ({"revision": "main"}, "", ["'main'", "'embedded'"]),
        ({"model": "./here", "revision": "main"}, "", ["'main'", "'./here'"]),
        ({"device": "cpu", "replica_resources": {"num_gpus": 1}}, "", ["num_gpus", "1"]),
        ({"device": "cuda", "replica_resources": {"num_gpus": 0}}, "", ["num_gpus", "0"]),
        (
            {
                "device": "cuda",
                "engine": {"tensor_parallel": 2},
                "replica_resources": {"num_gpus": 0.5},
            },
            "",
            ["num_gpus", "whole number", "0.5"],
        ),
        (
            {"engine": {"num_blocks": 9, "kv_cache_gib": 2}},
            "engine",
            ["num_blocks (9)", "kv_cache_gib (2.0)"],
        ),
        (
            {"engine": {"scheduler": "prefil_first"}},
            "engine.scheduler",
            ["'prefil_first'", "did you mean 'prefill_first'?"],
        ),
        (
            {"router": {"policy": "disaggregated"}, "engine": {"node_pool_gib": 0}},
            "",
            ["router.policy 'disaggregated'", "engine.node_pool_gib", "got 0"],
        ),
        ({"tls": {"certificate_file": "a"}}, "tls.key_file", ["required"]),
        ({"tls": TLS | {"host": "localhost"}}, "tls.host", ["an IP address", "'localhost'"]),
        ({"tls": TLS | {"min_version": 1.3}}, "tls.min_version", ["'1.2' or '1.3'", "1.3"]),
        ({"tls": TLS | {"grpc_port": 8443}}, "tls", ["grpc_port", "http_port", "8443 for both"]),
        ({"engine": {"demotion_order": "mru"}}, "engine.demotion_order", ["'lru'", "'mru'"]),
        ({"engine": {"max_prefill_ms": 0.5}}, "engine.max_prefill_ms", ["equal to 1", "0.5"]),
        (
            {"engine": {"safety_margin": 0.4, "resume_margin": 0.3}},
            "engine",
            ["resume_margin (0.3)", "safety_margin (0.4)"],
        ),
        (
            {"engine": {"allow_block_sharing": False, "prefix_caching": False}},
            "engine",
            ["allow_block_sharing is another name of prefix_caching"],
        ),
        (
            {"engine": {"allow_block_shraing": False}},
            "engine.allow_block_shraing",
            ["unknown key", "did you mean 'allow_block_sharing'?"],
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(args, path: str, words: list[str]):
    message = problems_of(args)[path]
    for word in words:
        assert word in message


def test_the_other_name_of_prefix_caching_works():
    for value in (True, False):
        args = {"engine": {"allow_block_sharing": value}}
        assert AppConfig.from_args(args).engine.prefix_caching is value
        jsonschema.validate(args, AppConfig.model_json_schema())
        assert ReplicaEngineArgs(allow_block_sharing=value).prefix_caching is value
    assert ReplicaEngineArgs(prefix_caching=False).prefix_caching is False
    with pytest.raises(ValueError, match="prefix_caching is false and allow_block_sharing true"):
        ReplicaEngineArgs(prefix_caching=False, allow_block_sharing=True)
    limits = AppConfig.from_args({"engine": {"max_prefill_ms": None}}).engine
    assert limits.max_prefill_ms is None


def test_every_problem_is_listed_one_a_line():
    args = {"modle": 1, "replicas": 0, "engine": {"block_size": 33}, "router": {"max_body": 1}}
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_args(args, "applications[0].args")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert all(line.startswith("applications[0].args.") for line in lines)


@given(st.text(), st.lists(st.text(min_size=1)))
def test_did_you_mean_names_only_what_is_known(word: str, known: list[str]):
    hint = did_you_mean(word, known)
    assert any(repr(name) in hint for name in known) or hint in (
        "",
        f"; known: {', '.join(sorted(known))}",
    )


def test_the_schema_describes_every_argument():
    schema = AppConfig.model_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"model": "Qwen/Qwen3-8B", "engine": {"block_size": 64}}, schema)
    for bad in ({"modle": "x"}, {"engine": {"block_size": 4}}, {"device": "tpu"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


# --------------------------------------------------------------------------------------------------
# The Serve config
# --------------------------------------------------------------------------------------------------


def serve_problems(data: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        serve_config.check(data)
    return {problem.path: problem.message for problem in caught.value.problems}


@pytest.fixture
def data() -> dict[str, Any]:
    return yaml.safe_load(CLUSTER_YAML)


def test_cluster_yaml_is_right():
    config = serve_config.load(ROOT / "cluster.yaml")
    (app,) = config.applications
    assert (app.name, app.route_prefix) == ("quire", "/")
    assert app.config == AppConfig()


def test_all_variables_are_read_by_ray_or_a_library(data):
    """A misspelt variable of an environment is ignored, by Ray and by everyone else."""
    source = "".join(p.read_text() for p in Path(inspect.getfile(ray.serve)).parent.rglob("*.py"))
    source += (Path(ray.__file__).parent / "_private/ray_constants.py").read_text()
    ours = {REQUEST_TIMEOUT_VARIABLE}  # `ray_proxies` reads it
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    # The allocator's variables are read by the dynamic loader.
    loader = b"".join(Path(p).read_bytes() for p in mapped if Path(p).name.startswith("ld-linux"))
    in_file = data["controller_options"]["runtime_env"]["env_vars"]
    for env_vars in (in_file, SERVE_DEFAULTS, DEPLOYMENT_VARIABLES):
        for name, value in env_vars.items():
            if name in ours:
                continue
            if name == "GRPC_EXPERIMENTS":
                # Of an experiment that it does not know, grpcio writes a line to each process's log.
                known = Path(cygrpc.__file__).read_bytes()
                for experiment in value.split(","):
                    assert b"\0%b\0" % experiment.removeprefix("-").encode() in known, experiment
                continue
            if name.startswith("TOKENIZERS_"):
                library = next(Path(tokenizers.__file__).parent.glob("tokenizers*.so"))
                assert name.encode() in library.read_bytes(), name
                continue
            is_allocators = name.startswith("MALLOC_") and b"\0%b\0" % name.encode() in loader
            assert is_allocators or f'"{name}"' in source, name


def test_cluster_yaml_is_the_built_in_config(data):
    """One source: what `quire serve MODEL` runs, and through tests/k8s the manifests."""
    assert data == default_config(data["applications"][0]["args"])


def test_the_servicers_that_ray_loads_exist(data):
    for name in data["grpc_options"]["grpc_servicer_functions"]:
        module, _, function = name.rpartition(".")
        assert module == "quire.cluster.grpc.grpc_servicers" and hasattr(grpc_servicers, function)


# Everything in Ray's schema that is a mapping, so that a key can be misspelt in each.
FULL_CONFIG = """
proxy_location: HeadOnly
http_options: {port: 8000}
grpc_options: {port: 9000}
controller_options: {runtime_env: {env_vars: {A: "1"}}}
logging_config: {log_level: INFO}
tracing_config: {enabled: false}
applications:
  - name: one
    import_path: a.b:c
    runtime_env: {env_vars: {A: "1"}}
    logging_config: {log_level: INFO}
    autoscaling_policy: {policy_function: "textwrap:dedent"}
    deployments:
      - name: D
        ray_actor_options: {num_cpus: 1, runtime_env: {env_vars: {A: "1"}}}
        backpressure_config: {status_code: 429}
        logging_config: {log_level: INFO}
        request_router_config: {request_router_class: "argparse:Namespace"}
        autoscaling_config: {min_replicas: 1, policy: {policy_function: "textwrap:dedent"}}
      - name: E
        gang_scheduling_config: {gang_size: 2}
        num_replicas: 2
        deployment_actors: [{name: x, actor_class: "argparse:Namespace"}]
  - name: two
    route_prefix: /two
    import_path: quire.cluster.app:build
    args: {engine: {block_size: 16}, router: {max_body_bytes: 4096}}
"""
# Free by their nature: names of environment variables.
FREE = {"env_vars"}


def mappings(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every mapping in `value` whose keys are checked, with its path."""
    if isinstance(value, dict):
        yield path, value
        for key, item in value.items():
            if key not in FREE:
                yield from mappings(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from mappings(item, f"{path}[{index}]")


def mutations() -> list:
    cases = []
    for name, text in (("cluster.yaml", CLUSTER_YAML), ("full", FULL_CONFIG)):
        for path, mapping in mappings(yaml.safe_load(text)):
            cases += [pytest.param(text, path, key, id=f"{name}:{path}.{key}") for key in mapping]
    return cases


@pytest.mark.parametrize(("text", "path", "key"), mutations())
def test_a_misspelt_key_is_refused_at_every_level(text: str, path: str, key: str):
    document = yaml.safe_load(text)
    mapping = dict(mappings(document))[path]
    mapping[f"{key}x"] = mapping.pop(key)
    message = serve_problems(document)[f"{path}.{key}x" if path else f"{key}x"]
    assert f"did you mean {key!r}?" in message


def test_the_full_config_is_otherwise_right():
    names = [app.name for app in serve_config.check(yaml.safe_load(FULL_CONFIG)).applications]
    assert names == ["one", "two"]


def set_at(data: Any, path: list[str | int], value: Any) -> None:
    for part in path[:-1]:
        data = data[part]
    data[path[-1]] = value


@pytest.mark.parametrize(
    ("path", "value", "where", "words"),
    [
        (["http_options", "port"], 70000, "http_options.port", "got 70000"),
        (["http_options", "port"], "x", "http_options.port", "got 'x'"),
        (["http_options", "port"], 9000, "grpc_options.port", "must differ"),
        (["applications"], [], "applications", "at least one"),
        (["applications"], None, "applications", "got None"),
        (["applications", 0, "import_path"], "x", "applications[0].import_path", "import path"),
        (["applications", 0, "route_prefix"], "a", "applications[0].route_prefix", "start with"),
        (["applications", 0, "route_prefix"], "/a/", "applications[0].route_prefix", "'/a/'"),
        (["applications", 0, "args"], None, "applications[0].args", "a mapping"),
        (
            ["applications", 0, "args", "tls"],
            TLS | {"http_port": 9000},
            "applications[0].args.tls.http_port",
            "must differ from grpc_options.port, got 9000 for both",
        ),
        (["applications", 0, "args", "replicas"], 0, "applications[0].args.replicas", "got 0"),
        (
            ["applications", 0, "runtime_env"],
            {"env_vars": {"A": 1}},
            "applications[0].runtime_env.env_vars.A",
            "quotes",
        ),
    ],
)
def test_bad_values_are_refused_by_path(data, path, value, where: str, words: str):
    set_at(data, path, value)
    assert words in serve_problems(data)[where]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"route_prefix": "/two"}, '"quire"'), ({"name": "two"}, 'route prefix "/"')],
)
def test_applications_have_names_and_prefixes_of_their_own(data, change, words: str):
    data["applications"].append({**copy.deepcopy(data["applications"][0]), **change})
    assert words in serve_problems(data)["applications"]


def test_two_models_are_two_applications(data):
    second = {**copy.deepcopy(data["applications"][0]), "name": "two", "route_prefix": "/two"}
    data["applications"].append(second)
    assert len(serve_config.check(data).applications) == 2


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["applications", "http_options", "port", "name", "import_path"])
                | st.text(max_size=4),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_data_is_accepted_or_refused_in_words(value: Any):
    with pytest.raises(ConfigError) as caught:
        serve_config.check(value)
    assert str(caught.value)


def test_a_class_that_cannot_be_imported_is_refused(data):
    router = {"request_router_class": "no_such_module:Router"}
    data["applications"][0]["deployments"] = [{"name": "R", "request_router_config": router}]
    assert "no_such_module" in serve_problems(data)[""]


def test_a_key_given_twice_is_refused():
    with pytest.raises(ConfigError, match=r"line 3: .*'port' was given in line 2"):
        serve_config.parse_yaml("http_options:\n  port: 1\n  port: 2\n")


def test_only_plain_yaml_is_read(tmp_path):
    marker = tmp_path / "ran"
    with pytest.raises(ConfigError, match="not valid YAML"):
        serve_config.parse_yaml(f"a: !!python/object/apply:os.mkdir ['{marker}']")
    assert not marker.exists()


@pytest.mark.parametrize("text", ["a: [", "{a: 1", "a: b: c", "a: 1\n---\nb: 1", "\x00"])
def test_what_is_not_yaml_is_refused(text: str):
    with pytest.raises(ConfigError, match="not valid YAML"):
        serve_config.parse_yaml(text)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"])
def test_an_unreadable_file_is_named(tmp_path, content):
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.yaml: cannot be read"):
        serve_config.load(path)


def test_a_tilde_is_the_home_in_every_path(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    config = AppConfig.from_args(
        {"model": "~/m/", "chat_template": "~/t", "router": {"decision_log_folder": "~/d"}}
    )
    assert (config.model, config.model_name, config.is_folder) == ("/home/x/m/", "m", True)
    assert (config.chat_template, config.router.decision_log_folder) == ("/home/x/t", "/home/x/d")


def test_variables_of_the_chat_template_are_checked():
    kwargs = {"enable_thinking": False, "limits": {"words": 5}}
    assert AppConfig.from_args({"chat_template_kwargs": kwargs}).chat_template_kwargs == kwargs
    for wrong, words in (
        ({"tools": []}, "sets this variable itself"),
        ({"a": {1: 2}}, "must be strings"),
    ):
        with pytest.raises(ConfigError, match=f"chat_template_kwargs.*{words}"):
            AppConfig.from_args({"chat_template_kwargs": wrong})
