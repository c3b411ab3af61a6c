"""What is in deploy/ is what the tools that read it accept, and what the code beside it expects."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
import yaml

from elastic_harness.train_config import read_train_config
from strata.coordinator.journal.etcd import parse_location
from strata.rendezvous import FAST_RECOVERY

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "deploy" / "docker"
KUBERNETES = ROOT / "deploy" / "kubernetes"
SEVERAL = ROOT / "deploy" / "kubernetes-several"
KUBERNETES_VERSION = "1.37"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
MANIFESTS: list[dict[str, Any]] = [
    manifest
    for path in sorted(KUBERNETES.glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for manifest in yaml.safe_load_all(path.read_text())
]
JOBSET: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["replicatedJobs"],
            "additionalProperties": False,
            "properties": {
                "suspend": {"type": "boolean"},
                "managedBy": {"type": "string"},
                "ttlSecondsAfterFinished": {"type": "integer", "minimum": 0},
                "startupPolicy": {"type": "object"},
                "coordinator": {"type": "object"},
                "network": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "enableDNSHostnames": {"type": "boolean"},
                        "publishNotReadyAddresses": {"type": "boolean"},
                        "subdomain": {"type": "string"},
                    },
                },
                "successPolicy": {
                    "type": "object",
                    "required": ["operator"],
                    "additionalProperties": False,
                    "properties": {
                        "operator": {"enum": ["All", "Any"]},
                        "targetReplicatedJobs": {"type": "array", "items": {"type": "string"}},
                    },
                },
                "failurePolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "maxRestarts": {"type": "integer", "minimum": 0},
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": {"type": "array"},
                    },
                },
                "replicatedJobs": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["name", "template"],
                        "additionalProperties": False,
                        "properties": {
                            "name": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "dependsOn": {"type": "array"},
                            "template": {
                                "type": "object",
                                "additionalProperties": False,
                                "properties": {"metadata": {"type": "object"}, "spec": {"type": "object"}},
                            },
                        },
                    },
                },
            },
        },
    },
}
"""What the custom resource definition of JobSet accepts; the Job inside is checked as a Job."""


def names(manifest: dict[str, Any]) -> str:
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def of_kind(kind: str) -> dict[str, Any]:
    return next(manifest for manifest in MANIFESTS if manifest["kind"] == kind)


def jobset_pod() -> dict[str, Any]:
    pod: dict[str, Any] = of_kind("JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
        "spec"
    ]
    return pod


# --- schemas ------------------------------------------------------------------------------------------------


def test_the_coordinator_is_asked_for_its_health_at_the_port_that_is_configured() -> None:
    coordinator = COMPOSE["services"]["coordinator"]
    assert "test" not in coordinator["healthcheck"]  # The image's own, which reads the variable.
    image = (DOCKER / "Dockerfile.coordinator").read_text()
    assert "os.environ['STRATA_HTTP_PORT']" in image.partition("HEALTHCHECK")[2]
    port = coordinator["environment"]["STRATA_HTTP_PORT"]
    assert f"127.0.0.1:{port}:{port}" in coordinator["ports"]


def test_the_compose_file_is_one_by_the_specification() -> None:
    schema = json.loads(
        (resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text()
    )
    problems = [str(error) for error in jsonschema_rs.validator_for(schema).iter_errors(COMPOSE)]
    assert problems == []


@pytest.mark.parametrize("manifest", [m for m in MANIFESTS if m["kind"] != "JobSet"], ids=names)
def test_a_manifest_is_one_by_its_kind(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)


def test_the_jobset_is_one_and_so_is_the_job_inside() -> None:
    manifest = of_kind("JobSet")
    assert [str(error) for error in jsonschema_rs.validator_for(JOBSET).iter_errors(manifest)] == []
    for job in manifest["spec"]["replicatedJobs"]:
        inside = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": job["name"]},
            **job["template"],
        }
        kubernetes_validate.validate(inside, KUBERNETES_VERSION, strict=True)


def test_kustomize_finds_what_it_names() -> None:
    document = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert all((KUBERNETES / name).is_file() for name in document["resources"])
    assert {m["metadata"].get("namespace", m["metadata"]["name"]) for m in MANIFESTS} == {
        document["namespace"]
    }


def merged(base: Any, patch: Any) -> Any:
    """As Kustomize does it: mappings key by key, containers by their names, everything else replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merged(base.get(key), patch[key]) if key in patch else base[key] for key in base | patch}
    if isinstance(base, list) and all(isinstance(each, dict) and "name" in each for each in [*base, *patch]):
        changes = {each["name"]: each for each in patch}
        there = [merged(each, changes.pop(each["name"], {})) for each in base]
        return [*there, *changes.values()]
    return patch


