"""Starts an image's root as Kubernetes starts its pod: uid 1000, no capabilities, nothing writable but the volumes.

The process gets a network of its own (a loopback with the pod's address, and no way out), process ids and mounts of its
own: its ports collide with nothing, and its end ends all that it has started.
"""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from . import image_pod
from .image_root import PATH, Stage
from .manifests import K8S, groups, pod, ray_container, rayservice, render

START_TIMEOUT_S = 900.0
POD_ADDRESS = "10.0.0.2"


def start(stage: Stage) -> dict[str, Any]:
    """Run `image_pod.main` in the root of a stage; return what it found."""
    service = rayservice(render(K8S / "base"))
    worker = groups(service)[1]
    container, security = ray_container(worker), pod(worker)["securityContext"]
    uid, gid = security["runAsUser"], security["runAsGroup"]
    assert stage.user == f"{uid}:{gid}"
    given = {
        "command": stage.command,
        "ray_start": ray_start(worker["rayStartParams"]),
        "raylet_url": "http://127.0.0.1:{port}{path}".format(
            **container["startupProbe"]["httpGet"]
        ),
        "readiness": container["readinessProbe"]["exec"]["command"],
        "serve_config": small(yaml.safe_load(service["spec"]["serveConfigV2"])),
    }
    environment = {item["name"]: item["value"] for item in container["env"]}
    # What KubeRay adds for `authOptions` in the mode `token`.
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "PATH": PATH}
    command = ["python", "-c", inspect.getsource(image_pod)]
    script = _script(stage, uid, gid, pod(worker)["volumes"], container["volumeMounts"], command)
    ran = subprocess.run(
        ["unshare", *"--mount --net --pid --fork --kill-child".split(), "sh", "-c", script],
        input=json.dumps(given),
        env=environment | {"LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
    )
    if ran.returncode:
        raise RuntimeError(f"the pod failed: {ran.stdout[-3000:]}\n{ran.stderr[-12000:]}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def ray_start(params: dict[str, str]) -> list[str]:
    """KubeRay's command, for one node that is head and worker."""
    defaults = {
        "block": "true",
        "dashboard-agent-listen-port": "52365",
        "dashboard-host": "0.0.0.0",
        "metrics-export-port": "8080",
        "num-cpus": "2",
    }
    options = [
        f"--{name}={value}" for name, value in (defaults | params).items() if name != "block"
    ]
    return ["ray", "start", "--head", "--block", *options]


def small(config: dict[str, Any]) -> dict[str, Any]:
    """The manifest's Serve config with one router and one replica."""
    (application,) = config["applications"]
    application["args"] |= {"replicas": 1, "routers": 1, "replica_resources": {"num_cpus": 1}}
    application["args"]["engine"] = {"num_threads": 1}
    return config


def _script(
    stage: Stage,
    uid: int,
    gid: int,
    volumes: list[dict[str, Any]],
    mounts: list[dict[str, str]],
    command: list[str],
) -> str:
    """Mount what the container's runtime mounts, the root read-only, and run the command as the user."""
    root = stage.root
    kinds = {volume["name"]: volume for volume in volumes}
    lines = [
        "set -e",
        "ip link set lo up",
        f"ip address add {POD_ADDRESS}/32 dev lo",
        "ip route add default dev lo",
        # As the kubelet: the pod's name has an address. Without one, each look-up of it by Ray takes 10 s. No name
        # server can be reached; without one in the file, this machine is asked and refuses at once.
        f"printf '127.0.0.1 localhost\\n{POD_ADDRESS} %s\\n' $(uname -n) > {root}/etc/hosts",
        f"echo > {root}/etc/resolv.conf",
        f"mount --bind {root} {root}",
        f"mount -t proc proc {root}/proc",
        f"mount --rbind /dev {root}/dev",
        f"mount --rbind /sys {root}/sys",
        f"mount -t tmpfs -o mode=755 tmpfs {root}/run",
    ]
    for mount in mounts:
        assert "emptyDir" in kinds[mount["name"]], mount
        path = Path(root, mount["mountPath"].lstrip("/"))
        lines += [f"mkdir -p {path}", f"mount -t tmpfs -o mode=1777 tmpfs {path}"]
    lines.append(f"mount -o remount,bind,ro {root}")
    user = (
        f"setpriv --reuid {uid} --regid {gid} --clear-groups --no-new-privs --bounding-set=-all "
        f"--inh-caps=-all"
    )
    lines.append(f"exec chroot {root} {user} env -C {stage.folder} {shlex.join(command)}")
    return "\n".join(lines)
