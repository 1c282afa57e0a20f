"""A stand-in of a Kubernetes cluster, as Spark's own client talks to it: pods are processes of this machine.

It plays the API server, and a node that starts an executor as `entrypoint.sh` of Spark's image does. What it does not play: images
(executors run on a Python of their own without tir_dagster), schedulers, service accounts, watches.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import Popen
from typing import Any

import pyspark

from tir_dagster_tests.cluster import run_on_machine

_JARS = f"{Path(pyspark.__file__).parent}/jars/*"
_BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


@dataclass
class Kubernetes:
    """One cluster: every pod that was asked for stays in `pods` as it was asked for."""

    folder: Path
    # Values of secrets by name of the secret and of its key.
    secrets: Mapping[tuple[str, str], str]
    pods: list[dict[str, Any]] = field(default_factory=list)
    processes: list[Popen[bytes]] = field(default_factory=list)
    port: int = 0
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def master(self) -> str:
        return f"k8s://http://127.0.0.1:{self.port}"

    def create(self, pod: dict[str, Any]) -> None:
        self.pods.append(pod)
        (container,) = pod["spec"]["containers"]
        env = {variable["name"]: self._value(variable, pod) for variable in container["env"]}
        options = [env[name] for name in sorted(env) if name.startswith("SPARK_JAVA_OPT_")]
        memory = env["SPARK_EXECUTOR_MEMORY"]
        java = [_java(), *options, f"-Xmx{memory}", "-cp", _JARS, _BACKEND]
        arguments = {
            "driver-url": env["SPARK_DRIVER_URL"],
            "executor-id": env["SPARK_EXECUTOR_ID"],
            "cores": env["SPARK_EXECUTOR_CORES"],
            "app-id": env["SPARK_APPLICATION_ID"],
            "hostname": "127.0.0.1",
            "resourceProfileId": env["SPARK_RESOURCE_PROFILE_ID"],
            "podName": pod["metadata"]["name"],
        }
        words = [word for name, value in arguments.items() for word in (f"--{name}", value)]
        self.processes.append(run_on_machine(self.folder / pod["metadata"]["name"], [*java, *words], env))
        pod["status"] = {
            "phase": "Running",
            "containerStatuses": [{"name": container["name"], "state": {"running": {}}}],
        }

    def _value(self, variable: Mapping[str, Any], pod: Mapping[str, Any]) -> str:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            return self.secrets[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
        if "fieldRef" in source:
            return {"metadata.name": str(pod["metadata"]["name"])}.get(source["fieldRef"]["fieldPath"], "127.0.0.1")
        return str(variable.get("value", ""))

    def stop(self) -> None:
        self.ended.set()
        for process in self.processes:
            process.kill()
            process.wait()


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    return f"{home}/bin/java" if home else "java"


@contextmanager
def running_kubernetes(folder: Path, secrets: Mapping[tuple[str, str], str]) -> Iterator[Kubernetes]:
    cluster = Kubernetes(folder, secrets)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    cluster.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield cluster
    finally:
        cluster.stop()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Kubernetes

    def log_message(self, *_: Any) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        if "watch=true" in self.path:
            self._watch()
            return
        pods = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": self.cluster.pods}
        self._answer(200, pods)

    def do_POST(self) -> None:
        # /api/v1/namespaces/NAMESPACE/KIND
        created, namespace = self._body(), self.path.split("/")[4]
        made = {"uid": str(uuid.uuid4()), "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
        created["metadata"] |= {"namespace": namespace, **made}
        if self.path.partition("?")[0].endswith("/pods"):
            self.cluster.create(created)
        self._answer(201, created)

    def do_DELETE(self) -> None:
        self._body()
        self._answer(200, {"kind": "Status", "status": "Success"})

    def _watch(self) -> None:
        """Tell nothing, for as long as the cluster is there: Spark's client also asks for the list every few seconds."""
        if self.headers.get("Upgrade"):
            # No web socket: the client falls back to a plain answer without an end.
            self._answer(200, {})
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.cluster.ended.wait()

    def _body(self) -> dict[str, Any]:
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        value: dict[str, Any] = json.loads(text) if text else {}
        return value

    def _answer(self, status: int, value: Mapping[str, Any]) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