def test_two_coordinators_are_reached_under_the_names_that_they_give_themselves() -> None:
    overlay = yaml.safe_load((SEVERAL / "kustomization.yaml").read_text())
    assert (SEVERAL / overlay["resources"][0]).resolve() == KUBERNETES
    service, budget = yaml.safe_load_all((SEVERAL / overlay["resources"][1]).read_text())
    patch = yaml.safe_load((SEVERAL / overlay["patches"][0]["path"]).read_text())
    stateful = merged(of_kind("StatefulSet"), patch)
    for manifest in (service, budget, stateful):
        assert manifest["metadata"]["namespace"] == overlay["namespace"]
        kubernetes_validate.validate(manifest, KUBERNETES_VERSION, strict=True)
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert stateful["spec"]["serviceName"] == service["metadata"]["name"]
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    options = dict(each.split("=", 1) for each in container["args"][1:])
    assert options["--advertise"] == f"$(POD_NAME).{service['metadata']['name']}"
    assert len(parse_location(options["--journal"]).address.endpoints) == 3
    # What agents are told to use.
    names = [
        f"{patch['metadata']['name']}-{number}.{service['metadata']['name']}:50051"
        for number in range(patch["spec"]["replicas"])
    ]
    assert f"COORDINATOR_ADDR={','.join(names)}" in (SEVERAL / "service.yaml").read_text()


@pytest.mark.parametrize("name", ["Dockerfile.coordinator", "Dockerfile.worker"])
def test_a_dockerfile_passes_the_linter(name: str, program: Callable[[str], str]) -> None:
    done = subprocess.run([program("hadolint"), DOCKER / name], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile.coordinator", "Dockerfile.worker"])
def test_an_image_is_built_from_files_that_its_context_has(name: str) -> None:
    let_in = {
        line.removeprefix("!").split("/")[0]
        for line in (DOCKER / f"{name}.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in (DOCKER / name).read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied
    assert all((ROOT / source).exists() for source in copied)
    assert {source.split("/")[0] for source in copied} <= let_in


# --- what belongs together ----------------------------------------------------------------------------------


def agents() -> dict[str, list[str]]:
    return {
        "compose": COMPOSE["services"]["worker"]["command"],
        "kubernetes": jobset_pod()["containers"][0]["args"],
    }


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_agents_are_started_as_torchrun_wants_it(where: str) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(agents()[where])
    assert options.rdzv_backend == "strata"
    assert options.rdzv_endpoint == "coordinator:50051"
    assert options.module
    assert options.training_script == "elastic_harness.train"
    conf = dict(pair.split("=") for pair in options.rdzv_conf.split(","))
    assert conf == {key: str(value) for key, value in FAST_RECOVERY.items()}


def test_the_configurations_are_ones_the_trainer_takes(tmp_path: Path) -> None:
    in_cluster = tmp_path / "train.yaml"
    in_cluster.write_text(of_kind("ConfigMap")["data"]["train.yaml"])
    for path in (DOCKER / "train.yaml", in_cluster):
        config, warnings = read_train_config(path)
        assert warnings == []
        assert config.elastic.min_nodes == 1


def test_services_reach_the_pods_and_policies_the_ports_they_mean() -> None:
    service, stateful = of_kind("Service"), of_kind("StatefulSet")
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert stateful["spec"]["selector"]["matchLabels"].items() <= labels.items()
    container = stateful["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} == set(ports)
    policy = next(m for m in MANIFESTS if names(m) == "NetworkPolicy/coordinator")
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    worker = of_kind("JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"][
        "labels"
    ]
    (from_workers,) = (
        rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == ports["grpc"]
    )
    assert from_workers["from"][0]["podSelector"]["matchLabels"].items() <= worker.items()


def test_nobody_runs_as_root_and_no_secret_is_written_down() -> None:
    for pod in (of_kind("StatefulSet")["spec"]["template"]["spec"], jobset_pod()):
        assert pod["securityContext"]["runAsNonRoot"]
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert container["securityContext"]["readOnlyRootFilesystem"]
            secrets = [variable for variable in container.get("env", []) if "TOKEN" in variable["name"]]
            assert all("secretKeyRef" in variable["valueFrom"] for variable in secrets)
    for name in ("Dockerfile.coordinator", "Dockerfile.worker"):
        assert "\nUSER 10001:10001\n" in (DOCKER / name).read_text()
    for service in COMPOSE["services"].values():
        for key, value in service.get("environment", {}).items():
            if "TOKEN" in key or "SECRET" in key:
                assert re.fullmatch(r"\$\{\w+:\?.+\}", value), f"{key} must come from outside"
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"]["coordinator"]["ports"])
