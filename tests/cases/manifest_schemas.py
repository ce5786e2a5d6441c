"""What Kubernetes, JobSet, Kubeflow Trainer and SkyPilot accept of the keys that our examples use, as facts.

A schema is a type, a set of the values that are allowed, a list with the schema of its items, or a mapping of keys:
"!" marks a key that must be there, and "*" stands for any key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TEXTS = {"*": str}
AMOUNTS = {"*": (int, str)}
RESOURCES = {"limits": AMOUNTS, "requests": AMOUNTS}
ENV = [
    {
        "name!": str,
        "value": str,
        "valueFrom": {"secretKeyRef": {"name!": str, "key!": str}, "fieldRef": {"fieldPath!": str}},
    }
]
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "env": ENV,
    "ports": [{"containerPort!": int}],
    "resources": RESOURCES,
    "volumeMounts": [{"name!": str, "mountPath!": str}],
}
POD = {
    "containers!": [CONTAINER],
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "securityContext": {"fsGroup": int, "runAsUser": int, "runAsNonRoot": bool},
    "subdomain": str,
    "terminationGracePeriodSeconds": int,
    "volumes": [
        {
            "name!": str,
            "persistentVolumeClaim": {"claimName!": str},
            "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": (int, str)},
        }
    ],
}
METADATA = {"name!": str, "labels": TEXTS, "annotations": TEXTS}
TEMPLATE = {"metadata": {"labels": TEXTS}, "spec!": POD}
JOB = {
    "backoffLimit": int,
    "completionMode": {"Indexed", "NonIndexed"},
    "completions": int,
    "parallelism": int,
    "suspend": bool,
    "template!": TEMPLATE,
}
JOBSET = {
    "failurePolicy": {"maxRestarts": int},
    "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
    "replicatedJobs!": [{"name!": str, "replicas": int, "template!": {"metadata": {"labels": TEXTS}, "spec!": JOB}}],
    "successPolicy": {"operator!": {"All", "Any"}, "targetReplicatedJobs": [str]},
}
MANIFESTS: dict[tuple[str, str], Any] = {
    ("v1", "Service"): {
        "clusterIP": str,
        "ports": [{"name": str, "port!": int}],
        "publishNotReadyAddresses": bool,
        "selector": TEXTS,
    },
    ("v1", "PersistentVolumeClaim"): {
        "accessModes!": [{"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"}],
        "resources!": RESOURCES,
    },
    ("batch/v1", "Job"): JOB,
    ("apps/v1", "Deployment"): {"replicas": int, "selector!": {"matchLabels": TEXTS}, "template!": TEMPLATE},
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": {"numProcPerNode": (int, str)}},
        "template!": {"spec!": JOBSET},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef!": {"name!": str, "kind": {"TrainingRuntime", "ClusterTrainingRuntime"}, "apiGroup": str},
        "trainer": {
            "command": [str],
            "env": ENV,
            "image": str,
            "numNodes": int,
            "numProcPerNode": int,
            "resourcesPerNode": RESOURCES,
        },
    },
}
"""(apiVersion, kind) → the schema of `spec`."""
SKYPILOT = {
    "name": str,
    "num_nodes": int,
    "resources": {"infra": str, "accelerators": str, "cpus": (int, str)},
    "volumes": TEXTS,
    "envs": {"*": (str, type(None))},
    "secrets": {"*": (str, type(None))},
    "setup": str,
    "run": str,
}


def manifest_mistakes(manifest: dict[str, Any]) -> list[str]:
    """List what a Kubernetes manifest has that is not in its schema, or lacks."""
    schema = MANIFESTS[manifest["apiVersion"], manifest["kind"]]
    whole = {"apiVersion!": str, "kind!": str, "metadata!": METADATA, "spec!": schema}
    return list(mistakes(manifest, whole, manifest["metadata"]["name"]))


def mistakes(value: Any, schema: Any, place: str) -> Iterator[str]:
    """Yield the places where a value contradicts a schema."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{place} is no mapping"
            return
        known = {key.rstrip("!"): own for key, own in schema.items()}
        for key, own in value.items():
            if key not in known and "*" not in known:
                yield f"{place}.{key} is unknown"
            else:
                yield from mistakes(own, known.get(key, known.get("*")), f"{place}.{key}")
        for key in schema:
            if key.endswith("!") and key[:-1] not in value:
                yield f"{place}.{key[:-1]} is missing"
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{place} is no list"
            return
        for number, item in enumerate(value):
            yield from mistakes(item, schema[0], f"{place}.{number}")
    elif isinstance(schema, set):
        if value not in schema:
            yield f"{place} is {value!r}, none of {sorted(schema)}"
    elif type(value) not in (schema if isinstance(schema, tuple) else (schema,)):
        yield f"{place} is {value!r}, a {type(value).__name__}"
