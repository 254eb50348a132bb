"""Tests that what docker-compose.yml says is true of the code, without an engine."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from services.cli.main import COMMANDS
from services.core.errors import ConfigError
from services.router.placement_config import read_selection
from services.router.policy import PRESETS
from services.rpc import names
from services.vllm.environment import VLLM_VERSION
from tests.support import compose

OURS = {name: service for name, service in compose.services().items() if service["image"].startswith("baton:")}
THEIRS = {name: service for name, service in compose.services().items() if name not in OURS}
WORKERS = [name for name, role, _ in compose.num_workers(OURS, {"cpu", "gpu", "vllm"}) if role]
"""Those of one host, which share memory."""
NETWORKED = [name for name, role, _ in compose.num_workers(OURS, {"network"}) if role]

# Keys of the compose specification that docker-compose 1.29 and docker compose v2 both know, as far as they are used.
SERVICE_KEYS = {
    "build": dict,
    "cap_drop": list,
    "command": list,
    "cpus": (int, float),
    "cpuset": (str, type(None)),
    "depends_on": (dict, list),
    "deploy": dict,
    "entrypoint": list,
    "env_file": list,
    "environment": dict,
    "healthcheck": dict,
    "image": str,
    "init": bool,
    "logging": dict,
    "mem_limit": str,
    "networks": dict,
    "pids_limit": int,
    "ports": list,
    "profiles": list,
    "read_only": bool,
    "restart": str,
    "scale": int,
    "security_opt": list,
    "shm_size": str,
    "stop_grace_period": str,
    "tmpfs": list,
    "volumes": list,
}


def test_only_keys_that_both_compose_versions_know() -> None:
    document = compose.load()
    assert {key for key in document if not key.startswith("x-")} == {"services", "volumes"}
    for name, service in document["services"].items():
        for key, value in service.items():
            assert key in SERVICE_KEYS, f"{name}: {key}"
            assert isinstance(value, SERVICE_KEYS[key]), f"{name}: {key} is {value!r}"  # type: ignore[arg-type]


@pytest.mark.process
@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
def test_compose_itself_takes_the_file(command: list[str]) -> None:
    if shutil.which(command[0]) is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} is not on this machine")
    environ = {**os.environ, "COMPOSE_PROFILES": "gpu,vllm,observability"}
    check = [*command, "--file", str(compose.COMPOSE_FILE), "config", "--quiet"]
    result = subprocess.run(check, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_default_is_a_split_cluster_on_cpu() -> None:
    started = list(compose.num_workers(OURS, compose.default_profiles()))
    assert started == [("prefill", "prefill", 1), ("decode", "decode", 1)]
    assert OURS["router"].get("profiles") is None
    for name in ("prefill", "decode"):
        assert OURS[name]["environment"]["BATON_DEVICE"] == "cpu"


def test_profiles() -> None:
    assert {profile for each in compose.services().values() for profile in each.get("profiles", [])} == {
        "cpu",
        "gpu",
        "network",
        "observability",
        "store",
        "vllm",
    }
    assert {name for name, each in THEIRS.items() if each["profiles"] == ["observability"]} == {
        "jaeger",
        "prometheus",
        "grafana",
    }


@pytest.mark.parametrize(
    "given", [[], ["cpu"], ["network"], ["gpu"], ["vllm"], ["cpu", "observability"], ["gpu", "observability"]]
)
def test_exactly_one_kind_of_worker_starts(given: list[str]) -> None:
    """The profiles of `--profile` replace those of .env: it does so in both compose versions."""
    profiles = set(given) or compose.default_profiles()
    started = [
        compose.configuration_of(OURS[name]) for name, _, number in compose.num_workers(OURS, profiles) if number
    ]
    expected = {("cuda", "torch" if "gpu" in given else "vllm")} if {"gpu", "vllm"} & set(given) else {("cpu", "torch")}
    assert {(config.device, config.engine) for config in started} == expected


def test_what_a_worker_costs_reaches_its_container() -> None:
    services = compose.services({"CPU_COST_PER_HOUR": "0.25", "GPU_COST_PER_HOUR": "2.5"})
    for name in (*WORKERS, *NETWORKED):
        expected = 0.25 if name.startswith(("prefill", "decode")) else 2.5
        assert compose.configuration_of(services[name]).cost_per_hour == expected, name


@pytest.mark.parametrize("name", ["router", "kvtransfer", *WORKERS, *NETWORKED])
def test_flags_and_variables_are_the_services_own(name: str) -> None:
    """Loads the configuration as the process would. A BATON_* variable that no option reads would do nothing."""
    service = OURS[name]
    assert service["command"][0] in COMMANDS
    config = compose.configuration_of(service)
    known = {f"BATON_{field.name.upper()}" for field in dataclasses.fields(config)}
    assert {variable for variable in service["environment"] if variable.startswith("BATON_")} <= known
    assert (config.host, config.port, config.metrics_port) == ("0.0.0.0", 50051, 9400)


@pytest.mark.parametrize(
    ("variable", "value"), [("CPU_TRANSPORT", "carrier-pigeon"), ("MAX_NUM_SEQS", "0"), ("DRAIN_S", "soon")]
)
def test_a_wrong_setting_is_told_by_the_service(variable: str, value: str) -> None:
    """This shows that the check above can fail."""
    with pytest.raises(ConfigError):
        compose.configuration_of(compose.services({variable: value})["decode"])


def test_what_the_image_sets_exists() -> None:
    ours = {name for name in compose.image_environment() if name.startswith("BATON_")}
    options = {
        f"BATON_{field.name.upper()}" for kind in compose.CONFIG_OF.values() for field in dataclasses.fields(kind)
    }
    assert ours - options == {"BATON_HOME"}


def test_settings_left_alone_are_the_services_defaults() -> None:
    """The settings of a container differ from a service's defaults only where a deployment has a reason."""
    changed = {"host", "port", "metrics_port", "http_port", "control_host", "cluster_token_file", "allow_plain_token"}
    changed |= {
        "router",
        "threads",
        "shm_dir",
        "transport",
        "memory_utilization",
        "policy_file",
        "console_token_file",
        "jaeger_url",
    }
    for name in ("router", "prefill"):
        config = compose.configuration_of(OURS[name])
        for field in dataclasses.fields(config):
            if field.name not in changed | {"drain_s"}:
                assert getattr(config, field.name) == field.default, field.name


