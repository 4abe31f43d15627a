"""What may change while an application runs, and what `quire config check` says of the rest."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from quire.cluster.config import serve_config
from quire.cluster.config.app_config import AppConfig
from quire.cluster.config.config_problems import ConfigError
from quire.cluster.config.engine_section import EngineArgs
from quire.cluster.config.live_update import (
    ENGINE_FIELDS,
    ROUTER_FIELDS,
    engine_section,
    router_section,
)
from quire.cluster.config.router_section import RouterArgs

CONFIG = yaml.safe_load((Path(__file__).parents[3] / "cluster.yaml").read_text())


def with_deployments(*deployments: object) -> dict:
    config = copy.deepcopy(CONFIG)
    config["applications"][0]["deployments"] = list(deployments)
    return config


def test_named_fields_change_and_the_others_are_as_in_the_arguments():
    args = RouterArgs(max_move_s=5.0, max_migrations=7)
    assert router_section(args, {}) == args
    changed = router_section(args, {"max_migrations": 1})
    assert (changed.max_migrations, changed.max_move_s) == (1, 5.0)
    engine = engine_section(EngineArgs(safety_margin=0.3), {"max_prefill_ms": None})
    assert (engine.max_prefill_ms, engine.safety_margin) == (None, 0.3)


def test_the_bounds_of_the_routers_queue_are_light_and_must_still_agree():
    changed = router_section(
        RouterArgs(),
        {
            "policy": "e2e",
            "max_wait_s": 5.0,
            "max_queued_requests": 7,
            "max_queued_tokens": 800,
            "dispatch_window_s": 0.25,
            "max_replica_waiting_requests": 3,
            "fairness_quantum_tokens": 64,
            "max_explained_decisions": 0,
            "decision_log_bytes": 128 * 1024,
        },
    )
    assert (changed.max_wait_s, changed.dispatch_window_s, changed.policy) == (5.0, 0.25, "e2e")
    with pytest.raises(ConfigError, match=r"dispatch_window_s \(6.0\).*max_wait_s \(5.0\)"):
        router_section(RouterArgs(max_wait_s=5.0), {"dispatch_window_s": 6.0})
    # A log begins when its router does: what came of a decision belongs to the file that has it.
    with pytest.raises(ConfigError, match=r"decision_log_folder: needs a restart"):
        router_section(RouterArgs(), {"decision_log_folder": "logs"})


def test_every_light_field_exists():
    assert set(ENGINE_FIELDS) <= EngineArgs.model_fields.keys()
    assert set(ROUTER_FIELDS) <= RouterArgs.model_fields.keys()


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"max_body_bytes": 4096}, ["user_config.max_body_bytes", "restart", "max_move_s"]),
        ({"max_mov_s": 1.0}, ["user_config.max_mov_s", "did you mean 'max_move_s'"]),
        ({"max_move_s": -1.0}, ["user_config.max_move_s", "-1.0", "0"]),
        ({"max_migrations": "3"}, ["user_config.max_migrations", "'3'"]),
        (["max_move_s"], ["user_config", "mapping"]),
    ],
)
def test_what_cannot_change_is_refused_by_name(user_config, words):
    with pytest.raises(ConfigError) as error:
        router_section(RouterArgs(), user_config)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_combination_out_of_bounds_is_refused():
    with pytest.raises(ConfigError, match=r"resume_margin \(0.1\).*safety_margin \(0.2\)"):
        engine_section(EngineArgs(), {"resume_margin": 0.1})


def test_config_check_reads_the_deployments_of_quire():
    config = with_deployments(
        {"name": "Replica", "num_replicas": 3, "user_config": {"max_waiting_requests": 10}},
        {"name": "Router", "user_config": {"policy": "e2e"}},
    )
    assert serve_config.check(config).applications[0].config == AppConfig.from_args(
        CONFIG["applications"][0]["args"]
    )
    bad = with_deployments(
        {"name": "Replica", "user_config": {"block_size": 64, "step_timeout_s": 0.0}},
        {"name": "Gateway"},
        {"name": "Router", "ray_actor_options": {"num_cpus": 1}},
    )
    with pytest.raises(ConfigError) as error:
        serve_config.check(bad)
    text = str(error.value)
    assert "applications[0].deployments[0].user_config.block_size: needs a restart" in text
    assert "applications[0].deployments[1].name: must be Replica or Router, got 'Gateway'" in text
    assert "deployments[2].ray_actor_options: give router_resources under args" in text
