"""The manifests for Kubernetes are valid, and their parts refer to one another."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from lightningrl.config import AgentConfig
from tests.docs.blocks import ROOT
from tests.docs.test_code import parse

FOLDER = ROOT / "deploy" / "kubernetes"
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())


def documents() -> list[dict[str, Any]]:
    files = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return [document for name in files for document in yaml.safe_load_all((FOLDER / name).read_text())]


def named(kind: str) -> dict[str, Any]:
    [found] = [document for document in documents() if document["kind"] == kind]
    return found


def pods() -> Iterator[dict[str, Any]]:
    for kind in ("StatefulSet", "Deployment"):
        yield named(kind)["spec"]["template"]


def container(template: dict[str, Any]) -> dict[str, Any]:
    [only] = template["spec"]["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
def test_every_manifest_is_valid(version: str) -> None:
    for document in documents():
        kubernetes_validate.validate(document, version, strict=True)


def test_a_mistake_is_refused() -> None:
    deployment = named("Deployment")
    deployment["spec"]["template"]["spec"]["terminationGracePeriod"] = 5
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[-1], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl puts the manifests together")
def test_the_manifests_go_together_with_the_secret(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "kubernetes")
    (folder / "worker.key").write_text("lrl-worker-0123456789\n")
    made = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=True, timeout=60)
    found = list(yaml.safe_load_all(made.stdout))
    for document in found:
        kubernetes_validate.validate(document, VERSIONS[-1], strict=True)
    assert sorted(document["kind"] for document in found) == ["Deployment", "Secret", "Service", "StatefulSet"]
    [secret] = [document["metadata"]["name"] for document in found if document["kind"] == "Secret"]
    assert made.stdout.count(f"secretName: {secret}\n") == 2


def test_every_pod_mounts_the_key_and_what_it_has_as_volumes() -> None:
    [key] = [made["name"] for made in yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["secretGenerator"]]
    claims = [claim["metadata"]["name"] for claim in named("StatefulSet")["spec"]["volumeClaimTemplates"]]
    for template in pods():
        volumes = template["spec"]["volumes"]
        assert [v["secret"]["secretName"] for v in volumes if "secret" in v] == [key]
        mounted = {mount["name"] for mount in container(template)["volumeMounts"]}
        assert mounted <= {*claims, *(volume["name"] for volume in volumes)} and "worker-key" in mounted


def test_the_service_leads_to_the_port_on_which_the_server_listens() -> None:
    service, server = named("Service"), named("StatefulSet")
    template = server["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert server["spec"]["serviceName"] == service["metadata"]["name"]
    [port] = container(template)["ports"]
    arguments = container(template)["args"]
    assert arguments[arguments.index("--listen") + 1] == f"0.0.0.0:{port['containerPort']}"
    url = f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert f"gateway.public_url={url}" in arguments
    assert url in container(named("Deployment")["spec"]["template"])["args"]


def test_probes_ask_the_server_for_its_health() -> None:
    server = container(named("StatefulSet")["spec"]["template"])
    assert server["readinessProbe"]["httpGet"]["path"] == "/health"
    for probe in ("startupProbe", "livenessProbe"):
        assert "/health" in server[probe]["exec"]["command"][-1]


def test_the_commands_exist_with_their_options() -> None:
    server, worker = (container(template)["args"] for template in pods())
    assert server[0] == "start-or-resume" and worker[0] == "lightningrl"
    parse(["train", server[1], "--run-dir", server[2], "--resume", *server[3:]])
    parse(worker[1:])


def test_a_worker_has_time_to_drain_and_no_more_rights_than_it_needs() -> None:
    grace_s = named("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > AgentConfig(entry="a:b").timeout_s + 60
    for template in pods():
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert not template["spec"]["automountServiceAccountToken"]
        assert container(template)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert {"memory", "cpu"} == container(template)["resources"]["requests"].keys()
        assert "memory" in container(template)["resources"]["limits"]