def test_the_policy_file_that_is_mounted_sets_nothing_and_what_it_shows_is_valid(tmp_path: Path) -> None:
    (mount,) = (volume for volume in OURS["router"]["volumes"] if "policy" in volume)
    path, inside, mode = mount.split(":")
    assert (OURS["router"]["environment"]["BATON_POLICY_FILE"], mode) == (inside, "ro")
    shown = (compose.DEPLOY / path).read_text()
    assert read_selection((), (), str(compose.DEPLOY / path)).of("any") == read_selection((), (), "").of("any")
    example = tmp_path / "policy.toml"
    example.write_text(re.sub(r"(?m)^# ?((policy|weights|\[).*)", r"\1", shown))
    chosen = read_selection((), (), str(example))
    assert chosen.of("code").config.prefill_terms == PRESETS["prefix_aware"].prefill_terms
    assert chosen.of("other").config.prefill_terms == PRESETS["hybrid"].prefill_terms


@pytest.mark.parametrize("name", sorted(OURS))
def test_health_checks_ask_for_a_metric_and_start_no_python(name: str) -> None:
    check = OURS[name].get("healthcheck")
    assert check is not None
    if check.get("disable"):
        assert name == "model"
        return
    probe, port, metric = check["test"][1:]
    assert (probe, port) == ("baton-probe", compose.image_environment()["BATON_METRICS_PORT"])
    assert metric == (names.Metric.READY if name == "router" else names.Metric.SESSIONS)


def test_a_store_is_started_by_its_profile_alone_and_keeps_what_the_workers_compute() -> None:
    service = OURS["kvtransfer"]
    assert service["profiles"] == ["store"]
    config = compose.configuration_of(service)
    assert (config.served_model_name, config.router) == ("", ("router:50052",))


def test_a_store_needs_neither_torch_nor_the_model() -> None:
    service = OURS["kvtransfer"]
    assert service["image"] == OURS["router"]["image"]
    assert set(service["depends_on"]) == {"router"}
    assert not any(volume.startswith("models:") for volume in service["volumes"])


def test_workers_share_the_sockets_and_only_read_the_models() -> None:
    for name in [*WORKERS, "kvtransfer"]:
        volumes = dict(volume.split(":", 1) for volume in OURS[name]["volumes"])
        models = {} if name == "kvtransfer" else {"models": "/var/lib/baton:ro"}
        assert volumes == {**models, "sockets": "/run/baton", "cluster": "/run/cluster"}
        assert compose.configuration_of(OURS[name]).shm_dir == "/run/baton"
        assert "ipc" not in OURS[name]
        assert "pid" not in OURS[name]
    writers = [name for name, service in OURS.items() if "models:/var/lib/baton" in service.get("volumes", [])]
    assert writers == ["model"]


def test_shared_memory_is_demanded() -> None:
    for name in WORKERS:
        assert compose.configuration_of(OURS[name]).transport == "shm"


def test_workers_of_the_network_profile_share_nothing_but_a_network() -> None:
    """So their KV goes as between hosts. A name in the abstract namespace is not seen from another container's."""
    assert [OURS[name]["command"] for name in NETWORKED] == [["prefill"], ["decode"]]
    for name in NETWORKED:
        config = compose.configuration_of(OURS[name])
        assert (config.transport, config.shm_dir) == ("auto", "")
        assert OURS[name]["volumes"] == ["models:/var/lib/baton:ro", "cluster:/run/cluster"]
        assert not {"ipc", "pid", "network_mode"} & set(OURS[name])


@pytest.mark.parametrize("name", [*WORKERS, *NETWORKED])
def test_replicas_can_be_told_apart(name: str) -> None:
    """A service that may have replicas has nothing that only one container can have."""
    assert "container_name" not in OURS[name]
    assert "ports" not in OURS[name]
    config = compose.configuration_of(OURS[name])
    assert not config.advertise
    assert not config.worker_id
    assert config.router == ("router:50052",)


def test_workers_may_finish_before_they_are_killed() -> None:
    for name in ("router", *WORKERS, *NETWORKED):
        grace = re.fullmatch(r"(\d+)s", OURS[name]["stop_grace_period"])
        assert grace is not None
        assert int(grace[1]) >= compose.configuration_of(OURS[name]).drain_s + 10


def test_published_ports_are_unique_and_local() -> None:
    published = [port for service in compose.services().values() for port in service.get("ports", [])]
    hosts, ports, _ = zip(*(port.split(":") for port in published), strict=True)
    assert set(hosts) == {"127.0.0.1"}
    assert max(Counter(ports).values()) == 1
    elsewhere = compose.services({"BIND_ADDRESS": "192.0.2.1"})
    assert all(port.startswith("192.0.2.1:") for each in elsewhere.values() for port in each.get("ports", []))


def test_published_ports_are_those_the_router_listens_on() -> None:
    config = compose.configuration_of(OURS["router"])
    inside = {int(port.rpartition(":")[2]) for port in OURS["router"]["ports"]}
    assert inside == {config.port, config.http_port, config.metrics_port}


def test_the_control_port_is_for_the_stack_alone() -> None:
    """Workers reach it over the network between the containers; it is not published."""
    config = compose.configuration_of(OURS["router"])
    assert config.control_host == "0.0.0.0"
    assert {compose.configuration_of(OURS[name]).router for name in (*WORKERS, *NETWORKED)} == {
        (f"router:{config.control_port}",)
    }
    published = [port.rpartition(":")[2] for service in OURS.values() for port in service.get("ports", [])]
    assert str(config.control_port) not in published


def test_only_the_router_publishes_ports() -> None:
    """KV is read from workers and stores over shared memory and the network between the containers."""
    assert {name for name, service in OURS.items() if service.get("ports")} == {"router"}
    for name in [*WORKERS, *NETWORKED, "kvtransfer"]:
        assert compose.configuration_of(OURS[name]).kv_port == 0, "a free one, which replicas cannot dispute"


def test_router_and_workers_share_a_token_that_the_first_of_them_makes() -> None:
    """The token lies in memory, in a volume that only Baton's user can open; it needs no step of the operator's and
    nothing in the file."""
    for name in ("router", *WORKERS, *NETWORKED):
        assert compose.configuration_of(OURS[name]).cluster_token_file == "/run/cluster/token"
        assert "cluster:/run/cluster" in OURS[name]["volumes"], "to be written to: whoever is first makes it"
        assert "BATON_CLUSTER_TOKEN" not in OURS[name]["environment"]
    options = compose.load()["volumes"]["cluster"]["driver_opts"]
    assert options["type"] == "tmpfs"
    assert "mode=0700,uid=10001,gid=10001" in options["o"]
    strangers = {name for name, service in THEIRS.items() if "cluster:" in str(service.get("volumes"))}
    assert not strangers


@pytest.mark.parametrize("name", sorted(compose.services()))
def test_images_have_a_tag(name: str) -> None:
    _, _, tag = compose.services()[name]["image"].rpartition(":")
    assert re.fullmatch(r"v?\d+\.\d+(\.\d+)?(-\w+)?", tag), tag


@pytest.mark.parametrize("name", sorted(compose.services()))
def test_containers_can_do_little(name: str) -> None:
    service: dict[str, Any] = compose.services()[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["init"] is True, "a signal before our handlers are there must not be lost on process 1"
    assert "no-new-privileges:true" in service["security_opt"]
    assert not {"privileged", "user"} & set(service)


@pytest.mark.parametrize("name", sorted(compose.services_with_tls()))
def test_containers_have_a_share_of_the_host(name: str) -> None:
    service: dict[str, Any] = compose.services_with_tls()[name]
    assert service["cpus"] >= 1
    assert re.fullmatch(r"\d+[gm]", service["mem_limit"])
    assert service["pids_limit"] >= 256


@pytest.mark.parametrize("name", [name for name in (*WORKERS, *NETWORKED) if not name.startswith("vllm")])
def test_a_worker_computes_on_its_share_of_the_cores(name: str) -> None:
    """More threads than the container may use at once wait for one another; while it loads, too."""
    assert compose.configuration_of(OURS[name]).threads == OURS[name]["cpus"]


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_what_others_wrote_has_health_checks(name: str) -> None:
    port = THEIRS[name]["ports"][0].rpartition(":")[2]
    assert f"http://127.0.0.1:{port}/" in THEIRS[name]["healthcheck"]["test"][-1]


def test_the_model_is_fetched_as_the_build_fetches() -> None:
    model = compose.services({"HTTPS_PROXY": "http://proxy:1"})["model"]
    assert model["environment"]["HTTPS_PROXY"] == model["build"]["args"]["HTTPS_PROXY"] == "http://proxy:1"
    assert model["environment"]["PIP_CONFIG_FILE"].startswith("/wheels/")
    assert "./wheels:/wheels:ro" in model["volumes"]


def test_every_gpu_worker_has_one_device() -> None:
    devices = []
    for name in WORKERS:
        if name.startswith("gpu-"):
            (device,) = OURS[name]["deploy"]["resources"]["reservations"]["devices"]
            assert device["capabilities"] == ["gpu"]
            devices += device["device_ids"]
    assert devices == [str(number) for number in range(8)]


def test_workers_with_vllm_have_its_image_and_gpus_of_their_own() -> None:
    given = {"VLLM_ENGINE_ARGS": "tensor_parallel_size=2", "VLLM_0_GPUS": "0,1", "VLLM_1_GPUS": "2,3"}
    services = {name: each for name, each in compose.services(given).items() if each.get("profiles") == ["vllm"]}
    assert [compose.configuration_of(each).engine_arguments() for each in services.values()] == [
        {"tensor_parallel_size": "2"}
    ] * 2
    assert [each["environment"]["CUDA_VISIBLE_DEVICES"] for each in services.values()] == ["0,1", "2,3"]
    for name in services:
        build = OURS[name]["build"]
        assert build["target"] == "vllm"
        assert build["args"]["BASE_IMAGE"].startswith(f"vllm/vllm-openai:v{VLLM_VERSION}.")
        assert OURS[name]["image"].endswith("-vllm")
        assert OURS[name]["tmpfs"] == [f"{OURS[name]['environment']['HOME']}:exec"], "what is compiled is loaded there"
    assert compose.configuration_of(OURS["vllm-0"]).engine_arguments() == {}


@pytest.mark.process
def test_grafana_has_no_password_that_everybody_knows() -> None:
    """Its own default is admin; without one of the operator's it gets a random one, and anonymous viewers."""
    grafana = compose.services()["grafana"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == ""
    told = compose.services({"GRAFANA_PASSWORD": "secret"})["grafana"]["environment"]
    assert told["GF_SECURITY_ADMIN_PASSWORD"] == "secret"
    assert grafana["environment"]["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    shell, flag, script = grafana["entrypoint"]
    # What compose leaves of it, run with another program in Grafana's place.
    script = script.replace("$$", "$").replace("exec /run.sh", "printenv GF_SECURITY_ADMIN_PASSWORD")
    runs = [
        subprocess.run(
            [shell, flag, script], env={**os.environ, "GF_SECURITY_ADMIN_PASSWORD": given}, capture_output=True
        )
        for given in ("", "", "secret")
    ]
    first, second, given = (run.stdout.decode().strip() for run in runs)
    assert min(len(first), len(second)) >= 32
    assert first != second
    assert given == "secret"
